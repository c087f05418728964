"""Shape classes: which calls of an op one certificate covers. workers/certify/cases.py has a case for each; the
broker asks for the class of a call.

A class is `variant/size/memory`, or "empty" when an extent is 0:
variant   what the kernel is asked to compute: causal rule, mask, grouped heads, weight, bias, broadcast ...; of
          attention with options (window, soft cap, sinks, slopes, mask of blocks or beside the causal rule) which
          one, or "several"
size      of the extents that kernels cut into blocks: small (all below 16), aligned (those from 16 on are multiples of
          16), ragged (some are not: there is a remainder to handle), long (one is above 256: several blocks)
memory    the worst of all tensors: dense, rows (only the last dimension is without gaps), strided; bshd for attention
          in that layout
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from layerzero.ipc.vocabulary.ops import ACTIVATIONS, BLOCKS, FILTERS, GATED
from layerzero.ipc.vocabulary.tensors import TensorSpec

EMPTY = "empty"
ANY = "any"  # the class of ops without tensors of a floating-point or integer kind, and their dtype
REGISTER = 16  # elements: no vector register of a CPU holds more floats
LONG = 256  # elements: above it libraries go on in blocks

Inputs = Sequence[Any]  # of TensorSpec, None where an optional one is left out


def shape_class(op: str, inputs: Inputs, attrs: Mapping[str, Any], outputs: Sequence[TensorSpec] = ()) -> str:
    """The class of a call in canonical form (ipc/vocabulary/ops.py). Where no `outputs` are given they count as dense.

    Total: an op without classes has the one class "any". So has a signature that breaks its op's rules, and no kernel
    of an op with classes has a certificate for that.
    """
    facets = _FACETS.get(op)
    given = [spec for spec in (*inputs, *outputs) if spec is not None]
    try:
        if facets is None:
            return _TEXT_OPS[op](attrs) if op in _TEXT_OPS else ANY
        if any(spec.numel == 0 for spec in given):
            return EMPTY
        variant, extents = facets(inputs, attrs)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return ANY
    memory = "bshd" if attrs.get("layout") == "BSHD" else max(map(_memory, given), key=_MEMORY.index, default="dense")
    return f"{variant}/{_size(extents)}/{memory}"


def class_dtype(op: str, inputs: Inputs) -> str:
    """The dtype a certificate is about: that of the call's data, or "any" where the op has none."""
    position = {"embedding": 1, "where": 1}.get(op, 0)
    if op not in _FACETS or len(inputs) <= position:
        return ANY
    spec = inputs[position]
    return ANY if spec is None else spec.dtype


_MEMORY = ("dense", "rows", "strided")


def _memory(spec: TensorSpec) -> str:
    if spec.is_contiguous:
        return "dense"
    return "strided" if spec.shape[-1] > 1 and spec.strides[-1] != 1 else "rows"


def _size(extents: Sequence[int]) -> str:
    if max(extents, default=0) > LONG:
        return "long"
    wide = [extent for extent in extents if extent >= REGISTER]
    return "small" if not wide else "ragged" if any(extent % REGISTER for extent in wide) else "aligned"


Facets = tuple[str, Sequence[int]]  # the variant, and the extents that decide on the size


def _attention(inputs: Inputs, attrs: Mapping[str, Any]) -> Facets:
    """With options all else is one class: its cases have causal rules, masks and grouped heads beside them."""
    q, k, v, mask, sinks, slopes = inputs
    queries, keys = q.shape[2], k.shape[2]
    option = _option(sinks, slopes, attrs, mask)
    if option:
        return option, _folded(max(queries, keys))
    parts = []
    if attrs["is_causal"]:
        parts.append("causal" if queries == keys else f"causal_{attrs['causal_alignment']}")
    if mask is not None:
        parts.append("bool_mask" if mask.dtype == "bool" else "float_mask")
    if q.shape[1] != k.shape[1]:
        parts.append("gqa")
    return "+".join(parts) or "plain", (queries, keys, q.shape[3], v.shape[3])


def _option(sinks: Any, slopes: Any, attrs: Mapping[str, Any], mask: Any = None) -> str:
    """Which option of attention a call asks for; "several", or "" for none."""
    options = {
        "window": "window_left" in attrs or "window_right" in attrs,
        "softcap": "softcap" in attrs,
        "sinks": sinks is not None,
        "alibi": slopes is not None,
        "causal+mask": attrs["is_causal"] and mask is not None,
        "blocks": "mask_block_q" in attrs,
    }
    given = [name for name, is_given in options.items() if is_given]
    return given[0] if len(given) == 1 else "several" if given else ""


