"""SelectionContext: everything about a call that a selection may depend on, and the keys of the caches (spec 5.5, 7.3).

The broker builds one per call signature; capabilities/match.py reads it.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from layerzero.capabilities.device import DeviceSpec, DeviceType
from layerzero.ipc.vocabulary.attention_shapes import masked_shape
from layerzero.ipc.vocabulary.ops import ATTENTION_OPS, OPS, PAGED_OPS, TOKENIZER_ATTRS, Heads, heads
from layerzero.ipc.vocabulary.quantization import Quantization, quantization
from layerzero.ipc.vocabulary.tensors import FLOAT_DTYPES, TensorSpec

# Attributes whose value is data: kernels take as long for one as for another.
_OF_FILES = frozenset(TOKENIZER_ATTRS) - {"tokenizer_format", "normalizer_id"}
DATA_ATTRS = frozenset({"scale", "eps", "alpha", "beta", "min", "max"}) | _OF_FILES


@dataclass(frozen=True, eq=False)
class SelectionContext:
    """A call in canonical form (`op` is one of OPS, its tensors are in wire order), the device it runs on, and the
    conditions that policy sets.

    Extents are counted in elements; a property is None (or empty) where the op or the call has no such thing. dtypes
    are names as in ipc/vocabulary/tensors.py. Attributes that no op of ours has yet (layout of caches, packed weights,
    dropout) are read from `attrs` under the name of their property."""

    op: str
    inputs: tuple[TensorSpec | None, ...]
    outputs: tuple[TensorSpec, ...]
    attrs: Mapping[str, Any]
    device: DeviceSpec
    policy_hash: str = ""
    allow_jit_compile: bool = True
    requires_deterministic: bool = False
    memory_headroom_bytes: int | None = None  # that must stay free; None: any use is fine
    free_memory_bytes: int | None = None  # of the device, when last asked

    # --- the call

    @property
    def device_type(self) -> DeviceType:
        """Platform of the device."""
        return self.device.device_type

    @property
    def sm(self) -> int | None:
        """CUDA compute capability as 10 * major + minor."""
        return self.device.sm_version

    @cached_property
    def given(self) -> dict[str, TensorSpec]:
        """The tensors that were passed, by argument name, in wire order."""
        return {name: spec for name, spec in zip(OPS[self.op].inputs, self.inputs, strict=True) if spec is not None}

    @cached_property
    def first(self) -> TensorSpec | None:
        """The first tensor that was passed."""
        return next(iter(self.given.values()), None)

    @cached_property
    def dtype(self) -> str | None:
        """Of the data: of the first floating-point input, else of the first input."""
        singles = OPS[self.op].singles
        numbers = (s for name, s in self.given.items() if name not in singles and s.dtype in FLOAT_DTYPES)
        data = next(numbers, self.first)
        return None if data is None else data.dtype

    # --- shapes

    @cached_property
    def batch_size(self) -> int | None:
        """Attention: extent of the first dimension. Else: rows, the product of all dimensions but the last."""
        if self.first is None or not self.first.ndim:
            return None
        return self.first.shape[0] if self.op in ATTENTION_OPS else math.prod(self.first.shape[:-1])

    @property
    def seq_len_q(self) -> int | None:
        """Queries of an attention call."""
        return self._extent("q", 2)

    @property
    def seq_len_k(self) -> int | None:
        """Keys of an attention call."""
        return self._extent("k", 2)

    @cached_property
    def seq_len(self) -> int | None:
        """The longer of queries and keys."""
        q, k = self.seq_len_q, self.seq_len_k
        return None if q is None or k is None else max(q, k)

    @cached_property
    def heads(self) -> Heads | None:
        """Heads and their extents, of ops that have them."""
        return heads(self.op, self.given)

    @property
    def num_heads(self) -> int | None:
        """Query heads."""
        return None if self.heads is None else self.heads.query

    @property
    def num_kv_heads(self) -> int | None:
        """Key and value heads."""
        return None if self.heads is None else self.heads.key

    @property
    def head_dim(self) -> int | None:
        """Of queries and keys."""
        return None if self.heads is None else self.heads.dims[0][1]

    @property
    def enable_gqa(self) -> bool:
        """Groups of query heads share a key head."""
        return self.num_heads != self.num_kv_heads

    def _extent(self, name: str, dim: int) -> int | None:
        return self.given[name].shape[dim] if self.op in ATTENTION_OPS else None

    # --- memory

    @property
    def layout(self) -> str | None:
        """BHSD or BSHD: the order of the caller's memory. The tensors here are BHSD views either way."""
        return self.attrs.get("layout")

    @cached_property
    def is_contiguous(self) -> bool:
        """Every input is row-major without gaps."""
        return all(spec.is_contiguous for spec in self.given.values())

    # --- attention

    @property
    def is_causal(self) -> bool:
        """A query sees no later key."""
        return bool(self.attrs.get("is_causal", False))

    @property
    def causal_alignment(self) -> str | None:
        """top_left or bottom_right; what it means is in docs/ops.md."""
        return self.attrs.get("causal_alignment")

    @property
    def scale(self) -> float | None:
        """Multiplies q kᵀ."""
        return self.attrs.get("scale")

    @cached_property
    def has_default_scale(self) -> bool:
        """The scale is 1/√head_dim, to seven digits (the C ABI of libraries is float32), or the op has none."""
        if self.scale is None or not self.head_dim:
            return True
        return math.isclose(self.scale, self.head_dim**-0.5, rel_tol=1e-7)

    @property
    def dropout_p(self) -> float:
        """Share of the weights that are dropped; 0 unless the attribute says otherwise: calls serve inference."""
        return float(self.attrs.get("dropout_p") or 0.0)

    @cached_property
    def attn_mask_type(self) -> str:
        """none, bool (True: attend) or float (added to the scores)."""
        mask = self._mask
        return "none" if mask is None else "bool" if mask.dtype == "bool" else "float"

    @cached_property
    def attn_mask_layout(self) -> str | None:
        """broadcast (one mask for all heads) or per_head."""
        mask = self._mask
        if mask is None:
            return None
        return "per_head" if mask.ndim > 1 and mask.shape[1] > 1 and mask.strides[1] else "broadcast"

    @cached_property
    def attn_mask_problem(self) -> str | None:
        """Why no kernel can take the mask: offending and allowed value; None for a good one and for none."""
        mask = self._mask
        if mask is None:
            return None
        q, k = self.given["q"], self.given["k"]
        if mask.dtype not in ("bool", q.dtype):
            return f"attn_mask is {mask.dtype}; allowed: bool, {q.dtype}"
        full = masked_shape(q, k, self.attrs)
        if any(extent not in (1, n) for extent, n in zip(mask.shape, full, strict=True)):
            return f"attn_mask has shape {list(mask.shape)}; allowed: 1 or the extent in each of {list(full)}"
        return None

    @property
    def _mask(self) -> TensorSpec | None:
        return self.given.get("attn_mask") if self.op in ATTENTION_OPS else None

    # --- attributes of ops with text

    @property
    def tokenizer_id(self) -> str | None:
        """The library that computes exactly what the tokenizer's file says, besides tokenizers; else the SHA-256 of
        the file."""
        return self.attrs.get("tokenizer_id")

    @property
    def vocab_hash(self) -> str | None:
        """SHA-256 of the vocabulary."""
        return self.attrs.get("vocab_hash")

    @property
    def merges_hash(self) -> str | None:
        """SHA-256 of the merge rules."""
        return self.attrs.get("merges_hash")

    @property
    def added_tokens_hash(self) -> str | None:
        """SHA-256 of the tokens added to the vocabulary."""
        return self.attrs.get("added_tokens_hash")

    @property
    def normalizer_id(self) -> str | None:
        """Types of the normalizers, such as "Prepend+Replace", or "none"."""
        return self.attrs.get("normalizer_id")

    @property
    def return_offsets(self) -> bool:
        """Character positions of each token are wanted."""
        return bool(self.attrs.get("return_offsets", False))

    # --- quantized numbers

    @cached_property
    def quantization(self) -> Quantization | None:
        """What of the call is quantized, and how; None for ops without such numbers."""
        return quantization(self.op, self.given, self.attrs)

    @property
    def quant_dtype(self) -> str | None:
        """Of the weight of a product, or of what is quantized."""
        return None if self.quantization is None else self.quantization.dtype

    @property
    def quant_scale_granularity(self) -> str | None:
        """The finest of the call's scales: per_tensor, per_channel or blockwise."""
        return None if self.quantization is None else self.quantization.granularity

    @property
    def quant_zero_point(self) -> bool:
        """The quantization is asymmetric."""
        return self.quantization is not None and self.quantization.has_zero_point

    @property
    def kv_cache_dtype(self) -> str | None:
        """dtype of a paged cache that has scales; None for others, and where there is none."""
        return self.given["k_cache"].dtype if "k_scale" in self.given else None

    # --- attributes that no op of ours has yet

    @property
    def kv_cache_layout(self) -> str | None:
        """Order of a paged cache: NHD or HND."""
        return self.attrs.get("kv_cache_layout")

    @property
    def packed_weights_id(self) -> str | None:
        """Which packing the weights have been through; None: they are plain."""
        return self.attrs.get("packed_weights_id")

    # --- keys

    def validity_key(self, thresholds: tuple[int, ...] = ()) -> tuple[Any, ...]:
        """Equal for two calls only if every kernel of the op gives both the same reason codes.

        `thresholds`: the limits on sequence length (max_seq_len) of the op's kernels, ascending. Other extents that no
        rule reads are left out, so that calls of many sizes share an entry.
        """
        shape: tuple[Any, ...] = ()
        if self.op in ATTENTION_OPS:
            q, k = self.given["q"], self.given["k"]
            is_square = q.shape[2] == k.shape[2]
            length = bisect.bisect_left(thresholds, max(q.shape[2], k.shape[2]))
            mask = (self.attn_mask_type, self.attn_mask_layout, self.attn_mask_problem is None)
            shape = (is_square, length, mask)
        elif self.op in PAGED_OPS:
            shape = (self.given["k_cache"].shape[1],)
        elif self.quantization is not None:
            shape = self.quantization
        return (
            self.op,
            tuple(None if spec is None else _memory_key(spec) for spec in self.inputs),
            tuple(_memory_key(spec) for spec in self.outputs),
            self.heads,
            shape,
            # The type as well: True, 1 and 1.0 are equal to a dict and not to a kernel.
            tuple((name, type(self.attrs[name]).__name__, self.attrs[name]) for name in sorted(self.attrs)),
            self.device,
            self.policy_hash,
            self.allow_jit_compile,
            self.requires_deterministic,
            self.memory_headroom_bytes,
        )

    def perf_key(self) -> str:
        """Equal for calls that should take about as long: extents rounded up to powers of two, memory as a class.

        Stable across processes: PerfDB keeps it. Example: "silu x:float32[8x1024]".
        """
        return self._perf_key

    @cached_property
    def _perf_key(self) -> str:
        parts = [self.op]
        for name, spec in self.given.items():
            extents = "x".join(str(_bucket(extent)) for extent in spec.shape)
            memory = "" if spec.is_contiguous else "/rows" if has_dense_rows(spec) else "/strided"
            parts.append(f"{name}:{spec.dtype}[{extents}]{memory}")
        parts += (f"{name}={self.attrs[name]}" for name in sorted(self.attrs) if name not in DATA_ATTRS)
        if self.device_type != "cpu":  # a machine has several, which need not be alike
            parts.append(f"on {self.device.device_uuid}")
        return " ".join(parts)


def has_dense_rows(spec: TensorSpec) -> bool:
    """The elements of a row lie side by side."""
    return not spec.ndim or spec.shape[-1] <= 1 or spec.strides[-1] == 1


def _memory_key(spec: TensorSpec) -> tuple[Any, ...]:
    """All that a rule reads of a tensor besides the extents of attention."""
    return (spec.dtype, spec.ndim, spec.numel == 0, spec.is_contiguous, has_dense_rows(spec))


def _bucket(extent: int) -> int:
    """The next power of two; 0 stays 0."""
    return 1 << (extent - 1).bit_length() if extent > 0 else 0
