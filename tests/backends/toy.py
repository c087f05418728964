"""Backends for tests: silu in NumPy, and a fault when the first element asks for one. The faults are real."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Sequence

from layerzero.ipc.errors import InvalidArgument
from layerzero.workers.provider import Block, Bound, Call, Loaded

KILL, SEGV, ABORT, EXIT0, RAISE, HANG, INVALID, WRITE_INPUT, SPIN = (6660.0 + i for i in range(9))


def load() -> Loaded:
    import numpy as np

    backend = os.environ.get("LZ_TOY_NAME", "")

    def array(block: Block) -> np.ndarray:
        spec = block.spec
        strides = [s * spec.itemsize for s in spec.strides]
        return np.ndarray(spec.shape, spec.dtype, buffer=block.memory, strides=strides)

    def silu(call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        source, target = inputs[0], outputs[0]
        assert source is not None
        x, y = array(source), array(target)

        def run() -> None:
            if x.size:
                _fault(float(x.flat[0]), source.memory)
            y[...] = x / (1 + np.exp(-x))

        return run

    def null(call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        return lambda: None

    names = [backend] if backend else ["alpha", "beta", "gamma"]
    kernels = {f"{name}.{op}": bind for name in names for op, bind in (("silu", silu), ("null", null))}
    return Loaded({"numpy": np.__version__}, kernels)


def _fault(value: float, memory: memoryview) -> None:
    if value == KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    elif value == SEGV:
        ctypes.string_at(0)
    elif value == ABORT:
        os.abort()
    elif value == EXIT0:
        os._exit(0)
    elif value == RAISE:
        raise RuntimeError("the toy raises on request")
    elif value == HANG:
        threading.Event().wait()
    elif value == SPIN:
        while True:
            pass
    elif value == INVALID:
        raise InvalidArgument("the toy calls this input invalid")
    elif value == WRITE_INPUT:
        address = ctypes.c_char.from_buffer_copy(memory[:1])  # a copy: only to show the type
        del address
        ctypes.memset(_address(memory), 0, 4)


def _address(memory: memoryview) -> int:
    import numpy as np

    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)


if __name__ == "__main__":
    sys.exit("a provider is imported by a worker")
