"""The call of a function's capsule as a program that needs its environment's packages and the function's file alone."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from layerzero.client.capsules import of_function
from layerzero.client.capsules.form import CPU, Capsule
from layerzero.client.capsules.of_function import Part
from layerzero.functions.replaying import Memory, code_of, function_memory
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.functions import frames, values

MAX_INLINE_BYTES = 16 << 10
_COLUMNS = 76
_HELPERS = '''
class _Same:
    """What the function's file says of layerzero does nothing here."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return _Same()

    def __call__(self, *args, **kwargs):
        if len(args) != 1 or kwargs or isinstance(args[0], _Same) or not callable(args[0]):
            return _Same()
        if isinstance(args[0], types.FunctionType):
            args[0].implementation = args[0].options = args[0].as_torch_op = _Same()
        return args[0]


def _layerzero():
    module = types.ModuleType("layerzero")
    module.isolated, module.env, module.module, module.Handle = _Same(), _Same(), _Same(), _Same
    return module


sys.modules["layerzero"] = _layerzero()


def of_module(module, qualname):
    found = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def made(cls, **fields):
    value = object.__new__(cls)
    for name, field in fields.items():
        object.__setattr__(value, name, field)
    return value


def array(library, dtype, shape, strides, data):
    """As the function got it."""
    room = np.frombuffer(bytes(data), np.uint8)
    if library == "torch":
        torch = importlib.import_module("torch")
        flat = torch.from_numpy(room.copy()).view(getattr(torch, dtype))
        return flat.as_strided(shape, strides)
    size = np.dtype(dtype).itemsize
    return np.lib.stride_tricks.as_strided(room.view(dtype), shape, [step * size for step in strides])
