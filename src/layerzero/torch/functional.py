"""The ops with the signatures of torch.nn.functional, where it has them: what a model calls in place of its own.

All take torch tensors on the CPU or on an NVIDIA GPU and return a new tensor, row-major, of the dtype that each says.
All can be compiled, exported, run under autocast and inference mode; those of this module have gradients. `backend`
pins one backend, `timeout_s` is how long an attempt may run.

Raise lz.InvalidArgument for calls that make no sense, and what the function of the same name in layerzero raises.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import layerzero as lz
from layerzero.torch import (
    registration,  # noqa: F401  # defines the ops
    vision,
)

ops = torch.ops.layerzero
Numbers = int | Sequence[int]


def silu(input: Tensor, *, backend: str | None = None, timeout_s: float | None = None) -> Tensor:
    """x / (1 + exp(-x)) of a tensor of any shape, in float16, bfloat16, float32 or float64. As
    torch.nn.functional.silu."""
    return ops.silu.default(input, backend=backend, timeout_s=timeout_s)


def gelu(
    input: Tensor, approximate: str = "none", *, backend: str | None = None, timeout_s: float | None = None
) -> Tensor:
    """x Phi(x), or with approximate="tanh" its approximation. Shapes and dtypes as silu; as
    torch.nn.functional.gelu."""
    return ops.gelu.default(input, approximate, backend=backend, timeout_s=timeout_s)


def swiglu(gate: Tensor, up: Tensor, *, backend: str | None = None, timeout_s: float | None = None) -> Tensor:
    """silu(gate) * up of tensors of one shape and dtype. Dtypes as silu."""
    return ops.swiglu.default(gate, up, backend=backend, timeout_s=timeout_s)


def softmax(
    input: Tensor,
    dim: int,
    dtype: torch.dtype | None = None,
    *,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> Tensor:
    """exp(x) / sum(exp(x)) along `dim`. `dtype`: what `input` is converted to before, and the result's; dtypes as
    silu.

    As torch.nn.functional.softmax, but for dim=None, which is deprecated there and refused here."""
    if dtype is not None and not (input.is_floating_point() and dtype.is_floating_point):
        input, dtype = input.to(dtype), None
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    return ops.softmax.default(input, dim, dtype=name, backend=backend, timeout_s=timeout_s)


def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimensions, whose extents are `normalized_shape`,
    that of weight and bias, too. One dtype for all, as silu. As torch.nn.functional.layer_norm."""
    shape = _extents(normalized_shape)
    return ops.layer_norm.default(input, shape, weight, bias, eps, backend=backend, timeout_s=timeout_s)


