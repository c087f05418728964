"""OperationSpec: what each op of ipc/vocabulary/ops.py means, takes and promises (spec 5.1). docs/ops.md has the long
form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from layerzero.ipc.vocabulary.numerics import TOLERANCE
from layerzero.ipc.vocabulary.ops import OPS

OpKind = Literal["tensor", "tokenization", "sampling", "communication", "prepost"]
DataKind = Literal["tensor", "text", "tokens", "none"]
_FLOATS: Mapping[str, float] = TOLERANCE
TOKENIZER_METADATA = (
    "tokenizer_id",
    "vocab_hash",
    "merges_hash",
    "normalizer_id",
    "added_tokens_hash",
    "special_tokens_hash",
)


@dataclass(frozen=True)
class OperationSpec:
    """One op.

    `semantics` is the formula that every kernel is held to. `precision_tolerances`: by dtype, the largest difference
    from it as a share of max(1, largest expected magnitude); a dtype that is not listed must be exact.
    `tokenization_metadata_required` identifies the tokenizer; one file's digest (tokenizer_id) fixes all of them.
    `fallback_impl` is the kernel that takes any call of the op, as "backend.op"; None: there is none.
    """

    op_id: str
    op_kind: OpKind
    input_kinds: tuple[DataKind, ...]
    output_kind: DataKind
    semantics: str
    fallback_impl: str | None
    precision_tolerances: Mapping[str, float] = field(default_factory=lambda: _FLOATS)
    tokenization_metadata_required: tuple[str, ...] = ()
    returns_offsets: bool = False
    layouts: tuple[str, ...] = ()  # of the caller's memory; empty: the op has one
    supports_gqa: bool = False
    supports_batched: bool = True  # leading dimensions, or several texts, in one call

    @property
    def optional_inputs(self) -> frozenset[str]:
        """Tensor arguments that a call may leave out."""
        return OPS[self.op_id].optional

    @property
    def attributes(self) -> tuple[str, ...]:
        """Attributes that every call carries."""
        return OPS[self.op_id].attrs


def _tensor(op_id: str, semantics: str) -> OperationSpec:
    return OperationSpec(op_id, "tensor", ("tensor",), "tensor", semantics, f"torch.{op_id}")


OPERATIONS: dict[str, OperationSpec] = {
    spec.op_id: spec
    for spec in (
        OperationSpec(
            "attention",
            "tensor",
            ("tensor",),
            "tensor",
            "out = softmax(scale * q k^T + bias) v; a query that may attend to nothing gives 0",
            "torch.attention",
            layouts=("BHSD", "BSHD"),
            supports_gqa=True,
        ),
        OperationSpec(
            "attention_varlen",
            "tensor",
            ("tensor",),
            "tensor",
            "out = softmax(scale * q k^T + bias) v within each sequence; a query that may attend to nothing gives 0",
            "torch.attention_varlen",
            supports_gqa=True,
        ),
        OperationSpec(
            "paged_attention",
            "tensor",
            ("tensor",),
            "tensor",
            "out[b] = softmax(scale * q[b] k^T) v over the seq_lens[b] keys that block_tables[b] leads to",
            "torch.paged_attention",
            supports_gqa=True,
        ),
        OperationSpec(
            "append_kv",
            "tensor",
            ("tensor",),
            "tensor",
            "token t of key and value is copied to slot slots[t] % P of block slots[t] // P of k_cache and v_cache; "
            "the rest of these stays",
            "torch.append_kv",
            precision_tolerances={},  # a copy is exact
        ),
        _tensor("rope", "pairs (a, b) of the first elements of each head become (a cos - b sin, b cos + a sin)"),
        _tensor("matmul", "out[..., m, n] = sum_k a[..., m, k] b[..., k, n]"),
        _tensor("linear", "out[..., n] = sum_k x[..., k] weight[n, k] + bias[n]"),
        _tensor("softmax", "out = exp(x - max(x)) / sum(exp(x - max(x))), over dim"),
        _tensor(
            "layer_norm", "out = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last ndim dimensions"
        ),
        _tensor("rms_norm", "out = x / sqrt(mean(x^2) + eps) * weight, over the last ndim dimensions"),
        _tensor(
            "gelu",
            "none: out = x/2 (1 + erf(x/sqrt(2))); tanh: out = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))",
        ),
        _tensor("silu", "out = x / (1 + exp(-x))"),
        _tensor("swiglu", "out = gate / (1 + exp(-gate)) * up"),
        OperationSpec(
            "quantize",
            "tensor",
            ("tensor",),
            "tensor",
            "out = x / scale in float32, rounded to nearest, ties to even, and cut to the finite range of dtype",
            "torch.quantize",
            precision_tolerances={},  # there is one right rounding
        ),
        _tensor("dequantize", "out = x * scale"),
        OperationSpec(
            "embedding",
            "prepost",
            ("tokens", "tensor"),
            "tensor",
            "out[..., :] = weight[ids[...], :]",
            "torch.embedding",
            precision_tolerances={},  # a copy is exact
        ),
        OperationSpec(
            "tokenize",
            "tokenization",
            ("text",),
            "tokens",
            "ids = the tokenizer file's normalizer, pre-tokenizer, model and (add_special_tokens) post-processor, "
            "applied to each text, cut to max_length",
            "tokenizers-0.23.tokenize",
            precision_tolerances={},
            tokenization_metadata_required=TOKENIZER_METADATA,
            returns_offsets=True,
        ),
        OperationSpec(
            "detokenize",
            "tokenization",
            ("tokens",),
            "text",
            "text = the tokenizer file's decoder applied to each sequence of ids, without special tokens if asked",
            "tokenizers-0.23.detokenize",
            precision_tolerances={},
            tokenization_metadata_required=TOKENIZER_METADATA,
        ),
        OperationSpec(
            "null", "communication", ("none",), "none", "does nothing", "null.null", {}, supports_batched=False
        ),
    )
}
