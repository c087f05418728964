"""Calls whose tensors belong together, of every op: as the client plans them from a user's arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from tests import attention_signatures, expert_calls
from tests.gpu.vision_calls import OPS as VISION_OPS
from tests.gpu.vision_calls import random_call
from tests.random_tensors import extents, float_dtype, tensor

from layerzero.client.planning import (
    activation_plans,
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
from layerzero.ipc.vocabulary.ops import CAST_DTYPES, GPU_ARRAYS, LINEAR_ACTIVATIONS, OPS, TOKENIZER_ATTRS
from layerzero.ipc.vocabulary.tensors import FLOAT_DTYPES, TensorSpec

DIGEST = {**dict.fromkeys(TOKENIZER_ATTRS, "none"), "tokenizer_digest": "0" * 64, "tokenizer_format": "0.19"}


def planned(op: str, rng: Random) -> Plan:
    """A call of an op with extents, dtypes and attributes by chance; some of its tensors are strided."""
    return _MAKERS[op](rng)


def _matmul(rng: Random) -> Plan:
    dtype, (batch, m, k, n) = rng.choice((float_dtype(rng), "int32")), extents(rng, 4)
    lead = rng.choice(((), (batch,), (1, batch)))
    return plans.plan_matmul(tensor(rng, dtype, *lead, m, k), tensor(rng, dtype, *rng.choice(((), lead)), k, n))


def _pair(rng: Random, plan: Callable[..., Plan]) -> Plan:
    dtype, shape = rng.choice((float_dtype(rng), "int32")), extents(rng, 2)
    return plan(
        tensor(rng, dtype, *shape), tensor(rng, dtype, *[rng.choice((1, n)) for n in shape][rng.randint(0, 2) :])
    )


def _clamp(rng: Random) -> Plan:
    x = tensor(rng, rng.choice((float_dtype(rng), "int8")), *extents(rng, 2))
    return elementwise_plans.plan_clamp(x, *rng.choice(((None, 2), (-1, None), (-1, 2))))


def _where(rng: Random) -> Plan:
    dtype, shape = rng.choice((float_dtype(rng), "bool")), extents(rng, 2)
    condition, x, other = ([rng.choice((1, n)) for n in shape][rng.randint(0, 2) :] for _ in range(3))
    return elementwise_plans.plan_where(
        tensor(rng, "bool", *condition), tensor(rng, dtype, *x), tensor(rng, dtype, *other)
    )


def _cat(rng: Random) -> Plan:
    dtype, shape, dim = float_dtype(rng), extents(rng, 2), rng.randrange(2)
    shapes = [[*shape[:dim], rng.randint(0, 4), *shape[dim + 1 :]] for _ in range(rng.randint(1, 8))]
    tensors = [tensor(rng, dtype, *one) for one in shapes]
    return elementwise_plans.plan_cat(*tensors, *[None] * (8 - len(tensors)), dim=dim)


def _cast(rng: Random) -> Plan:
    x = tensor(rng, rng.choice(CAST_DTYPES), *extents(rng, 2))
    return elementwise_plans.plan_cast(x, rng.choice(CAST_DTYPES))


def _addmm(rng: Random) -> Plan:
    dtype, (m, k, n) = float_dtype(rng), extents(rng, 3)
    x = tensor(rng, dtype, *rng.choice(((), (n,), (1, n), (m, 1), (m, n))))
    scales = {"beta": rng.choice((0, 1, 0.5)), "alpha": rng.choice((1, -2.0))}
    return product_plans.plan_addmm(x, tensor(rng, dtype, m, k), tensor(rng, dtype, k, n), **scales)


def _linear(rng: Random) -> Plan:
    dtype, (rows, k, n) = float_dtype(rng), extents(rng, 3)
    bias = rng.choice((None, TensorSpec.contiguous(dtype, (n,))))
    activation = rng.choice((None, *LINEAR_ACTIVATIONS))
    return plans.plan_linear(tensor(rng, dtype, rows, k), tensor(rng, dtype, n, k), bias, activation)


def _gated_mlp(rng: Random) -> Plan:
    dtype, (rows, k, hidden, n) = float_dtype(rng), extents(rng, 4)
    shapes = ((rows, k), (2 * hidden, k), (n, hidden))
    return product_plans.plan_gated_mlp(
        *(tensor(rng, dtype, *shape) for shape in shapes), rng.choice(LINEAR_ACTIVATIONS)
    )


def _experts(rng: Random, op: str) -> Plan:
    dtype = float_dtype(rng)
    given, attrs = expert_calls.random_call(op, rng)
    plan = getattr(expert_plans, f"plan_{op}")
    made: Plan = plan(*(one and tensor(rng, one[0] or dtype, *one[1]) for one in given), **attrs)
    return made


def _vision(rng: Random, op: str) -> Plan:
    dtype = float_dtype(rng)
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
    made: Plan = planner(*(shape and tensor(rng, dtype, *shape) for shape in shapes), **given)
    return made


def _softmax(rng: Random) -> Plan:
    shape = extents(rng, rng.randint(1, 3))
    dtype = rng.choice((None, *sorted(FLOAT_DTYPES)))
    return plans.plan_softmax(tensor(rng, float_dtype(rng), *shape), rng.randrange(len(shape)), dtype)


def _log_softmax(rng: Random) -> Plan:
    shape = extents(rng, rng.randint(1, 3))
    dtype = rng.choice((None, *sorted(FLOAT_DTYPES)))
    return plans.plan_log_softmax(tensor(rng, float_dtype(rng), *shape), rng.randrange(len(shape)), dtype)


def _channels(rng: Random, op: str) -> Plan:
    dtype, (groups, each) = float_dtype(rng), extents(rng, 2, least=1)
    shape = extents(rng, rng.randint(1 if op == "instance_norm" else 0, 2))
    x = tensor(rng, dtype, *extents(rng, 1), groups * each, *shape)
    per_channel = TensorSpec.contiguous(dtype, (groups * each,))
    weight, bias = (rng.choice((None, per_channel)) for _ in range(2))
    if op == "group_norm":
        activation = rng.choice((None, None, *LINEAR_ACTIVATIONS))
        return norm_plans.plan_group_norm(x, weight, bias, num_groups=groups, activation=activation)
    if op == "instance_norm":
        return norm_plans.plan_instance_norm(x, weight, bias)
    return norm_plans.plan_batch_norm(x, per_channel, per_channel, weight, bias)


def _layer_norm(rng: Random) -> Plan:
    dtype, shape = float_dtype(rng), extents(rng, rng.randint(1, 3), least=1)
    over = tuple(shape[rng.randrange(len(shape)) :])
    weight, bias = (rng.choice((None, TensorSpec.contiguous(dtype, over))) for _ in range(2))
    return plans.plan_layer_norm(tensor(rng, dtype, *shape), over, weight, bias)


def _rms_norm(rng: Random) -> Plan:
    dtype, shape = float_dtype(rng), extents(rng, rng.randint(1, 3), least=1)
    weight = rng.choice((None, TensorSpec.contiguous(dtype, tuple(shape[-1:]))))
    return plans.plan_rms_norm(tensor(rng, dtype, *shape), tuple(shape[-1:]), weight)


def _add_rms_norm(rng: Random) -> Plan:
    dtype, shape = float_dtype(rng), extents(rng, rng.randint(1, 3), least=1)
    over = tuple(shape[-1:])
    weight = rng.choice((None, TensorSpec.contiguous(dtype, over)))
    x, residual = tensor(rng, dtype, *shape), tensor(rng, dtype, *shape)
    return norm_plans.plan_add_rms_norm(x, residual, weight, normalized_shape=over)


def _norm_backward(rng: Random, plan: Any) -> Plan:
    dtype, shape = float_dtype(rng), extents(rng, rng.randint(1, 3), least=1)
    over = tuple(shape[rng.randrange(len(shape)) :])
    weight = rng.choice((None, TensorSpec.contiguous(dtype, over)))
    made: Plan = plan(tensor(rng, dtype, *shape), tensor(rng, dtype, *shape), over, weight)
    return made


def _activation(plan: Any, rng: Random) -> Plan:
    made: Plan = plan(tensor(rng, float_dtype(rng), *extents(rng, rng.randint(0, 3))))
    return made


def _quantize(rng: Random) -> Plan:
    shape = extents(rng, 2, least=1)
    scale = TensorSpec.contiguous("float32", (rng.choice((1, shape[0])), rng.choice((1, shape[1]))))
    dtype = rng.choice(("float8_e4m3fn", "float8_e5m2", "int8", "uint8"))
    x = tensor(rng, rng.choice(("float32", "bfloat16")), *shape)
    return quantized_plans.plan_quantize(x, scale, _zeros(rng, scale, dtype), dtype=dtype)


def _dequantize(rng: Random) -> Plan:
    shape = extents(rng, 2, least=1)
    scale = TensorSpec.contiguous("float32", (rng.choice((1, shape[0])), 1))
    x = tensor(rng, rng.choice(("float8_e4m3fn", "int8", "float4_e2m1fn_x2")), *shape)
    dtype = rng.choice(("float32", "bfloat16"))
    return quantized_plans.plan_dequantize(x, scale, _zeros(rng, scale, x.dtype), dtype=dtype)


def _zeros(rng: Random, scale: TensorSpec, dtype: str) -> TensorSpec | None:
    return scale.as_dtype("int32") if dtype in ("int8", "uint8") and rng.random() < 0.5 else None


def _dynamic_quantize(rng: Random) -> Plan:
    dtype = rng.choice(("int8", "uint8", "float8_e4m3fn", "mxfp4", "nvfp4"))
    x = tensor(rng, rng.choice(("float32", "bfloat16")), rng.randint(0, 4), 32 * rng.randint(1, 2))
    size = -1 if dtype in ("mxfp4", "nvfp4") else rng.choice((-1, 0, 16))
    is_symmetric = dtype != "int8" or rng.random() < 0.5
    return quantized_plans.plan_dynamic_quantize(x, dtype=dtype, group_size=size, symmetric=is_symmetric)


def _int_matmul(rng: Random) -> Plan:
    m, k, n = extents(rng, 3)
    lead = extents(rng, rng.randint(0, 2), least=1)
    zeros = [
        TensorSpec.contiguous("int32", rng.choice(((), (1,), (extent,)))) if rng.random() < 0.5 else None
        for extent in (m, n)
    ]
    a, b = (tensor(rng, rng.choice(("int8", "uint8")), *shape) for shape in ((*lead, m, k), (k, n)))
    return quantized_plans.plan_int_matmul(a, b, *zeros)


def _scaled_linear(rng: Random) -> Plan:
    rows, n, k = rng.randint(1, 4), rng.randint(1, 4), 2 * rng.randint(1, 4)
    kind = rng.choice(("int8", "uint8", "float8_e5m2", "float4_e2m1fn_x2", "int4"))
    stored, is_pair = ("uint8" if kind == "int4" else kind), kind in ("int4", "float4_e2m1fn_x2")
    weight = tensor(rng, stored, n, k // (1 + is_pair))
    scale = TensorSpec.contiguous("float32", (rng.choice((1, n)), rng.choice((1, k))))
    zeros = _zeros(rng, scale, stored)
    options = {"weight_format": "int4" if kind == "int4" else ""}
    bias = TensorSpec.contiguous("float32", (n,)) if rng.random() < 0.5 else None
    if rng.random() < 0.5:
        x = tensor(rng, rng.choice(("float32", "bfloat16")), rows, k)
        return quantized_plans.plan_scaled_linear(x, weight, scale, None, bias, None, zeros, **options)
    x = tensor(rng, stored, rows, k // (1 + (kind == "float4_e2m1fn_x2")))
    x_scale = TensorSpec.contiguous("float32", (rng.choice((1, rows)), 1))
    dtype = rng.choice((None, "bfloat16"))
    return quantized_plans.plan_scaled_linear(x, weight, scale, x_scale, bias, None, zeros, dtype=dtype, **options)


def _cross_entropy(rng: Random) -> Plan:
    dtype, (batch, classes, *rest) = float_dtype(rng), extents(rng, rng.randint(2, 4), least=1)
    target = TensorSpec.contiguous(rng.choice(("int32", "int64")), (batch, *rest))
    weight = rng.choice((None, TensorSpec.contiguous(dtype, (classes,))))
    options = {"reduction": rng.choice(("none", "mean", "sum")), "label_smoothing": rng.choice((0.0, 0.5))}
    return loss_plans.plan_cross_entropy(tensor(rng, dtype, batch, classes, *rest), target, weight, **options)


def _embedding(rng: Random) -> Plan:
    ids = TensorSpec.contiguous(rng.choice(("int32", "int64")), tuple(extents(rng, rng.randint(0, 2))))
    return plans.plan_embedding(ids, tensor(rng, float_dtype(rng), *extents(rng, 2, least=1)))


def _setting(rng: Random, dtype: str, rows: int) -> TensorSpec | None:
    return rng.choice((None, *(TensorSpec.contiguous(dtype, shape) for shape in ((), (1,), (rows,)))))


def _penalize(rng: Random) -> Plan:
    rows, size, length = extents(rng, 3)
    ids = tensor(rng, rng.choice(("int32", "int64")), rows, length)
    settings = [_setting(rng, "float32", rows) for _ in range(3)]
    return sampling_plans.plan_penalize_logits(tensor(rng, float_dtype(rng), rows, size), ids, *settings)


def _filter(rng: Random) -> Plan:
    rows, size = extents(rng, 2)
    return sampling_plans.plan_filter_logits(tensor(rng, float_dtype(rng), rows, size), *_filters(rng, rows))


def _sample(rng: Random) -> Plan:
    rows, size = extents(rng, 2, least=1)
    seeds = [TensorSpec.contiguous("int64", (rng.choice((1, rows)),)) for _ in range(2)]
    return sampling_plans.plan_sample(tensor(rng, float_dtype(rng), rows, size), *seeds, *_filters(rng, rows))


def _verify(rng: Random) -> Plan:
    dtype, (rows, steps, size) = float_dtype(rng), extents(rng, 3, least=1)
    seeds = [TensorSpec.contiguous("int64", (rng.choice((1, rows)),)) for _ in range(2)]
    ids = tensor(rng, rng.choice(("int32", "int64")), rows, steps - 1)
    draft = rng.choice((None, tensor(rng, dtype, rows, steps - 1, size)))
    return sampling_plans.plan_speculative_verify(tensor(rng, dtype, rows, steps, size), ids, draft, *seeds)


def _tree(rng: Random) -> Plan:
    dtype, shape = rng.choice(("int32", "int64")), extents(rng, 2, least=1)
    parents = tensor(rng, rng.choice(("int32", "int64")), *shape)
    return sampling_plans.plan_tree_accept(tensor(rng, dtype, *shape), parents, tensor(rng, dtype, *shape))


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
        TensorSpec.contiguous("float32", tuple(extents(rng, rng.randint(0, 4))))
        for _ in range(rng.randint(2, len(GPU_ARRAYS) + 1))
    ]
    *inputs, result = specs
    told = {"call": "00", "ranges": "", "result": " ".join(map(str, (result.dtype, *result.shape))), "worker": "1"}
    return Plan("function_on_gpu", (*inputs, *[None] * (len(GPU_ARRAYS) - len(inputs))), told, (result,), (result,))


_MAKERS: dict[str, Callable[[Random], Plan]] = {
    **attention_signatures.MAKERS,
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
    "gelu": lambda rng: plans.plan_gelu(tensor(rng, float_dtype(rng), *extents(rng, 2)), rng.choice(("none", "tanh"))),
    "silu": lambda rng: plans.plan_silu(tensor(rng, float_dtype(rng), *extents(rng, rng.randint(0, 3)))),
    "swiglu": lambda rng: token_plans.plan_swiglu(*[tensor(rng, "float32", *[3, 5]) for _ in range(2)]),
    "geglu": lambda rng: activation_plans.plan_geglu(*[tensor(rng, "float32", *[3, 5]) for _ in range(2)]),
    "reglu": lambda rng: activation_plans.plan_reglu(*[tensor(rng, "float32", *[3, 5]) for _ in range(2)]),
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