def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimensions; as layer_norm. eps=None: the epsilon of what is
    computed in, float32, or float64 for float64. As torch.nn.functional.rms_norm."""
    shape = _extents(normalized_shape)
    return ops.rms_norm.default(input, shape, weight, eps, backend=backend, timeout_s=timeout_s)


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> Tensor:
    """input @ weight^T + bias: (..., in) and (out, in), (out,) -> (..., out), one dtype for all: any but bool. As
    torch.nn.functional.linear, and activation of that: "relu", "gelu", "gelu_tanh" or "silu", of floating-point."""
    return ops.linear.default(input, weight, bias, activation, backend=backend, timeout_s=timeout_s)


def matmul(a: Tensor, b: Tensor, *, backend: str | None = None, timeout_s: float | None = None) -> Tensor:
    """(..., M, K) @ (..., K, N) -> (..., M, N) with leading dimensions that broadcast; 1-D tensors are a row on the
    left and a column on the right. Dtypes as linear. As torch.matmul."""
    return ops.matmul.default(a, b, backend=backend, timeout_s=timeout_s)


def cat(
    tensors: Sequence[Tensor], dim: int = 0, *, backend: str | None = None, timeout_s: float | None = None
) -> Tensor:
    """Up to eight tensors one after the other along `dim`, of equal shapes but for that; one dtype, any. As
    torch.cat."""
    return ops.cat.default(*tensors, dim=dim, backend=backend, timeout_s=timeout_s)


def rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> Tensor:
    """Rotary position embedding of x (batch, sequence, heads, head_dim) or without batch, by tables (sequence, pairs)
    or (1 or batch, sequence, pairs). One dtype for all, as silu. As layerzero.rope."""
    return ops.rope.default(x, cos, sin, interleaved=interleaved, backend=backend, timeout_s=timeout_s)


def rope_qk(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> tuple[Tensor, Tensor]:
    """rope of q and of k, which differ in their heads alone, by the same tables. As layerzero.rope_qk."""
    found = ops.rope_qk.default(q, k, cos, sin, interleaved=interleaved, backend=backend, timeout_s=timeout_s)
    return found[0], found[1]


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> Tensor:
    """Minus the log-softmax of input (batch, classes, ...) at class indices (batch, ...), or without batch. Dtypes as
    silu. As layerzero.cross_entropy; size_average and reduce, which torch has deprecated, must be None."""
    if size_average is not None or reduce is not None:
        raise lz.InvalidArgument("cross_entropy: size_average and reduce must be None; pass reduction")
    settings = {"backend": backend, "timeout_s": timeout_s}
    return ops.cross_entropy.default(input, target, weight, ignore_index, reduction, label_smoothing, **settings)


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> Tensor:
    """Rows of `weight` (num_embeddings, dim) at int32 or int64 indices (...) -> (..., dim), in the weight's dtype.

    padding_idx: this row gets no gradient; negative ones count from the end. max_norm, norm_type: rows that are
    looked up and longer are first scaled to that norm, in place. scale_grad_by_freq: gradients are divided by how
    often a row was looked up. sparse: the weight's gradient is a sparse tensor. All as
    torch.nn.functional.embedding."""
    if padding_idx is None:
        row = -1  # of torch's op: no such row
    else:
        rows = weight.shape[0]
        if not -rows <= padding_idx < rows:
            raise lz.InvalidArgument(
                f"embedding: padding_idx is {padding_idx}; allowed: {-rows} to {rows - 1}; pass a row of weight"
            )
        row = padding_idx + rows if padding_idx < 0 else padding_idx
    if max_norm is not None:
        with torch.no_grad():
            torch.embedding_renorm_(weight.detach(), input.contiguous(), max_norm, norm_type)
    return ops.embedding.default(
        input,
        weight,
        padding_idx=row,
        scale_grad_by_freq=scale_grad_by_freq,
        sparse=sparse,
        backend=backend,
        timeout_s=timeout_s,
    )


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> Tensor:
    """softmax(query key^T * scale + mask) value: (batch, heads, seq_q, head_dim), (batch, kv_heads, seq_k, head_dim)
    and (..., value_dim) -> (batch, heads, seq_q, value_dim); batch and heads may be left out. One dtype for all, as
    silu; attn_mask is bool (True: attend) or of that dtype (added). With dropout_p above 0 torch's own kernel
    computes it in this process, and lz.last_report() says so. Gradients are an op of ours, attention_backward; where no
    kernel has it they are computed in this process, in memory for seq_q * seq_k numbers of each head.

    As torch.nn.functional.scaled_dot_product_attention; docs/ops.md lists what differs."""
    return ops.attention.default(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, backend=backend, timeout_s=timeout_s
    )


def _extents(shape: int | Sequence[int]) -> Sequence[int]:
    return (shape,) if isinstance(shape, (int, torch.SymInt)) else shape


def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Numbers = 1,
    padding: str | Numbers = 0,
    dilation: Numbers = 1,
    groups: int = 1,
    *,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> Tensor:
    """Of (batch, channels, length), or without batch, and a weight (out_channels, channels / groups, kernel). Dtypes as
    silu; as torch.nn.functional.conv1d."""
    return _conv(1, input, weight, bias, stride, padding, dilation, groups, backend, timeout_s)


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Numbers = 1,
    padding: str | Numbers = 0,
    dilation: Numbers = 1,
    groups: int = 1,
    *,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> Tensor:
    """As conv1d, of two dimensions; as torch.nn.functional.conv2d."""
    return _conv(2, input, weight, bias, stride, padding, dilation, groups, backend, timeout_s)


def conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Numbers = 1,
    padding: str | Numbers = 0,
    dilation: Numbers = 1,
    groups: int = 1,
    *,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> Tensor:
    """As conv1d, of three dimensions; as torch.nn.functional.conv3d."""
    return _conv(3, input, weight, bias, stride, padding, dilation, groups, backend, timeout_s)


def _conv(
    dims: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Numbers,
    padding: str | Numbers,
    dilation: Numbers,
    groups: int,
    backend: str | None,
    timeout_s: float | None,
) -> Tensor:
    _of_dims(f"conv{dims}d", dims, weight)
    pads = vision.flattened(padding, weight, stride, dilation)
    options = {"backend": backend, "timeout_s": timeout_s}
    return ops.conv.default(input, weight, bias, stride, pads, dilation, groups, **options)


def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Numbers = 1,
    padding: Numbers = 0,
    output_padding: Numbers = 0,
    groups: int = 1,
    dilation: Numbers = 1,
    *,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> Tensor:
    """Of (batch, channels, length), or without batch, and a weight (channels, out_channels / groups, kernel). Dtypes as
    silu; as torch.nn.functional.conv_transpose1d."""
    _of_dims("conv_transpose1d", 1, weight)
    args = (input, weight, bias, stride, padding, output_padding, groups, dilation)
    return ops.conv_transpose.default(*args, backend=backend, timeout_s=timeout_s)


def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Numbers = 1,
    padding: Numbers = 0,
    output_padding: Numbers = 0,
    groups: int = 1,
    dilation: Numbers = 1,
    *,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> Tensor:
    """As conv_transpose1d, of two dimensions; as torch.nn.functional.conv_transpose2d."""
    _of_dims("conv_transpose2d", 2, weight)
    args = (input, weight, bias, stride, padding, output_padding, groups, dilation)
    return ops.conv_transpose.default(*args, backend=backend, timeout_s=timeout_s)


def conv_transpose3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Numbers = 1,
    padding: Numbers = 0,
    output_padding: Numbers = 0,
    groups: int = 1,
    dilation: Numbers = 1,
    *,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> Tensor:
    """As conv_transpose1d, of three dimensions; as torch.nn.functional.conv_transpose3d."""
    _of_dims("conv_transpose3d", 3, weight)
    args = (input, weight, bias, stride, padding, output_padding, groups, dilation)
    return ops.conv_transpose.default(*args, backend=backend, timeout_s=timeout_s)


def _of_dims(name: str, dims: int, weight: Tensor) -> None:
    if weight.dim() != dims + 2:
        raise lz.InvalidArgument(
            f"{name}: weight has shape {list(weight.shape)}; allowed: {dims + 2} dimensions; check it"
        )
