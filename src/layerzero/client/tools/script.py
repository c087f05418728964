"""A capsule's call as a Python program for the library's own developers: it needs the library and NumPy alone."""

from __future__ import annotations

import base64
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from layerzero.client.capsules.form import ALIGNMENTS, Argument, Capsule
from layerzero.client.planning.plans import Plan
from layerzero.client.tools import mlx_script, onnx_script, torch_script
from layerzero.client.tools.replay import request_of
from layerzero.ipc.errors import EnvError, InvalidArgument
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.places import places
from layerzero.ipc.vocabulary.tensors import NARROW_DTYPES, TensorSpec

MAX_INLINE_BYTES = 16 << 10  # of all arguments; more lies in a file beside the script
_COLUMNS = 100  # of inline bytes
_MEMORY = f'''\
def memory(nbytes, offset, given=None):
    """Memory whose first byte is `offset` behind a multiple of {ALIGNMENTS}."""
    room = np.zeros(nbytes + {ALIGNMENTS}, np.uint8)
    start = (offset - room.ctypes.data) % {ALIGNMENTS}
    block = room[start : start + nbytes]
    if given is not None:
        block[...] = np.frombuffer(given, np.uint8)
    return block
'''
_TORCH = """\
def tensor(block, dtype, shape, strides):
    if not block.size:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.from_numpy(block).view(getattr(torch, dtype)).as_strided(shape, strides)


def numbers(values, dtype):
    return torch.from_numpy(np.ascontiguousarray(values)).to(getattr(torch, dtype)).view(torch.uint8).numpy()


torch.set_grad_enabled(False)
"""
_NUMPY = """\
def tensor(block, dtype, shape, strides):
    dtype = np.dtype(dtype)
    return np.ndarray(shape, dtype, block, 0, [step * dtype.itemsize for step in strides])


def numbers(values, dtype):
    return np.ascontiguousarray(values).astype(dtype).view(np.uint8)


def info(name, dtype, rank):
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), [None] * rank)


kept = []


def bind(put, name, array, shape):
    array = np.ascontiguousarray(array)
    kept.append(array)
    put(name, "cpu", 0, array.dtype, shape, array.ctypes.data)
"""

_MLX = """\
def kind(dtype):
    return mx.bool_ if dtype == "bool" else getattr(mx, dtype)


def tensor(block, dtype, shape, strides):
    if not block.size:
        return mx.zeros(shape, kind(dtype))
    flat = mx.array(block.view(f"u{kind(dtype).size}")).view(kind(dtype))
    is_dense = list(strides) == [int(np.prod(shape[n + 1 :])) for n in range(len(shape))]
    return flat.reshape(shape) if is_dense else mx.as_strided(flat, shape, strides)


def numbers(values, dtype):
    return np.array(mx.array(np.ascontiguousarray(values), kind(dtype)).view(mx.uint8))


mx.set_default_device(mx.cpu)
"""
_PREAMBLES = {"torch": _TORCH, "onnxruntime": _NUMPY, "mlx": _MLX}
_IMPORTS = {
    "torch": ["import torch"],
    "onnxruntime": ["import onnx", "import onnxruntime", "from onnx import helper, numpy_helper"],
    "mlx": ["import mlx.core as mx"],
}
_VERSIONS = {
    "torch": {"torch": "torch"},
    "onnxruntime": {"onnx": "onnx", "onnxruntime": "onnxruntime"},
    "mlx": {"mlx": "mx"},
}


def write(capsule: Capsule, data: Sequence[bytes], requirements: Sequence[str], path: Path | None, seed: int) -> str:
    """The program's text. `data`: the capsule's memory, empty for random numbers of `seed`; what is too large for a
    text is written beside `path`. `requirements`: the lines of the environment's lock. Raises InvalidArgument where
    there is no such program, and says what to do instead; EnvError without NumPy, OSError."""
    failed = capsule.failed
    family = failed.kernel_id.partition(".")[0]
    specs = {a.name: a.spec for a in capsule.arguments}
    request = request_of(capsule.op, capsule.params, specs, None, None)
    plan = request.planner(*request.args, **request.params)
    made = _lines(family, failed.kernel_id, plan)
    if made is None or failed.kernel_id.partition(".")[2].partition(".")[0] != capsule.op:
        raise InvalidArgument(
            f"no script can be written for {failed.kernel_id}: it is no call of one public function of its library; "
            f"send the capsule: lz capsule share {capsule.name} FILE.tar.gz"
        )
    function, lines = made
    beside = ""
    if sum(map(len, data)) > MAX_INLINE_BYTES:
        beside = _write_data(data, path)
    text = [
        f'"""{function}: {_end(capsule)}.',
        "",
        _plain(f"The call: {capsule.label}"),
        _plain(f"Arguments: {_told(data, beside, seed)}."),
        '"""',
        *_pinned(requirements, capsule),
        "",
        "import base64",
        "import faulthandler",
        "import platform",
        "import sys",
        "import zlib",
        "from pathlib import Path",
        "",
        "import numpy as np",
        *_IMPORTS[family],
        "",
        "faulthandler.enable()",
        'print("Python", sys.version.split()[0], platform.platform())',
        *(f'print("{name}", {module}.__version__)' for name, module in _VERSIONS[family].items()),
        'print("numpy", np.__version__)',
        "",
        "",
        _MEMORY,
        "",
        _PREAMBLES[family],
        *_inputs(capsule, plan, data, beside, seed),
        f'print("calling", {function!r}, flush=True)',
        *lines,
        f'print("it came back:", {_shown(plan)})',
    ]
    return "\n".join(text) + "\n"


