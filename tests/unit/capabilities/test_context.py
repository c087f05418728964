"""SelectionContext: its fields, and that its keys tell apart what a kernel can tell apart and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.example_counts import examples
from tests.unit.capabilities.calls import ATTENTION, ATTRS, TOKENIZER, attention_call, call, kernel, spec

from layerzero.capabilities import descriptor
from layerzero.capabilities.context import SelectionContext
from layerzero.capabilities.descriptor import KernelCapability
from layerzero.capabilities.device import DeviceSpec
from layerzero.capabilities.match import match
from layerzero.ipc.vocabulary.tensors import TensorSpec

DESCRIPTORS = sorted((Path(descriptor.__file__).parent / "descriptors").glob("*.json"))
SHIPPED: dict[str, list[KernelCapability]] = {}
for path in DESCRIPTORS:
    for op, kernels in descriptor.load(path).ops.items():
        SHIPPED.setdefault(op, []).extend(kernels)

Q = spec(2, 8, 6, 16)
CPU = DeviceSpec(device_uuid="cpu-1", isa=("avx2",))


# --- fields


def test_fields_of_attention_follow_from_its_tensors() -> None:
    """Rules, plans and reports read them; the client sends only tensors."""
    k, v = spec(2, 4, 9, 16), spec(2, 4, 9, 32)
    one = attention_call(Q, k, v, spec(1, 8, 6, 9, dtype="bool"), scale=0.25)
    assert (one.dtype, one.device_type) == ("float32", "cpu")
    assert (one.batch_size, one.seq_len_q, one.seq_len_k, one.seq_len) == (2, 6, 9, 9)
    assert (one.num_heads, one.num_kv_heads, one.head_dim) == (8, 4, 16)
    assert (one.enable_gqa, one.layout) == (True, "BHSD")
    assert (one.is_causal, one.causal_alignment, one.scale, one.has_default_scale) == (False, "top_left", 0.25, True)
    assert (one.attn_mask_type, one.attn_mask_layout, one.attn_mask_problem) == ("bool", "per_head", None)
    assert (one.is_contiguous, one.dropout_p) == (True, 0.0)


def test_mask_that_repeats_one_head_is_a_broadcast() -> None:
    """`expand` makes a full shape over one head's memory."""
    repeated = spec(2, 8, 6, 6, dtype="bool", strides=(0, 0, 6, 1))
    assert attention_call(Q, mask=repeated).attn_mask_layout == "broadcast"


def test_fields_of_other_ops_are_rows_or_nothing() -> None:
    """A field that the op lacks must not look like a value."""
    one = call("silu", spec(3, 5, 7))
    assert (one.batch_size, one.seq_len, one.num_heads, one.head_dim, one.layout) == (15, None, None, None, None)
    assert (one.attn_mask_type, one.attn_mask_layout, one.has_default_scale) == ("none", None, True)
    empty = call("null")
    assert (empty.dtype, empty.batch_size, empty.is_contiguous) == (None, None, True)
    assert call("silu", spec()).batch_size is None
    assert call("embedding", spec(3, dtype="int64"), spec(9, 4, dtype="float16")).dtype == "float16"