def _attention_backward(inputs: Inputs, attrs: Mapping[str, Any]) -> Facets:
    return _attention((*inputs[1:4], inputs[6], None, None), attrs)


def _merge_attention(inputs: Inputs, _: Mapping[str, Any]) -> Facets:
    return ("pair" if inputs[4] is None else "several"), _folded(inputs[0].numel)


def _attention_varlen(inputs: Inputs, attrs: Mapping[str, Any]) -> Facets:
    q, k, v, _, _ = inputs
    parts = [f"causal_{attrs['causal_alignment']}"] if attrs["is_causal"] else []
    if q.shape[1] != k.shape[1]:
        parts.append("gqa")
    return "+".join(parts) or "plain", (q.shape[0], k.shape[0], q.shape[2], v.shape[2])


def _paged_attention(inputs: Inputs, _: Mapping[str, Any]) -> Facets:
    """With scales the class is the dtype of the caches, and the room for keys, folded: what is read is scaled, and then
    all goes on as without. So it is with several queries."""
    q, k_cache, v_cache, block_tables, _, k_scale, _ = inputs
    page = k_cache.shape[1]
    if k_scale is not None:
        return k_cache.dtype, _folded(page * block_tables.shape[1])
    extents = (page, page * block_tables.shape[1], q.shape[2], v_cache.shape[3])
    return ("plain" if q.shape[1] == k_cache.shape[2] else "gqa"), extents


def _varlen_forward(inputs: Inputs, attrs: Mapping[str, Any]) -> Facets:
    """Among the cases of a class are grouped heads and others; so it is with those of a paged cache."""
    q, k, _, _, _, sinks, slopes = inputs
    variant = f"causal_{attrs['causal_alignment']}" if attrs["is_causal"] else "plain"
    return _option(sinks, slopes, attrs) or variant, _folded(max(q.shape[0], k.shape[0]))


def _paged_forward(inputs: Inputs, attrs: Mapping[str, Any]) -> Facets:
    _, k_cache, _, tables, _, ends, sinks, slopes, k_scale, _ = inputs
    variant = "decode" if ends is None else "causal" if attrs["is_causal"] else "plain"
    option = _option(sinks, slopes, attrs)
    if k_scale is not None:
        variant, option = k_cache.dtype, f"{k_cache.dtype}+options" if option else ""
    return option or variant, _folded(k_cache.shape[1] * tables.shape[1])


def _mla_decode(inputs: Inputs, _: Mapping[str, Any]) -> Facets:
    """The class is the room for keys, folded: heads, and what they share, decide on nothing."""
    _, _, ckv, _, tables, _ = inputs
    return "plain", _folded(ckv.shape[1] * tables.shape[1])


def _append_kv(inputs: Inputs, _: Mapping[str, Any]) -> Facets:
    key, value, k_cache, _, slots, k_scale, _ = inputs
    extents = (key.shape[0], k_cache.shape[1], key.shape[2], value.shape[2])
    return (slots.dtype, extents) if k_scale is None else (f"{slots.dtype}+{k_cache.dtype}", _folded(max(extents)))


def _of_cache(inputs: Inputs, attrs: Mapping[str, Any]) -> Facets:
    """What copies rows or blocks of a cache; rows that are scaled have another dtype."""
    k_cache, v_cache, places = inputs[:3]
    variant = f"{places.dtype}+{attrs['dtype']}" if "dtype" in attrs else places.dtype
    return variant, _folded(max(places.shape[0], k_cache.shape[1], k_cache.shape[3], v_cache.shape[3]))


def _rope(inputs: Inputs, attrs: Mapping[str, Any]) -> Facets:
    x, cos, _ = inputs
    rotated = 2 * cos.shape[2]
    parts = ["interleaved" if attrs["interleaved"] else "halves"]
    if rotated < x.shape[3]:
        parts.append("partial")
    if cos.shape[0] > 1:
        parts.append("batched")
    return "+".join(parts), (rotated, x.shape[3])


def _rope_qk(inputs: Inputs, attrs: Mapping[str, Any]) -> Facets:
    """As of q; heads decide on nothing."""
    q, _, *tables = inputs
    return _rope((q, *tables), attrs)


