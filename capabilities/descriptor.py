"""Capability descriptors: what each kernel of a backend claims it can do. Data in descriptors/*.json.

Schema 1.0 of the LayerZero spec (6.3) and the semantic fields in which libraries differ. Fails closed: an
unknown version, an unknown field or a missing constraint disables that backend, and only that one.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from layerzero.capabilities.reasons import Reason
from layerzero.ipc.errors import ConfigError
from layerzero.ipc.tensors import ITEMSIZE

SCHEMA_VERSION = "1.0"

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}$")]
Positive = Annotated[int, Field(ge=1)]
Attr = str | int | float | bool | None
# Ops whose inputs are text and ids; their kernels declare tokenizer formats and no tensor dtypes.
TOKENIZER_OPS = frozenset({"tokenize", "detokenize"})


class DescriptorError(ConfigError):
    """A descriptor cannot be used; `.reason` is the code its backend is disabled with."""

    def __init__(self, message: str, reason: Reason) -> None:
        super().__init__(message)
        self.reason = reason


class KernelCapability(BaseModel):
    """Constraints of one kernel. A call must satisfy all of them; None means no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kernel_id: Name
    priority: Annotated[int, Field(ge=0, le=100)]
    source: str  # where the claims come from: entry point and document or file

    dtypes: tuple[str, ...] = ()  # of every floating-point tensor of the call
    index_dtypes: tuple[str, ...] = ()  # of integer index tensors (embedding)
    min_ndim: int = 0  # of the first tensor argument
    max_ndim: int | None = None
    supports_empty: bool = False  # tensors with an extent of 0
    requires_contiguous: bool = False  # every input row-major without gaps
    requires_last_dim_stride1: bool = False
    optional_args: tuple[str, ...] = ()  # optional tensor arguments that may be given
    required_args: tuple[str, ...] = ()  # optional tensor arguments that must be given
    attrs: dict[str, tuple[Attr, ...]] = {}  # attribute -> allowed values

    # attention
    requires_layouts: tuple[Literal["BHSD", "BSHD"], ...] = ()
    min_head_dim: Positive = 1
    max_head_dim: Positive | None = None
    head_dim_multiple: Positive = 1
    max_seq_len: Positive | None = None
    supports_gqa: bool = False
    attn_mask_types: tuple[Literal["bool", "float"], ...] = ()
    causal_alignments: tuple[Literal["top_left", "bottom_right"], ...] = ()
    masked_rows: Literal["zero", "mean_v", "nan"] | None = None  # what the library does by itself

    # tokenize, detokenize
    tokenizer_formats: tuple[str, ...] = ()
    supports_offsets: bool = False

    # semantics
    compute_dtype: str = "same"  # accumulation dtype; "same" is that of the inputs
    deterministic: bool

    # cost
    needs_jit: bool = False  # the first call of a shape compiles
    transform_cost_hint: Annotated[int, Field(ge=0)] = 0  # in points of the score
    fuses_ops: tuple[str, ...] = ()  # adjacent ops that it does in the same pass
    workspace_bytes: Annotated[int, Field(ge=0)] = 0  # beyond the caller's memory, for any call
    workspace_factor: Annotated[float, Field(ge=0)] = 0.0  # likewise, times the bytes of all inputs and outputs
    mutates_inputs: bool = False
    copies_inputs: bool = False  # the library copies inputs into its own memory
    copies_outputs: bool = False  # results are copied into the caller's memory

    @model_validator(mode="after")
    def _complete(self) -> KernelCapability:
        unknown = [d for d in (*self.dtypes, *self.index_dtypes) if d not in ITEMSIZE]
        if unknown:
            raise ValueError(f"unknown dtypes {unknown}; known: {', '.join(ITEMSIZE)}")
        if self.max_head_dim is not None and self.max_head_dim < self.min_head_dim:
            raise ValueError(f"max_head_dim {self.max_head_dim} is below min_head_dim {self.min_head_dim}")
        return self


class Capability(BaseModel):
    """One backend's descriptor."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal["1.0"]
    backend: Name
    backend_version: str
    platform: Literal["cpu", "cuda"]
    ops: dict[str, tuple[KernelCapability, ...]]

    @model_validator(mode="after")
    def _unambiguous(self) -> Capability:
        ids = [kernel.kernel_id for kernels in self.ops.values() for kernel in kernels]
        twice = sorted({k for k in ids if ids.count(k) > 1})
        if twice:
            raise ValueError(f"kernel ids must be unique in a backend; given twice: {', '.join(twice)}")
        for op, kernels in self.ops.items():
            if not kernels:
                raise ValueError(f"op {op!r} lists no kernel")
            for kernel in kernels:
                if op in TOKENIZER_OPS:
                    missing = [] if kernel.tokenizer_formats else ["tokenizer_formats"]
                elif op == "null":
                    missing = []
                else:
                    missing = [] if kernel.dtypes else ["dtypes"]
                    if op == "attention":
                        missing += [
                            f
                            for f in ("requires_layouts", "causal_alignments", "masked_rows")
                            if not getattr(kernel, f)
                        ]
                if missing:
                    raise ValueError(f"{kernel.kernel_id}: missing constraint {', '.join(missing)} (fail closed)")
        return self

    @property
    def kernel_ids(self) -> tuple[str, ...]:
        return tuple(kernel.kernel_id for kernels in self.ops.values() for kernel in kernels)

    @property
    def hash(self) -> str:
        """SHA-256 of the canonical form; part of every cached decision."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


def parse(text: str, origin: str) -> Capability:
    """Validate a descriptor's JSON. Raises DescriptorError naming file, field, value and what is allowed."""
    try:
        return Capability.model_validate_json(text)
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "descriptor"
        is_version = first["loc"] == ("schema_version",)
        raise DescriptorError(
            f"{origin}: {where}: {first['msg']} (got {first.get('input')!r:.120}; "
            f"{exc.error_count()} problem(s) in all)",
            Reason.CAPABILITIES_SCHEMA_MISMATCH if is_version else Reason.CAPABILITIES_INVALID,
        ) from exc


def load(path: Path) -> Capability:
    """Read one descriptor file."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as exc:
        raise DescriptorError(f"{path}: cannot be read: {exc}", Reason.CAPABILITIES_INVALID) from exc
    return parse(text, str(path))