ATTRIBUTES = {
    "tokenizer_id": "t",
    "vocab_hash": "v",
    "merges_hash": "m",
    "added_tokens_hash": "a",
    "normalizer_id": "n",
    "return_offsets": True,
    "kv_cache_layout": "NHD",
    "packed_weights_id": "w",
    "dropout_p": 0.5,
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_field_is_read_from_its_attribute(name: str) -> None:
    """A misspelt name would read as "not given" for ever."""
    assert getattr(call("silu", spec(4), **{name: ATTRIBUTES[name]}), name) == ATTRIBUTES[name]
    assert not getattr(call("silu", spec(4)), name)


def test_times_of_one_vocabulary_are_those_of_another() -> None:
    """And not those of another normalizer, which takes time, or format."""

    def key(**parts: str) -> str:
        return call("tokenize", *[spec(3, dtype="uint8")] * 3, **parts).perf_key()

    for name in ("tokenizer_digest", "tokenizer_id", "vocab_hash", "merges_hash", "added_tokens_hash"):
        assert key(**{name: "x"}) == key()
    assert len({key(), key(normalizer_id="NFC"), key(tokenizer_format="x")}) == 3


def test_sm_is_that_of_the_device() -> None:
    """Policy rules compare with it."""
    assert call("silu", spec(4), device=DeviceSpec("cuda", sm_version=90)).sm == 90


# --- keys: what differs

STRIDED = spec(2, 8, 6, 16, strides=(1536, 192, 32, 2))
ROWS = spec(2, 8, 6, 16, strides=(1536, 192, 32, 1))
MASK = spec(1, 1, 6, 6, dtype="bool")
DIFFERENT: dict[str, Callable[[], SelectionContext]] = {
    "plain": lambda: attention_call(Q),
    "dtype": lambda: attention_call(spec(2, 8, 6, 16, dtype="float16")),
    "dtype of one input": lambda: attention_call(Q, Q, spec(2, 8, 6, 16, dtype="float16")),
    "dtype of the output": lambda: attention_call(Q, out=spec(2, 8, 6, 16, dtype="float16")),
    "gaps in the output": lambda: attention_call(Q, out=STRIDED),
    "output": lambda: attention_call(Q, out=Q),
    "gaps": lambda: attention_call(ROWS),
    "last stride": lambda: attention_call(STRIDED),
    "gaps in one input": lambda: attention_call(Q, ROWS, Q),
    "empty": lambda: attention_call(spec(0, 8, 6, 16)),
    "head_dim": lambda: attention_call(spec(2, 8, 6, 32)),
    "head_dim of values": lambda: attention_call(Q, Q, spec(2, 8, 6, 32)),
    "heads": lambda: attention_call(spec(2, 4, 6, 16)),
    "key heads": lambda: attention_call(Q, spec(2, 4, 6, 16)),
    "value heads": lambda: attention_call(Q, Q, spec(2, 4, 6, 16)),
    "other length of keys": lambda: attention_call(Q, spec(2, 8, 7, 16)),
    "long": lambda: attention_call(spec(2, 8, 101, 16)),
    "longer": lambda: attention_call(spec(2, 8, 1001, 16)),
    "causal": lambda: attention_call(Q, is_causal=True),
    "alignment": lambda: attention_call(Q, causal_alignment="bottom_right"),
    "scale": lambda: attention_call(Q, scale=0.5),
    "scale of another type": lambda: attention_call(Q, scale=1),
    "layout": lambda: attention_call(Q, layout="BSHD"),
    "bool mask": lambda: attention_call(Q, mask=MASK),
    "float mask": lambda: attention_call(Q, mask=spec(1, 1, 6, 6)),
    "mask per head": lambda: attention_call(Q, mask=spec(1, 8, 6, 6, dtype="bool")),
    "bad mask": lambda: attention_call(Q, mask=spec(1, 1, 6, 5, dtype="bool")),
    "dropout": lambda: attention_call(Q, dropout_p=0.5),
    "lse": lambda: attention_call(Q, lse_base="2"),
    "cache layout": lambda: attention_call(Q, kv_cache_layout="NHD"),
    "packed": lambda: attention_call(Q, packed_weights_id="w"),
    "other op": lambda: call("matmul", Q, Q),
    "ndim": lambda: call("matmul", spec(8, 6, 16), Q),
    "one argument": lambda: call("layer_norm", Q, None, None),
    "two arguments": lambda: call("layer_norm", Q, spec(16), None),
    "another argument": lambda: call("layer_norm", Q, None, spec(16)),
    "eps": lambda: call("layer_norm", Q, None, None, eps=0.5),
    "tokenizer": lambda: call("tokenize", *[spec(3, dtype="uint8")] * 3),
    "deterministic": lambda: attention_call(Q, requires_deterministic=True),
    "no jit": lambda: attention_call(Q, allow_jit_compile=False),
    "headroom": lambda: attention_call(Q, memory_headroom_bytes=1),
    "policy": lambda: replace(attention_call(Q), policy_hash="p"),
    "device": lambda: attention_call(Q, device=CPU),
    "isa": lambda: attention_call(Q, device=replace(CPU, isa=())),
    "sm": lambda: attention_call(Q, device=DeviceSpec("cuda", sm_version=80)),
    "newer sm": lambda: attention_call(Q, device=DeviceSpec("cuda", sm_version=90)),
    "driver": lambda: attention_call(Q, device=replace(CPU, driver_version="1")),
    **{
        name: lambda name=name: call("tokenize", *[spec(3, dtype="uint8")] * 3, **{name: "x"})  # type: ignore[misc]
        for name in (
            *("tokenizer_digest", "tokenizer_format", "vocab_hash", "merges_hash", "added_tokens_hash"),
            *("normalizer_id", "tokenizer_id", "return_offsets", "max_length"),
        )
    },
}
THRESHOLDS = (100, 1000)


def test_no_two_calls_that_differ_in_a_field_share_a_key() -> None:
    """A shared entry would serve one call with the verdicts of the other."""
    keys = {name: make().validity_key(THRESHOLDS) for name, make in DIFFERENT.items()}
    first: dict[tuple[Any, ...], str] = {}
    shared = [(name, first[key]) for name, key in keys.items() if first.setdefault(key, name) != name]
    assert shared == []


def test_batches_and_lengths_between_limits_share_a_key() -> None:
    """A cache with an entry per length would never be hit while decoding."""
    one = attention_call(Q).validity_key(THRESHOLDS)
    assert attention_call(spec(3, 8, 100, 16)).validity_key(THRESHOLDS) == one
    assert attention_call(spec(3, 8, 101, 16)).validity_key(THRESHOLDS) != one
    assert attention_call(spec(3, 8, 101, 16)).validity_key() == attention_call(Q).validity_key()


# --- keys: what a kernel can tell apart

ODD_KERNELS: dict[str, list[dict[str, Any]]] = {
    "attention": [
        {**ATTENTION, **more}
        for more in (
            {},
            {"requires_contiguous": True, "supports_gqa": True, "supports_empty": True},
            {"requires_last_dim_stride1": True, "copies_outputs": True, "requires_contiguous": True},
            {"max_seq_len": 7, "supports_gqa": True},
            {"requires_layouts": ["BSHD"], "produces_layout": "BHSD", "supports_scale": False},
            {"attn_mask_types": ["bool", "float"], "attn_mask_layouts": ["broadcast"], "max_seq_len": 3},
            {"requires_dtype": "float16", "produces_dtype": "float32", "deterministic": False},
            {"requires_isa": ["avx2"], "needs_jit": True, "lse_base": "2", "supports_dropout": True},
            {"platform": "cuda", "min_sm": 80, "max_sm": 90, "is_cuda_graph_safe": True},
            {"head_dim_multiple": 16, "min_head_dim": 1, "causal_alignments": ["top_left", "bottom_right"]},
            {"mutates_inputs": True, "min_ndim": 5, "supports_kv_cache_layouts": ["NHD"]},
            {"optional_attrs": ["window_left", "softcap"], "supports_causal_mask": True},
            {"optional_args": ["sinks"], "required_args": ["alibi_slopes"]},
        )
    ],
    "layer_norm": [
        {"optional_args": ["weight"], "supports_empty": True},
        {"required_args": ["weight"], "optional_args": ["bias"], "requires_contiguous": True},
        {"optional_args": ["weight", "bias"], "requires_last_dim_stride1": True, "min_ndim": 2, "max_ndim": 3},
        {"optional_args": ["weight", "bias"], "attrs": {"ndim": [1]}},
        {"optional_args": ["bias"], "produces_dtype": "float16", "rng": "global", "deterministic": False},
    ],
    "tokenize": [
        {**TOKENIZER, **more}
        for more in (
            {"supports_offsets": True},
            {"tokenizer_ids": ["d"], "vocab_hashes": ["v", "w"]},
            {"merges_hashes": ["v"], "added_tokens_hashes": ["v"]},
            {"supports_normalizers": ["v"]},
        )
    ],
}
KERNELS = {op: [*SHIPPED[op], *(kernel(**claims) for claims in odd)] for op, odd in ODD_KERNELS.items()}
LIMITS = {op: tuple(sorted({k.max_seq_len for k in ks if k.max_seq_len})) for op, ks in KERNELS.items()}

few = st.sampled_from([0, 1, 2, 3, 4, 7, 8, 16])
dtypes = st.sampled_from(["float32", "float32", "float16", "bool"])


@st.composite
def tensors(draw: st.DrawFn, shape: tuple[int, ...], dtype: str | None = None) -> TensorSpec:
    """Dense, with gaps between rows or elements, transposed, or repeated."""
    dense = TensorSpec.contiguous(dtype or draw(dtypes), shape)
    match draw(st.sampled_from(["dense", "dense", "wide", "odd", "stepped", "transposed", "repeated"])):
        case "wide" | "odd" as how:
            pad = 16 if how == "wide" else 1
            return replace(dense, strides=(*(s * (shape[-1] + pad) for s in dense.strides[:-1]), *dense.strides[-1:]))
        case "stepped":
            return replace(dense, strides=tuple(2 * s for s in dense.strides))
        case "transposed":
            other = TensorSpec.contiguous(dense.dtype, tuple(reversed(shape)))
            return other.permute(*reversed(range(len(shape))))
        case "repeated":
            return replace(dense, strides=(0,) * len(shape))
    return dense


@st.composite
def contexts(draw: st.DrawFn, op: str) -> SelectionContext:
    """Any call that can be expressed, valid or not."""
    attrs = dict(ATTRS[op])
    inputs: list[TensorSpec | None]
    outputs: list[TensorSpec]
    if op == "attention":
        b, h, hk, sq, sk, d = (draw(few) for _ in range(6))
        v_heads = draw(st.sampled_from([hk, hk, hk, h]))
        shapes = [(b, h, sq, d), (b, hk, sk, d), (b, v_heads, sk, draw(st.sampled_from([d, 8, 80])))]
        mask_shape = tuple(draw(st.sampled_from([1, n, n])) for n in (b, h, sq, sk))
        if draw(st.booleans()):
            mask_shape = (*mask_shape[:3], 5)
        inputs = [draw(tensors(shape)) for shape in shapes]
        inputs.append(draw(st.none() | tensors(mask_shape)))
        inputs += [draw(st.none() | st.none() | tensors(shape)) for shape in ((h,), (1, h))]
        outputs = [draw(tensors((b, h, sq, shapes[2][3])))]
        attrs["is_causal"] = draw(st.booleans())
        attrs["causal_alignment"] = draw(st.sampled_from(["top_left", "bottom_right"]))
        attrs["layout"] = draw(st.sampled_from(["BHSD", "BSHD"]))
        attrs["scale"] = draw(st.sampled_from([1.0, 0.25, 1]))
        attrs |= draw(st.sampled_from([{}, {}, {"window_left": 3}, {"window_right": 3}, {"softcap": 2.0}]))
        attrs |= draw(st.sampled_from([{}, {}, {}, {"dropout_p": 0.5}, {"lse_base": "2"}, {"kv_cache_layout": "NHD"}]))
    elif op == "layer_norm":
        shape = tuple(draw(st.lists(few, min_size=1, max_size=4)))
        inputs = [draw(tensors(shape)), *(draw(st.none() | tensors(shape[-1:])) for _ in range(2))]
        outputs = [draw(tensors(shape))]
        attrs["ndim"] = draw(st.integers(1, 2))
    else:
        inputs = [draw(tensors((draw(few),), "uint8")) for _ in range(3)]
        outputs = []
        names = ["vocab_hash", "merges_hash", "added_tokens_hash", "normalizer_id"]
        attrs |= draw(st.dictionaries(st.sampled_from(names), st.sampled_from(["v", "w"])))
        attrs["tokenizer_format"] = draw(st.sampled_from(["plain", "0.13"]))
        attrs["return_offsets"] = draw(st.booleans())
    device = draw(st.sampled_from([CPU, replace(CPU, isa=()), *(DeviceSpec("cuda", sm_version=n) for n in (75, 86))]))
    flags = {
        name: draw(st.booleans())
        for name in ("requires_deterministic", "allow_jit_compile")
        if draw(st.sampled_from([False, False, True]))
    }
    return SelectionContext(op, tuple(inputs), tuple(outputs), attrs, device, **flags)


@st.composite
def resized(draw: st.DrawFn, one: SelectionContext) -> SelectionContext:
    """Batch and sequence (or any extent) exchanged throughout, memory laid out anew with the strides' ratios kept."""
    found = {spec.shape[dim] for spec in one.given.values() for dim in range(spec.ndim)}
    other = {
        extent: draw(st.sampled_from([extent, extent, *([] if extent in (0, 1) else [2, 3, 5, 9])])) for extent in found
    }

    def resize(spec: TensorSpec) -> TensorSpec:
        dims = (0, 2) if one.op == "attention" else range(spec.ndim)
        if one.op == "attention" and spec is one.inputs[3]:
            dims = (0, 2, 3)
        shape = tuple(other.get(n, n) if dim in dims else n for dim, n in enumerate(spec.shape))
        order = sorted(range(spec.ndim), key=lambda dim: (spec.strides[dim], -dim))
        strides, step = [0] * spec.ndim, 1
        for dim in order:
            if not spec.is_contiguous and not spec.strides[dim]:
                continue
            strides[dim] = step if spec.is_contiguous else max(step, spec.strides[dim])
            step = strides[dim] * max(shape[dim], 1)
        dense = TensorSpec.contiguous(spec.dtype, shape)
        return dense if spec.is_contiguous else TensorSpec(spec.dtype, shape, tuple(strides))

    return replace(
        one,
        inputs=tuple(None if spec is None else resize(spec) for spec in one.inputs),
        outputs=tuple(map(resize, one.outputs)),
    )


def codes(context: SelectionContext, capability: KernelCapability) -> frozenset[str]:
    return frozenset(rejection.code.value for rejection in match(context, capability))


@pytest.mark.parametrize("op", sorted(KERNELS))
@settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_calls_that_share_a_key_get_the_same_codes_from_every_kernel(op: str, data: st.DataObject) -> None:
    """This is what makes the validity cache a cache and not a guess."""
    one = data.draw(contexts(op))
    other = data.draw(resized(one))
    assume(one.validity_key(LIMITS[op]) == other.validity_key(LIMITS[op]))
    for capability in KERNELS[op]:
        assert codes(one, capability) == codes(other, capability), capability


@pytest.mark.parametrize("op", sorted(KERNELS))
@settings(max_examples=examples(80), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_calls_that_some_kernel_tells_apart_have_two_keys(op: str, data: st.DataObject) -> None:
    """The same rule from the other side, over unrelated calls."""
    one, other = data.draw(contexts(op)), data.draw(contexts(op))
    if any(codes(one, capability) != codes(other, capability) for capability in KERNELS[op]):
        assert one.validity_key(LIMITS[op]) != other.validity_key(LIMITS[op])


# --- the key of timings


def test_perf_key_buckets_extents_and_says_what_it_is() -> None:
    """It is a column of PerfDB that people read."""
    assert call("silu", spec(7, 1000)).perf_key() == "silu x:float32[8x1024]"
    rows, steps = spec(7, 1000, strides=(1024, 1)), spec(7, 1000, strides=(2000, 2))
    assert call("silu", rows).perf_key() == "silu x:float32[8x1024]/rows"
    assert call("silu", steps).perf_key() == "silu x:float32[8x1024]/strided"
    assert call("gelu", spec(0, 1)).perf_key() == "gelu x:float32[0x1] approximate=none"


def test_perf_key_ignores_what_costs_no_time() -> None:
    """Every scale would otherwise start without a measurement."""
    assert attention_call(Q, scale=0.1).perf_key() == attention_call(Q, scale=0.2).perf_key()
    one, other = (call("clamp", Q, min=low, max=None).perf_key() for low in (0.0, 1.0))
    assert one == other
    assert attention_call(Q, is_causal=True).perf_key() != attention_call(Q).perf_key()
    assert attention_call(Q).perf_key() != attention_call(spec(2, 8, 9, 16)).perf_key()
