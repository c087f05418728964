"""Arguments for a call that nobody has data for: which parameters are arrays, random ones in shared memory, and plain
ones without NumPy."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from layerzero.client.arrays.recognition import CPU, describe
from layerzero.client.arrays.wrapping import wrap
from layerzero.client.facade.memory import empty
from layerzero.client.gpu.own_arrays import GpuArray
from layerzero.ipc.errors import EnvError
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.places import places
from layerzero.ipc.vocabulary.tensors import NARROW_DTYPES, TensorSpec


def tensor_names(function: Callable[..., Any]) -> list[str]:
    """The parameters of an op that are arrays, in order."""
    parameters = inspect.signature(function).parameters
    return [name for name, p in parameters.items() if _is_array(str(p.annotation)) and name != "out"]


def _is_array(annotation: str) -> bool:
    return "Array" in annotation or annotation == "Any"


def random_inputs(op: str, specs: Mapping[str, TensorSpec | None], seed: int, *, device: int = CPU) -> dict[str, Any]:
    """Seeded arrays in shared memory, with the strides of their specs: normal floats, small integers, coin flips; for
    embedding, rows that exist; sequences of equal lengths, and as many keys in a paged cache as its tables have room
    for. `device`: the ordinal of a GPU, where they lie then, in memory of ours. Raises EnvError without NumPy,
    OutOfMemory."""
    if not any(specs.values()):
        return dict(specs)
    try:
        import numpy as np
    except ImportError as exc:
        raise EnvError(
            "random inputs are made with NumPy, which is not installed here",
            cause=str(exc),
            repair="pip install 'layerzero-broker[demo]'",
        ) from exc
    plain = ("bfloat16",) if device != CPU else ()  # bytes are enough there
    needs_names = {"bfloat16", *NARROW_DTYPES}.difference(plain)
    if any(spec is not None and spec.dtype in needs_names for spec in specs.values()):
        try:
            import ml_dtypes  # type: ignore[import-not-found,unused-ignore]  # noqa: F401  # teaches NumPy the name
        except ImportError as exc:
            raise EnvError(
                "NumPy has neither bfloat16 nor 8-bit floats of its own, and ml_dtypes is not installed here",
                cause=str(exc),
                repair="pip install ml_dtypes, or use float16 or float32",
            ) from exc
    table = specs.get("weight") if op == "embedding" else None
    top = table.shape[0] if table is not None and table.ndim else 8
    rng = np.random.default_rng(seed)

    def make(name: str, spec: TensorSpec) -> Any:
        numel = spec.span_bytes // spec.itemsize
        spread = places(name, specs) if name in OPS[op].indices else None
        if spread is not None:
            start, stop = spread
            values: Any = np.linspace(start, stop, numel)
        elif spec.dtype == "bool":
            values = rng.random(numel) < 0.5
        elif "int" in spec.dtype:
            values = rng.integers(0, max(min(top, np.iinfo(spec.dtype).max), 1), numel)
        else:
            values = rng.standard_normal(numel)
            values = abs(values) if name.endswith("_probs") else values
        if device != CPU:
            made = GpuArray(device, spec)
            made.store(memoryview(_packed(values, spec.dtype)))
            return made
        memory = empty(numel, spec.dtype)
        memory[...] = values.astype(spec.dtype)
        strides = [step * spec.itemsize for step in spec.strides]
        return np.lib.stride_tricks.as_strided(memory, spec.shape, strides)

    def _packed(values: Any, dtype: str) -> Any:
        if dtype == "bfloat16":
            return (values.astype("float32").view("uint32") >> 16).astype("uint16").view("uint8")
        return values.astype(dtype).view("uint8")

    return {name: None if spec is None else make(name, spec) for name, spec in specs.items()}


def plain_inputs(op: str, specs: Mapping[str, TensorSpec | None], *, device: int = CPU) -> dict[str, Any]:
    """Zeros in plain memory, made without NumPy; of index tensors, the values that random_inputs gives them. `device`:
    the ordinal of a GPU, where they lie then, in memory of ours. Raises OutOfMemory."""
    like = describe(b"")

    def make(name: str, spec: TensorSpec) -> Any:
        memory = bytearray(spec.span_bytes)
        spread = places(name, specs) if name in OPS[op].indices else None
        if spread is not None:
            start, stop = spread
            numel = spec.span_bytes // spec.itemsize
            values = (start + (stop - start) * n // max(numel - 1, 1) for n in range(numel))
            memory[:] = b"".join(value.to_bytes(spec.itemsize, sys.byteorder, signed=True) for value in values)
        if device != CPU:
            made = GpuArray(device, spec)
            made.store(memoryview(memory))
            return made
        return wrap(memoryview(memory), spec, like)[0]

    return {name: None if spec is None else make(name, spec) for name, spec in specs.items()}