def _matmul(inputs: Inputs, _: Mapping[str, Any]) -> Facets:
    a, b = inputs
    extents = (*a.shape[-2:], b.shape[-1])
    if a.ndim == b.ndim == 2:
        return "matrix", extents
    return ("batched" if a.shape[:-2] == b.shape[:-2] else "broadcast"), extents


def _addmm(inputs: Inputs, attrs: Mapping[str, Any]) -> Facets:
    x, a, b = inputs
    shape = (a.shape[0], b.shape[1])
    variant = "matrix" if x.shape == shape else "row" if x.shape[1] == shape[1] else "column"
    return variant + ("" if attrs["beta"] == attrs["alpha"] == 1.0 else "+scaled"), (*a.shape, b.shape[1])


def _linear(inputs: Inputs, attrs: Mapping[str, Any]) -> Facets:
    """With an activation x of any rank is one class: what that does is done to the result."""
    x, weight, bias = inputs
    rows = x.numel // max(x.shape[-1], 1)
    variant = attrs["activation"] or ("matrix" if x.ndim <= 2 else "batched")
    return variant + ("+bias" if bias is not None else ""), (rows, *weight.shape)


def _gated_mlp(inputs: Inputs, attrs: Mapping[str, Any]) -> Facets:
    x, gate_up, down = inputs
    return str(attrs["activation"]), (x.numel // max(x.shape[-1], 1), gate_up.shape[1], *down.shape)


def _grouped_linear(inputs: Inputs, _: Mapping[str, Any]) -> Facets:
    """How long groups are is data."""
    x, weight, _offsets, bias = inputs
    return "plain" if bias is None else "bias", (x.shape[0], *weight.shape[1:])


def _route(inputs: Inputs, attrs: Mapping[str, Any]) -> Facets:
    logits, bias = inputs
    parts = [attrs["scoring"], *([] if bias is None else ["bias"])]
    return "+".join([*parts, *(["groups"] if attrs["top_groups"] < attrs["num_groups"] else [])]), (logits.shape[1],)


def _permute(inputs: Inputs, _: Mapping[str, Any]) -> Facets:
    x, ids = inputs
    return ids.dtype, (x.shape[1],)


def _combine(inputs: Inputs, _: Mapping[str, Any]) -> Facets:
    rows, order, _weights = inputs
    return order.dtype, (rows.shape[1],)


def _moe_mlp(inputs: Inputs, attrs: Mapping[str, Any]) -> Facets:
    x, gate_up, down, *_ = inputs
    return str(attrs["activation"]), (x.shape[0], gate_up.shape[2], *down.shape[1:])


def _conv(inputs: Inputs, attrs: Mapping[str, Any]) -> Facets:
    """With an activation any convolution is one class: what that does is done to the result."""
    x, groups = inputs[0], attrs["groups"]
    kind = "" if groups == 1 else "+depthwise" if groups == x.shape[1] else "+groups"
    return attrs["activation"] or f"{x.ndim - 2}d{kind}", _folded(x.numel)


def _pool(inputs: Inputs, attrs: Mapping[str, Any]) -> Facets:
    (x,) = inputs
    parts = [f"{x.ndim - 2}d", *(["padded"] if set(attrs.get("padding", "")) - {"0", ","} else [])]
    return "+".join(parts), _folded(x.numel)


def _interpolate(inputs: Inputs, attrs: Mapping[str, Any]) -> Facets:
    (x,) = inputs
    parts = [attrs["mode"], f"{x.ndim - 2}d", *[name for name in ("align_corners", "antialias") if attrs[name]]]
    return "+".join(parts), _folded(x.numel)


def _softmax(inputs: Inputs, attrs: Mapping[str, Any]) -> Facets:
    (x,) = inputs
    dim = attrs["dim"]
    to = f"+to_{attrs['dtype']}" if attrs["dtype"] else ""
    return ("last" if dim == x.ndim - 1 else "inner") + to, (x.shape[dim],)


def _norm(inputs: Inputs, attrs: Mapping[str, Any]) -> Facets:
    x = inputs[0]
    extent = 1
    for n in x.shape[x.ndim - attrs["ndim"] :]:
        extent *= n
    return "+".join(["one" if attrs["ndim"] == 1 else "several", *_given(inputs)]), (extent,)


def _add_norm(inputs: Inputs, attrs: Mapping[str, Any]) -> Facets:
    """As of the norm."""
    x, _, *parameters = inputs
    return _norm((x, *parameters), attrs)


def _norm_backward(inputs: Inputs, attrs: Mapping[str, Any]) -> Facets:
    """As of the norm; the number of rows, which gradients of weights are sums over, decides on nothing."""
    return _norm(inputs[1:], attrs)


def _cross_entropy(inputs: Inputs, attrs: Mapping[str, Any]) -> Facets:
    """A weight and smoothing are one class; so are predictions of several dimensions."""
    x, _, weight = inputs
    has_options = weight is not None or attrs["label_smoothing"] > 0 or x.ndim > 2
    return f"{attrs['reduction']}{'+options' if has_options else ''}", (x.shape[1],)


def _group_norm(inputs: Inputs, attrs: Mapping[str, Any]) -> Facets:
    """instance_norm has no groups: there each channel is one. With an activation all else is one class."""
    x, channels = inputs[0], inputs[0].shape[1]
    groups = attrs.get("num_groups", channels)
    if "activation" in attrs:
        return attrs["activation"], (x.numel // (x.shape[0] * groups),)
    variant = "one_group" if groups == 1 else "channels" if groups == channels else "groups"
    parts = ["plain" if "num_groups" not in attrs else variant, *_given(inputs)]
    return "+".join(parts), (x.numel // (x.shape[0] * groups),)


def _batch_norm(inputs: Inputs, attrs: Mapping[str, Any]) -> Facets:
    x, _, _, *parameters = inputs
    parts = ["flat" if x.ndim == 2 else "spatial", *_given((x, *parameters))]
    return "+".join(parts), (x.shape[1], x.numel // (x.shape[0] * x.shape[1]))


def _given(inputs: Inputs) -> list[str]:
    """Which of a norm's parameters there are."""
    return [name for name, spec in zip(("weight", "bias"), inputs[1:], strict=False) if spec is not None]


def _elementwise(inputs: Inputs, attrs: Mapping[str, Any]) -> Facets:
    return str(attrs.get("approximate", "plain")), (inputs[0].numel,)


def _broadcast(inputs: Inputs, _: Mapping[str, Any]) -> Facets:
    shapes = {spec.shape for spec in inputs}
    numel = max(spec.numel for spec in inputs) if len(shapes) == 1 else _numel_of_result(inputs)
    return ("equal" if len(shapes) == 1 else "broadcast"), _folded(numel)


def _numel_of_result(inputs: Inputs) -> int:
    ndim = max(spec.ndim for spec in inputs)
    padded = [(1,) * (ndim - spec.ndim) + spec.shape for spec in inputs]
    numel = 1
    for extents in zip(*padded, strict=True):
        numel *= max(extents)
    return numel


def _folded(numel: int) -> Sequence[int]:
    """Of ops on one element after the other: such calls are long, or small."""
    return (numel,) if numel > LONG else ()


def _clamp(inputs: Inputs, attrs: Mapping[str, Any]) -> Facets:
    return "+".join(name for name in ("min", "max") if attrs[name] is not None), _folded(inputs[0].numel)


def _cat(inputs: Inputs, attrs: Mapping[str, Any]) -> Facets:
    numel = sum(spec.numel for spec in inputs if spec is not None)
    return ("inner" if attrs["dim"] else "first"), _folded(numel)


def _cast(inputs: Inputs, attrs: Mapping[str, Any]) -> Facets:
    return f"to_{attrs['dtype']}", _folded(inputs[0].numel)


def _quantization(inputs: Inputs, attrs: Mapping[str, Any]) -> Facets:
    x, scale, zero_point = inputs
    parts = [attrs["dtype"], "groups" if scale.shape[-1] > 1 else "rows" if scale.numel > 1 else "one"]
    return "+".join([*parts, *([] if zero_point is None else ["zero"])]), _folded(x.numel)


def _dynamic_quantization(inputs: Inputs, attrs: Mapping[str, Any]) -> Facets:
    (x,), groups = inputs, attrs["groups"]
    parts = [attrs["format"]]
    if attrs["format"] not in BLOCKS:
        parts += ["groups" if groups > 1 else "row" if groups else "tensor"]
    return "+".join([*parts, *([] if attrs["symmetric"] else ["zero"])]), _folded(x.numel)


def _int_matmul(inputs: Inputs, _: Mapping[str, Any]) -> Facets:
    a, b, *zeros = inputs
    variant, extents = _matmul((a, b), {})
    parts = ["matrix" if variant == "matrix" else "batched", *([] if a.dtype == b.dtype else [f"by_{b.dtype}"])]
    return "+".join([*parts, *(["zero"] if any(zeros) else [])]), extents


def _scaled_linear(inputs: Inputs, attrs: Mapping[str, Any]) -> Facets:
    """Among the cases of a class are one scale and one for each row, a bias and none, several results; of zero
    points those with groups as well."""
    x, weight, weight_scale, x_scale, _, *zeros = inputs
    has_groups = any(scale is not None and scale.shape[-1] > 1 for scale in (x_scale, weight_scale))
    way = ["zero"] if any(zeros) else ["groups"] if has_groups else []
    return "+".join([attrs["weight_format"] or weight.dtype, *way]), (x.numel // x.shape[-1], *weight.shape)


def _embedding(inputs: Inputs, _: Mapping[str, Any]) -> Facets:
    ids, weight = inputs
    return ids.dtype, (ids.numel, weight.shape[1])


def _penalties(inputs: Inputs, _: Mapping[str, Any]) -> Facets:
    logits, token_ids = inputs[:2]
    return token_ids.dtype, (logits.shape[1],)


def _filters(inputs: Inputs, _: Mapping[str, Any]) -> Facets:
    """Which of the filters that remove tokens: none, one by its name, or several."""
    logits = inputs[0]
    names = [name for name, spec in zip(FILTERS[1:], inputs[-len(FILTERS) + 1 :], strict=True) if spec is not None]
    return (names[0] if len(names) == 1 else "several" if names else "plain"), (logits.shape[1],)


def _verify(inputs: Inputs, _: Mapping[str, Any]) -> Facets:
    target, _, draft = inputs[:3]
    return ("plain" if draft is None else "draft_probs"), (target.shape[2],)


def _tree(inputs: Inputs, _: Mapping[str, Any]) -> Facets:
    return "plain", (inputs[0].shape[1],)


_FACETS: dict[str, Callable[[Inputs, Mapping[str, Any]], Facets]] = {
    "attention": _attention,
    "attention_forward": _attention,
    "attention_backward": _attention_backward,
    "merge_attention": _merge_attention,
    "attention_varlen": _attention_varlen,
    "attention_varlen_forward": _varlen_forward,
    "paged_attention": _paged_attention,
    "paged_attention_forward": _paged_forward,
    "mla_decode": _mla_decode,
    "append_kv": _append_kv,
    "gather_kv": _of_cache,
    "copy_kv_blocks": _of_cache,
    "rope": _rope,
    "rope_qk": _rope_qk,
    "matmul": _matmul,
    "addmm": _addmm,
    "linear": _linear,
    "gated_mlp": _gated_mlp,
    "grouped_linear": _grouped_linear,
    "moe_route": _route,
    "moe_permute": _permute,
    "moe_combine": _combine,
    "moe_mlp": _moe_mlp,
    **dict.fromkeys(("conv", "conv_transpose"), _conv),
    **dict.fromkeys(("max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool"), _pool),
    "interpolate": _interpolate,
    "softmax": _softmax,
    "log_softmax": _softmax,
    "layer_norm": _norm,
    "rms_norm": _norm,
    "add_rms_norm": _add_norm,
    "cross_entropy": _cross_entropy,
    "group_norm": _group_norm,
    "instance_norm": _group_norm,
    "batch_norm": _batch_norm,
    "layer_norm_backward": _norm_backward,
    "rms_norm_backward": _norm_backward,
    "gelu": _elementwise,
    "silu": _elementwise,
    "swiglu": _elementwise,
    **dict.fromkeys((*ACTIVATIONS, *GATED), _elementwise),
    **dict.fromkeys(("add", "mul", "where"), _broadcast),
    "clamp": _clamp,
    "cat": _cat,
    "cast": _cast,
    "quantize": _quantization,
    "dequantize": _quantization,
    "dynamic_quantize": _dynamic_quantization,
    "int_matmul": _int_matmul,
    "scaled_linear": _scaled_linear,
    "embedding": _embedding,
    "penalize_logits": _penalties,
    "filter_logits": _filters,
    "sample": _filters,
    "speculative_verify": _verify,
    "tree_accept": _tree,
}
_TEXT_OPS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "tokenize": lambda attrs: f"{attrs['tokenizer_format']}{'+offsets' if attrs['return_offsets'] else ''}",
    "detokenize": lambda attrs: str(attrs["tokenizer_format"]),
}
