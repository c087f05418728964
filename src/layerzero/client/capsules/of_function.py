"""The call of a function in a capsule: which function of which file, in which environments, and its arguments as they
can be shown: texts and bytes by their lengths alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from layerzero.ipc.functions import frames, values
from layerzero.ipc.functions.frames import Code
from layerzero.ipc.vocabulary.tensors import TensorSpec

KINDS = CALL, MANY, LOAD, METHOD, GET, SET, ITSELF = ("call", "many", "load", "method", "get", "set", "itself")
MAX_PARTS, MAX_TARGETS, MAX_SHOWN = 2, 64, 120
TEXT, BYTES, INTEGER = "text", "bytes", "integer"  # the key of what stands for such a value


@dataclass(frozen=True)
class Target:
    """A function as one environment has it: the backend of that, and a Code."""

    env: str
    module: str
    qualname: str
    file: str
    sha256: str
    root: str
    is_main: bool

    @classmethod
    def of(cls, env: str, code: Code) -> Target:
        return cls(env, *code.to_tree())

    @property
    def code(self) -> Code:
        """Raises ProtocolError."""
        return Code.from_tree([self.module, self.qualname, self.file, self.sha256, self.root, self.is_main])


@dataclass(frozen=True)
class Part:
    """One frame that was sent: the construction of an object, or the call itself. `kind`: one of KINDS; `name`: of a
    method or an attribute. `stays`: what of the result does. `given`: arguments, and those by name. `memory`: the
    segments of its trees, of the arrays beside them, and of what it lent. `outs`: of results that have their memory
    before the call: library, dtype, shape, strides."""

    kind: str
    name: str
    stays: int
    given: tuple[Any, Any]
    memory: tuple[int, ...]
    outs: tuple[Any, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether its values can be had again from what is shown: no text and no bytes are left out."""
        return not _left_out(list(self.given))


@dataclass(frozen=True)
class FunctionCall:
    """`targets`: that of the environment that failed first. `parts`: the construction of the object first, where it is
    one's. `problem`: why it cannot be made again; "" where it can."""

    label: str
    targets: tuple[Target, ...]
    parts: tuple[Part, ...]
    problem: str = ""

    @property
    def short(self) -> str:
        """The last part of its name, for the name of a file."""
        return re.sub(r"[^A-Za-z0-9_]", "", self.label.partition(" ")[0].rpartition(".")[2])[:40] or "function"

    @property
    def text(self) -> str:
        """The call in a line."""
        return f"{self.label}({words_of(*self.parts[-1].given)})"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, value: Any) -> FunctionCall:
        """Checked, since it may be anybody's. Raises what is wrong with it: ValueError, KeyError, TypeError,
        LayerZeroError."""
        if len(value["targets"]) > MAX_TARGETS or not value["targets"] or not 0 < len(value["parts"]) <= MAX_PARTS:
            raise ValueError("no function, or no call of it")
        targets = tuple(Target(**{key: one[key] for key in Target.__annotations__}) for one in value["targets"])
        for target in targets:
            if not isinstance(target.env, str) or target.code.is_model:
                raise ValueError("no reference to a function")
        return cls(str(value["label"]), targets, tuple(map(_part, value["parts"])), str(value["problem"]))


def _part(value: Mapping[str, Any]) -> Part:
    args, kwargs = value["given"]
    if value["kind"] not in KINDS or not isinstance(value["name"], str) or type(value["stays"]) is not int:
        raise ValueError("no call of a function")
    if any(type(n) is not int or n < 0 for n in value["memory"]):
        raise ValueError("no numbers of memory")
    if len(value["memory"]) < 2:
        raise ValueError("arguments without memory")
    if not 0 <= value["stays"] <= frames.OWN:
        raise ValueError(f"{value['stays']} is no word for what of a result stays")
    outs = tuple(map(tuple, value["outs"]))
    part = Part(value["kind"], value["name"], value["stays"], (args, kwargs), tuple(value["memory"]), outs)
    if type(args) is not list or type(kwargs) is not list or args[:1] != [values.LIST] or kwargs[:1] != [values.DICT]:
        raise ValueError("no arguments")
    for one in arrays(part.given):
        spec_of(one)
    return part


def words_of(args: Any, kwargs: Any) -> str:
    """Arguments, and those by name, in a line: as they are shown, or as they cross."""
    flat = kwargs[1:]
    named = [f"{name}={_shown(value)}" for name, value in zip(flat[::2], flat[1::2], strict=False)]
    return ", ".join([*map(_shown, args[1:]), *named])


