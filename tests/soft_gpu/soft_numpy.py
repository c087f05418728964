"""NumPy kernels on the streams of soft_gpu.py: what backends on the GPU of threads run.

gelu of SLOW elements keeps its stream busy for SLOW_S first, and for as long as there is a file `gate`, so that tests
meet calls under way. layer_norm with an eps of FAULTS strikes in backend "one".
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tests.soft_gpu import soft_gpu
from tests.soft_gpu.soft_gpu import array_at, driver

from layerzero.ipc.vocabulary.ops import OPS
from layerzero.workers.provider import Block, Bound, Call, Loaded

SLOW, SLOW_S = 4099, 0.2
WORN = 0.7  # silu of arrays that begin with it is wrong by 1 % in backend "one"; no probe has such
SLOW_SILU_S = 0.005  # what the kernel NAME.silu.slow takes
GATE = "gate"
ILLEGAL, RAISE, STUCK = FAULTS = (0.4375, 0.109375, 0.21875)


def load(gate: Path) -> Loaded:
    """Of the backend LZ_TOY_NAME."""
    soft_gpu.install()
    name = os.environ["LZ_TOY_NAME"]
    kernels = {
        "silu": _silu,
        "matmul": _matmul,
        "gelu": partial(_gelu, gate),
        "layer_norm": _layer_norm,
        "append_kv": _append_kv,
    }
    kernels |= {"silu.slow": _slow_silu, "attention_forward": _attention_forward}
    streams = _Current()
    return Loaded(
        versions={"numpy": np.__version__},
        kernels={f"{name}.{op}": streams.bind(name, kernel) for op, kernel in kernels.items()},
        on_stream=streams.on_stream,
    )


Kernel = Callable[[str, Call, Sequence[Any], Any], Callable[[], None]]


class _Current:
    """The stream that kernels go to."""

    def __init__(self) -> None:
        self._stream = 0
        self._loaded: set[str] = set()

    @contextlib.contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        before, self._stream = self._stream, stream
        yield
        self._stream = before

    def bind(self, name: str, kernel: Kernel) -> Callable[..., Bound]:
        def bind(call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
            arrays = [None if block is None else array_at(block.device.pointer, block.spec) for block in inputs]
            outs = [array_at(block.device.pointer, block.spec) for block in outputs]
            out = outs if len(OPS[call.op].outputs) > 1 else outs[0]

            def bound() -> None:
                if call.op not in self._loaded and not driver.is_capturing(self._stream):
                    self._loaded.add(call.op)
                    driver.synchronize()  # as CUDA may when it loads a kernel
                driver.put(self._stream, kernel(name, call, arrays, out))

            return bound

        return bind


def _silu(name: str, call: Call, inputs: Sequence[Any], out: Any) -> Callable[[], None]:
    def run() -> None:
        x = inputs[0].astype(np.float64)
        is_worn = name == "one" and x.size and x.flat[0] == np.float32(WORN)
        with np.errstate(over="ignore"):
            out[...] = x / (1 + np.exp(-x)) * (1.01 if is_worn else 1)

    return run


def _attention_forward(name: str, call: Call, inputs: Sequence[Any], outs: Any) -> Callable[[], None]:
    def run() -> None:
        q, k, v = (array.astype(np.float64) for array in inputs[:3])
        scores = call.attrs["scale"] * q @ np.swapaxes(k, -1, -2)
        weights = np.exp(scores)
        outs[0][...] = weights @ v / weights.sum(-1, keepdims=True)
        outs[1][...] = np.log(weights.sum(-1))

    return run


def _slow_silu(name: str, call: Call, inputs: Sequence[Any], out: Any) -> Callable[[], None]:
    run = _silu(name, call, inputs, out)
    return lambda: (time.sleep(SLOW_SILU_S), run())[1]


def _matmul(name: str, call: Call, inputs: Sequence[Any], out: Any) -> Callable[[], None]:
    def run() -> None:
        out[...] = inputs[0].astype("float64") @ inputs[1].astype("float64")

    return run


def _gelu(gate: Path, name: str, call: Call, inputs: Sequence[Any], out: Any) -> Callable[[], None]:
    is_tanh = call.attrs["approximate"] == "tanh"

    def run() -> None:
        if out.size == SLOW:
            time.sleep(SLOW_S)
            while gate.exists():
                time.sleep(0.001)
        x = inputs[0].astype(np.float64)
        if is_tanh:
            out[...] = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        else:
            out[...] = 0.5 * x * (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2)))

    return run


def _layer_norm(name: str, call: Call, inputs: Sequence[Any], out: Any) -> Callable[[], None]:
    x, weight, bias = inputs
    eps, axes = call.attrs["eps"], tuple(range(-call.attrs["ndim"], 0))
    if name == "one" and eps == RAISE:
        raise RuntimeError("the toy raises")

    def run() -> None:
        if name == "one" and eps == ILLEGAL:
            driver.is_lost = True
            return
        if name == "one" and eps == STUCK:
            threading.Event().wait()
        wide = x.astype(np.float64)
        mean = wide.mean(axes, keepdims=True)
        result = (wide - mean) / np.sqrt(((wide - mean) ** 2).mean(axes, keepdims=True) + eps)
        out[...] = result * (1 if weight is None else weight) + (0 if bias is None else bias)

    return run


def _append_kv(name: str, call: Call, inputs: Sequence[Any], out: Any) -> Callable[[], None]:
    def run() -> None:
        key, value, _, _, slots, *_ = inputs
        for rows, cache in zip((key, value), out, strict=True):
            for row, slot in zip(rows, slots.tolist(), strict=True):
                if 0 <= slot < cache.shape[0] * cache.shape[1]:
                    cache[slot // cache.shape[1], slot % cache.shape[1]] = row

    return run