'''


def write(capsule: Capsule, data: Sequence[bytes], path: Path | None, seed: int) -> str:
    """The program's text. `data`: the capsule's memory; empty for random numbers of `seed`. What is too large for a
    text is written beside `path`. Raises InvalidArgument where there is no such program, OSError."""
    function, memories = capsule.function, function_memory(capsule, data, seed)
    assert function is not None
    target = function.targets[0]
    code = code_of(function, target.env, None)
    if capsule.device != CPU:
        raise InvalidArgument(
            f"send the capsule: lz capsule share {capsule.name} FILE.tar.gz; arrays of its call were on a GPU, for "
            "which there is no script"
        )
    if code.is_main:
        raise InvalidArgument(
            f"send the capsule: lz capsule share {capsule.name} FILE.tar.gz; {code.label} is of a program, which a "
            "script cannot import"
        )
    calls = [_Call(part, memory, n) for n, (part, memory) in enumerate(zip(function.parts, memories, strict=True))]
    beside = ""
    if sum(len(one) for call in calls for one in call.arrays) > MAX_INLINE_BYTES:
        beside = _write_arrays(calls, path)
    locked = capsule.facts.get("environment")
    lines = locked if isinstance(locked, list) else []
    words = function.label.replace('"""', "").replace("\\", "/")
    text = [
        f'"""{words}: {capsule.failed.what}, by a capsule of LayerZero.',
        "",
        "Arguments: " + ("those of the call." if data else f"random numbers of seed {seed} where it had arrays."),
        '"""',
        "# /// script",
        "# dependencies = [",
        *(f"#     {_text(line)}," for line in lines),
        "# ]",
        "# ///",
        "",
        *("import base64", "import faulthandler", "import importlib", "import platform", "import sys", "import types"),
        "from pathlib import Path",
        "",
        *(["import numpy as np", ""] if any(call.arrays for call in calls) else []),
        "faulthandler.enable()",
        'print("Python", sys.version.split()[0], platform.platform())',
        *([f"sys.path.insert(0, {_text(code.root)})"] if code.root else []),
        f"# {_text(code.file)} has the SHA-256 {code.sha256}" if code.file else "# of a package of the environment",
        "",
        _HELPERS,
        "",
        *([f"kept = np.load(Path(__file__).with_name({_text(beside)}))"] if beside else []),
        f"function = of_module({_text(code.module)}, {_text(code.qualname)})",
    ]
    for call in calls:
        text += call.lines(beside)
    return "\n".join([*text, 'print("it came back:", type(result))']) + "\n"


class _Call:
    """One of the calls, and its arrays."""

    def __init__(self, part: Part, memory: Memory, number: int) -> None:
        self._part, self._number = part, number
        trees, beside, ranges = memory
        self._memories = [beside, *(data for data, _ in ranges)]
        self.arrays: list[bytes] = []
        self._args, self._kwargs = (self._source(tree) for tree in trees)

    def lines(self, beside: str) -> list[str]:
        found = []
        for n, data in enumerate(self.arrays):
            name = f"bytes_{self._number}_{n}"
            if beside:
                found.append(f"{name} = kept[{_text(name)}]")
                continue
            coded = base64.b64encode(data).decode()
            rows = [coded[at : at + _COLUMNS] for at in range(0, len(coded), _COLUMNS)] or [""]
            found += [f"{name} = base64.b64decode(", *(f'    "{row}"' for row in rows), ")"]
        part, give = self._part, f"*{self._args}, **{self._kwargs}"
        found.append('print("calling", function, flush=True)')
        match part.kind:
            case of_function.MANY:
                return [*found, f"for args in {self._args}:", "    result = function(*args)"]
            case of_function.METHOD:
                return [*found, f"result = getattr(result, {_text(part.name)})({give})"]
            case of_function.GET:
                return [*found, f"result = getattr(result, {_text(part.name)})"]
            case of_function.SET:
                return [*found, f"setattr(result, {_text(part.name)}, *{self._args})"]
            case of_function.LOAD:
                return [*found, "result = function"]
        if part.outs:
            raise InvalidArgument(
                "no script can be written of a call whose function takes out=; lz capsule share sends it"
            )
        return [*found, f"result = function({give})"]

    def _source(self, tree: Any) -> str:
        """An expression of a value."""
        match tree:
            case float() if tree != tree or tree in (float("inf"), -float("inf")):
                return f'float("{tree}")'
            case None | bool() | int() | float() | str() | bytes():
                return repr(tree)
            case [values.LIST | values.TUPLE as tag, *items]:
                inside = ", ".join(map(self._source, items))
                return f"[{inside}]" if tag == values.LIST else f"({inside}{',' if len(items) == 1 else ''})"
            case [values.DICT, *flat]:
                pairs = zip(flat[::2], flat[1::2], strict=True)
                return "{" + ", ".join(f"{self._source(key)}: {self._source(value)}" for key, value in pairs) + "}"
            case [values.INTEGER, bytes() as data]:
                return str(int.from_bytes(data, "little", signed=True))
            case [values.ENUM, str() as module, str() as name, _, value]:
                return f"of_module({module!r}, {name!r})({self._source(value)})"
            case [values.DATACLASS, str() as module, str() as name, list() as names, *items]:
                fields = ", ".join(f"{n!r}: {self._source(one)}" for n, one in zip(names, items, strict=True))
                return f"made(of_module({module!r}, {name!r}), **{{{fields}}})"
            case [values.ARRAY, *node]:
                memories: list[memoryview | None] = [memoryview(one) for one in self._memories]
                library, spec, part = frames.read_array(node, memories, ("numpy", "torch"))
                self.arrays.append(bytes(part))
                name = f"bytes_{self._number}_{len(self.arrays) - 1}"
                return f"array({library!r}, {spec.dtype!r}, {spec.shape!r}, {spec.strides!r}, {name})"
        raise InvalidArgument("no script can be written: an object among the arguments; lz capsule share sends it")


def _write_arrays(calls: Sequence[_Call], path: Path | None) -> str:
    """The name of the file."""
    import numpy as np

    if path is None:
        raise InvalidArgument(
            f"name a file by -o: arrays of more than {MAX_INLINE_BYTES:,} bytes go into one beside it"
        )
    target = path.with_suffix(".npz")
    named = {f"bytes_{c}_{n}": one for c, call in enumerate(calls) for n, one in enumerate(call.arrays)}
    arrays: dict[str, Any] = {name: np.frombuffer(one, np.uint8) for name, one in named.items()}
    with target.open("xb") as file:
        np.savez(file, **arrays)
    return target.name


def _text(value: str) -> str:
    return repr(str(value))
