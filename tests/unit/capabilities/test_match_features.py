"""The rules about devices, conditions, quantization, semantics and tokenizers, and that no code lacks a rule."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.capabilities.calls import (
    ATTENTION,
    TOKENIZER,
    attention,
    attention_call,
    call,
    kernel,
    reasons,
    spec,
)
from tests.unit.capabilities.test_match import CASES as BASIC

from layerzero.capabilities.descriptor import KernelCapability
from layerzero.capabilities.device import DeviceSpec
from layerzero.capabilities.match import Rejection, match, memory_rejection, workspace_bytes
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.vocabulary.tensors import TensorSpec

X = spec(2, 8)
Q = spec(1, 4, 6, 16)
GPU = DeviceSpec("cuda", sm_version=80)
CPU = DeviceSpec("cpu", isa=("avx2", "fma"))


def tokenize(limits: dict[str, Any], **attrs: Any) -> list[Rejection]:
    return reasons("tokenize", kernel(**TOKENIZER, **limits), *[spec(3, dtype="uint8")] * 3, **attrs)


def memory(needed: dict[str, Any], **conditions: int) -> list[Rejection]:
    found = memory_rejection(call("silu", X, out=X, **conditions), kernel(**needed))
    return [] if found is None else [found]


QUANTIZED = {
    "dtypes": ["int8"],
    "index_dtypes": ["int32"],
    "optional_args": ["x_scale", "weight_zero_point"],
    "supported_quant_dtypes": ["int8"],
    "quantization_scale_granularities": ["per_tensor"],
}


def scaled(
    capability: KernelCapability, scale: TensorSpec | None = None, zero: TensorSpec | None = None
) -> list[Rejection]:
    """A product of int8, with one scale each where no other is given."""
    one = spec(1, 1)
    inputs = (spec(4, 8, dtype="int8"), spec(6, 8, dtype="int8"), scale or one, one, None, None, zero)
    return reasons("scaled_linear", capability, *inputs, dtype="float32", weight_format="")


PAGED = (spec(2, 4, 16), *[spec(9, 24, 4, 16)] * 2, spec(2, 3, dtype="int32"), spec(2, dtype="int32"))
PAGES = {"index_dtypes": ["int32"]}
SCALES = {"required_args": ["k_scale", "v_scale"], "supports_kv_cache_dtypes": ["float8_e5m2"]}
SCALED = (PAGED[0], *[spec(9, 24, 4, 16, dtype="int8")] * 2, *PAGED[3:5], spec(1), spec(4))
STORED = (*[spec(3, 4, 16)] * 2, *SCALED[1:3], spec(3, dtype="int64"), spec(1), spec(4))
CASES: dict[str, tuple[list[Rejection], Reason, str]] = {
    "page of another multiple": (
        reasons("paged_attention", kernel(**PAGES, page_size_multiple=16), *PAGED, scale=1.0),
        Reason.PAGE_SIZE_MISMATCH,
        "blocks of 24 keys; allowed: multiples of 16",
    ),
    "large page": (
        reasons("paged_attention", kernel(**PAGES, max_page_size=16), *PAGED, scale=1.0),
        Reason.PAGE_SIZE_MISMATCH,
        "blocks of 24 keys; allowed: at most 16",
    ),
    "index dtype of a table": (
        reasons("paged_attention", kernel(index_dtypes=["int64"]), *PAGED, scale=1.0),
        Reason.DTYPE_UNSUPPORTED,
        "block_tables is int32; allowed: int64",
    ),
    "heads of two sizes": (
        reasons(
            "paged_attention",
            kernel(**PAGES, equal_head_dims=True),
            *(*PAGED[:2], spec(9, 24, 4, 8), *PAGED[3:]),
            scale=1.0,
        ),
        Reason.HEAD_DIM_INVALID,
        "query and key head_dim 16 and value head_dim 8; allowed: equal ones",
    ),
    "rotary dimension": (
        reasons(
            "rope", kernel(head_dim_multiple=16), spec(1, 3, 4, 32), *[spec(1, 3, 4)] * 2, interleaved=False
        ),
        Reason.HEAD_DIM_ALIGNMENT,
        "rotary head_dim 8; allowed: multiples of 16",
    ),
    "causal rule of packed sequences": (
        reasons(
            "attention_varlen",
            kernel(**PAGES, causal_alignments=["bottom_right"]),
            *[spec(9, 4, 16)] * 3,
            *[spec(3, dtype="int32")] * 2,
            is_causal=True,
            scale=1.0,
            causal_alignment="top_left",
        ),
        Reason.CAUSAL_ALIGNMENT_UNSUPPORTED,
        "top_left with sequences; allowed: bottom_right",
    ),
    "platform": (
        reasons("silu", kernel(platform="cuda"), X, device=CPU),
        Reason.PLATFORM_MISMATCH,
        "the device is cpu; the kernel needs cuda",
    ),
    "old GPU": (
        reasons("silu", kernel(min_sm=90), X, device=GPU),
        Reason.DEVICE_CAPABILITY_UNSUPPORTED,
        "SM 80; allowed: at least 90",
    ),
    "new GPU": (
        reasons("silu", kernel(max_sm=75), X, device=GPU),
        Reason.DEVICE_CAPABILITY_UNSUPPORTED,
        "SM 80; allowed: at most 75",
    ),
    "unknown GPU": (
        reasons("silu", kernel(min_sm=90), X, device=CPU),
        Reason.DEVICE_CAPABILITY_UNSUPPORTED,
        "SM unknown; allowed: at least 90",
    ),
    "instruction set": (
        reasons("silu", kernel(requires_isa=["avx2", "avx512f"]), X, device=CPU),
        Reason.DEVICE_CAPABILITY_UNSUPPORTED,
        "the CPU has avx2, fma; needed as well: avx512f",
    ),
    "instruction set of an unknown CPU": (
        reasons("silu", kernel(requires_isa=["avx2"]), X),
        Reason.DEVICE_CAPABILITY_UNSUPPORTED,
        "the CPU has no known instruction sets; needed as well: avx2",
    ),
    "determinism": (
        reasons("silu", kernel(deterministic=False), X, requires_deterministic=True),
        Reason.NON_DETERMINISTIC,
        "deterministic=False, rng='none'; allowed: repeatable",
    ),
    "dropout without a seed": (
        attention(kernel(**ATTENTION, supports_dropout=True), Q, dropout_p=0.1, requires_deterministic=True),
        Reason.NON_DETERMINISTIC,
        "dropout with rng='none'; allowed: 'seeded'",
    ),
    "jit": (
        reasons("silu", kernel(needs_jit=True), X, allow_jit_compile=False),
        Reason.JIT_DISABLED,
        "needs_jit=True; allow_jit_compile=False allows only kernels that are compiled",
    ),
    "mutation": (
        reasons("silu", kernel(mutates_inputs=True), X),
        Reason.INPUT_MUTATED,
        "mutates_inputs=True on the caller's memory; allowed: on copies",
    ),
    "one dtype": (
        reasons("silu", kernel(requires_dtype="float16"), X),
        Reason.DTYPE_UNSUPPORTED,
        "data is float32; allowed: float16",
    ),
    "dtype of results": (
        reasons("silu", kernel(produces_dtype="float16"), X, out=X),
        Reason.DTYPE_UNSUPPORTED,
        "out is float32; the kernel gives float16",
    ),
    "narrow accumulation": (
        reasons("silu", kernel(dtypes=["float16"]), spec(4, dtype="float16"), compute_dtype="float32"),
        Reason.ATTR_UNSUPPORTED,
        "compute_dtype='float32'; the kernel computes in float16",
    ),
    "quantized data": (
        scaled(kernel(**QUANTIZED | {"supported_quant_dtypes": ["fp8_e4m3"]})),
        Reason.DTYPE_UNSUPPORTED,
        "quant_dtype='int8'; allowed: fp8_e4m3",
    ),
    "scale granularity": (
        scaled(kernel(**QUANTIZED), scale=spec(6, 1)),
        Reason.ATTR_UNSUPPORTED,
        "quant_scale_granularity='per_channel'; allowed: per_tensor",
    ),
    "blocks of a weight": (
        scaled(kernel(**QUANTIZED), scale=spec(2, 1)),
        Reason.ATTR_UNSUPPORTED,
        "quant_scale_granularity='blockwise'; allowed: per_tensor",
    ),
    "zero point": (
        scaled(kernel(**QUANTIZED), zero=spec(1, 1, dtype="int32")),
        Reason.ATTR_UNSUPPORTED,
        "quant_zero_point=True; allowed: False",
    ),
    "plain weights": (
        reasons("linear", kernel(requires_packed_weights=True), X, X, None),
        Reason.PACKED_WEIGHTS_REQUIRED,
        "packed_weights_id=None; the kernel takes packed weights only",
    ),
    "packed weights": (
        reasons("linear", kernel(), X, X, None, packed_weights_id="blocked"),
        Reason.ATTR_UNSUPPORTED,
        "packed_weights_id='blocked'; allowed: plain weights",
    ),
    "layout of results": (
        attention(kernel(**ATTENTION, produces_layout="BSHD"), Q),
        Reason.LAYOUT_UNSUPPORTED,
        "out has layout BHSD; the kernel gives BSHD",
    ),
    "odd groups": (
        attention(kernel(**ATTENTION, supports_gqa=True), Q, spec(1, 3, 6, 16)),
        Reason.GQA_HEADS_MISMATCH,
        "4 query, 3 key and 3 value heads; allowed: as many values as keys, queries a multiple of them",
    ),
    "keys without values": (
        attention(kernel(**ATTENTION, supports_gqa=True), Q, Q, spec(1, 2, 6, 16)),
        Reason.GQA_HEADS_MISMATCH,
        "4 query, 4 key and 2 value heads; allowed: as many values as keys, queries a multiple of them",
    ),
    "mask per head": (
        attention(kernel(**ATTENTION, attn_mask_layouts=["broadcast"]), Q, Q, Q, spec(1, 4, 6, 6, dtype="bool")),
        Reason.ATTN_MASK_UNSUPPORTED,
        "per_head mask; allowed: broadcast",
    ),
    "shape of a mask": (
        attention(kernel(**ATTENTION), Q, Q, Q, spec(1, 1, 6, 5, dtype="bool")),
        Reason.ATTN_MASK_INVALID,
        "attn_mask has shape [1, 1, 6, 5]; allowed: 1 or the extent in each of [1, 4, 6, 6]",
    ),
    "dtype of a mask": (
        attention(kernel(**ATTENTION), Q, Q, Q, spec(1, 1, 6, 6, dtype="float16")),
        Reason.ATTN_MASK_INVALID,
        "attn_mask is float16; allowed: bool, float32",
    ),
    "scale": (
        attention(kernel(**ATTENTION, supports_scale=False), Q, scale=0.3),
        Reason.ATTR_UNSUPPORTED,
        "scale=0.3; allowed: 1/sqrt(16)",
    ),
    "dropout": (
        attention(kernel(**ATTENTION), Q, dropout_p=0.1),
        Reason.ATTR_UNSUPPORTED,
        "dropout_p=0.1; allowed: 0",
    ),
    "base of the log-sum-exp": (
        attention(kernel(**ATTENTION, lse_base="2"), Q, lse_base="e"),
        Reason.ATTR_UNSUPPORTED,
        "lse_base='e'; the kernel gives '2'",
    ),
    "no log-sum-exp": (
        attention(kernel(**ATTENTION), Q, lse_base="e"),
        Reason.ATTR_UNSUPPORTED,
        "lse_base='e'; the kernel gives none",
    ),
    "cache layout": (
        attention(kernel(**ATTENTION, supports_kv_cache_layouts=["NHD"]), Q, kv_cache_layout="HND"),
        Reason.KV_CACHE_LAYOUT_MISMATCH,
        "kv_cache_layout='HND'; allowed: NHD",
    ),
    "cache dtype": (
        reasons("paged_attention", kernel(**PAGES, **SCALES), *SCALED, scale=1.0),
        Reason.KV_CACHE_DTYPE_MISMATCH,
        "caches with scales are int8; allowed: float8_e5m2",
    ),
    "dtype of a cache that is stored to": (
        reasons("append_kv", kernel(index_dtypes=["int64"], optional_args=["k_scale", "v_scale"]), *STORED),
        Reason.KV_CACHE_DTYPE_MISMATCH,
        "caches with scales are int8; allowed: none",
    ),
    "tokenizer": (
        tokenize({"tokenizer_ids": ["a", "b"]}),
        Reason.TOKENIZER_ID_MISMATCH,
        "tokenizer_id='d'; allowed: a, b",
    ),
    "vocabulary": (
        tokenize({"vocab_hashes": ["a"]}, vocab_hash="x"),
        Reason.VOCAB_HASH_MISMATCH,
        "vocab_hash='x'; allowed: a",
    ),
    "merges": (tokenize({"merges_hashes": ["a"]}), Reason.MERGES_HASH_MISMATCH, "merges_hash='merges'; allowed: a"),
    "added tokens": (
        tokenize({"added_tokens_hashes": []}, added_tokens_hash="x"),
        Reason.ADDED_TOKENS_MISMATCH,
        "added_tokens_hash='x'; allowed: none",
    ),
    "normalizer": (
        tokenize({"supports_normalizers": ["NFC"]}, normalizer_id="NFD"),
        Reason.NORMALIZER_MISMATCH,
        "normalizer_id='NFD'; allowed: NFC",
    ),
    "memory": (
        memory({"workspace_bytes": 100, "copies_inputs": True}, memory_headroom_bytes=900, free_memory_bytes=1000),
        Reason.MEMORY_HEADROOM_EXCEEDED,
        "needs 164 bytes of 1000 free ones; allowed: 100, which keeps 900 free",
    ),
}  # fmt: skip
ELSEWHERE = {  # codes about state; the broker and its parts raise them
    Reason.VERSION_NOT_NAMED,
    Reason.BACKEND_DISABLED,
    Reason.BACKEND_ERROR,
    Reason.BACKEND_IMPORT_FAILED,
    Reason.BACKEND_RESTARTING,
    Reason.CAPABILITIES_INVALID,
    Reason.CAPABILITIES_SCHEMA_MISMATCH,
    Reason.NOT_CERTIFIED,
    Reason.NOT_IN_PROFILE,
    Reason.NOT_COMPILED,
    Reason.COMPILE_FAILED,
    Reason.NOT_FOR_MACHINE,
    Reason.NOT_RUN,
    Reason.NOT_INSTALLED,
    Reason.ENV_CHANGED,
    Reason.LIFTED_ELSEWHERE,
    Reason.LIFTED_ONLY,
    Reason.NOT_JOINED,
    Reason.NOT_PINNED,
    Reason.OP_UNSUPPORTED,
    Reason.PLAN_BUCKET_MISS,
    Reason.POLICY_DENIED,
    Reason.POLICY_LOCKED,
    Reason.SOURCE_CHANGED,
    Reason.SOURCE_NOT_ALLOWED,
}


@pytest.mark.parametrize("name", CASES)
def test_rejection_names_the_offending_and_the_allowed_value(name: str) -> None:
    """Who reads it must know what to change."""
    found, code, detail = CASES[name]
    assert Rejection(code, detail) in found


def test_every_reason_of_a_rule_has_a_case() -> None:
    """A code that no rule raises is a promise without a keeper."""
    assert {code for _, code, _ in (*BASIC.values(), *CASES.values())} == set(Reason) - ELSEWHERE


ACCEPTED: dict[str, list[Rejection]] = {
    "platform": reasons("silu", kernel(platform="cuda", min_sm=80, max_sm=80), X, device=GPU),
    "instruction sets": reasons("silu", kernel(requires_isa=["avx2"]), X, device=CPU),
    "seeded dropout": attention(
        kernel(**ATTENTION, supports_dropout=True, rng="seeded"), Q, dropout_p=0.1, requires_deterministic=True
    ),
    "jit": reasons("silu", kernel(needs_jit=True), X),
    "mutated copies": reasons("silu", kernel(mutates_inputs=True, copies_inputs=True), X),
    "wide accumulation": reasons("silu", kernel(compute_dtype="float64"), X, compute_dtype="float32"),
    "quantized data": scaled(kernel(**QUANTIZED)),
    "packed weights": reasons("linear", kernel(requires_packed_weights=True), X, X, None, packed_weights_id="blocked"),
    "layout of copied results": attention(kernel(**ATTENTION, produces_layout="BSHD", copies_outputs=True), Q),
    "default scale": attention(kernel(**ATTENTION, supports_scale=False), Q, scale=0.25),
    "log-sum-exp": attention(kernel(**ATTENTION, lse_base="2"), Q, lse_base="2"),
    "cache": attention(
        kernel(**ATTENTION, supports_kv_cache_layouts=["NHD"]),
        Q,
        kv_cache_layout="NHD",
    ),
    "cache with scales": reasons(
        "paged_attention", kernel(**PAGES, **SCALES | {"supports_kv_cache_dtypes": ["int8"]}), *SCALED, scale=1.0
    ),
    "tokenizer": tokenize({"tokenizer_ids": ["d"], "vocab_hashes": ["v"]}, vocab_hash="v"),
    "memory": memory({"workspace_bytes": 100}, memory_headroom_bytes=900, free_memory_bytes=1000),
    "memory without a limit": memory({"workspace_bytes": 1 << 50}, free_memory_bytes=0),
    "memory of unknown size": memory({"workspace_bytes": 1 << 50}, memory_headroom_bytes=0),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_rule_lets_pass_what_the_kernel_does(name: str) -> None:
    """A rule that always refuses would pass the other test."""
    assert ACCEPTED[name] == []


def test_workspace_counts_what_is_declared_and_copied() -> None:
    """Half of a memory estimate is no estimate."""
    one = call("silu", X, out=X)  # 64 bytes each
    assert workspace_bytes(one, kernel()) == 0
    assert workspace_bytes(one, kernel(workspace_bytes=10, workspace_factor=0.5)) == 74
    assert workspace_bytes(one, kernel(copies_inputs=True, copies_outputs=True)) == 128


def test_seedless_random_numbers_are_no_determinism() -> None:
    """A kernel that reads the process's generator repeats nothing."""
    found = match(attention_call(Q, requires_deterministic=True), kernel(**ATTENTION | {"deterministic": False}))
    assert [r.code for r in found] == [Reason.NON_DETERMINISTIC]
