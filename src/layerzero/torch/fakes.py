"""Fake functions: dtype, shape and strides of each op's result, for whoever traces a program; nothing is computed.

Each has the op's signature. Sizes may be symbolic, so these are not the client's own checks (client/planning), which
compare and hash sizes; opcheck, in tests/frameworks/test_torch_ops.py, compares them with real results. What these
refuse is what would make the shape of a result wrong; all else is refused by the call itself. Results are row-major, as
the client makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import layerzero as lz

Fake = Callable[..., Any]


def silu(input: Tensor, **_: Any) -> Tensor:
    """As `input`."""
    return input.new_empty(input.shape)


def gelu(input: Tensor, approximate: str = "none", **_: Any) -> Tensor:
    """As `input`."""
    return input.new_empty(input.shape)


def gated(op: str) -> Callable[..., Tensor]:
    """Of swiglu and its like: as `gate`; equal shapes."""

    def fake(gate: Tensor, up: Tensor, approximate: str = "none", **_: Any) -> Tensor:
        _alike(op, gate=gate, up=up)
        return gate.new_empty(gate.shape)

    return fake


def softmax(op: str) -> Callable[..., Tensor]:
    """Of softmax and its logarithm: as `input`, in `dtype`."""

    def fake(input: Tensor, dim: int, dtype: str | None = None, **_: Any) -> Tensor:
        ndim = max(input.dim(), 1)
        _need(-ndim <= dim < ndim, lambda: f"{op}: dim is {dim}; allowed: {-ndim} to {ndim - 1}; pass one of them")
        return input.new_empty(input.shape, dtype=getattr(torch, dtype) if dtype else None)

    return fake


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """As `input`."""
    made = _channel_norm("group_norm", input, 2, weight=weight, bias=bias)
    text = f"group_norm: num_groups is {num_groups}; allowed: a divisor of x's channels; pass one of them"
    _need(num_groups > 0, lambda: text)
    _need(input.shape[1] % num_groups == 0, lambda: text)
    return made


def instance_norm(
    input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, **_: Any
) -> Tensor:
    """As `input`."""
    return _channel_norm("instance_norm", input, 3, weight=weight, bias=bias)


def batch_norm(
    input: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    **_: Any,
) -> Tensor:
    """As `input`."""
    params = {"running_mean": running_mean, "running_var": running_var, "weight": weight, "bias": bias}
    return _channel_norm("batch_norm", input, 2, **params)


def _channel_norm(op: str, x: Tensor, least: int, **params: Tensor | None) -> Tensor:
    _same(op, x=x, **params)
    _need(x.dim() >= least, lambda: _shapes(op, f"{least} dimensions or more, channels in the second", x=x))
    for name, given in params.items():
        if given is not None:
            _like(op, name, given, x.shape[1:2], "one number for each channel of x")
    return x.new_empty(x.shape)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    **_: Any,
) -> Tensor:
    """As `input`."""
    return _norm("layer_norm", input, normalized_shape, weight=weight, bias=bias)


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None, **_: Any
) -> Tensor:
    """As `input`."""
    return _norm("rms_norm", input, normalized_shape, weight=weight)


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    **_: Any,
) -> Any:
    """As `input`, twice."""
    _alike("add_rms_norm", input=input, residual=residual)
    return _norm("add_rms_norm", input, normalized_shape, weight=weight), input.new_empty(input.shape)


def layer_norm_backward(
    grad_out: Tensor, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, *_: Any, **__: Any
) -> Any:
    """As `input`, and twice as `normalized_shape`."""
    return _norm_backward("layer_norm_backward", grad_out, input, normalized_shape, weight, 2)


def rms_norm_backward(
    grad_out: Tensor, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, *_: Any, **__: Any
) -> Any:
    """As `input`, and as `normalized_shape`."""
    return _norm_backward("rms_norm_backward", grad_out, input, normalized_shape, weight, 1)


def _norm_backward(op: str, grad: Tensor, x: Tensor, shape: Sequence[int], weight: Tensor | None, sums: int) -> Any:
    _alike(op, grad_out=grad, input=x)
    by_x = _norm(op, x, shape, weight=weight)
    return (by_x, *(x.new_empty(tuple(shape)) for _ in range(sums)))


def _norm(op: str, x: Tensor, shape: Sequence[int], **params: Tensor | None) -> Tensor:
    _same(op, x=x, **params)
    ndim = len(shape)
    text = (
        f"{op}: normalized_shape is {list(shape)}; allowed: the last extents of x, {list(x.shape)}; pass some of them"
    )
    _need(0 < ndim <= x.dim(), lambda: text)
    for wanted, extent in zip(shape, x.shape[x.dim() - ndim :], strict=True):
        _need(wanted == extent, lambda: text)
    for name, given in params.items():
        if given is not None:
            _like(op, name, given, shape)
    return x.new_empty(x.shape)


def matmul(a: Tensor, b: Tensor, **_: Any) -> Tensor:
    """(..., M, K) @ (..., K, N) -> (..., M, N)."""
    _same("matmul", a=a, b=b)
    _need(a.dim() > 0 and b.dim() > 0, lambda: "matmul: a scalar; allowed: 1 or more dimensions; multiply it with *")
    rows, columns = a.shape[-2:-1], b.shape[-1:] if b.dim() > 1 else ()
    inner = b.shape[-2] if b.dim() > 1 else b.shape[0]
    _need(a.shape[-1] == inner, lambda: _shapes("matmul", "a's last extent equal to b's second to last", a=a, b=b))
    return a.new_empty((*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), *rows, *columns))


def addmm(input: Tensor, a: Tensor, b: Tensor, **_: Any) -> Tensor:
    """What broadcasts to (M, N), (M, K) and (K, N) -> (M, N)."""
    _same("addmm", input=input, a=a, b=b)
    _need(a.dim() == 2 and b.dim() == 2, lambda: _shapes("addmm", "2 dimensions", a=a, b=b))
    _need(a.shape[1] == b.shape[0], lambda: _shapes("addmm", "a's last extent equal to b's first", a=a, b=b))
    return a.new_empty((a.shape[0], b.shape[1]))


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    """(..., in_features) -> (..., out_features)."""
    _same("linear", input=input, weight=weight, bias=bias)
    text = "(..., in_features) and (out_features, in_features)"
    is_fit = input.dim() > 0 and weight.dim() in (1, 2)
    _need(is_fit, lambda: _shapes("linear", text, input=input, weight=weight))
    _need(input.shape[-1] == weight.shape[-1], lambda: _shapes("linear", text, input=input, weight=weight))
    if bias is not None:
        _need(bias.dim() == weight.dim() - 1, lambda: _shapes("linear", "(out_features,)", bias=bias))
        for one, other in zip(bias.shape, weight.shape[:-1], strict=True):
            _need(one == other, lambda: _shapes("linear", "(out_features,)", bias=bias, weight=weight))
    return input.new_empty((*input.shape[:-1], *weight.shape[:-1]))


def gated_mlp(input: Tensor, gate_up: Tensor, down: Tensor, activation: str = "silu", **_: Any) -> Tensor:
    """(..., in_features) -> (..., out_features)."""
    _same("gated_mlp", input=input, gate_up=gate_up, down=down)
    text = "(..., in_features), (2 * hidden, in_features) and (out_features, hidden)"

    def found() -> str:
        return _shapes("gated_mlp", text, input=input, gate_up=gate_up, down=down)

    _need(input.dim() > 0 and gate_up.dim() == 2 and down.dim() == 2, found)
    _need(input.shape[-1] == gate_up.shape[1], found)
    _need(gate_up.shape[0] == 2 * down.shape[1], found)
    return input.new_empty((*input.shape[:-1], down.shape[0]))


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, **_: Any) -> Tensor:
    """As `x`."""
    _same("rope", x=x, cos=cos, sin=sin)
    text = "(batch, sequence, heads, head_dim) or without batch, and (sequence, pairs) or with a batch"
    is_fit = x.dim() in (3, 4) and cos.dim() in (2, x.dim() - 1) and sin.dim() == cos.dim()
    _need(is_fit, lambda: _shapes("rope", text, x=x, cos=cos, sin=sin))
    _need(cos.shape[-2] == x.shape[-3], lambda: _shapes("rope", text, x=x, cos=cos))
    return x.new_empty(x.shape)


def rope_qk(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, **_: Any) -> Any:
    """As `q`, and as `k`."""
    _same("rope_qk", q=q, k=k, cos=cos, sin=sin)
    text = "(batch, sequence, heads, head_dim) or without batch, for k with heads of its own"
    _need(q.dim() == k.dim(), lambda: _shapes("rope_qk", text, q=q, k=k))
    made = rope(q, cos, sin)
    for dim in (*range(q.dim() - 2), -1):
        _need(q.shape[dim] == k.shape[dim], lambda: _shapes("rope_qk", text, q=q, k=k))
    return made, k.new_empty(k.shape)


def embedding(
    input: Tensor,
    weight: Tensor,
    *,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    **_: Any,
) -> Tensor:
    """(...) ids -> (..., dim) in the dtype of `weight`."""
    text = "(rows, features)"
    _need(weight.dim() == 2, lambda: _shapes("embedding", text, weight=weight))
    return weight.new_empty((*input.shape, weight.shape[1]))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    *,
    layout: str = "BHSD",
    causal_alignment: str = "top_left",
    **_: Any,
) -> Tensor:
    """As `q`, with v's last extent."""
    _same("attention", q=q, k=k, v=v)
    text = "as many dimensions each, 2 to 4, with layout='BSHD' 4"
    is_fit = q.dim() == k.dim() == v.dim() and q.dim() in ((4,) if layout == "BSHD" else (2, 3, 4))
    _need(is_fit, lambda: _shapes("attention", text, q=q, k=k, v=v))
    _need(q.shape[-1] == k.shape[-1], lambda: _shapes("attention", "one head_dim for q and k", q=q, k=k))
    sequence = 1 if layout == "BSHD" else q.dim() - 2
    _need(k.shape[sequence] == v.shape[sequence], lambda: _shapes("attention", "k and v of equal length", k=k, v=v))
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def attention_forward(q: Tensor, k: Tensor, v: Tensor, *args: Any, layout: str = "BHSD", **options: Any) -> Any:
    """As attention, and (..., heads, sequence) in float32."""
    out = attention(q, k, v, layout=layout, **options)
    rows = (q.shape[0], q.shape[2], q.shape[1]) if layout == "BSHD" else q.shape[:-1]
    return out, q.new_empty(rows, dtype=torch.float32)


def attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, *args: Any, **options: Any
) -> Any:
    """As `q`, `k` and `v`."""
    _same("attention_backward", grad_out=grad_out, q=q, k=k, v=v, output=output)
    return tuple(tensor.new_empty(tensor.shape) for tensor in (q, k, v))


def merge_attention(out0: Tensor, lse0: Tensor, out1: Tensor, lse1: Tensor, *more: Tensor | None, **_: Any) -> Any:
    """As `out0` and `lse0`."""
    _same("merge_attention", out0=out0, out1=out1)
    _need(out0.dim() > 1, lambda: _shapes("merge_attention", "(..., value_dim)", out0=out0))
    return out0.new_empty(out0.shape), lse0.new_empty(lse0.shape)


def attention_varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **_: Any) -> Tensor:
    """As `q`, with v's last extent."""
    _same("attention_varlen", q=q, k=k, v=v)
    is_fit = q.dim() == k.dim() == v.dim() == 3
    _need(is_fit, lambda: _shapes("attention_varlen", "(tokens, heads, head_dim)", q=q, k=k, v=v))
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, *more: Tensor | None, **_: Any) -> Tensor:
    """As `q`, with v_cache's last extent. The last two, if there are four, are scales."""
    _same_or_scaled("paged_attention", k_cache, v_cache, more[2:], q=q)
    _need(q.dim() == 3, lambda: _shapes("paged_attention", "(sequences, heads, head_dim)", q=q))
    return q.new_empty((*q.shape[:-1], v_cache.shape[-1]))