def shown_of(tree: Any) -> Any:
    """A tree as JSON has it: a text by its length, bytes by theirs."""
    match tree:
        case str():
            return {TEXT: len(tree)}
        case bytes():
            return {BYTES: len(tree)}
        case [values.INTEGER, bytes() as number]:
            return {INTEGER: number.hex()}
        case [values.ENUM | values.DATACLASS as tag, module, name, its, *rest]:
            return [tag, module, name, its, *map(shown_of, rest)]
        case [values.ARRAY, *_] | [values.HELD, *_]:
            return tree
        case [tag, *rest]:
            return [tag, *map(shown_of, rest)]
    return tree


def given_of(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Trees of arguments, and of those by name, as JSON has them. The names are the function's own, and stay; keys of
    dicts among the arguments are the caller's texts."""
    flat = kwargs[1:]
    named = [one for name, value in zip(flat[::2], flat[1::2], strict=True) for one in (name, shown_of(value))]
    return shown_of(args), [*kwargs[:1], *named]


def tree_of(shown: Any) -> Any:
    """The tree again, of what leaves nothing out. Raises ValueError."""
    match shown:
        case {"integer": str(number)}:
            return [values.INTEGER, bytes.fromhex(number)]
        case dict():
            raise ValueError("a value was left out")
        case [values.ARRAY, *_]:
            return shown
        case list():
            return [tree_of(one) for one in shown]
    return shown


def arrays(shown: Any) -> list[list[Any]]:
    """What stands for arrays in there, in order: library, dtype, shape, strides, position, offset."""
    return [node[1:] for node in nodes(shown)]


def nodes(shown: Any) -> list[list[Any]]:
    """As they are in there, behind the word that says what they are."""
    match shown:
        case [values.ARRAY, *_] if type(shown[0]) is int and type(shown) is list:
            return [shown]
        case list() | tuple():
            return [found for one in shown for found in nodes(one)]
    return []


def spec_of(node: list[Any]) -> TensorSpec:
    """Of what stands for an array: library, dtype, shape, strides, position, offset. Raises ValueError,
    LayerZeroError."""
    if len(node) != 6 or type(node[4]) is not int or type(node[5]) is not int:
        raise ValueError("no array")
    return TensorSpec.from_wire(node[1:4])


def demand_inside(part: Part, trees: Any, sizes: Sequence[int]) -> None:
    """Each array of these trees lies in the part's own memory. `sizes`: the bytes of its arrays, and of each range that
    it lent. Raises ValueError, LayerZeroError."""
    for node in arrays(trees):
        spec, position, start = spec_of(node), node[4] + 1, node[5]
        if not 0 <= position < len(sizes):
            raise ValueError(f"an array lies in range {node[4]} of memory, and the call lent {len(sizes) - 1}")
        if start < 0 or start + spec.span_bytes > sizes[position]:
            said = f"an array of {spec.span_bytes:,} bytes from byte {start:,} on lies outside of its memory"
            raise ValueError(f"{said}, which has {sizes[position]:,}")


def _left_out(shown: Any) -> bool:
    if isinstance(shown, dict):
        return INTEGER not in shown
    return isinstance(shown, list) and any(map(_left_out, shown))


def _shown(tree: Any) -> str:
    """A value in a few words."""
    match tree:
        case str() | bytes():  # as it crosses
            return f"{tree[:MAX_SHOWN]!r}" + (f"... of {len(tree)}" if len(tree) > MAX_SHOWN else "")
        case {"text": length}:
            return f"text of {length}"
        case {"bytes": length}:
            return f"bytes of {length}"
        case {"integer": str(number)}:
            return f"integer of {len(number) // 2} bytes"
        case [values.ARRAY, library, dtype, list() as shape, *_]:
            return f"{library} {'x'.join(map(str, shape)) or 'scalar'}:{dtype}"
        case [values.ENUM | values.DATACLASS, _, name, *_]:
            return str(name)
        case [values.HELD, *_]:
            return "object"
        case [int() as tag, *rest]:
            words = [*map(_shown, rest[:8])]
            if tag == values.DICT:  # its keys and items in turn
                words = [f"{key}: {item}" for key, item in zip(words[::2], words[1::2], strict=False)]
            inside = ", ".join([*words, *(["..."] if len(rest) > 8 else [])])
            begin, end = {values.TUPLE: ("(", ")"), values.DICT: ("{", "}")}.get(tag, ("[", "]"))
            return f"{begin}{inside}{end}"[:MAX_SHOWN]
    return f"{tree!r:.40}"
