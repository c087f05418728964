"""Ops on quantized numbers: fake functions and batch rules, as fakes.py and batching.py have them of others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import layerzero as lz
from layerzero.ipc.vocabulary.ops import BLOCKS, QUANTIZED_FORMATS
from layerzero.ipc.vocabulary.quantized_shapes import QUANTIZED_DTYPES, SCALED_DTYPES

Dims = Sequence[int | None]
ops = torch.ops.layerzero


# --- fake functions


def quantize_fake(x: Tensor, scale: Tensor, *_: Any, dtype: str = "float8_e4m3fn", **__: Any) -> Tensor:
    """As `x`, in `dtype`."""
    return x.new_empty(x.shape, dtype=_dtype("quantize", dtype, QUANTIZED_DTYPES))


def dequantize_fake(x: Tensor, scale: Tensor, *_: Any, dtype: str = "float32", **__: Any) -> Tensor:
    """As `x`, in `dtype`; two numbers for each byte of packed fp4."""
    found = _dtype("dequantize", dtype, SCALED_DTYPES)
    shape: Sequence[int] = x.shape
    if x.dtype == torch.float4_e2m1fn_x2:
        shape = (*x.shape[:-1], 2 * x.shape[-1]) if x.dim() else (2,)
    return x.new_empty(shape, dtype=found)


def dynamic_quantize_fake(x: Tensor, *, dtype: str = "int8", group_size: int = -1, **_: Any) -> Any:
    """Numbers, their scales and zero points."""
    if dtype not in QUANTIZED_FORMATS:
        allowed = " or ".join(QUANTIZED_FORMATS)
        raise lz.InvalidArgument(f"dynamic_quantize: dtype is {dtype!r}; allowed: {allowed}; pass one of them")
    size = BLOCKS.get(dtype, group_size)
    lead: tuple[Any, ...] = tuple(x.shape[:-1])
    extent = x.shape[-1] if x.dim() else 1
    steps = (1,) * max(x.dim(), 1) if size == 0 else (*lead, 1 if size == -1 else extent // size)
    if dtype in BLOCKS:
        numbers = x.new_empty((*lead, extent // 2), dtype=torch.float4_e2m1fn_x2)
    else:
        numbers = x.new_empty(x.shape, dtype=getattr(torch, dtype))
    return numbers, x.new_empty(steps, dtype=torch.float32), x.new_empty(steps, dtype=torch.int32)


def int_matmul_fake(a: Tensor, b: Tensor, *_: Any, **__: Any) -> Tensor:
    """int32, of the last two extents, with leading dimensions that broadcast."""
    if a.dim() < 2 or b.dim() < 2:
        found = f"a has shape {list(a.shape)} and b {list(b.shape)}"
        raise lz.InvalidArgument(f"int_matmul: {found}; allowed: at least 2 dimensions; unsqueeze one of them")
    lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return a.new_empty((*lead, a.shape[-2], b.shape[-1]), dtype=torch.int32)


def scaled_linear_fake(
    x: Tensor, weight: Tensor, weight_scale: Tensor, *_: Any, dtype: str | None = None, **__: Any
) -> Tensor:
    """As `x`, with weight's rows for the last extent."""
    is_plain = str(x.dtype).removeprefix("torch.") in SCALED_DTYPES
    made = x.dtype if is_plain else _dtype("scaled_linear", dtype or "float32", SCALED_DTYPES)
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=made)


def _dtype(op: str, name: str, allowed: Sequence[str]) -> Any:
    if name not in allowed:
        raise lz.InvalidArgument(f"{op}: dtype is {name!r}; allowed: {' or '.join(allowed)}; pass one of them")
    return getattr(torch, name)


# --- batch rules


def quantize_batch(
    info: Any, dims: Dims, x: Tensor, scale: Tensor, zero_point: Tensor | None = None, **options: Any
) -> tuple[Tensor, int]:
    """Scales of each sample, or the same for all."""
    return ops.quantize(*_scaled(info, dims, x, scale, zero_point), **options), 0


def dequantize_batch(
    info: Any, dims: Dims, x: Tensor, scale: Tensor, zero_point: Tensor | None = None, **options: Any
) -> tuple[Tensor, int]:
    """As quantize."""
    return ops.dequantize(*_scaled(info, dims, x, scale, zero_point), **options), 0


def _scaled(info: Any, dims: Dims, x: Tensor, scale: Tensor, zero_point: Tensor | None) -> tuple[Tensor | None, ...]:
    x = x.expand(info.batch_size, *x.shape) if dims[0] is None else x.movedim(dims[0], 0)
    steps = _padded(x, scale, dims[1])
    if zero_point is None:
        return x, steps, None
    points = _padded(x, zero_point, dims[2])
    return x, *torch.broadcast_tensors(steps, points)


def _padded(x: Tensor, scale: Tensor, dim: int | None) -> Tensor:
    """With as many dimensions as samples have, one of them for samples."""
    if dim is None and scale.numel() == 1:
        return scale
    scale = scale.unsqueeze(0) if dim is None else scale.movedim(dim, 0)
    while scale.dim() < x.dim():
        scale = scale.unsqueeze(1)
    return scale