def attention_varlen_forward(q: Tensor, k: Tensor, v: Tensor, *ends: Tensor, **_: Any) -> Any:
    """As attention_varlen, and (tokens, heads) in float32."""
    return attention_varlen(q, k, v, *ends[:2]), q.new_empty(q.shape[:2], dtype=torch.float32)


def paged_attention_forward(q: Tensor, k_cache: Tensor, v_cache: Tensor, *more: Tensor | None, **_: Any) -> Any:
    """As paged_attention, and (tokens, heads) in float32."""
    return paged_attention(q, k_cache, v_cache, *more[:2], *more[5:]), q.new_empty(q.shape[:2], dtype=torch.float32)


def mla_decode(q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, *more: Tensor, **_: Any) -> Any:
    """As `q_nope`, and (sequences, heads) in float32."""
    _same("mla_decode", q_nope=q_nope, q_pe=q_pe, ckv_cache=ckv_cache, kpe_cache=kpe_cache)
    _need(q_nope.dim() == 3, lambda: _shapes("mla_decode", "(sequences, heads, latent_dim)", q_nope=q_nope))
    return q_nope.new_empty(q_nope.shape), q_nope.new_empty(q_nope.shape[:2], dtype=torch.float32)


def append_kv(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, *scales: Tensor | None, **_: Any
) -> None:
    """Nothing: the caches are changed."""
    _same_or_scaled("append_kv", k_cache, v_cache, scales, key=key, value=value)


def gather_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    *_: Any,
    dtype: str | None = None,
    kv_layout: str = "NHD",
    **__: Any,
) -> Any:
    """(tokens, heads, extent) of each cache, with scales in `dtype`."""
    _same("gather_kv", k_cache=k_cache, v_cache=v_cache)
    made = k_cache.dtype if k_scale is None else getattr(torch, dtype or "float32")
    heads = 2 if kv_layout == "NHD" else 1
    shapes = [(slots.shape[0], cache.shape[heads], cache.shape[3]) for cache in (k_cache, v_cache)]
    return tuple(k_cache.new_empty(shape, dtype=made) for shape in shapes)


