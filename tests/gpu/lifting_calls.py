"""Calls that a program makes, of every op, for tests that lift kernels: plain data, without any library."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.lifting.form import ALIGNMENTS
from layerzero.ipc.vocabulary.ops import ACTIVATIONS, GATED, OPS
from layerzero.ipc.vocabulary.shapes import check_call
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.workers.certify.cases import cases
from layerzero.workers.certify.claims import Claims, admits, dtypes
from layerzero.workers.certify.problems import PROBLEMS
from layerzero.workers.provider import Call

FLOATS = ("bfloat16", "float16", "float32", "float64")


class Kind(NamedTuple):
    """A call by a name, and how its tensors lie."""

    name: str
    call: Call
    alignments: tuple[int, ...]


def kinds(op: str, kernel: Claims) -> Iterator[Kind]:
    """Those that a kernel's descriptor takes."""
    kernel_id = kernel["kernel_id"]
    seen: set[str] = set()
    for name, inputs, outputs, attrs, alignment in _calls(op, kernel):
        try:
            check_call(op, inputs, outputs, attrs)
        except InvalidArgument as exc:
            raise AssertionError(f"{op}, {name}: {exc.message}") from exc
        if name in seen or not admits(op, kernel, inputs, outputs, attrs):
            continue
        seen.add(name)
        alignments = tuple(0 if spec is None else alignment for spec in (*inputs, *outputs))
        yield Kind(f"{kernel_id}: {name}", Call(op, kernel_id, inputs, outputs, attrs), alignments)


def certified(op: str, kernel: Claims) -> Iterator[Kind]:
    """A call for each class of shapes that a kernel is certified in, dtypes taken together; of those that compute
    something, since the others are not launched, or enqueue nothing."""
    seen: set[str] = set()
    problems = list(PROBLEMS[op](kernel)) if op in PROBLEMS else []
    for dtype in dtypes(op, kernel):
        for case in cases(op, kernel, problems, dtype):
            if case.shape_class in seen or not is_computing(op, case.inputs, case.outputs):
                continue
            seen.add(case.shape_class)
            call = Call(op, kernel["kernel_id"], case.inputs, case.outputs, dict(case.attrs))
            alignments = tuple(0 if spec is None else _WELL for spec in (*case.inputs, *case.outputs))
            yield Kind(f"{kernel['kernel_id']}: {case.shape_class}", call, alignments)


def is_computing(op: str, inputs: Sequence[TensorSpec | None], outputs: Sequence[TensorSpec]) -> bool:
    """Whether a call has elements to write; one in place, whether anything goes there."""
    specs = inputs if OPS[op].in_place else outputs
    return all(spec.numel for spec in specs if spec is not None)


_Made = tuple[str, tuple[TensorSpec | None, ...], tuple[TensorSpec, ...], dict[str, object], int]
_WELL = ALIGNMENTS[-1]


