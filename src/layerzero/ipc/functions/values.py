"""Arguments and results of functions: values of the user's as trees of scalars and lists, and back.

A scalar is itself; one of NumPy crosses as Python's of the same value. All else is a list that begins with its tag.
Arrays and objects that stay in a worker are left to callbacks: the bytes of arrays lie beside the tree, objects go by
reference. So do classes of enums and dataclasses; both sides have them and compare members and fields.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import sys
from collections.abc import Callable
from typing import Any

from layerzero.ipc.errors import InvalidArgument, ProtocolError

MAX_DEPTH = 64
MAX_VALUES = 1_000_000  # of a call: larger data belongs into arrays, bytes or text
MAX_INT_BYTES = 4096
MAX_FLAT = 64
LIST, TUPLE, DICT, ENUM, DATACLASS, ARRAY, INTEGER, HELD = range(8)
ALLOWED = (
    "None, bool, int, float, str, bytes, lists, tuples, dicts with scalar keys, enums, dataclasses, NumPy arrays, "
    "torch tensors, and arrays of CuPy and JAX on a GPU"
)
_PLAIN = frozenset({type(None), bool, float, str, bytes})
SCALARS = _PLAIN | {int}

Put = Callable[[Any], "list[Any] | None"]
"""What stands for an array behind its tag, in a list of its own; None for what is no array. Raises
InvalidArgument for one that cannot go."""
Get = Callable[[list[Any]], Any]
"""The array that this stands for. Raises ProtocolError, and InvalidArgument where it cannot be had here."""
Resolve = Callable[[str, str], Any]
"""What a module has under a qualified name. Raises InvalidArgument."""
Refer = Callable[[Any], "list[Any] | None"]
"""The reference to what a value stands for in a worker; None for what stands for nothing. Raises InvalidArgument for
what is not there."""
Find = Callable[[list[Any]], Any]
"""What a reference, as it came, leads to. Raises ProtocolError, NotHeld."""


class NotHeld(InvalidArgument):
    """A reference leads to nothing. Fact `reference`."""


class _At(Exception):
    """Something is wrong with a part of a value; `steps` lead there, the last one first."""

    def __init__(self, error: InvalidArgument | ProtocolError) -> None:
        self.error, self.steps = error, []  # type: ignore[var-annotated]

    def under(self, root: str) -> InvalidArgument | ProtocolError:
        return type(self.error)(f"{root}{''.join(reversed(self.steps))}: {self.error.message}", **self.error.facts)


def encode(value: Any, put: Put, root: str, refer: Refer | None = None) -> Any:
    """The tree of a value. `root`: what to call it in errors. Raises InvalidArgument with the place of what cannot
    go."""
    if type(value) in _PLAIN:
        return value
    try:
        return _Encoder(put, refer).tree(value, 0)
    except _At as exc:
        raise exc.under(root) from None


def decode(tree: Any, get: Get, resolve: Resolve, root: str, find: Find | None = None) -> Any:
    """The value of a tree that another process sent; without `find` no part of it is a reference. Raises ProtocolError,
    and InvalidArgument for what this process does not have."""
    if type(tree) in SCALARS:
        return tree
    try:
        return _Decoder(get, resolve, find).value(tree, 0)
    except _At as exc:
        raise exc.under(root) from None


def decode_flat(tree: Any, get: Get) -> list[Any] | None:
    """As `decode`, of a short list of scalars and arrays; None for all other trees, and where something is wrong."""
    if type(tree) is not list or not 0 < len(tree) <= MAX_FLAT or type(tree[0]) is not int or tree[0] != LIST:
        return None
    if SCALARS.issuperset(map(type, tree)):
        return tree[1:]
    found: list[Any] = []
    for one in tree[1:]:
        if type(one) in SCALARS:
            found.append(one)
        elif type(one) is list and one and type(one[0]) is int and one[0] == ARRAY:
            try:
                found.append(get(one[1:]))
            except (ProtocolError, InvalidArgument):
                return None
        else:
            return None
    return found


def described(value: object) -> str:
    """The type of a value that cannot go."""
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{module}{kind.__qualname__}"


class _Encoder:
    def __init__(self, put: Put, refer: Refer | None) -> None:
        self._put, self._refer, self._count = put, refer, 0

    def tree(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is int:
            return value if -(1 << 63) <= value < 1 << 64 else _wide(value)
        if depth >= MAX_DEPTH:
            raise _At(InvalidArgument(f"nested more than {MAX_DEPTH} deep, or in a circle; pass a flatter value"))
        if kind is list or kind is tuple:
            self._note(len(value))
            return [LIST if kind is list else TUPLE, *self._items(value, depth)]
        if kind is dict:
            return self._dict(value, depth)
        if self._refer is not None:
            reference_of = self._asked(self._refer, value)
            if reference_of is not None:
                return [HELD, *reference_of]
        if isinstance(value, enum.Enum):
            module, name = reference(kind)
            # A flag of several members has no name of its own.
            return [ENUM, module, name, value.name or "", self._step(f".{value.name}", value.value, depth)]
        if dataclasses.is_dataclass(value):
            return self._dataclass(value, depth)
        node = self._asked(self._put, value)
        if node is None:
            number = _number(value)
            if number is not None:
                return self.tree(number, depth + 1)
            hint = f"{_instead(value)}; allowed: {ALLOWED}"
            hint += "; with keep=True a result stays there" if self._refer is None else ", and objects that are there"
            raise _At(InvalidArgument(f"{described(value)} cannot go to another environment{hint}"))
        node.insert(0, ARRAY)
        return node

    def _note(self, count: int) -> None:
        self._count += count
        if self._count > MAX_VALUES:
            raise _At(InvalidArgument(f"more than {MAX_VALUES:,} values; put numbers into an array"))

    def _asked(self, callback: Put | Refer, value: Any) -> list[Any] | None:
        try:
            return callback(value)
        except InvalidArgument as exc:
            raise _At(exc) from None

    def _items(self, values: Any, depth: int) -> list[Any]:
        found: list[Any] = []
        try:
            for value in values:
                found.append(value if type(value) in _PLAIN else self.tree(value, depth + 1))
        except _At as exc:
            exc.steps.append(f"[{len(found)}]")
            raise
        return found

    def _step(self, step: str, value: Any, depth: int) -> Any:
        try:
            return self.tree(value, depth + 1)
        except _At as exc:
            exc.steps.append(step)
            raise

    def _dict(self, value: dict[Any, Any], depth: int) -> list[Any]:
        self._note(2 * len(value))
        found: list[Any] = [DICT]
        for key, item in value.items():
            if type(key) not in SCALARS:
                raise _At(InvalidArgument(f"a key is {described(key)}; allowed: None, bool, int, float, str, bytes"))
            found.append(key if type(key) is not int else self.tree(key, depth + 1))
            found.append(self._step(f"[{key!r:.60}]", item, depth))
        return found

    def _dataclass(self, value: Any, depth: int) -> list[Any]:
        module, name = reference(type(value))
        names = [field.name for field in dataclasses.fields(value)]
        self._note(len(names))
        items = [self._step(f".{one}", getattr(value, one), depth) for one in names]
        return [DATACLASS, module, name, names, *items]


def _number(value: Any) -> Any:
    """The Python number or text that has exactly the value of a scalar of NumPy; None for what has none, such as a
    complex number, a time, or a long double."""
    if _kind_of_scalar(value) not in tuple("biufSU"):
        return None
    found = value.item()
    return found if type(found) in SCALARS else None


def _kind_of_scalar(value: Any) -> str:
    """Of its dtype; empty for what is no scalar of NumPy, such as finfo, which has a dtype as well."""
    is_scalar = type(value).__module__ == "numpy" and hasattr(value, "item")
    return getattr(getattr(value, "dtype", None), "kind", "") if is_scalar else ""


def _instead(value: Any) -> str:
    """What can go in the place of it, where something comes near."""
    kind = _kind_of_scalar(value)
    if kind == "c" or type(value) is complex:
        return "; its .real and .imag can"
    if kind == "f":
        return "; float() of it can, which may round it"
    near = next((name for types, name in _NEAR if isinstance(value, types)), "str" if kind in ("m", "M") else "")
    return f"; {near}() of it can" if near else ""


_NEAR: tuple[tuple[tuple[type, ...], str], ...] = (
    ((os.PathLike,), "os.fspath"),
    ((str,), "str"),
    ((bytearray, memoryview, bytes), "bytes"),
    ((dict,), "dict"),
    ((tuple,), "tuple"),
    ((list, set, frozenset, range), "list"),
)


def _wide(value: int) -> list[Any]:
    size = value.bit_length() // 8 + 1
    if size > MAX_INT_BYTES:
        raise _At(InvalidArgument(f"an int of {size} bytes; allowed: at most {MAX_INT_BYTES}; pass it as bytes"))
    return [INTEGER, value.to_bytes(size, "little", signed=True)]


def reference(cls: type) -> tuple[str, str]:
    """Module and qualified name of a class that the other side can find. Raises _At."""
    module, name = cls.__module__, cls.__qualname__
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not cls:
        text = f"{module}.{name} cannot be found by its name; define the class at the top of a module"
        raise _At(InvalidArgument(text))
    return module, name


class _Decoder:
    def __init__(self, get: Get, resolve: Resolve, find: Find | None) -> None:
        self._get, self._resolve, self._find, self._count = get, resolve, find, 0

    def value(self, tree: Any, depth: int) -> Any:
        kind = type(tree)
        if kind in SCALARS:
            return tree
        if kind is not list or not tree or type(tree[0]) is not int or not 0 <= tree[0] <= HELD:
            raise _At(ProtocolError(f"{kind.__name__} that is no value, or has no tag"))
        if depth >= MAX_DEPTH:
            raise _At(ProtocolError(f"nested more than {MAX_DEPTH} deep"))
        self._count += len(tree)
        if self._count > 4 * MAX_VALUES:
            raise _At(ProtocolError(f"more than {MAX_VALUES:,} values"))
        return _READ[tree[0]](self, tree, depth)

    def _items(self, tree: list[Any], depth: int, start: int = 1) -> list[Any]:
        found: list[Any] = []
        try:
            for one in tree[start:]:
                found.append(one if type(one) in SCALARS else self.value(one, depth + 1))
        except _At as exc:
            exc.steps.append(f"[{len(found)}]")
            raise
        return found

    def _tuple(self, tree: list[Any], depth: int) -> tuple[Any, ...]:
        return tuple(self._items(tree, depth))

    def _dict(self, tree: list[Any], depth: int) -> dict[Any, Any]:
        try:
            flat = self._items(tree, depth)
        except _At as exc:
            at = int(exc.steps[-1][1:-1])
            key = tree[1 + at - at % 2]
            if type(key) in SCALARS:  # what another process made may be too deep to be shown
                exc.steps[-1] = f"[{key!r:.60}]"
            raise
        keys = flat[::2]
        if len(flat) % 2 or any(type(key) not in SCALARS for key in keys):
            raise _At(ProtocolError("a dict's keys and values do not pair"))
        return dict(zip(keys, flat[1::2], strict=True))

    def _integer(self, tree: list[Any], _: int) -> int:
        if len(tree) != 2 or type(tree[1]) is not bytes or not 0 < len(tree[1]) <= MAX_INT_BYTES:
            raise _At(ProtocolError("no integer"))
        return int.from_bytes(tree[1], "little", signed=True)

    def _array(self, tree: list[Any], _: int) -> Any:
        try:
            return self._get(tree[1:])
        except (ProtocolError, InvalidArgument) as exc:
            raise _At(exc) from None

    def _held(self, tree: list[Any], _: int) -> Any:
        if self._find is None:
            raise _At(ProtocolError("a reference, where none may be"))
        try:
            return self._find(tree[1:])
        except (ProtocolError, InvalidArgument) as exc:
            raise _At(exc) from None

    def _class(self, tree: list[Any], least: int) -> Any:
        if len(tree) < least or type(tree[1]) is not str or type(tree[2]) is not str:
            raise _At(ProtocolError("no class is named"))
        try:
            return self._resolve(tree[1], tree[2])
        except InvalidArgument as exc:
            raise _At(exc) from None

    def _enum(self, tree: list[Any], depth: int) -> Any:
        cls = self._class(tree, 5)
        if type(tree[3]) is not str:
            raise _At(ProtocolError("no member is named"))
        value = self.value(tree[4], depth + 1)
        if not (isinstance(cls, type) and issubclass(cls, enum.Enum)):
            raise _At(InvalidArgument(f"{tree[1]}.{tree[2]} is no enum here"))
        try:
            member = cls(value)
        except Exception as exc:
            raise _At(
                InvalidArgument(f"{tree[2]} has no member {tree[3]:.60} of this value here: {exc!s:.200}")
            ) from None
        if (member.name or "") != tree[3]:
            raise _At(InvalidArgument(f"{tree[2]}.{tree[3]:.60} is called {member.name} here"))
        return member

    def _dataclass(self, tree: list[Any], depth: int) -> Any:
        cls = self._class(tree, 4)
        if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
            raise _At(InvalidArgument(f"{tree[1]}.{tree[2]} is no dataclass here"))
        if type(tree[3]) is not list or any(type(name) is not str for name in tree[3]):
            raise _At(ProtocolError("no fields are named"))
        names = [field.name for field in dataclasses.fields(cls)]
        if names != tree[3] or len(tree) != 4 + len(names):
            raise _At(InvalidArgument(f"{tree[2]} has the fields {names} here, and {tree[3]!r:.300} on the other side"))
        try:
            items = self._items(tree, depth, 4)
        except _At as exc:
            exc.steps[-1] = f".{names[int(exc.steps[-1][1:-1])]}"
            raise
        value = object.__new__(cls)
        for name, item in zip(names, items, strict=True):
            object.__setattr__(value, name, item)
        return value


_READ: dict[int, Callable[[_Decoder, list[Any], int], Any]] = {
    LIST: _Decoder._items,
    TUPLE: _Decoder._tuple,
    DICT: _Decoder._dict,
    ENUM: _Decoder._enum,
    DATACLASS: _Decoder._dataclass,
    ARRAY: _Decoder._array,
    INTEGER: _Decoder._integer,
    HELD: _Decoder._held,
}