def _same_or_scaled(op: str, k_cache: Tensor, v_cache: Tensor, scales: Sequence[Any], **data: Tensor) -> None:
    """One dtype and device for all; with scales one for `data` and one for caches."""
    if any(scale is not None for scale in scales):
        _same(op, **data)
        _same(op, k_cache=k_cache, v_cache=v_cache)
    else:
        _same(op, **data, k_cache=k_cache, v_cache=v_cache)


def copy_kv_blocks(k_cache: Tensor, v_cache: Tensor, sources: Tensor, targets: Tensor, **_: Any) -> None:
    """Nothing: the caches are changed."""
    _same("copy_kv_blocks", k_cache=k_cache, v_cache=v_cache)


def like_logits(op: str) -> Callable[..., Tensor]:
    """Of what changes logits: as `logits`."""

    def fake(logits: Tensor, *_: Any, **__: Any) -> Tensor:
        _need(logits.dim() in (1, 2), lambda: _shapes(op, "(rows, vocabulary) or (vocabulary,)", logits=logits))
        return logits.new_empty(logits.shape)

    return fake


def sample(logits: Tensor, *_: Any, **__: Any) -> Tensor:
    """A token of each row."""
    text = "(rows, vocabulary) or (vocabulary,)"
    _need(logits.dim() in (1, 2), lambda: _shapes("sample", text, logits=logits))
    return logits.new_empty(logits.shape[:-1], dtype=torch.int64)


def speculative_verify(target_probs: Tensor, draft_ids: Tensor, *_: Any, **__: Any) -> Any:
    """A token for each step, and a count for each row."""
    text = "(rows, drafts + 1, vocabulary) or without rows"
    _need(target_probs.dim() in (2, 3), lambda: _shapes("speculative_verify", text, target_probs=target_probs))
    shape = target_probs.shape
    return tuple(target_probs.new_empty(one, dtype=torch.int64) for one in (shape[:-1], shape[:-2]))


def tree_accept(draft_ids: Tensor, parents: Tensor, target_ids: Tensor, **_: Any) -> Any:
    """A token and a node for each node, and a count for each row."""
    _need(draft_ids.dim() in (1, 2), lambda: _shapes("tree_accept", "(rows, nodes) or (nodes,)", draft_ids=draft_ids))
    shape = draft_ids.shape
    return tuple(draft_ids.new_empty(one, dtype=torch.int64) for one in (shape, shape, shape[:-1]))


# --- checks ------------------------------------------------------------------------------------------------------


def _need(condition: Any, message: Callable[[], str]) -> None:
    """Raises InvalidArgument, or makes a condition on symbolic sizes one of the program's."""
    if condition is True:
        return
    if condition is False:
        raise lz.InvalidArgument(message())
    torch._check(condition, message)


def _like(op: str, name: str, tensor: Tensor, shape: Sequence[int], what: str = "normalized_shape") -> None:
    text = f"{op}: {name} has shape {list(tensor.shape)}; allowed: {what}, {list(shape)}; reshape it"
    _need(tensor.dim() == len(shape), lambda: text)
    for extent, wanted in zip(tensor.shape, shape, strict=True):
        _need(extent == wanted, lambda: text)


def _alike(op: str, **tensors: Tensor) -> None:
    """One dtype, one device and one shape for two."""
    _same(op, **tensors)
    first, second = tensors.values()
    _need(first.dim() == second.dim(), lambda: _shapes(op, "equal shapes", **tensors))
    for one, other in zip(first.shape, second.shape, strict=True):
        _need(one == other, lambda: _shapes(op, "equal shapes", **tensors))


def _shapes(op: str, allowed: str, **tensors: Tensor) -> str:
    found = ", ".join(f"{name} has shape {list(tensor.shape)}" for name, tensor in tensors.items())
    return f"{op}: {found}; allowed: {allowed}; check the arguments"


def _same(op: str, **tensors: Tensor | None) -> None:
    """One dtype and one device for all that are given."""
    (first, one), *others = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
    for name, other in others:
        if other.dtype != one.dtype:
            raise lz.InvalidArgument(
                f"{op}: {first} is {_name(one)}, {name} is {_name(other)}; allowed: one dtype for all; convert them"
            )
        if other.device != one.device:
            raise lz.InvalidArgument(
                f"{op}: {first} is on {one.device}, {name} on {other.device}; allowed: one device; call .to()"
            )


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _dtype(op: str, name: str, allowed: Sequence[str]) -> Any:
    if name not in allowed:
        raise lz.InvalidArgument(f"{op}: dtype is {name!r}; allowed: {' or '.join(allowed)}; pass one of them")
    return getattr(torch, name)
