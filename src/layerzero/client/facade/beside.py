"""Numbers of the caller's as a small array, beside an array that a call has anyway: of its library where that is torch,
and on its device."""

from __future__ import annotations

import array
import sys
from typing import Any, Literal

from layerzero.client.arrays.recognition import CPU, describe
from layerzero.client.gpu.own_arrays import GpuArray
from layerzero.ipc.vocabulary.tensors import TensorSpec

_CODES: dict[str, Literal["f", "q"]] = {"float32": "f", "int64": "q"}


def beside(other: Any, value: float, dtype: str) -> Any:
    """A read-only array (1) of float32 or int64. `other`: what the caller passed, also while a plan is recorded; for a
    TensorSpec the result is one. Raises InvalidArgument for what is no array, OutOfMemory."""
    spec = TensorSpec.contiguous(dtype, (1,))
    if isinstance(other, TensorSpec):
        return spec
    torch, device = sys.modules.get("torch"), getattr(other, "device", "cpu")
    if torch is not None and isinstance(device, torch.device):
        return torch.tensor([value], dtype=getattr(torch, dtype), device=device)
    # Of bytes, which nobody can write to: plans need not look at them again.
    found = memoryview(array.array(_CODES[dtype], [value]).tobytes())
    ordinal = CPU if device == "cpu" else describe(other).device
    if ordinal == CPU:
        return found.cast(_CODES[dtype])
    made = GpuArray(ordinal, spec)
    made.store(found)
    return made
