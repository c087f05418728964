"""Batch rules: what torch.func.vmap makes of each op. One call for all samples, or an error that says why not.

A rule takes vmap's info, for each argument of the op the dimension that is mapped over (None where it is not), and the
arguments, of which tensors have that dimension. It returns the result and where its mapped dimension is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import layerzero as lz

Rule = Callable[..., tuple[Any, Any]]
Dims = Sequence[int | None]
ops = torch.ops.layerzero


def silu(info: Any, dims: Dims, input: Tensor, **options: Any) -> tuple[Tensor, int]:
    """Element by element: the mapped dimension is one like the others."""
    return ops.silu(_front(input, dims[0]), **options), 0


def gelu(info: Any, dims: Dims, input: Tensor, approximate: str = "none", **options: Any) -> tuple[Tensor, int]:
    """As silu."""
    return ops.gelu(_front(input, dims[0]), approximate, **options), 0


def each(name: str) -> Rule:
    """As silu, of another activation."""

    def rule(info: Any, dims: Dims, input: Tensor, **options: Any) -> tuple[Tensor, int]:
        return getattr(ops, name)(_front(input, dims[0]), **options), 0

    return rule


def gated(name: str) -> Rule:
    """Of swiglu and its like: as silu; what is not mapped is expanded, which copies nothing here."""

    def rule(info: Any, dims: Dims, gate: Tensor, up: Tensor, *args: Any, **options: Any) -> tuple[Tensor, int]:
        size = info.batch_size
        return getattr(ops, name)(_mapped(gate, dims[0], size), _mapped(up, dims[1], size), *args, **options), 0

    return rule


def softmax(name: str) -> Rule:
    """Of softmax and its logarithm: over the same dimension of each sample."""

    def rule(info: Any, dims: Dims, input: Tensor, dim: int, **options: Any) -> tuple[Tensor, int]:
        x, op = _front(input, dims[0]), getattr(ops, name)
        if x.dim() == 1:  # samples are scalars
            return op(x.unsqueeze(-1), -1 if dim in (0, -1) else dim + 1, **options).squeeze(-1), 0
        return op(x, dim if dim < 0 else dim + 1, **options), 0

    return rule


def add_rms_norm(
    info: Any,
    dims: Dims,
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    **options: Any,
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """As rms_norm."""
    dims = (*dims, None, None)
    x, other = (_mapped(one, dim, info.batch_size) for one, dim in ((input, dims[0]), (residual, dims[1])))
    is_mapped = weight is not None and dims[3] is not None
    out, summed = ops.add_rms_norm(x, other, normalized_shape, None if is_mapped else weight, eps, **options)
    if weight is not None and is_mapped:
        out = out * _beside(weight, dims[3], x)
    return (out, summed), (0, 0)


def group_norm(
    info: Any,
    dims: Dims,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: str | None = None,
    **options: Any,
) -> tuple[Tensor, int]:
    """Each channel of each sample is one of a larger call."""
    dims = (*dims, None, None, None)
    x, params = _as_channels(info, (dims[0], dims[2], dims[3]), input, weight, bias)
    result = ops.group_norm(x, num_groups * info.batch_size, *params, eps, activation, **options)
    return result.unflatten(1, (info.batch_size, -1)), 1


def instance_norm(
    info: Any,
    dims: Dims,
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    **options: Any,
) -> tuple[Tensor, int]:
    """As group_norm."""
    x, params = _as_channels(info, (*dims, None, None), input, weight, bias)
    return ops.instance_norm(x, *params, eps, **options).unflatten(1, (info.batch_size, -1)), 1


def batch_norm(
    info: Any,
    dims: Dims,
    input: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *args: Any,
    **options: Any,
) -> tuple[Tensor, int]:
    """As group_norm."""
    x, params = _as_channels(info, (*dims, None, None), input, running_mean, running_var, weight, bias)
    return ops.batch_norm(x, *params, *args, **options).unflatten(1, (info.batch_size, -1)), 1


def _as_channels(info: Any, dims: Dims, x: Tensor, *params: Tensor | None) -> tuple[Tensor, list[Tensor | None]]:
    """(batch, samples * channels, ...), and for each of those channels its parameters."""
    size = info.batch_size
    flat = [
        None if one is None else _mapped(one, dim, size).flatten() for one, dim in zip(params, dims[1:], strict=False)
    ]
    return _mapped(x, dims[0], size).transpose(0, 1).flatten(1, 2), flat


def layer_norm(
    info: Any,
    dims: Dims,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    **options: Any,
) -> tuple[Tensor, int]:
    """Weights of each sample are multiplied after the op."""
    dims = (*dims, None, None, None, None)
    x = _mapped(input, dims[0], info.batch_size)
    if dims[2] is None and dims[3] is None:
        return ops.layer_norm(x, normalized_shape, weight, bias, eps, **options), 0
    result = ops.layer_norm(x, normalized_shape, None, None, eps, **options)
    if weight is not None:
        result = result * _beside(weight, dims[2], x)
    if bias is not None:
        result = result + _beside(bias, dims[3], x)
    return result, 0


def rms_norm(
    info: Any,
    dims: Dims,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    **options: Any,
) -> tuple[Tensor, int]:
    """As layer_norm."""
    dims = (*dims, None, None)
    x = _mapped(input, dims[0], info.batch_size)
    if weight is None or dims[2] is None:
        return ops.rms_norm(x, normalized_shape, weight, eps, **options), 0
    return ops.rms_norm(x, normalized_shape, None, eps, **options) * _beside(weight, dims[2], x), 0


def matmul(info: Any, dims: Dims, a: Tensor, b: Tensor, **options: Any) -> tuple[Tensor, int]:
    """The mapped dimension is the first of the leading ones."""
    a, b = _front(a, dims[0]), _front(b, dims[1])
    ndim_a, ndim_b = a.dim() - (dims[0] is not None), b.dim() - (dims[1] is not None)
    if ndim_a == 1:
        a = a.unsqueeze(-2)
    if ndim_b == 1:
        b = b.unsqueeze(-1)
    ndim = max(ndim_a, ndim_b, 2)
    a = a if dims[0] is None else _padded(a, ndim + 1)
    b = b if dims[1] is None else _padded(b, ndim + 1)
    result = ops.matmul(a, b, **options)
    if ndim_b == 1:
        result = result.squeeze(-1)
    if ndim_a == 1:
        result = result.squeeze(-1 if ndim_b == 1 else -2)
    return result, 0


def addmm(
    info: Any,
    dims: Dims,
    input: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    beta: float = 1.0,
    alpha: float = 1.0,
    **options: Any,
) -> tuple[Tensor, int]:
    """A matmul of batches, and what is added after it."""
    made = alpha * ops.matmul(_mapped(a, dims[1], info.batch_size), _front(b, dims[2]), **options)
    if not beta:
        return made, 0
    x = input if dims[0] is None else input.movedim(dims[0], 0)
    while dims[0] is not None and x.dim() < 3:
        x = x.unsqueeze(1)
    return made + beta * x, 0


def linear(
    info: Any,
    dims: Dims,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **options: Any,
) -> tuple[Tensor, int]:
    """Weights of each sample make it a matmul of batches, and an activation a call of its own."""
    dims = (*dims, None)
    x = _mapped(input, dims[0], info.batch_size)
    if dims[1] is None and dims[2] is None:
        return ops.linear(x, weight, bias, activation, **options), 0
    w = _mapped(weight, dims[1], info.batch_size)
    is_vector = w.dim() == 2
    w = w.unsqueeze(1) if is_vector else w
    rows = x.unsqueeze(1) if x.dim() == 2 else x.flatten(1, -2)
    result = ops.matmul(rows, w.mT, **options)
    if bias is not None:
        given = _mapped(bias, dims[2], info.batch_size)
        result = result + (given.unsqueeze(1) if is_vector else given).unsqueeze(1)
    result = result.reshape((*x.shape[:-1], w.shape[1]))
    if activation is not None:
        op, _, approximate = activation.partition("_")
        result = getattr(ops, op)(result, *([approximate] if approximate else []), **options)
    return (result.squeeze(-1) if is_vector else result), 0


def gated_mlp(
    info: Any,
    dims: Dims,
    input: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str = "silu",
    **options: Any,
) -> tuple[Tensor, int]:
    """Weights of each sample make it the calls that it stands for, of batches."""
    x = _mapped(input, dims[0], info.batch_size)
    if dims[1] is None and dims[2] is None:
        return ops.gated_mlp(x, gate_up, down, activation, **options), 0
    rows = x.unsqueeze(1) if x.dim() == 2 else x.flatten(1, -2)
    gate, up = ops.matmul(rows, _mapped(gate_up, dims[1], info.batch_size).mT, **options).chunk(2, -1)
    op, _, approximate = activation.partition("_")
    hidden = getattr(ops, op)(gate, *([approximate] if approximate else []), **options) * up
    result = ops.matmul(hidden, _mapped(down, dims[2], info.batch_size).mT, **options)
    return result.reshape((*x.shape[:-1], result.shape[-1])), 0


def rope(
    info: Any, dims: Dims, x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, **options: Any
) -> tuple[Tensor, int]:
    """Samples become the batch; with one of their own they are flattened into it."""
    x = _mapped(x, dims[0], info.batch_size)
    tables = _tables(info, x, (cos, sin), dims[1:])
    flat = x.flatten(0, 1) if x.dim() == 5 else x
    return ops.rope(flat, *tables, interleaved=interleaved, **options).reshape(x.shape), 0


def rope_qk(
    info: Any, dims: Dims, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, **options: Any
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """As rope."""
    both = [_mapped(x, dim, info.batch_size) for x, dim in ((q, dims[0]), (k, dims[1]))]
    tables = _tables(info, both[0], (cos, sin), dims[2:])
    flat = [x.flatten(0, 1) if x.dim() == 5 else x for x in both]
    found = ops.rope_qk(*flat, *tables, interleaved=interleaved, **options)
    by_q, by_k = (one.reshape(x.shape) for one, x in zip(found, both, strict=True))
    return (by_q, by_k), (0, 0)


def _tables(info: Any, x: Tensor, tables: Sequence[Tensor], dims: Dims) -> list[Tensor]:
    """cos and sin for samples of x that become its batch."""
    found = []
    for table, dim in zip(tables, dims, strict=False):
        own = _mapped(table, dim, info.batch_size)
        if x.dim() == 5:
            own = own.unsqueeze(1) if own.dim() == 3 else own
            own = own.expand(x.shape[0], x.shape[1], *own.shape[2:]).flatten(0, 1)
        found.append(own)
    return found


def embedding(info: Any, dims: Dims, input: Tensor, weight: Tensor, **options: Any) -> tuple[Tensor, int]:
    """Ids of each sample; a table for each sample is refused."""
    if dims[1] is not None:
        raise lz.InvalidArgument(
            "layerzero::embedding under vmap: weight is mapped over; allowed: one weight for all samples; index it by "
            "hand: weight[ids]"
        )
    return ops.embedding(_front(input, dims[0]), weight, **options), 0


ATTENTION_SCALARS = 4  # arguments of attention between its mask and its sinks


def attention(
    info: Any,
    dims: Dims,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    *args: Any,
    **options: Any,
) -> tuple[Tensor, int]:
    """Samples are flattened into the batch."""
    dims = (*dims, *[None] * 7)
    size = info.batch_size
    if len(args) > ATTENTION_SCALARS:
        sinks, *slopes = args[ATTENTION_SCALARS:]
        if dims[4 + ATTENTION_SCALARS] is not None:
            raise lz.InvalidArgument(
                "layerzero::attention under vmap: sinks is mapped over; allowed: the same for all samples; loop over "
                "them"
            )
        args = (*args[:ATTENTION_SCALARS], sinks, *[_slopes(one, dims, size, q) for one in slopes])
    q5, k5, v5 = (_padded(_mapped(t, dim, size), 5) for t, dim in ((q, dims[0]), (k, dims[1]), (v, dims[2])))
    ndim = q.dim() - (dims[0] is not None)
    mask = None
    if attn_mask is not None:
        mask = _padded(_mapped(attn_mask, dims[3], size), 5)
        mask = mask.expand(size, q5.shape[1], *mask.shape[2:]).flatten(0, 1)
    flat = (tensor.flatten(0, 1) for tensor in (q5, k5, v5))
    result = ops.attention(*flat, mask, *args, **options).unflatten(0, q5.shape[:2])
    for _ in range(4 - ndim):
        result = result.squeeze(1)
    return result, 0


def _slopes(slopes: Tensor | None, dims: Dims, size: int, q: Tensor) -> Tensor | None:
    """alibi_slopes, (heads) or (batch, heads), of the flattened batch; those of all samples are left as they are."""
    dim = dims[5 + ATTENTION_SCALARS]
    if slopes is None or (dim is None and (slopes.dim() == 1 or len(slopes) == 1)):
        return slopes
    mapped = _mapped(slopes, dim, size)
    mapped = mapped if mapped.dim() == 3 else mapped.unsqueeze(1)
    sample = q if dims[0] is None else q.select(dims[0], 0)
    return mapped.expand(-1, sample.shape[0] if sample.dim() == 4 else 1, -1).flatten(0, 1)


def refused(name: str) -> Rule:
    """The rule of an op that has none."""

    def rule(info: Any, dims: Dims, *args: Any, **options: Any) -> tuple[Tensor, int]:
        raise lz.InvalidArgument(
            f"layerzero::{name} has no batch rule for torch.func.vmap; call it outside of vmap, its arguments have a "
            "dimension for sequences"
        )

    return rule


def _front(tensor: Tensor, dim: int | None) -> Tensor:
    return tensor if dim is None else tensor.movedim(dim, 0)


def _mapped(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """With the mapped dimension in front, expanded where there is none."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _padded(tensor: Tensor, ndim: int) -> Tensor:
    """With extents of 1 behind the mapped dimension, up to `ndim` dimensions."""
    while tensor.dim() < ndim:
        tensor = tensor.unsqueeze(1)
    return tensor


def _beside(param: Tensor, dim: int | None, x: Tensor) -> Tensor:
    """A parameter of each sample, so that it broadcasts with samples."""
    return param if dim is None else _padded(param.movedim(dim, 0), x.dim())
