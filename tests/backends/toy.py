"""Backends for tests: silu, matmul and append_kv, and a real fault when the first element of silu's input or
of append_kv's key asks for one.

A worker serves the backend that LZ_TOY_NAME names, or alpha, beta and gamma. `fault(KILL)` strikes in every backend,
`fault(KILL, "alpha")` in that one alone.

A silu of few numbers is computed in plain Python: of the hundreds of these workers in a test run, few import NumPy.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from layerzero.ipc.errors import InvalidArgument
from layerzero.workers.provider import Bind, Block, Bound, Call, Loaded

if TYPE_CHECKING:
    import numpy as np

KILL, SEGV, ABORT, EXIT0, RAISE, HANG, INVALID, WRITE_INPUT, SPIN, SCRIBBLE, HALF, PAUSE, HOARD, COUNT = (
    6660 + i for i in range(14)
)
HOARD_BYTES = 1 << 30
FEW = 1024  # -1: NumPy for all
_counted = itertools.count(1)
_SCOPE = {"": 0.0, "alpha": 0.25, "beta": 0.5, "gamma": 0.75}


def fault(action: int, backend: str = "") -> float:
    """The first element that makes `backend`, or all of them, do `action`. Exact in float32 and float64."""
    return action + _SCOPE[backend]


def load() -> Loaded:
    named = os.environ.get("LZ_TOY_NAME")
    ops: dict[str, Bind] = {"silu": _silu, "matmul": _matmul, "append_kv": _append_kv, "null": _null}
    ops["silu.again"] = _silu
    kernels = {f"{name}.{op}": ops[op] for name in ([named] if named else ("alpha", "beta", "gamma")) for op in ops}
    return Loaded({"toy": "1.0"}, kernels)


def _array(block: Block) -> np.ndarray:
    import numpy as np

    spec = block.spec
    strides = [stride * spec.itemsize for stride in spec.strides]
    dtype = "uint16" if spec.dtype == "bfloat16" else spec.dtype
    return np.ndarray(spec.shape, dtype, buffer=block.memory, strides=strides)


def _reader(block: Block) -> Callable[[], np.ndarray]:
    """Reads the block's numbers; bfloat16 as float32, which NumPy knows."""
    import numpy as np

    array = _array(block)
    if block.spec.dtype != "bfloat16":
        return lambda: array
    return lambda: (array.astype(np.uint32) << 16).view(np.float32)


def _writer(block: Block) -> Callable[[np.ndarray], None]:
    """Writes the block's numbers; to bfloat16 with rounding to nearest, ties to even."""
    import numpy as np

    array = _array(block)

    def write(value: np.ndarray) -> None:
        if block.spec.dtype == "bfloat16":
            bits = np.asarray(value, np.float32).view(np.uint32)
            value = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        array[...] = value

    return write


def _silu(call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
    source, target = inputs[0], outputs[0]
    assert source is not None
    scope = _SCOPE.get(call.kernel_id.partition(".")[0], 0.0)
    if math.prod(source.spec.shape) <= FEW and source.spec.dtype != "bfloat16":
        return _silu_of_few(source, target, scope)
    import numpy as np

    read, write = _reader(source), _writer(target)

    def run() -> None:
        x = read()
        if x.size and (count := _asked(float(x.flat[0]), scope, source, target)) is not None:
            write(np.full(x.shape, count))
            return
        with np.errstate(over="ignore"):
            write(x / (1 + np.exp(-x)))

    return run


def _silu_of_few(source: Block, target: Block, scope: float) -> Bound:
    from layerzero.ipc.vocabulary.numerics import gather, pack, scatter, unpack

    def run() -> None:
        x = unpack(gather(source.memory, source.spec), source.spec.dtype)
        if x and (count := _asked(x[0], scope, source, target)) is not None:
            y = [float(count)] * len(x)
        else:
            y = [v / (1 + math.exp(-v)) if not v < -700 else v * math.exp(v) for v in x]
        scatter(pack(y, target.spec.dtype), target.spec, target.memory)

    return run


def _asked(first: float, scope: float, source: Block, target: Block) -> int | None:
    """Do what the first element asks for. When it is COUNT: the place of this call among those of this worker that
    have asked so, which is the answer."""
    if 6660 <= first < 6680 and first % 1 in (0.0, scope):
        if first == COUNT:
            return next(_counted)
        _strike(int(first), source, target)
    return None


def _matmul(call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
    a, b = inputs
    assert a is not None
    assert b is not None
    read_a, read_b, write = _reader(a), _reader(b), _writer(outputs[0])
    return lambda: write(read_a() @ read_b())


def _append_kv(call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
    """The first element of key may ask for a fault, as that of a silu input; then the first token is stored before."""
    import numpy as np

    key, value, _, _, where, *_ = inputs
    assert key is not None
    assert value is not None
    assert where is not None
    rows, caches, slots = (_array(key), _array(value)), [_array(block) for block in outputs], _array(where)
    scope = _SCOPE.get(call.kernel_id.partition(".")[0], 0.0)

    def run() -> None:
        if slots.size and int(slots.max()) >= math.prod(caches[0].shape[:2]):
            raise InvalidArgument(f"slot {slots.max()} is outside the cache")
        first = float(rows[0].flat[0]) if rows[0].size else 0.0
        for token in np.flatnonzero(slots >= 0):
            for cache, row in zip(caches, rows, strict=True):
                cache[divmod(int(slots[token]), cache.shape[1])] = row[token]
            if 6660 <= first < 6680 and first % 1 in (0.0, scope):
                _strike(int(first), key, outputs[0])

    return run


def _null(call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
    return lambda: None


def _strike(action: int, source: Block, target: Block) -> None:
    if action == KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == SEGV:
        ctypes.string_at(0)
    elif action == ABORT:
        os.abort()
    elif action == EXIT0:
        os._exit(0)
    elif action == RAISE:
        raise RuntimeError("the toy raises on request")
    elif action == HANG:
        threading.Event().wait()
    elif action == SPIN:
        while True:
            pass
    elif action == PAUSE:  # until someone sends SIGCONT; then it ends well, unlike one that hangs
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == HOARD:
        raise MemoryError(f"nobody stopped the toy from taking {len(b'x' * HOARD_BYTES)} bytes")
    elif action == INVALID:
        raise InvalidArgument("the toy calls this input invalid")
    elif action == WRITE_INPUT:
        ctypes.memset(_address(source.memory), 0, 4)
    elif action == SCRIBBLE:  # never returns, and never stops writing to the output
        while True:
            target.memory[:4] = os.urandom(4)
    elif action == HALF:  # dies with the first half of the output written
        target.memory[: len(target.memory) // 2] = b"\xff" * (len(target.memory) // 2)
        os.kill(os.getpid(), signal.SIGKILL)


def _address(memory: memoryview) -> int:
    import numpy as np

    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