def _calls(op: str, kernel: Claims) -> Iterator[_Made]:
    known = list(kernel.get("dtypes") or ())
    dtype = next((one for one in FLOATS if one in known), known[0] if known else "float32")

    def of(*shape: int, dtype: str = dtype) -> TensorSpec:
        return TensorSpec.contiguous(dtype, shape)

    if op == "attention":
        yield from _attention(dtype)
    elif op in ("attention_forward", "attention_backward"):
        for name, given, (out,), attrs, alignment in _attention(dtype):
            q, k, v, mask, *_ = given
            assert q is not None
            assert k is not None
            assert v is not None
            lse = of(*q.shape[:3], dtype="float32")
            if op == "attention_forward":
                yield name, given, (out, lse), attrs, alignment
            else:
                yield name, (out, q, k, v, out, lse, mask), (out, k, v), attrs, alignment
    elif op == "attention_varlen":
        q, k, ends = of(900, 16, 128), of(900, 16, 128), of(5, dtype="int32")
        for alignment in ("top_left", "bottom_right"):
            attrs = {"is_causal": True, "scale": 128**-0.5, "causal_alignment": alignment}
            yield "4 sequences, 900 tokens, causal", (q, k, k, ends, ends), (q,), attrs, _WELL
    elif op == "paged_attention":
        q, lengths = of(8, 32, 128), of(8, dtype="int32")
        for blocks, page in ((256, 16), (16, 256)):
            tables = of(8, 512 // page, dtype="int32")
            for name, stored, scale in _caches(kernel, of(blocks, page, 8, 128)):
                given = (q, stored, stored, tables, lengths, scale, scale)
                yield f"8 x 512 keys in pages of {page}, grouped{name}", given, (q,), {"scale": 128**-0.5}, _WELL
    elif op == "mla_decode":
        queries, caches = (of(8, 16, 512), of(8, 16, 64)), (of(256, 16, 512), of(256, 16, 64))
        where, sums = (of(8, 32, dtype="int32"), of(8, dtype="int32")), of(8, 16, dtype="float32")
        yield "8 x 512 keys", (*queries, *caches, *where), (queries[0], sums), {"scale": 0.0625}, _WELL
    elif op == "append_kv":
        key, cache = of(64, 8, 128), of(256, 16, 8, 128)
        for name, stored, scale in _caches(kernel, cache):
            for index in ("int64", "int32"):
                given = (key, key, stored, stored, of(64, dtype=index), scale, scale)
                yield f"64 tokens{name}", given, (stored, stored), {}, _WELL
    elif op == "gather_kv":
        cache, places = of(256, 16, 8, 128), of(64, dtype="int64")
        yield "64 tokens", (cache, cache, places, None, None), (of(64, 8, 128),) * 2, {}, _WELL
        for name, stored, scale in _caches(kernel, cache):
            if scale is not None:
                rows = (of(64, 8, 128, dtype="bfloat16"),) * 2
                yield f"64 tokens{name}", (stored, stored, places, scale, scale), rows, {"dtype": "bfloat16"}, _WELL
    elif op == "copy_kv_blocks":
        cache, places = of(256, 16, 8, 128), of(64, dtype="int64")
        yield "64 blocks", (cache, cache, places, places), (cache, cache), {}, _WELL
    elif op == "rope":
        x, cos = of(1, 512, 32, 128), of(1, 512, 64)
        for interleaved in (False, True):
            yield f"512 tokens, interleaved {interleaved}", (x, cos, cos), (x,), {"interleaved": interleaved}, _WELL
    elif op == "rope_qk":
        q, k, cos = of(1, 512, 32, 128), of(1, 512, 8, 128), of(1, 512, 64)
        yield "512 tokens", (q, k, cos, cos), (q, k), {"interleaved": False}, _WELL
    elif op == "matmul":
        yield "16 x (256, 128, 256)", (of(16, 256, 128), of(16, 128, 256)), (of(16, 256, 256),), {}, _WELL
        yield "(1000, 1000, 1000)", (of(1000, 1000), of(1000, 1000)), (of(1000, 1000),), {}, 16
        yield "(33, 70, 5), odd", (of(33, 70), of(70, 5)), (of(33, 5),), {}, 8
    elif op == "gated_mlp":
        inputs = (of(64, 1024), of(5632, 1024), of(1024, 2816))
        yield "64 rows, 1024 by 2816", inputs, (of(64, 1024),), {"activation": "silu"}, _WELL
    elif op in ("add", "mul"):
        yield "512 x 2048", (of(512, 2048), of(512, 2048)), (of(512, 2048),), {}, _WELL
        yield "512 x 2048 and a row", (of(512, 2048), of(2048)), (of(512, 2048),), {}, _WELL
    elif op == "clamp":
        yield "512 x 2048", (of(512, 2048),), (of(512, 2048),), {"min": -0.5, "max": 0.5}, _WELL
    elif op == "where":
        condition = of(512, 2048, dtype="bool")
        yield "512 x 2048", (condition, of(512, 2048), of(2048)), (of(512, 2048),), {}, _WELL
    elif op == "merge_attention":
        parts = (of(2, 16, 256, 64), of(2, 16, 256, dtype="float32")) * 2
        yield "two parts", (*parts, *[None] * 4), (of(2, 16, 256, 64), of(2, 16, 256, dtype="float32")), {}, _WELL
    elif op == "cat":
        given = (of(512, 1024), of(512, 2048), *[None] * 6)
        yield "512 x 1024 and 512 x 2048", given, (of(512, 3072),), {"dim": 1}, _WELL
    elif op == "cast":
        yield "512 x 2048 to float32", (of(512, 2048),), (of(512, 2048, dtype="float32"),), {"dtype": "float32"}, _WELL
    elif op == "addmm":
        inputs = (of(1, 1000), of(1000, 512), of(512, 1000))
        yield "1000 x 512 x 1000 and a row", inputs, (of(1000, 1000),), {"beta": 0.5, "alpha": 2.0}, _WELL
    elif op == "linear":
        weight, attrs = of(4096, 4096), {"activation": ""}
        yield "4 rows, 4096", (of(4, 4096), weight, None), (of(4, 4096),), attrs, _WELL
        yield "1024 rows, 4096", (of(1024, 4096), weight, None), (of(1024, 4096),), attrs, _WELL
        yield "512 rows, bias", (of(512, 1024), of(2048, 1024), of(2048)), (of(512, 2048),), attrs, _WELL
    elif op == "conv":
        inputs = (of(2, 320, 32, 32), of(320, 320, 3, 3), of(320))
        attrs = {"stride": "1,1", "padding": "1,1,1,1", "dilation": "1,1", "groups": 1, "activation": ""}
        yield "320 channels, 3 x 3", inputs, (of(2, 320, 32, 32),), attrs, _WELL
    elif op == "conv_transpose":
        inputs = (of(2, 64, 32, 32), of(64, 64, 4, 4), of(64))
        attrs = {"stride": "2,2", "padding": "1,1,1,1", "dilation": "1,1", "groups": 1, "activation": ""}
        yield "64 channels, 4 x 4", inputs, (of(2, 64, 64, 64),), {**attrs, "output_padding": "0,0"}, _WELL
    elif op in ("max_pool", "avg_pool"):
        attrs = {"kernel_size": "2,2", "stride": "2,2", "padding": "0,0,0,0", "ceil_mode": False}
        attrs |= {"dilation": "1,1"} if op == "max_pool" else {"count_include_pad": True, "divisor": 0}
        yield "halves of 56", (of(4, 64, 56, 56),), (of(4, 64, 28, 28),), attrs, _WELL
    elif op in ("adaptive_max_pool", "adaptive_avg_pool"):
        yield "14 to 7", (of(4, 256, 14, 14),), (of(4, 256, 7, 7),), {"output_size": "7,7"}, _WELL
    elif op == "interpolate":
        attrs = {"size": "64,64", "scale": "2.0,2.0", "align_corners": False, "antialias": False}
        for mode in ("nearest", "linear"):
            yield f"32 to 64, {mode}", (of(2, 320, 32, 32),), (of(2, 320, 64, 64),), {**attrs, "mode": mode}, _WELL
    elif op in ("softmax", "log_softmax"):
        yield "256 x 32000", (of(256, 32000),), (of(256, 32000),), {"dim": 1, "dtype": ""}, _WELL
        yield "dim 0", (of(300, 70),), (of(300, 70),), {"dim": 0, "dtype": ""}, _WELL
    elif op in ("layer_norm", "rms_norm"):
        x, weight, attrs = of(1024, 4096), of(4096), {"ndim": 1, "eps": 1e-5}
        weights = (weight, weight) if op == "layer_norm" else (weight,)
        yield "1024 x 4096", (x, *weights), (x,), attrs, _WELL
        yield "1024 x 4096, no weight", (x, *(None for _ in weights)), (x,), attrs, _WELL
        small = of(7, 100)
        yield "7 x 100", (small, *(of(100) for _ in weights)), (small,), attrs, 16
    elif op == "add_rms_norm":
        for rows, columns, alignment in ((1024, 4096, _WELL), (7, 100, 16)):
            x = of(rows, columns)
            yield f"{rows} x {columns}", (x, x, of(columns)), (x, x), {"ndim": 1, "eps": 1e-5}, alignment
    elif op in ("group_norm", "instance_norm", "batch_norm"):
        x, w = of(2, 320, 32, 32), of(320)
        params = (w, w, w, w) if op == "batch_norm" else (w, w)
        attrs = {"num_groups": 32, "eps": 1e-5} if op == "group_norm" else {"eps": 1e-5}
        yield "2 x 320 x 32 x 32", (x, *params), (x,), attrs, _WELL
    elif op in ("layer_norm_backward", "rms_norm_backward"):
        attrs = {"ndim": 1, "eps": 1e-5}
        for rows, columns, alignment in ((1024, 4096, _WELL), (7, 100, 16)):
            x, weight = of(rows, columns), of(columns)
            sums = (weight, weight) if op == "layer_norm_backward" else (weight,)
            yield f"{rows} x {columns}", (x, x, weight), (x, *sums), attrs, alignment
            yield f"{rows} x {columns}, no weight", (x, x, None), (x, *sums), attrs, alignment
    elif op in ("gelu", "silu", "swiglu", *ACTIVATIONS, *GATED):
        count = 2 if op in ("swiglu", *GATED) else 1
        attrs = {"approximate": "none"} if op in ("gelu", "geglu") else {}
        for name, spec, alignment in (
            ("1024 x 4096", of(1024, 4096), _WELL),
            ("1000, at an element", of(1000), TensorSpec.contiguous(dtype, (1,)).itemsize),
            ("columns", TensorSpec(dtype, (300, 200), (1, 300)), _WELL),
        ):
            yield name, (spec,) * count, (TensorSpec.contiguous(dtype, spec.shape),), attrs, alignment
    elif op == "quantize":
        for made in (kernel.get("attrs") or {}).get("dtype", ()):
            x, scale = of(512, 1024), of(512, 1, dtype="float32")
            narrow = (512, 512) if made == "float4_e2m1fn_x2" else (512, 1024)
            yield f"to {made}", (x, scale, None), (of(*narrow, dtype=made),), {"dtype": made}, _WELL
    elif op == "dequantize":
        for made in (kernel.get("attrs") or {}).get("dtype", ()):
            for stored in known:
                narrow = (512, 512) if stored == "float4_e2m1fn_x2" else (512, 1024)
                inputs = (of(*narrow, dtype=stored), of(512, 1, dtype="float32"), None)
                yield f"{stored} to {made}", inputs, (of(512, 1024, dtype=made),), {"dtype": made}, _WELL
    elif op == "dynamic_quantize":
        for made in (kernel.get("attrs") or {}).get("format", ()):
            groups = {"mxfp4": 32, "nvfp4": 64}.get(made, 1)
            narrow = of(512, 512, dtype="float4_e2m1fn_x2") if groups > 1 else of(512, 1024, dtype=made)
            outs = (narrow, of(512, groups, dtype="float32"), of(512, groups, dtype="int32"))
            attrs = {"format": made, "groups": groups, "symmetric": made != "uint8"}
            yield f"to {made}", (of(512, 1024),), outs, attrs, _WELL
    elif op == "int_matmul":
        a, b = (of(*shape, dtype="int8") for shape in ((512, 1024), (1024, 512)))
        yield "512 x 1024 x 512", (a, b, None, None), (of(512, 512, dtype="int32"),), {}, _WELL
    elif op == "scaled_linear":
        x, weight, scale, steps = (of(512, 1024), of(2048, 1024), of(2048, 1), of(512, 1))
        for stored in ("int8", "float8_e4m3fn"):
            if stored in known:
                x, weight = (of(*one.shape, dtype=stored) for one in (x, weight))
                scale, steps = (of(*one.shape, dtype="float32") for one in (scale, steps))
                out, attrs = of(512, 2048, dtype="bfloat16"), {"dtype": "bfloat16", "weight_format": ""}
                yield f"{stored}, 512 rows", (x, weight, scale, steps, None, None, None), (out,), attrs, _WELL
    elif op == "grouped_linear":
        given = (of(512, 1024), of(8, 2048, 1024), of(8, dtype="int32"), of(8, 2048))
        yield "512 rows, 8 groups", given, (of(512, 2048),), {}, _WELL
    elif op == "moe_route":
        attrs = {"top_k": 8, "scoring": "sigmoid", "normalize": True, "num_groups": 8, "top_groups": 4}
        outs = (of(512, 8, dtype="float32"), of(512, 8, dtype="int64"))
        for name, bias in (("bias", of(256, dtype="float32")), ("no bias", None)):
            more = {**attrs, "group_score": "top2", "scale": 2.5}
            yield f"8 of 256, {name}", (of(512, 256), bias), outs, more, _WELL
    elif op == "moe_permute":
        outs = (of(1024, 2048), of(1024, dtype="int64"), of(8, dtype="int32"))
        yield "512 by 2", (of(512, 2048), of(512, 2, dtype="int64")), outs, {"num_experts": 8}, _WELL
    elif op == "moe_combine":
        given = (of(1024, 2048), of(1024, dtype="int64"), of(512, 2, dtype="float32"))
        yield "512 of 2", given, (of(512, 2048),), {}, _WELL
    elif op == "moe_mlp":
        weights = of(8, 2816, 1024), of(8, 1024, 1408)
        routed = of(64, 2, dtype="int64"), of(64, 2, dtype="float32")
        yield "64 tokens by 2", (of(64, 1024), *weights, *routed), (of(64, 1024),), {"activation": "silu"}, _WELL
    elif op == "cross_entropy":
        attrs = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0}
        yield "512 of 32000", (of(512, 32000), of(512, dtype="int64"), None), (of(),), attrs, _WELL
    elif op == "embedding":
        yield "512 of 32000", (of(4, 512, dtype="int64"), of(32000, 1024)), (of(4, 512, 1024),), {}, _WELL
    elif op == "penalize_logits":
        logits, penalty = of(8, 32000), of(8, dtype="float32")
        given = (logits, of(8, 512, dtype="int64"), penalty, penalty, penalty)
        yield "8 rows of 32000, 512 tokens", given, (logits,), {}, _WELL
    elif op in ("filter_logits", "sample"):
        logits, one = of(8, 32000), of(1, dtype="float32")
        filters = (one, of(8, dtype="int64"), one, one)
        if op == "filter_logits":
            yield "8 rows of 32000", (logits, *filters), (logits,), {}, _WELL
        else:
            seeds = (of(1, dtype="int64"), of(8, dtype="int64"))
            yield "8 rows of 32000", (logits, *seeds, *filters), (of(8, dtype="int64"),), {}, _WELL
    elif op == "speculative_verify":
        drafts, seeds = of(8, 4, dtype="int64"), (of(1, dtype="int64"), of(8, dtype="int64"))
        outs = (of(8, 5, dtype="int64"), of(8, dtype="int64"))
        yield "8 rows of 4 drafts", (of(8, 5, 32000), drafts, of(8, 4, 32000), *seeds), outs, {}, _WELL
    elif op == "tree_accept":
        ids, nodes = of(8, 32), of(8, 32, dtype="int64")
        yield "8 trees of 32 nodes", (ids, nodes, ids), (nodes, nodes, of(8, dtype="int64")), {}, _WELL


