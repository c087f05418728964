"""workers/certify/cases.py: there is a case for each class that a descriptor permits, and what it expects is right."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests import expert_calls
from tests import reference as numpy_reference
from tests.example_counts import examples
from tests.gpu import vision_calls

from layerzero.capabilities.context import SelectionContext
from layerzero.capabilities.descriptor import KernelCapability, load
from layerzero.capabilities.device import DeviceSpec
from layerzero.capabilities.match import Rejection, match
from layerzero.ipc.vocabulary.attention_shapes import SCALED_CACHES
from layerzero.ipc.vocabulary.numerics import TOLERANCE, gather, pack, scatter, tolerance, unpack
from layerzero.ipc.vocabulary.ops import (
    ATTENTION_OPS,
    CAT_INPUTS,
    FILTERS,
    GATED,
    LINEAR_ACTIVATIONS,
    MERGE_INPUTS,
    OPS,
    PAGED_OPS,
    PENALTIES,
    TAKE_OUTS,
    VARLEN_OPS,
)
from layerzero.ipc.vocabulary.quantized_shapes import WEIGHTS_OF
from layerzero.ipc.vocabulary.shape_class import class_dtype, shape_class
from layerzero.ipc.vocabulary.shapes import check_call, outputs_of
from layerzero.ipc.vocabulary.tensors import FLOAT_DTYPES, TensorSpec
from layerzero.ipc.vocabulary.tokenizer_format import FORMATS
from layerzero.workers.certify.cases import Case, cases, lay_out
from layerzero.workers.certify.claims import admits, dtypes
from layerzero.workers.certify.problem import Problem
from layerzero.workers.certify.problems import PROBLEMS

ROOT = Path(__file__).parents[4]
DESCRIPTORS = sorted((ROOT / "src" / "layerzero" / "capabilities" / "descriptors").glob("*.json"))
KERNELS = [
    pytest.param(op, kernel, id=kernel.kernel_id)
    for path in DESCRIPTORS
    for op, kernels in load(path).ops.items()
    for kernel in kernels
]


def refusals(
    op: str, inputs: Sequence[TensorSpec | None], outputs: Sequence[TensorSpec], attrs: Any, kernel: KernelCapability
) -> list[Rejection]:
    """What the broker says, on a device that the kernel was made for."""
    device = DeviceSpec(device_type="cuda", sm_version=90) if kernel.platform == "cuda" else DeviceSpec()
    return match(SelectionContext(op, tuple(inputs), tuple(outputs), attrs, device), kernel)


# Everything that any kernel may claim.
WIDEST: dict[str, Any] = {
    "dtypes": ["float64", "float32", "float16", "bfloat16", "int64", "uint8", "bool"],
    "index_dtypes": ["int32", "int64", "bool"],
    "supports_empty": True,
    "optional_args": [
        *("weight", "bias", "correction_bias", *PENALTIES, *FILTERS, "draft_probs", *CAT_INPUTS[1:]),
        *MERGE_INPUTS[4:],
        *("zero_point", "a_zero_point", "b_zero_point", "x_zero_point", "weight_zero_point", "x_scale"),
        *("k_scale", "v_scale"),
    ],
    "optional_attrs": ["dtype", "mask_block_q", "mask_block_k"],
    "supports_kv_cache_dtypes": SCALED_CACHES,
    "supported_quant_dtypes": ["int8", "uint8", "int4", "fp8_e4m3", "fp8_e5m2", "mxfp4", "nvfp4", "fp4"],
    "quantization_scale_granularities": ["per_tensor", "per_channel", "blockwise"],
    "quantization_zero_point": True,
    "requires_layouts": ["BHSD", "BSHD"],
    "supports_gqa": True,
    "attn_mask_types": ["bool", "float"],
    "causal_alignments": ["top_left", "bottom_right"],
}
NARROW = ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2"]
DTYPES = {
    "quantize": ["float32"],
    "dequantize": [*NARROW, "int8", "uint8"],
    "dynamic_quantize": ["float32"],
    "int_matmul": ["int8", "uint8"],
    "scaled_linear": ["float32", "int8", "uint8", *NARROW],
    **{op: ["float64", *NARROW[:2], "int8"] for op in ("append_kv", "gather_kv", "copy_kv_blocks")},
}
DTYPES |= {"tree_accept": ["int64"]}
DTYPES |= {"matmul": WIDEST["dtypes"][:-1], "linear": WIDEST["dtypes"][:-1], "embedding": WIDEST["dtypes"]}
DTYPES |= dict.fromkeys(("add", "mul", "clamp"), WIDEST["dtypes"][:-1])
DTYPES |= dict.fromkeys(("where", "cat", "cast"), WIDEST["dtypes"])


@functools.cache
def problems(op: str) -> tuple[Problem, ...]:
    return tuple(PROBLEMS[op](WIDEST)) if op in PROBLEMS else ()


@functools.cache
def certifiable(op: str, claims: str, dtype: str) -> frozenset[str]:
    """The classes for which a kernel's probe has a case. Claims come as text, to be remembered by."""
    kernel = json.loads(claims)
    of_kernel = list(PROBLEMS[op](kernel)) if op in PROBLEMS else []
    return frozenset(case.shape_class for case in cases(op, kernel, of_kernel, dtype))


