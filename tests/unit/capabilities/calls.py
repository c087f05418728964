"""Calls and kernels for the tests of capabilities/."""

from __future__ import annotations

from typing import Any

from layerzero.capabilities.context import SelectionContext
from layerzero.capabilities.descriptor import KernelCapability
from layerzero.capabilities.device import DeviceSpec
from layerzero.capabilities.match import Rejection, match
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec

ATTENTION = {
    "requires_layouts": ["BHSD"],
    "causal_alignments": ["top_left"],
    "masked_rows": "zero",
    "attn_mask_types": ["bool"],
    "max_head_dim": 64,
    "min_head_dim": 8,
    "head_dim_multiple": 8,
    "max_seq_len": 512,
}
TOKENIZER = {"tokenizer_formats": ["0.13"], "dtypes": []}
ATTRS: dict[str, dict[str, Any]] = {
    "attention": {"is_causal": False, "scale": 1.0, "causal_alignment": "top_left", "layout": "BHSD"},
    "softmax": {"dim": 0, "dtype": ""},
    "gelu": {"approximate": "none"},
    "layer_norm": {"ndim": 1, "eps": 1e-5},
    "tokenize": {
        "tokenizer_digest": "d",
        "tokenizer_format": "0.13",
        "tokenizer_id": "d",
        "vocab_hash": "vocab",
        "merges_hash": "merges",
        "added_tokens_hash": "added",
        "normalizer_id": "none",
        "add_special_tokens": True,
        "max_length": None,
        "return_offsets": False,
    },
}


def kernel(**claims: Any) -> KernelCapability:
    given = {
        "kernel_id": "lib.op",
        "priority": 50,
        "source": "test",
        "dtypes": ["float32", "float16"],
        "deterministic": True,
        **claims,
    }
    return KernelCapability.model_validate(given)


def spec(*shape: int, dtype: str = "float32", strides: tuple[int, ...] | None = None) -> TensorSpec:
    return TensorSpec.contiguous(dtype, shape) if strides is None else TensorSpec(dtype, shape, strides)


CONDITIONS = frozenset({"requires_deterministic", "allow_jit_compile", "memory_headroom_bytes", "free_memory_bytes"})


def call(op: str, *inputs: TensorSpec | None, out: TensorSpec | None = None, device: DeviceSpec | None = None,
         **named: Any) -> SelectionContext:  # fmt: skip
    """`named` are attributes, or conditions of the context."""
    attrs = {name: value for name, value in named.items() if name not in CONDITIONS}
    conditions = {name: value for name, value in named.items() if name in CONDITIONS}
    outputs = (out,) if out is not None else ()
    inputs = (*inputs, *[None] * (len(OPS[op].inputs) - len(inputs)))
    return SelectionContext(op, inputs, outputs, {**ATTRS.get(op, {}), **attrs}, device or DeviceSpec(), **conditions)


def attention_call(q: TensorSpec, k: TensorSpec | None = None, v: TensorSpec | None = None,
                   mask: TensorSpec | None = None, **named: Any) -> SelectionContext:  # fmt: skip
    return call("attention", q, k or q, v or k or q, mask, **named)


def reasons(op: str, capability: KernelCapability, *inputs: TensorSpec | None, **named: Any) -> list[Rejection]:
    return match(call(op, *inputs, **named), capability)


def attention(capability: KernelCapability, *inputs: TensorSpec, **named: Any) -> list[Rejection]:
    return match(attention_call(*inputs, **named), capability)
