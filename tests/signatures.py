"""Calls whose tensors belong together, of every op: as the client plans them from a user's arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from tests import expert_calls
from tests.gpu.vision_calls import OPS as VISION_OPS
from tests.gpu.vision_calls import random_call

from layerzero.client.planning import (
    activation_plans,
    attention_plans,
    cache_plans,
    elementwise_plans,
    expert_plans,
    loss_plans,
    norm_plans,
    plans,
    product_plans,
    quantized_plans,
    sampling_plans,
    token_plans,
    vision_plans,
)
from layerzero.client.planning.plans import Plan
from layerzero.functions import calling
from layerzero.ipc.vocabulary.attention_shapes import SCALED_CACHES
from layerzero.ipc.vocabulary.ops import CAST_DTYPES, GPU_ARRAYS, LINEAR_ACTIVATIONS, OPS, TOKENIZER_ATTRS
from layerzero.ipc.vocabulary.tensors import FLOAT_DTYPES, TensorSpec

DIGEST = {**dict.fromkeys(TOKENIZER_ATTRS, "none"), "tokenizer_digest": "0" * 64, "tokenizer_format": "0.19"}


def planned(op: str, rng: Random) -> Plan:
    """A call of an op with extents, dtypes and attributes by chance; some of its tensors are strided."""
    return _MAKERS[op](rng)


def _tensor(rng: Random, dtype: str, *shape: int) -> TensorSpec:
    """Dense, with rows apart, or transposed in memory."""
    dense = TensorSpec.contiguous(dtype, shape)
    way = rng.randrange(3)
    if way == 1 and len(shape) > 1:
        wide = TensorSpec.contiguous(dtype, (*shape[:-1], shape[-1] + 3))
        return TensorSpec(dtype, shape, wide.strides)
    if way == 2 and len(shape) > 1:
        order = (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2)
        return TensorSpec.contiguous(dtype, tuple(shape[n] for n in order)).permute(*order)
    return dense


def _float(rng: Random) -> str:
    return rng.choice(("float32", "float64", "float16", "bfloat16"))


def _extents(rng: Random, count: int, least: int = 0) -> list[int]:
    return [rng.randint(least, 4) for _ in range(count)]


def _attention(rng: Random) -> Plan:
    args, options = _attention_call(rng)
    return attention_plans.plan_attention(*args, **options)


def _attention_forward(rng: Random) -> Plan:
    args, options = _attention_call(rng)
    return attention_plans.plan_attention_forward(*args, **options)


def _attention_backward(rng: Random) -> Plan:
    (q, k, v, mask), options = _attention_call(rng)
    shape = (*q.shape[:3], v.shape[3])
    grad, output = (_tensor(rng, q.dtype, *shape) for _ in range(2))
    b, *middle = shape[:3]
    lse = _tensor(rng, "float32", b, *(reversed(middle) if options.get("layout") == "BSHD" else middle))
    return attention_plans.plan_attention_backward(grad, q, k, v, output, lse, mask, **options)


def _attention_call(rng: Random) -> tuple[tuple[Any, ...], dict[str, Any]]:
    dtype, (batch, groups, queries, keys) = _float(rng), _extents(rng, 4, least=1)
    heads, dim, wide = groups * rng.randint(1, 3), rng.choice((1, 4, 8)), rng.choice((1, 4, 8))
    q, k, v = (
        _tensor(rng, dtype, batch, h, s, d)
        for h, s, d in ((heads, queries, dim), (groups, keys, dim), (groups, keys, wide))
    )
    mask = None
    if rng.random() < 0.5:
        shape = [rng.choice((1, n)) for n in (batch, heads, queries, keys)]
        mask = _tensor(rng, rng.choice(("bool", dtype)), *shape)
    if mask is None and rng.random() < 0.3:
        q, k, v = (spec.permute(0, 2, 1, 3) for spec in (q, k, v))
        return (q, k, v, mask), {"enable_gqa": True, "layout": "BSHD", "is_causal": rng.random() < 0.5}
    is_causal = mask is None and rng.random() < 0.5
    alignment = rng.choice(("top_left", "bottom_right"))
    return (q, k, v, mask), {"enable_gqa": True, "is_causal": is_causal, "causal_alignment": alignment}


def _merge_attention(rng: Random) -> Plan:
    dtype, shape = _float(rng), _extents(rng, 4, least=1)
    layout = rng.choice(("BHSD", "BSHD"))
    rows = [shape[0], shape[2], shape[1]] if layout == "BSHD" else shape[:-1]
    parts = rng.randint(2, 4)
    pairs = [(_tensor(rng, dtype, *shape), _tensor(rng, "float32", *rows)) for _ in range(parts)]
    tensors = [spec for pair in pairs for spec in pair]
    return attention_plans.plan_merge_attention(*tensors, *[None] * (8 - len(tensors)), layout=layout)


def _varlen(rng: Random) -> Plan:
    dtype, (queries, keys, groups, count) = _float(rng), _extents(rng, 4, least=1)
    dim, wide = rng.choice((4, 8)), rng.choice((4, 8))
    ends = [TensorSpec.contiguous("int32", (count,)) for _ in range(2)]
    q, k, v = (
        _tensor(rng, dtype, n, h, d)
        for n, h, d in ((queries, groups * 2, dim), (keys, groups, dim), (keys, groups, wide))
    )
    return token_plans.plan_attention_varlen(q, k, v, *ends, is_causal=rng.random() < 0.5)


def _paged(rng: Random) -> Plan:
    dtype, (batch, groups, blocks, page) = _float(rng), _extents(rng, 4, least=1)
    k_cache, v_cache = (_tensor(rng, dtype, blocks, page, groups, d) for d in (4, rng.choice((4, 8))))
    tables = TensorSpec.contiguous("int32", (batch, rng.randint(1, 3)))
    lengths = TensorSpec.contiguous("int32", (batch,))
    return token_plans.plan_paged_attention(
        _tensor(rng, dtype, batch, groups * 2, 4), k_cache, v_cache, tables, lengths
    )


def _varlen_forward(rng: Random) -> Plan:
    plain = _varlen(rng)
    q, sequences = plain.inputs[0], plain.inputs[3].shape[0] - 1  # type: ignore[union-attr]
    options = {"window_size": rng.choice(((-1, -1), (1, 0), (0, 2))), "softcap": rng.choice((0.0, 2.0))}
    return cache_plans.plan_attention_varlen_forward(
        *plain.inputs,  # type: ignore[arg-type]
        *_beside(rng, q, sequences),
        is_causal=rng.random() < 0.5,
        **options,
    )


def _paged_forward(rng: Random) -> Plan:
    q, *cached = _paged(rng).inputs[:5]
    sequences, layout = cached[3].shape[0], rng.choice(("NHD", "HND"))  # type: ignore[union-attr]
    assert q is not None
    ends = None
    if rng.random() < 0.5:
        ends, q = TensorSpec.contiguous("int32", (sequences + 1,)), _tensor(rng, q.dtype, 5, *q.shape[1:])
    if layout == "HND":
        cached[:2] = [cache.permute(0, 2, 1, 3) for cache in cached[:2] if cache]
    options = {"window_size": rng.choice(((-1, -1), (1, 0), (0, 2))), "softcap": rng.choice((0.0, 2.0))}
    return cache_plans.plan_paged_attention_forward(
        q, *cached, ends, *_beside(rng, q, sequences), is_causal=rng.random() < 0.5, kv_layout=layout, **options
    )


def _mla_decode(rng: Random) -> Plan:
    dtype, (batch, heads, blocks, page) = _float(rng), _extents(rng, 4, least=1)
    latent, rope = rng.choice((4, 8)), rng.choice((2, 4))
    queries, caches = (
        [_tensor(rng, dtype, *shape, wide) for wide in (latent, rope)] for shape in ((batch, heads), (blocks, page))
    )
    where = (TensorSpec.contiguous("int32", shape) for shape in ((batch, rng.randint(1, 3)), (batch,)))
    return cache_plans.plan_mla_decode(*queries, *caches, *where, scale=0.5)


def _moved(rng: Random, op: str) -> Plan:
    _, _, k_cache, v_cache, slots, *scales = _append(rng).inputs
    assert k_cache is not None
    assert v_cache is not None
    assert slots is not None
    if op == "gather_kv":
        return cache_plans.plan_gather_kv(k_cache, v_cache, slots, *scales)
    return cache_plans.plan_copy_kv_blocks(k_cache, v_cache, slots, slots)


def _beside(rng: Random, q: TensorSpec | None, sequences: int) -> list[TensorSpec | None]:
    assert q is not None
    sinks = TensorSpec.contiguous(q.dtype, q.shape[1:2]) if rng.random() < 0.5 else None
    slopes = TensorSpec.contiguous("float32", (rng.choice((1, sequences)), q.shape[1])) if rng.random() < 0.5 else None
    return [sinks, slopes]


def _append(rng: Random) -> Plan:
    dtype, (tokens, groups, blocks, page) = _float(rng), _extents(rng, 4, least=1)
    dims = 4, rng.choice((4, 8))
    rows = [_tensor(rng, dtype, tokens, groups, d) for d in dims]
    caches = [_tensor(rng, dtype, blocks, page, groups, d) for d in dims]
    slots = TensorSpec.contiguous(rng.choice(("int32", "int64")), (tokens,))
    if dtype != "float64" and rng.random() < 0.3:
        kind = rng.choice(SCALED_CACHES)
        caches = [_tensor(rng, kind, blocks, page, groups, d) for d in dims]
        return token_plans.plan_append_kv(*rows, *caches, slots, *_scales(rng, groups))
    return token_plans.plan_append_kv(*rows, *caches, slots)


def _scales(rng: Random, heads: int) -> list[TensorSpec]:
    return [TensorSpec.contiguous("float32", (rng.choice((1, heads)),)) for _ in "kv"]


def _rope(rng: Random) -> Plan:
    dtype, (batch, length, heads, half) = _float(rng), _extents(rng, 4, least=1)
    tables = [_tensor(rng, dtype, rng.choice((1, batch)) if n < 0 else 1, length, half) for n in range(2)]
    x = _tensor(rng, dtype, batch, length, heads, 2 * half + rng.choice((0, 2)))
    return token_plans.plan_rope(x, *tables, interleaved=rng.random() < 0.5)


def _rope_qk(rng: Random) -> Plan:
    q, cos, sin = _rope(rng).inputs
    assert q is not None
    assert cos is not None
    assert sin is not None
    k = _tensor(rng, q.dtype, q.shape[0], q.shape[1], rng.randint(1, 2), q.shape[3])
    return token_plans.plan_rope_qk(q, k, cos, sin, interleaved=rng.random() < 0.5)


def _matmul(rng: Random) -> Plan:
    dtype, (batch, m, k, n) = rng.choice((_float(rng), "int32")), _extents(rng, 4)
    lead = rng.choice(((), (batch,), (1, batch)))
    return plans.plan_matmul(_tensor(rng, dtype, *lead, m, k), _tensor(rng, dtype, *rng.choice(((), lead)), k, n))


def _pair(rng: Random, plan: Callable[..., Plan]) -> Plan:
    dtype, shape = rng.choice((_float(rng), "int32")), _extents(rng, 2)
    return plan(
        _tensor(rng, dtype, *shape), _tensor(rng, dtype, *[rng.choice((1, n)) for n in shape][rng.randint(0, 2) :])
    )


def _clamp(rng: Random) -> Plan:
    x = _tensor(rng, rng.choice((_float(rng), "int8")), *_extents(rng, 2))
    return elementwise_plans.plan_clamp(x, *rng.choice(((None, 2), (-1, None), (-1, 2))))


def _where(rng: Random) -> Plan:
    dtype, shape = rng.choice((_float(rng), "bool")), _extents(rng, 2)
    condition, x, other = ([rng.choice((1, n)) for n in shape][rng.randint(0, 2) :] for _ in range(3))
    return elementwise_plans.plan_where(
        _tensor(rng, "bool", *condition), _tensor(rng, dtype, *x), _tensor(rng, dtype, *other)
    )


def _cat(rng: Random) -> Plan:
    dtype, shape, dim = _float(rng), _extents(rng, 2), rng.randrange(2)
    shapes = [[*shape[:dim], rng.randint(0, 4), *shape[dim + 1 :]] for _ in range(rng.randint(1, 8))]
    tensors = [_tensor(rng, dtype, *one) for one in shapes]
    return elementwise_plans.plan_cat(*tensors, *[None] * (8 - len(tensors)), dim=dim)


def _cast(rng: Random) -> Plan:
    x = _tensor(rng, rng.choice(CAST_DTYPES), *_extents(rng, 2))
    return elementwise_plans.plan_cast(x, rng.choice(CAST_DTYPES))


def _addmm(rng: Random) -> Plan:
    dtype, (m, k, n) = _float(rng), _extents(rng, 3)
    x = _tensor(rng, dtype, *rng.choice(((), (n,), (1, n), (m, 1), (m, n))))
    scales = {"beta": rng.choice((0, 1, 0.5)), "alpha": rng.choice((1, -2.0))}
    return product_plans.plan_addmm(x, _tensor(rng, dtype, m, k), _tensor(rng, dtype, k, n), **scales)


def _linear(rng: Random) -> Plan:
    dtype, (rows, k, n) = _float(rng), _extents(rng, 3)
    bias = rng.choice((None, TensorSpec.contiguous(dtype, (n,))))
    activation = rng.choice((None, *LINEAR_ACTIVATIONS))
    return plans.plan_linear(_tensor(rng, dtype, rows, k), _tensor(rng, dtype, n, k), bias, activation)


def _gated_mlp(rng: Random) -> Plan:
    dtype, (rows, k, hidden, n) = _float(rng), _extents(rng, 4)
    shapes = ((rows, k), (2 * hidden, k), (n, hidden))
    return product_plans.plan_gated_mlp(
        *(_tensor(rng, dtype, *shape) for shape in shapes), rng.choice(LINEAR_ACTIVATIONS)
    )


def _experts(rng: Random, op: str) -> Plan:
    dtype = _float(rng)
    given, attrs = expert_calls.random_call(op, rng)
    plan = getattr(expert_plans, f"plan_{op}")
    made: Plan = plan(*(one and _tensor(rng, one[0] or dtype, *one[1]) for one in given), **attrs)
    return made


def _vision(rng: Random, op: str) -> Plan:
    dtype = _float(rng)
    shapes, attrs = random_call(op, rng)
    given: dict[str, Any] = dict(attrs)
    for name in ("kernel_size", "stride", "padding", "output_padding", "dilation", "output_size", "size"):
        if name in given:
            given[name] = tuple(map(int, given[name].split(",")))
    if "padding" in given:
        half = len(given["padding"]) // 2
        given["padding"] = tuple(zip(given["padding"][:half], given["padding"][half:], strict=True))
    if "activation" in given:
        given["activation"] = given["activation"] or None
    if "divisor" in given:
        given["divisor_override"] = given.pop("divisor") or None
    if "mode" in given:
        dims = len(given["size"])
        names = {
            "linear": ("linear", "bilinear", "trilinear")[dims - 1],
            "cubic": "bicubic",
            "nearest_exact": "nearest-exact",
        }
        given["align_corners"] = given["align_corners"] or None
        scale, given["mode"] = given.pop("scale"), names.get(given["mode"], given["mode"])
        if scale:
            given["size"], given["scale_factor"] = None, tuple(map(float, scale.split(",")))
    planner = getattr(vision_plans, f"plan_{op}")
    made: Plan = planner(*(shape and _tensor(rng, dtype, *shape) for shape in shapes), **given)
    return made


def _softmax(rng: Random) -> Plan:
    shape = _extents(rng, rng.randint(1, 3))
    dtype = rng.choice((None, *sorted(FLOAT_DTYPES)))
    return plans.plan_softmax(_tensor(rng, _float(rng), *shape), rng.randrange(len(shape)), dtype)


def _log_softmax(rng: Random) -> Plan:
    shape = _extents(rng, rng.randint(1, 3))
    dtype = rng.choice((None, *sorted(FLOAT_DTYPES)))
    return plans.plan_log_softmax(_tensor(rng, _float(rng), *shape), rng.randrange(len(shape)), dtype)


def _channels(rng: Random, op: str) -> Plan:
    dtype, (groups, each) = _float(rng), _extents(rng, 2, least=1)
    shape = _extents(rng, rng.randint(1 if op == "instance_norm" else 0, 2))
    x = _tensor(rng, dtype, *_extents(rng, 1), groups * each, *shape)
    per_channel = TensorSpec.contiguous(dtype, (groups * each,))
    weight, bias = (rng.choice((None, per_channel)) for _ in range(2))
    if op == "group_norm":
        activation = rng.choice((None, None, *LINEAR_ACTIVATIONS))
        return norm_plans.plan_group_norm(x, weight, bias, num_groups=groups, activation=activation)
    if op == "instance_norm":
        return norm_plans.plan_instance_norm(x, weight, bias)
    return norm_plans.plan_batch_norm(x, per_channel, per_channel, weight, bias)


def _layer_norm(rng: Random) -> Plan:
    dtype, shape = _float(rng), _extents(rng, rng.randint(1, 3), least=1)
    over = tuple(shape[rng.randrange(len(shape)) :])
    weight, bias = (rng.choice((None, TensorSpec.contiguous(dtype, over))) for _ in range(2))
    return plans.plan_layer_norm(_tensor(rng, dtype, *shape), over, weight, bias)


def _rms_norm(rng: Random) -> Plan:
    dtype, shape = _float(rng), _extents(rng, rng.randint(1, 3), least=1)
    weight = rng.choice((None, TensorSpec.contiguous(dtype, tuple(shape[-1:]))))
    return plans.plan_rms_norm(_tensor(rng, dtype, *shape), tuple(shape[-1:]), weight)


def _add_rms_norm(rng: Random) -> Plan:
    dtype, shape = _float(rng), _extents(rng, rng.randint(1, 3), least=1)
    over = tuple(shape[-1:])
    weight = rng.choice((None, TensorSpec.contiguous(dtype, over)))
    x, residual = _tensor(rng, dtype, *shape), _tensor(rng, dtype, *shape)
    return norm_plans.plan_add_rms_norm(x, residual, weight, normalized_shape=over)


def _norm_backward(rng: Random, plan: Any) -> Plan:
    dtype, shape = _float(rng), _extents(rng, rng.randint(1, 3), least=1)
    over = tuple(shape[rng.randrange(len(shape)) :])
    weight = rng.choice((None, TensorSpec.contiguous(dtype, over)))
    made: Plan = plan(_tensor(rng, dtype, *shape), _tensor(rng, dtype, *shape), over, weight)
    return made


def _activation(plan: Any, rng: Random) -> Plan:
    made: Plan = plan(_tensor(rng, _float(rng), *_extents(rng, rng.randint(0, 3))))
    return made


def _quantize(rng: Random) -> Plan:
    shape = _extents(rng, 2, least=1)
    scale = TensorSpec.contiguous("float32", (rng.choice((1, shape[0])), rng.choice((1, shape[1]))))
    dtype = rng.choice(("float8_e4m3fn", "float8_e5m2", "int8", "uint8"))
    x = _tensor(rng, rng.choice(("float32", "bfloat16")), *shape)
    return quantized_plans.plan_quantize(x, scale, _zeros(rng, scale, dtype), dtype=dtype)


def _dequantize(rng: Random) -> Plan:
    shape = _extents(rng, 2, least=1)
    scale = TensorSpec.contiguous("float32", (rng.choice((1, shape[0])), 1))
    x = _tensor(rng, rng.choice(("float8_e4m3fn", "int8", "float4_e2m1fn_x2")), *shape)
    dtype = rng.choice(("float32", "bfloat16"))
    return quantized_plans.plan_dequantize(x, scale, _zeros(rng, scale, x.dtype), dtype=dtype)


def _zeros(rng: Random, scale: TensorSpec, dtype: str) -> TensorSpec | None:
    return scale.as_dtype("int32") if dtype in ("int8", "uint8") and rng.random() < 0.5 else None


def _dynamic_quantize(rng: Random) -> Plan:
    dtype = rng.choice(("int8", "uint8", "float8_e4m3fn", "mxfp4", "nvfp4"))
    x = _tensor(rng, rng.choice(("float32", "bfloat16")), rng.randint(0, 4), 32 * rng.randint(1, 2))
    size = -1 if dtype in ("mxfp4", "nvfp4") else rng.choice((-1, 0, 16))
    is_symmetric = dtype != "int8" or rng.random() < 0.5
    return quantized_plans.plan_dynamic_quantize(x, dtype=dtype, group_size=size, symmetric=is_symmetric)


def _int_matmul(rng: Random) -> Plan:
    m, k, n = _extents(rng, 3)
    lead = _extents(rng, rng.randint(0, 2), least=1)
    zeros = [
        TensorSpec.contiguous("int32", rng.choice(((), (1,), (extent,)))) if rng.random() < 0.5 else None
        for extent in (m, n)
    ]
    a, b = (_tensor(rng, rng.choice(("int8", "uint8")), *shape) for shape in ((*lead, m, k), (k, n)))
    return quantized_plans.plan_int_matmul(a, b, *zeros)


def _scaled_linear(rng: Random) -> Plan:
    rows, n, k = rng.randint(1, 4), rng.randint(1, 4), 2 * rng.randint(1, 4)
    kind = rng.choice(("int8", "uint8", "float8_e5m2", "float4_e2m1fn_x2", "int4"))
    stored, is_pair = ("uint8" if kind == "int4" else kind), kind in ("int4", "float4_e2m1fn_x2")
    weight = _tensor(rng, stored, n, k // (1 + is_pair))
    scale = TensorSpec.contiguous("float32", (rng.choice((1, n)), rng.choice((1, k))))
    zeros = _zeros(rng, scale, stored)
    options = {"weight_format": "int4" if kind == "int4" else ""}
    bias = TensorSpec.contiguous("float32", (n,)) if rng.random() < 0.5 else None
    if rng.random() < 0.5:
        x = _tensor(rng, rng.choice(("float32", "bfloat16")), rows, k)
        return quantized_plans.plan_scaled_linear(x, weight, scale, None, bias, None, zeros, **options)
    x = _tensor(rng, stored, rows, k // (1 + (kind == "float4_e2m1fn_x2")))
    x_scale = TensorSpec.contiguous("float32", (rng.choice((1, rows)), 1))
    dtype = rng.choice((None, "bfloat16"))
    return quantized_plans.plan_scaled_linear(x, weight, scale, x_scale, bias, None, zeros, dtype=dtype, **options)


def _cross_entropy(rng: Random) -> Plan:
    dtype, (batch, classes, *rest) = _float(rng), _extents(rng, rng.randint(2, 4), least=1)
    target = TensorSpec.contiguous(rng.choice(("int32", "int64")), (batch, *rest))
    weight = rng.choice((None, TensorSpec.contiguous(dtype, (classes,))))
    options = {"reduction": rng.choice(("none", "mean", "sum")), "label_smoothing": rng.choice((0.0, 0.5))}
    return loss_plans.plan_cross_entropy(_tensor(rng, dtype, batch, classes, *rest), target, weight, **options)


def _embedding(rng: Random) -> Plan:
    ids = TensorSpec.contiguous(rng.choice(("int32", "int64")), tuple(_extents(rng, rng.randint(0, 2))))
    return plans.plan_embedding(ids, _tensor(rng, _float(rng), *_extents(rng, 2, least=1)))


def _setting(rng: Random, dtype: str, rows: int) -> TensorSpec | None:
    return rng.choice((None, *(TensorSpec.contiguous(dtype, shape) for shape in ((), (1,), (rows,)))))


def _penalize(rng: Random) -> Plan:
    rows, size, length = _extents(rng, 3)
    ids = _tensor(rng, rng.choice(("int32", "int64")), rows, length)
    settings = [_setting(rng, "float32", rows) for _ in range(3)]
    return sampling_plans.plan_penalize_logits(_tensor(rng, _float(rng), rows, size), ids, *settings)


def _filter(rng: Random) -> Plan:
    rows, size = _extents(rng, 2)
    return sampling_plans.plan_filter_logits(_tensor(rng, _float(rng), rows, size), *_filters(rng, rows))


def _sample(rng: Random) -> Plan:
    rows, size = _extents(rng, 2, least=1)
    seeds = [TensorSpec.contiguous("int64", (rng.choice((1, rows)),)) for _ in range(2)]
    return sampling_plans.plan_sample(_tensor(rng, _float(rng), rows, size), *seeds, *_filters(rng, rows))


def _verify(rng: Random) -> Plan:
    dtype, (rows, steps, size) = _float(rng), _extents(rng, 3, least=1)
    seeds = [TensorSpec.contiguous("int64", (rng.choice((1, rows)),)) for _ in range(2)]
    ids = _tensor(rng, rng.choice(("int32", "int64")), rows, steps - 1)
    draft = rng.choice((None, _tensor(rng, dtype, rows, steps - 1, size)))
    return sampling_plans.plan_speculative_verify(_tensor(rng, dtype, rows, steps, size), ids, draft, *seeds)


def _tree(rng: Random) -> Plan:
    dtype, shape = rng.choice(("int32", "int64")), _extents(rng, 2, least=1)
    parents = _tensor(rng, rng.choice(("int32", "int64")), *shape)
    return sampling_plans.plan_tree_accept(_tensor(rng, dtype, *shape), parents, _tensor(rng, dtype, *shape))


def _filters(rng: Random, rows: int) -> list[TensorSpec | None]:
    return [_setting(rng, dtype, rows) for dtype in ("float32", rng.choice(("int32", "int64")), "float32", "float32")]


def _sized(
    op: str, inputs: tuple[str, ...], outputs: tuple[tuple[str, tuple[int, ...]], ...], **attrs: plans.Scalar
) -> Plan:
    specs = tuple(TensorSpec.contiguous(dtype, (0,)) for dtype in inputs)
    results = tuple(TensorSpec.contiguous(dtype, shape) for dtype, shape in outputs)
    return Plan(op, specs, {**DIGEST, **attrs}, results, ())


def _function(rng: Random) -> Plan:
    some = [None if rng.random() < 0.5 else calling.BYTES for _ in range(calling.MAX_LENT)]
    return calling.plan(calling.BYTES, *some)


def _function_on_gpu(rng: Random) -> Plan:
    """Of arrays whose shapes have nothing to do with each other."""
    specs = [
        TensorSpec.contiguous("float32", tuple(_extents(rng, rng.randint(0, 4))))
        for _ in range(rng.randint(2, len(GPU_ARRAYS) + 1))
    ]
    *inputs, result = specs
    told = {"call": "00", "ranges": "", "result": " ".join(map(str, (result.dtype, *result.shape))), "worker": "1"}
    return Plan("function_on_gpu", (*inputs, *[None] * (len(GPU_ARRAYS) - len(inputs))), told, (result,), (result,))


_MAKERS: dict[str, Callable[[Random], Plan]] = {
    "attention": _attention,
    "attention_forward": _attention_forward,
    "attention_backward": _attention_backward,
    "merge_attention": _merge_attention,
    "attention_varlen": _varlen,
    "attention_varlen_forward": _varlen_forward,
    "paged_attention": _paged,
    "paged_attention_forward": _paged_forward,
    "mla_decode": _mla_decode,
    "append_kv": _append,
    **{op: partial(_moved, op=op) for op in ("gather_kv", "copy_kv_blocks")},
    "rope": _rope,
    "rope_qk": _rope_qk,
    "matmul": _matmul,
    "addmm": _addmm,
    "linear": _linear,
    "gated_mlp": _gated_mlp,
    **{op: partial(_experts, op=op) for op in expert_calls.OPS},
    **{op: partial(_vision, op=op) for op in VISION_OPS},
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "layer_norm": _layer_norm,
    "add_rms_norm": _add_rms_norm,
    **{op: partial(_channels, op=op) for op in ("group_norm", "instance_norm", "batch_norm")},
    "rms_norm": _rms_norm,
    "layer_norm_backward": lambda rng: _norm_backward(rng, plans.plan_layer_norm_backward),
    "rms_norm_backward": lambda rng: _norm_backward(rng, plans.plan_rms_norm_backward),
    "gelu": lambda rng: plans.plan_gelu(_tensor(rng, _float(rng), *_extents(rng, 2)), rng.choice(("none", "tanh"))),
    "silu": lambda rng: plans.plan_silu(_tensor(rng, _float(rng), *_extents(rng, rng.randint(0, 3)))),
    "swiglu": lambda rng: token_plans.plan_swiglu(*[_tensor(rng, "float32", *[3, 5]) for _ in range(2)]),
    "geglu": lambda rng: activation_plans.plan_geglu(*[_tensor(rng, "float32", *[3, 5]) for _ in range(2)]),
    "reglu": lambda rng: activation_plans.plan_reglu(*[_tensor(rng, "float32", *[3, 5]) for _ in range(2)]),
    **{op: partial(_activation, plan) for op, plan in activation_plans.PLANS.items()},
    "add": partial(_pair, plan=elementwise_plans.plan_add),
    "mul": partial(_pair, plan=elementwise_plans.plan_mul),
    "clamp": _clamp,
    "where": _where,
    "cat": _cat,
    "cast": _cast,
    "quantize": _quantize,
    "dequantize": _dequantize,
    "dynamic_quantize": _dynamic_quantize,
    "int_matmul": _int_matmul,
    "scaled_linear": _scaled_linear,
    "cross_entropy": _cross_entropy,
    "embedding": _embedding,
    "penalize_logits": _penalize,
    "filter_logits": _filter,
    "sample": _sample,
    "speculative_verify": _verify,
    "tree_accept": _tree,
    "tokenize": lambda rng: _sized(
        "tokenize",
        ("uint8", "uint8", "int64"),
        (("int32", (0,)), ("int64", (0,)), ("int32", (0, 2))),
        add_special_tokens=True,
        max_length=rng.choice((None, 7)),
        return_offsets=False,
    ),
    "detokenize": lambda rng: _sized(
        "detokenize", ("uint8", "int32", "int64"), (("uint8", (0,)), ("int64", (0,))), skip_special_tokens=True
    ),
    "null": lambda rng: plans.plan_null(),
    "function": _function,
    "function_on_gpu": _function_on_gpu,
}
assert _MAKERS.keys() == OPS.keys()
