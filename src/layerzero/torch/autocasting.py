"""What torch.autocast makes of each op: rules like those that torch has for its own.

A rule takes torch's device type, the dtype that autocast is for there, and the call's tensors; it returns the dtype
that its floating-point tensors are converted to, and that of the result where it differs. Tensors of float64, of
8-bit floats and of integers stay as they are, as with torch's ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Rule = Callable[[str, torch.dtype, Sequence[Tensor]], tuple[torch.dtype | None, torch.dtype | None]]
CASTS = (torch.float16, torch.bfloat16, torch.float32)


def state() -> tuple[torch.dtype | None, torch.dtype | None] | None:
    """This thread's: the dtypes that it converts to on the CPU and on CUDA, None where it is off; None where it is off
    on all devices."""
    if not torch._C._is_any_autocast_enabled():
        return None
    on_cpu, on_cuda = (
        torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
        for device_type in ("cpu", "cuda")
    )
    return on_cpu, on_cuda


def lower(device_type: str, dtype: torch.dtype, tensors: Sequence[Tensor]) -> tuple[torch.dtype | None, None]:
    """Matrix products: autocast's dtype."""
    return dtype, None


def single(
    device_type: str, dtype: torch.dtype, tensors: Sequence[Tensor]
) -> tuple[torch.dtype | None, torch.dtype | None]:
    """What sums over many elements: float32 on a GPU. On the CPU torch has no rule for these, and its kernels take
    half-precision tensors with float32 weights, and return the first one's dtype; so does this."""
    return (torch.float32, None) if device_type != "cpu" else first(device_type, dtype, tensors)


def always_single(device_type: str, dtype: torch.dtype, tensors: Sequence[Tensor]) -> tuple[torch.dtype, None]:
    """Losses: float32 on a CPU, too."""
    return torch.float32, None


def widest(device_type: str, dtype: torch.dtype, tensors: Sequence[Tensor]) -> tuple[torch.dtype | None, None]:
    """Tensors of several dtypes are converted to the widest of them, as torch's promotion does."""
    found = {tensor.dtype for tensor in tensors if tensor.dtype in CASTS}
    return (torch.float32 if len(found) > 1 else None), None


def first(
    device_type: str, dtype: torch.dtype, tensors: Sequence[Tensor]
) -> tuple[torch.dtype | None, torch.dtype | None]:
    """As widest, with the result in the dtype of the first tensor."""
    wide, _ = widest(device_type, dtype, tensors)
    return wide, None if wide is None else tensors[0].dtype