def claims_of(kernel: KernelCapability) -> str:
    return json.dumps(kernel.model_dump(mode="json"))


def planned(op: str, specs: Sequence[TensorSpec | None]) -> list[TensorSpec | None]:
    """As a route says them: texts are as long as each call says."""
    if op not in ("tokenize", "detokenize"):
        return list(specs)
    return [spec and TensorSpec.contiguous(spec.dtype, (0, *spec.shape[1:])) for spec in specs]


@pytest.mark.parametrize(("op", "kernel"), KERNELS)
def test_cases_are_those_that_the_broker_would_send(op: str, kernel: KernelCapability) -> None:
    """The probe reads descriptors without pydantic; its reading must be the broker's, or it certifies other calls."""
    claims = json.loads(claims_of(kernel))
    ours = problems(op) if kernel.min_head_dim <= 64 else tuple(PROBLEMS[op](claims))  # of those no head is wider
    admitted = 0
    widest = {**WIDEST, "dtypes": list(kernel.dtypes) or WIDEST["dtypes"], "tokenizer_formats": list(FORMATS)}
    for dtype in dtypes(op, {**widest, "dtypes": widest["dtypes"][:3]}) if kernel.dtypes else ["any"]:
        for case in cases(op, {**widest, "supports_offsets": True}, ours, dtype):
            check_call(op, planned(op, case.inputs), planned(op, case.outputs), case.attrs)
            said = admits(op, claims, case.inputs, case.outputs, case.attrs)
            assert said == (refusals(op, case.inputs, case.outputs, case.attrs, kernel) == []), case.name
            admitted += said
    assert admitted


@st.composite
def placed(draw: st.DrawFn, dtype: str, shape: Sequence[int], is_dense: bool) -> TensorSpec:
    layout = draw(st.sampled_from(["dense"] if is_dense else ["dense", "dense", "rows", "gaps", "transposed"]))
    return lay_out(dtype, tuple(shape), layout)


@st.composite
def options(
    draw: st.DrawFn, dtype: str, heads: int, kernel: KernelCapability
) -> tuple[list[TensorSpec | None], dict[str, Any]]:
    """Sinks and slopes, and attributes, of what the kernel takes alone: most calls would be refused, and that refusals
    are is tested elsewhere."""
    tensors = functools.partial(placed, is_dense=kernel.requires_contiguous)
    known = [kind for kind in ("window_left", "window_right", "softcap") if kind in (kernel.optional_attrs or ())]
    asked = [kind for kind in known if draw(st.sampled_from([0, 0, 1]))]
    beside = [
        draw(st.none() | tensors(*one)) if name in kernel.optional_args else None
        for name, *one in (("sinks", dtype, (heads,)), ("alibi_slopes", "float32", (1, heads)))
    ]
    return beside, {kind: 2.0 if kind == "softcap" else 3 for kind in asked}


@st.composite
def with_scales(
    draw: st.DrawFn, kernel: KernelCapability, inputs: list[TensorSpec | None], place: int, heads: int
) -> list[TensorSpec | None]:
    """Caches of 8 bits, which are two inputs from a place on, and their scales, where the kernel takes such."""
    known = kernel.supports_kv_cache_dtypes
    if not known:
        return [*inputs, None, None]
    caches = [spec for spec in inputs[place : place + 2] if spec is not None]
    kind = caches[0].dtype if caches[0].dtype in known else draw(st.sampled_from(known))
    made = [TensorSpec(kind, spec.shape, spec.strides) for spec in caches]
    scales = [TensorSpec.contiguous("float32", (draw(st.sampled_from([1, heads])),)) for _ in "kv"]
    return [*inputs[:place], *made, *inputs[place + 2 :], *scales]