def _caches(kernel: Claims, cache: TensorSpec) -> Iterator[tuple[str, TensorSpec, TensorSpec | None]]:
    """What a name says of it, a cache of keys and values, and its scale: one of the kernel's own dtype, and those that
    it scales."""
    yield "", cache, None
    for dtype in kernel.get("supports_kv_cache_dtypes", ()):
        scale = TensorSpec.contiguous("float32", cache.shape[2:3])
        yield f", {dtype}", TensorSpec.contiguous(dtype, cache.shape), scale


def _attention(dtype: str) -> Iterator[_Made]:
    for name, batch, heads, kv_heads, queries, keys, dim, is_causal in (
        ("1024 causal", 2, 16, 16, 1024, 1024, 128, True),
        ("512 causal, grouped", 1, 32, 8, 512, 512, 128, True),
        ("decode, 2048 keys, grouped", 4, 32, 8, 1, 2048, 128, False),
        ("decode, 4096 keys", 1, 16, 16, 1, 4096, 128, False),
        ("100 on 70, head_dim 64", 1, 4, 4, 100, 70, 64, False),
        ("512 causal, head_dim 192", 1, 16, 16, 512, 512, 192, True),
    ):
        scale = dim**-0.5
        for alignment in ("top_left", "bottom_right"):
            for layout in ("BHSD", "BSHD"):
                q, k = (
                    TensorSpec.contiguous(dtype, (batch, h, s, dim))
                    if layout == "BHSD"
                    else TensorSpec.contiguous(dtype, (batch, s, h, dim)).permute(0, 2, 1, 3)
                    for h, s in ((heads, queries), (kv_heads, keys))
                )
                attrs = {"is_causal": is_causal, "scale": scale, "causal_alignment": alignment, "layout": layout}
                yield f"{name}, {layout}", (q, k, k, None, None, None), (q,), attrs, _WELL