def _lines(family: str, kernel_id: str, plan: Plan) -> tuple[str, list[str]] | None:
    if family == "torch":
        return torch_script.lines_of(plan)
    dtypes = {spec.dtype for spec in (*plan.inputs, *plan.outputs) if spec is not None}
    if family not in _PREAMBLES or not dtypes.isdisjoint(NARROW_DTYPES):
        return None
    if family == "onnxruntime" and "bfloat16" in dtypes:
        return None
    return mlx_script.lines_of(plan) if family == "mlx" else onnx_script.lines_of(plan, kernel_id)


def _end(capsule: Capsule) -> str:
    failed = capsule.failed
    if failed.is_late:
        return "it did not come back in time"
    if failed.exit_signal is not None:
        name = f"signal {failed.exit_signal}"
        with suppress(ValueError):
            name = signal.Signals(failed.exit_signal).name
        return f"the process ended by {name}"
    if failed.exit_code is not None:
        return f"the process ended with exit code {failed.exit_code}"
    return "it did not end well"


def _told(data: Sequence[bytes], beside: str, seed: int) -> str:
    if not data:
        return f"random numbers of seed {seed}, those of the call were not kept or not given away"
    return f"as they were, in {beside}" if beside else "as they were"


def _pinned(requirements: Sequence[str], capsule: Capsule) -> list[str]:
    """What was installed: comments."""
    versions = capsule.facts.get("versions")
    said = []
    if isinstance(versions, dict):
        said.append("# It failed with " + ", ".join(f"{n} {v}" for n, v in versions.items()) + ".")
    said += [f"# {key}: {capsule.facts[key]}" for key in ("python", "system") if key in capsule.facts]
    if requirements:
        said += ["# The environment's lock:", *(f"#   {line}" for line in requirements)]
    return [_plain(line) for line in said]


def _plain(text: str) -> str:
    """A line that is no code: a capsule may be anybody's."""
    return "".join(one if one.isprintable() and one not in '"\\' else " " for one in text)


def _write_data(data: Sequence[bytes], path: Path | None) -> str:
    """The file's name."""
    if path is None:
        raise InvalidArgument("name a file for the script: -o FILE.py; its arguments' bytes are written beside it")
    np = _numpy()
    target = path.with_suffix(".npz")
    with target.open("xb") as file:
        np.savez(file, **{f"memory_{n}": np.frombuffer(one, np.uint8) for n, one in enumerate(data)})
    return target.name


def _numpy() -> Any:
    try:
        import numpy as np
    except ImportError as exc:
        raise EnvError(
            "arguments beside a script are NumPy's arrays, which is not installed here",
            cause=str(exc),
            repair="pip install 'layerzero-broker[demo]'",
        ) from exc
    return np


def _inputs(capsule: Capsule, plan: Plan, data: Sequence[bytes], beside: str, seed: int) -> list[str]:
    """Variables of the op's inputs: the arguments as the kernel gets them."""
    given = {a.name: a for a in capsule.arguments}
    lines = []
    if data and beside:
        lines.append(f"data = np.load(Path(__file__).with_name({beside!r}))")
    elif not data:
        lines.append(f"rng = np.random.default_rng({seed})")
    for number, (segment, kept) in enumerate(zip(capsule.segments, data, strict=False)):
        source = f"data['memory_{number}']"
        if not beside:
            coded = base64.b64encode(kept).decode()
            rows = [coded[n : n + _COLUMNS] for n in range(0, len(coded), _COLUMNS)]
            lines += ["given = base64.b64decode(", *(f'    "{row}"' for row in rows or [""]), ")"]
            source = "given"
        lines.append(f"memory_{number} = memory({segment.nbytes}, {segment.offset}, {source})")
    for name, spec in zip(OPS[plan.op].inputs, plan.inputs, strict=True):
        if spec is None or name not in given:
            lines.append(f"{name} = None")
            continue
        argument, nbytes = given[name], spec.span_bytes
        block = f"memory_{argument.segment}[{argument.start} : {argument.start + nbytes}]"
        if not data:
            lines.append(f"given = numbers({_random(plan.op, name, given)}, {argument.spec.dtype!r})[:{nbytes}]")
            offset = (capsule.segments[argument.segment].offset + argument.start) % ALIGNMENTS
            block = f"memory({nbytes}, {offset}, given)"
        lines.append(f"{name} = tensor({block}, {spec.dtype!r}, {spec.shape}, {spec.strides})")
    return lines


def _random(op: str, name: str, given: dict[str, Argument]) -> str:
    """An expression of as many numbers as an argument has room for, as random_inputs makes them."""
    specs: dict[str, TensorSpec | None] = {one: a.spec for one, a in given.items()}
    spec = given[name].spec
    numel = spec.span_bytes // spec.itemsize
    spread = places(name, specs) if name in OPS[op].indices else None
    if spread is not None:
        return f"np.linspace({spread[0]}, {spread[1]}, {numel})"
    if spec.dtype == "bool":
        return f"rng.random({numel}) < 0.5"
    if "int" in spec.dtype:
        table = specs.get("weight") if op == "embedding" else None
        return f"rng.integers(0, {max(min(table.shape[0] if table else 8, 127), 1)}, {numel})"
    return f"rng.standard_normal({numel})"


def _shown(plan: Plan) -> str:
    return ", ".join(f"{name!r}, tuple({name}.shape), {name}.dtype" for name in OPS[plan.op].outputs)