@st.composite
def calls(
    draw: st.DrawFn, op: str, dtype: str, kernel: KernelCapability
) -> tuple[list[TensorSpec | None], TensorSpec, dict[str, Any]]:
    """Any call that the public API can make, by shapes alone. Where the kernel takes few, most of them are of those:
    dense tensors only, heads and blocks of multiples of what they must be."""
    tensors = functools.partial(placed, is_dense=kernel.requires_contiguous)

    def multiple(step: int) -> int:
        return -(-draw(extent) // step) * step

    def dims() -> tuple[int, int]:
        top = kernel.max_head_dim or 1000
        d, dv = (max(min(multiple(kernel.head_dim_multiple), top), kernel.min_head_dim) for _ in "dv")
        return d, d if kernel.equal_head_dims else dv

    extent = st.sampled_from([1, 2, 3, 7, 8, 15, 16, 17, 32, 33, 64, 128, 129, 256, 257, 272, 301, 512, 1000])
    lead = st.lists(st.integers(1, 3), max_size=2)
    inputs: list[TensorSpec | None]
    if op in ATTENTION_OPS:
        b, hk, group = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
        (sq, sk), (d, dv) = (draw(extent), draw(extent)), dims()
        layout = draw(st.sampled_from(["BHSD", "BSHD"]))
        is_causal = draw(st.booleans())
        place = (lambda t, s: st.just(lay_out(t, s, "bshd"))) if layout == "BSHD" else tensors
        shapes = [(b, hk * group, sq, d), (b, hk, sk, d), (b, hk, sk, dv)]
        inputs = [draw(place(dtype, shape)) for shape in shapes]
        mask = None
        if draw(st.booleans()):
            shape = [draw(st.sampled_from([1, n])) for n in (b, hk * group, sq, sk)]
            mask = draw(tensors(draw(st.sampled_from(["bool", dtype])), shape))
        blocks: dict[str, Any] = {}
        if "mask_block_q" in kernel.optional_attrs and draw(st.booleans()):
            blocks = {"mask_block_q": 16, "mask_block_k": 3}
            shape = [draw(st.sampled_from([1, n])) for n in (b, hk * group, -(-sq // 16), -(-sk // 3))]
            mask = draw(tensors("bool", shape))
        alignment = draw(st.sampled_from(["top_left", "bottom_right"])) if is_causal and sq != sk else "top_left"
        attrs = {"is_causal": is_causal, "scale": 1.0, "causal_alignment": alignment, "layout": layout}
        out = draw(place(dtype, (b, hk * group, sq, dv)))
        if op != "attention_backward":
            beside, more = draw(options(dtype, shapes[0][1], kernel))
            return [*inputs, mask, *beside], out, {**attrs, **more, **blocks}
        output, lse = draw(place(dtype, out.shape)), draw(tensors("float32", out.shape[:3]))
        return [out, *inputs, output, lse, mask], out, attrs
    if op == "merge_attention":
        shape, parts = [*draw(lead), draw(extent), draw(extent)], draw(st.integers(2, 4))
        pairs = [(draw(tensors(dtype, shape)), draw(tensors("float32", shape[:-1]))) for _ in range(parts)]
        inputs = [spec for pair in pairs for spec in pair]
        return [*inputs, *[None] * (8 - len(inputs))], draw(tensors(dtype, shape)), {}
    if op in VARLEN_OPS:
        hk, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        (tq, tk), (d, dv) = (draw(extent), draw(extent)), dims()
        is_causal = draw(st.booleans())
        ends = draw(st.integers(1, 5))
        inputs = [draw(tensors(dtype, shape)) for shape in ((tq, hk * group, d), (tk, hk, d), (tk, hk, dv))]
        inputs += [draw(tensors("int32", (ends,))) for _ in "qk"]
        attrs = {"is_causal": is_causal, "scale": 1.0}
        if op.endswith("_forward"):
            beside, more = draw(options(dtype, hk * group, kernel))
            inputs, attrs = [*inputs, *beside], {**attrs, **more}
        has_places = is_causal or inputs[6:] not in ([], [None]) or "window_left" in attrs or "window_right" in attrs
        attrs["causal_alignment"] = draw(st.sampled_from(["top_left", "bottom_right"])) if has_places else "top_left"
        return inputs, draw(tensors(dtype, (tq, hk * group, dv))), attrs
    if op in PAGED_OPS:
        b, hk, group, blocks, wide = (draw(st.integers(1, 3)) for _ in range(5))
        page, (d, dv) = multiple(kernel.page_size_multiple), dims()
        tokens = b
        if op.endswith("_forward") and draw(st.booleans()):
            tokens = draw(extent)
        inputs = [
            draw(tensors(dtype, shape))
            for shape in ((tokens, hk * group, d), (blocks, page, hk, d), (blocks, page, hk, dv))
        ]
        inputs += [draw(tensors("int32", shape)) for shape in ((b, wide), (b,))]
        attrs = {"scale": 1.0}
        if op.endswith("_forward"):
            beside, more = draw(options(dtype, hk * group, kernel))
            ends_q = draw(tensors("int32", (b + 1,))) if tokens != b or draw(st.booleans()) else None
            inputs = [*inputs, ends_q, *beside]
            attrs = {**attrs, "is_causal": ends_q is not None and draw(st.booleans()), **more}
        inputs = draw(with_scales(kernel, inputs, 1, hk))
        return inputs, draw(tensors(dtype, (tokens, hk * group, dv))), attrs
    if op == "mla_decode":
        b, heads, blocks, wide = (draw(st.integers(1, 3)) for _ in range(4))
        page, latent, rope = (draw(extent) for _ in range(3))
        shapes = [(b, heads, latent), (b, heads, rope), (blocks, page, latent), (blocks, page, rope)]
        inputs = [draw(tensors(dtype, shape)) for shape in shapes]
        inputs += [draw(tensors("int32", shape)) for shape in ((b, wide), (b,))]
        return inputs, draw(tensors(dtype, (b, heads, latent))), {"scale": 1.0}
    if op == "append_kv":
        tokens, page, d, dv = (draw(extent) for _ in range(4))
        blocks, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        shapes = [(tokens, heads, d), (tokens, heads, dv), (blocks, page, heads, d), (blocks, page, heads, dv)]
        inputs = [draw(tensors(dtype, shape)) for shape in shapes]
        inputs = [*inputs, draw(tensors(draw(st.sampled_from(["int32", "int64"])), (tokens,)))]
        inputs = draw(with_scales(kernel, inputs, 2, heads))
        assert inputs[2] is not None
        return inputs, inputs[2], {}
    if op in ("gather_kv", "copy_kv_blocks"):
        places, page, d, dv = (draw(extent) for _ in range(4))
        blocks, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        inputs = [draw(tensors(dtype, (blocks, page, heads, width))) for width in (d, dv)]
        index = draw(st.sampled_from(["int32", "int64"]))
        inputs += [draw(tensors(index, (places,))) for _ in range(1 if op == "gather_kv" else 2)]
        assert inputs[0] is not None
        if op == "copy_kv_blocks":
            return inputs, inputs[0], {}
        inputs = draw(with_scales(kernel, inputs, 0, heads))
        attrs = {} if inputs[3] is None else {"dtype": draw(st.sampled_from(["float32", "bfloat16", "float16"]))}
        return inputs, draw(tensors(attrs.get("dtype", dtype), (places, heads, d))), attrs
    if op in ("rope", "rope_qk"):
        b, s, h, d = draw(st.integers(1, 3)), draw(extent), draw(st.integers(1, 3)), draw(extent)
        rotated = 2 * draw(st.sampled_from([n for n in (1, 4, 8, 12, 16, 32, 64, 136) if 2 * n <= max(d, 2)]))
        table = (draw(st.sampled_from([1, b])), s, rotated // 2)
        x = draw(tensors(dtype, (b, s, h, max(d, 2))))
        inputs = [x, *(draw(tensors(dtype, table)) for _ in ("cos", "sin"))]
        if op == "rope_qk":
            inputs.insert(1, draw(tensors(dtype, x.shape)))
        return inputs, draw(tensors(dtype, x.shape)), {"interleaved": draw(st.booleans())}
    if op == "matmul":
        m, k, n = (draw(extent) for _ in range(3))
        left, right = draw(st.sampled_from([((), ()), ((2,), (2,)), ((2, 1), (3,)), ((2,), ()), ((1,), (2,))]))
        out = (*np.broadcast_shapes(left, right), m, n)
        return (
            [draw(tensors(dtype, (*left, m, k))), draw(tensors(dtype, (*right, k, n)))],
            draw(tensors(dtype, out)),
            {},
        )
    if op == "addmm":
        m, k, n = (draw(extent) for _ in range(3))
        rows, columns = draw(st.sampled_from([1, m])), draw(st.sampled_from([1, n]))
        inputs = [draw(tensors(dtype, shape)) for shape in ((rows, columns), (m, k), (k, n))]
        attrs = {"beta": draw(st.sampled_from([0.0, 1.0, 0.5])), "alpha": draw(st.sampled_from([1.0, 2.0]))}
        return inputs, draw(tensors(dtype, (m, n))), attrs
    if op == "linear":
        rows, k, n = [*draw(lead), draw(extent)], draw(extent), draw(extent)
        bias = draw(tensors(dtype, (n,))) if draw(st.booleans()) else None
        x, weight = draw(tensors(dtype, (*rows, k))), draw(tensors(dtype, (n, k)))
        activations = ["", *LINEAR_ACTIVATIONS] if dtype in FLOAT_DTYPES else [""]
        attrs = {"activation": draw(st.sampled_from(activations))}
        return [x, weight, bias], draw(tensors(dtype, (*rows, n))), attrs
    if op == "gated_mlp":
        rows, k, hidden, n = [*draw(lead), draw(extent)], draw(extent), draw(extent), draw(extent)
        inputs = [draw(tensors(dtype, shape)) for shape in ((*rows, k), (2 * hidden, k), (n, hidden))]
        return inputs, draw(tensors(dtype, (*rows, n))), {"activation": draw(st.sampled_from(LINEAR_ACTIVATIONS))}
    if op in expert_calls.OPS:
        given, attrs = expert_calls.random_call(op, Random(draw(st.integers(0, 1 << 32))))
        inputs = [one and draw(tensors(one[0] or dtype, one[1])) for one in given]
        made = outputs_of(op, inputs, attrs)
        return inputs, draw(tensors(*made[0])), attrs
    if op in vision_calls.OPS:
        shapes, attrs = vision_calls.random_call(op, Random(draw(st.integers(0, 1 << 32))))
        inputs = [shape and draw(tensors(dtype, shape)) for shape in shapes]
        ((_, made),) = outputs_of(op, inputs, attrs)
        return inputs, draw(tensors(dtype, made)), attrs
    if op == "cross_entropy":
        n, classes, rest = draw(st.integers(1, 3)), draw(extent), draw(st.lists(st.integers(1, 3), max_size=2))
        weight = draw(tensors(dtype, (classes,))) if draw(st.booleans()) else None
        target = draw(tensors(draw(st.sampled_from(["int32", "int64"])), (n, *rest)))
        reduction = draw(st.sampled_from(["none", "mean", "sum"]))
        attrs = {"ignore_index": 1, "reduction": reduction, "label_smoothing": draw(st.sampled_from([0.0, 0.5]))}
        out = draw(tensors(dtype, (n, *rest) if reduction == "none" else ()))
        return [draw(tensors(dtype, (n, classes, *rest))), target, weight], out, attrs
    if op == "embedding":
        ids, d = [*draw(lead), draw(extent)], draw(extent)
        index = draw(tensors(draw(st.sampled_from(["int32", "int64"])), ids))
        return [index, draw(tensors(dtype, (5, d)))], draw(tensors(dtype, (*ids, d))), {}
    if op in ("group_norm", "instance_norm", "batch_norm"):
        groups, rest = draw(st.integers(1, 4)), draw(st.lists(st.integers(1, 9), max_size=2))
        channels = groups * draw(st.sampled_from([1, 2, 3, 16])) if op != "batch_norm" else draw(extent)
        rest = [*rest, draw(extent)] if rest or op == "instance_norm" else rest
        inputs = [draw(tensors(dtype, (draw(st.integers(1, 3)), channels, *rest)))]
        inputs += [draw(tensors(dtype, (channels,))) for _ in range(2 if op == "batch_norm" else 0)]
        inputs += [draw(tensors(dtype, (channels,))) if draw(st.booleans()) else None for _ in range(2)]
        attrs = {"eps": 1e-5, **({"num_groups": groups} if op == "group_norm" else {})}
        if op == "group_norm" and "activation" in kernel.optional_attrs and draw(st.booleans()):
            attrs["activation"] = draw(st.sampled_from(LINEAR_ACTIVATIONS))
        assert inputs[0] is not None
        return inputs, draw(tensors(dtype, inputs[0].shape)), attrs
    if op in ("penalize_logits", "filter_logits", "sample"):
        rows = draw(st.integers(1, 3))
        logits = draw(tensors(dtype, (rows, draw(extent))))
        inputs = [logits]
        for name in OPS[op].inputs[1:]:
            kind = draw(st.sampled_from(["int32", "int64"])) if name in OPS[op].indices else "float32"
            kind = "int64" if name in ("seed", "offset") else kind
            given_shape = (rows, 5) if name == "token_ids" else (draw(st.sampled_from([1, rows])),)
            is_given = name not in OPS[op].optional or (name in kernel.optional_args and draw(st.booleans()))
            inputs.append(draw(tensors(kind, given_shape)) if is_given else None)
        result = draw(tensors("int64", (rows,)) if op == "sample" else tensors(dtype, logits.shape))
        return inputs, result, {}
    if op == "speculative_verify":
        rows, steps, size = draw(st.integers(1, 3)), draw(st.integers(2, 4)), draw(extent)
        ids = draw(tensors(draw(st.sampled_from(["int32", "int64"])), (rows, steps - 1)))
        draft = draw(tensors(dtype, (rows, steps - 1, size))) if draw(st.booleans()) else None
        seeds = [draw(tensors("int64", (draw(st.sampled_from([1, rows])),))) for _ in range(2)]
        inputs = [draw(tensors(dtype, (rows, steps, size))), ids, draft, *seeds]
        return inputs, draw(tensors("int64", (rows, steps))), {}
    if op == "tree_accept":
        rows, nodes = draw(st.integers(1, 3)), draw(extent)
        parents = draw(tensors(draw(st.sampled_from(["int32", "int64"])), (rows, nodes)))
        drafts, wanted = (draw(tensors(dtype, (rows, nodes))) for _ in range(2))
        return [drafts, parents, wanted], draw(tensors("int64", (rows, nodes))), {}
    shape = [*draw(lead), draw(extent)]
    x, out_spec = draw(tensors(dtype, shape)), draw(tensors(dtype, shape))
    if op in ("softmax", "log_softmax"):
        return [x], out_spec, {"dim": draw(st.integers(0, len(shape) - 1)), "dtype": ""}
    if op in ("layer_norm", "rms_norm"):
        ndim = draw(st.integers(1, len(shape)))
        rest = [
            draw(tensors(dtype, shape[len(shape) - ndim :])) if draw(st.booleans()) else None
            for _ in range(2 if op == "layer_norm" else 1)
        ]
        return [x, *rest], out_spec, {"ndim": ndim, "eps": 1e-5}
    if op in ("layer_norm_backward", "rms_norm_backward", "add_rms_norm"):
        ndim = draw(st.integers(1, len(shape)))
        weight = draw(tensors(dtype, shape[len(shape) - ndim :])) if draw(st.booleans()) else None
        return [x, draw(tensors(dtype, shape)), weight], out_spec, {"ndim": ndim, "eps": 1e-5}
    if op in ("swiglu", *GATED):
        attrs = {"approximate": draw(st.sampled_from(["none", "tanh"]))} if op == "geglu" else {}
        return [x, draw(tensors(dtype, shape))], out_spec, attrs
    if op in ("add", "mul", "where"):
        shapes = [[draw(st.sampled_from([1, n])) for n in shape][draw(st.integers(0, len(shape))) :] for _ in range(3)]
        inputs = [draw(tensors(dtype, one)) for one in shapes[:2]]
        if op == "where":
            inputs = [draw(tensors("bool", shapes[2])), *inputs]
        return inputs, draw(tensors(dtype, np.broadcast_shapes(*(spec.shape for spec in inputs if spec)))), {}
    if op == "clamp":
        low, high = (1, 3) if dtype not in FLOAT_DTYPES else (1.0, 3.0)
        low, high = draw(st.sampled_from([(low, high), (None, high), (low, None)]))
        return [x], out_spec, {"min": low, "max": high}
    if op == "cat":
        dim = draw(st.integers(0, len(shape) - 1))
        extents = [shape[dim], *draw(st.lists(st.integers(1, 40), max_size=7))]
        whole = [[*shape[:dim], n, *shape[dim + 1 :]] for n in (*extents, sum(extents))]
        inputs = [x, *(draw(tensors(dtype, one)) for one in whole[1:-1])]
        return [*inputs, *[None] * (8 - len(inputs))], draw(tensors(dtype, whole[-1])), {"dim": dim}
    if op == "cast":
        made = str(draw(st.sampled_from(kernel.attrs["dtype"])))
        return [x], draw(tensors(made, shape)), {"dtype": made}
    if op == "dynamic_quantize":
        kind = draw(st.sampled_from(kernel.attrs["format"]))
        groups = draw(st.sampled_from([0, 1, shape[-1]]))
        is_symmetric = draw(st.booleans()) if kind == "int8" else kind != "uint8"
        block = {"mxfp4": 32, "nvfp4": 16}.get(str(kind))
        if block:
            shape, groups = [*shape[:-1], 2 * block], 2
            x = draw(tensors(dtype, shape))
        return [x], out_spec, {"format": kind, "groups": groups, "symmetric": is_symmetric}
    if op == "int_matmul":
        m, k, n = (draw(extent) for _ in range(3))
        left, right = draw(st.sampled_from([((), ()), ((2,), (2,)), ((2, 1), (3,)), ((2,), ()), ((1,), (2,))]))
        other = draw(st.sampled_from(kernel.dtypes))
        zeros = [
            draw(tensors("int32", made)) if draw(st.booleans()) else None
            for made in ((draw(st.sampled_from([1, m])), 1), (1, draw(st.sampled_from([1, n]))))
        ]
        inputs = [draw(tensors(dtype, (*left, m, k))), draw(tensors(other, (*right, k, n))), *zeros]
        return inputs, draw(tensors("int32", (*np.broadcast_shapes(left, right), m, n))), {}
    if op == "scaled_linear":
        return draw(scaled(dtype, kernel, tensors))
    if op in ("quantize", "dequantize"):
        pairs = 2 if dtype == "float4_e2m1fn_x2" else 1
        groups = draw(st.sampled_from([n for n in (1, 2, 4) if shape[-1] * pairs % n == 0]))
        scale = draw(tensors("float32", (*(draw(st.sampled_from([1, n])) for n in shape[:-1]), groups)))
        made = draw(st.sampled_from(kernel.attrs["dtype"]))
        is_whole = (made if op == "quantize" else dtype) in ("int8", "uint8")
        zero = draw(tensors("int32", scale.shape)) if is_whole and draw(st.booleans()) else None
        return [x, scale, zero], draw(tensors(str(made), (*shape[:-1], shape[-1] * pairs))), {"dtype": made}
    return [x], out_spec, {"approximate": draw(st.sampled_from(["none", "tanh"]))} if op == "gelu" else {}


@st.composite
def scaled(
    draw: st.DrawFn, dtype: str, kernel: KernelCapability, tensors: Callable[..., Any]
) -> tuple[list[TensorSpec | None], TensorSpec, dict[str, Any]]:
    """Calls of scaled_linear whose dtypes belong together."""
    m, n = draw(st.integers(1, 40)), draw(st.sampled_from([1, 2, 5, 16, 17, 32, 40]))
    k, groups = draw(st.sampled_from([(8, 4), (32, 1), (40, 4), (320, 4), (640, 4), (16, 1), (12, 1)]))
    plain = dtype in ("float32", "bfloat16", "float16")
    known = ("int8", "uint8", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2") if plain else WEIGHTS_OF[dtype]
    weight_dtype = draw(st.sampled_from(known))
    is_int4 = weight_dtype == "uint8" and draw(st.booleans())
    pair, is_packed = dtype == "float4_e2m1fn_x2", is_int4 or weight_dtype == "float4_e2m1fn_x2"
    x_scale = None if plain else draw(tensors("float32", (draw(st.sampled_from([1, m])), groups)))
    scale = draw(tensors("float32", (draw(st.sampled_from([1, n])), groups)))
    zeros = [
        draw(tensors("int32", one.shape))
        if one is not None and kind in ("int8", "uint8") and draw(st.booleans())
        else None
        for one, kind in ((x_scale, dtype), (scale, weight_dtype))
    ]
    bias = draw(tensors("float32", (n,))) if draw(st.booleans()) else None
    made = "" if plain else str(draw(st.sampled_from([d for d in kernel.attrs["dtype"] if d])))
    x, weight = draw(tensors(dtype, (m, k // (1 + pair)))), draw(tensors(weight_dtype, (n, k // (1 + is_packed))))
    inputs = [x, weight, scale, x_scale, bias, *zeros]
    attrs = {"dtype": made, "weight_format": "int4" if is_int4 else ""}
    return inputs, draw(tensors(made or dtype, (m, n))), attrs


@pytest.mark.parametrize(("op", "kernel"), [k for k in KERNELS if k.values[0] in PROBLEMS])  # type: ignore[operator]
@settings(
    max_examples=examples(40), suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow], deadline=None
)
@given(data=st.data())
def test_every_call_that_a_descriptor_permits_has_a_case_of_its_class(
    op: str, kernel: KernelCapability, data: st.DataObject
) -> None:
    """A class without a case is certified for nobody, and its calls would fail for want of a test."""
    dtype = data.draw(st.sampled_from(kernel.dtypes))
    inputs, out, attrs = data.draw(calls(op, dtype, kernel))
    outs = [spec for name in OPS[op].in_place if (spec := inputs[OPS[op].inputs.index(name)])] or [out]
    if op in TAKE_OUTS:
        outs = [out] * len(OPS[op].outputs)
    elif len(OPS[op].outputs) > len(outs):  # several results are always new
        outs = [TensorSpec.contiguous(*made) for made in outputs_of(op, inputs, attrs)]
    assume(refusals(op, inputs, outs, attrs, kernel) == [])
    assert class_dtype(op, inputs) == dtype
    assert shape_class(op, inputs, attrs, outs) in certifiable(op, claims_of(kernel), dtype)


def as_numpy(case: Case) -> list[Any]:
    """The inputs of a case, for tests/reference.py."""
    found: list[Any] = []
    for spec, data in zip(case.inputs, case.data, strict=True):
        if spec is None:
            found.append(None)
            continue
        dtype = "uint16" if spec.dtype == "bfloat16" else "uint8" if spec.dtype in NARROW else spec.dtype
        found.append(numpy_reference.from_bits(np.frombuffer(data, dtype).reshape(spec.shape), spec.dtype))
    return found


@pytest.mark.parametrize("op", sorted(PROBLEMS))
def test_two_references_agree(op: str) -> None:
    """One is plain Python, one NumPy: a slip in either would certify wrong kernels or refuse right ones."""
    for dtype in DTYPES.get(op, WIDEST["dtypes"][:1]):
        for case in cases(op, {**WIDEST, "requires_contiguous": True}, problems(op), dtype):
            result = numpy_reference.TENSOR_OPS[op](*as_numpy(case), **case.attrs)
            every = result if isinstance(result, tuple) else (result,)
            for expected, values, spec in zip(every, case.expected, case.outputs, strict=True):
                got = np.array(values).reshape(spec.shape)
                assert expected.shape == got.shape, case.name
                error = numpy_reference.error(got, expected)
                assert error <= (1e-13 if dtype in FLOAT_DTYPES else 0), (case.name, dtype)


@pytest.mark.parametrize("op", sorted(PROBLEMS))
def test_values_are_exact_in_every_dtype(op: str) -> None:
    """One case serves all dtypes only if rounding its inputs changes nothing. Results of a forward pass are rounded, as
    they are for a backward pass."""
    for problem in problems(op):
        for name, values, kind in zip(OPS[op].inputs, problem.inputs, problem.kinds, strict=False):
            for dtype in TOLERANCE if values is not None and not kind and name != "output" else ():
                assert values is not None
                found = unpack(pack(values.flat, dtype), dtype)
                assert list(map(repr, found)) == list(map(repr, values.flat)), (problem.name, dtype)  # NaN is NaN


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.sampled_from(["dense", "rows", "gaps", "transposed", "bshd"]),
    st.sampled_from(["uint8", "int16", "float32", "float64"]),
)
def test_elements_come_back_from_any_layout(shape: list[int], layout: str, dtype: str) -> None:
    """What is scattered over strides is gathered from them, and nothing between is touched."""
    spec = lay_out(dtype, tuple(shape), layout)
    data = bytes(range(1, 256))[: spec.numel * spec.itemsize] or b"\1"
    data = (data * (spec.numel * spec.itemsize // len(data) + 1))[: spec.numel * spec.itemsize]
    memory = bytearray(spec.span_bytes)
    scatter(data, spec, memoryview(memory))
    assert gather(memoryview(memory), spec) == data
    assert len(memory) - memory.count(0) == len(data)


def test_dtypes_without_a_tolerance_are_exact() -> None:
    """Integers, and ids of tokenizers."""
    assert [tolerance(dtype) for dtype in ("float32", "int64", "any")] == [1e-5, 0.0, 0.0]
    assert tolerance("int8", "dequantize", "float32") == 0.0


def test_results_of_another_dtype_have_the_coarser_tolerance() -> None:
    """The log-sum-exp of float64 data is float32; that of half precision is as exact as its data."""
    forward = [tolerance(dtype, "attention_forward", "float32") for dtype in ("float64", "float32", "bfloat16")]
    assert forward == [1e-5, 1e-5, 1.6e-2]
    assert tolerance("bfloat16", "attention_backward", "bfloat16") == 4e-2


def test_bfloat16_is_rounded_to_the_nearest() -> None:
    """Ties to even; exact values and infinities stay."""
    values = [1.0, -2.5, math.inf, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-7 + 2**-12, -(1 + 2**-9)]
    assert unpack(pack(values, "bfloat16"), "bfloat16") == [1.0, -2.5, math.inf, 1.0, 1 + 2**-6, 1 + 2**-7, -1.0]
