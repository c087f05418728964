"""Capability descriptors: what each kernel of a backend claims it can do. Data in descriptors/*.json.

Schema 1.0 of the LayerZero spec (6.3) and the semantic fields in which libraries differ. Fails closed: an
unknown version, an unknown field or a missing constraint disables that backend, and only that one.
"""

from __future__ import annotations

import difflib
import hashlib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from layerzero.capabilities.compile_unit import Facet
from layerzero.capabilities.device import DeviceType
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.errors import ConfigError
from layerzero.ipc.vocabulary.ops import ATTENTION_OPS, DRAWING, FUNCTION, OPS, VARLEN_OPS
from layerzero.ipc.vocabulary.tensors import ITEMSIZE

SCHEMA_VERSION = "1.0"
MAX_BYTES = 1 << 20  # of a descriptor

# Of a version beside another backend (envs/versions), BACKEND@VERSION, and BACKEND@VERSION.KERNEL of its kernels.
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.@-]{0,63}$")]
Positive = Annotated[int, Field(ge=1)]
Attr = str | int | float | bool | None
Layout = Literal["BHSD", "BSHD"]
QuantDtype = Literal["int8", "uint8", "int4", "fp8_e4m3", "fp8_e5m2", "mxfp4", "nvfp4", "fp4"]
Granularity = Literal["per_tensor", "per_channel", "blockwise"]
# Ops whose inputs are text and ids; their kernels declare tokenizer formats and no tensor dtypes.
TOKENIZER_OPS = frozenset({"tokenize", "detokenize"})
PLAIN_OPS = frozenset({"null", FUNCTION})  # whose kernels declare nothing about tensors


class DescriptorError(ConfigError):
    """A descriptor cannot be used; `.reason` is the code its backend is disabled with."""

    def __init__(self, message: str, reason: Reason) -> None:
        super().__init__(message)
        self.reason = reason


class KernelCapability(BaseModel):
    """Constraints of one kernel. A call must satisfy all of them; None means no limit. docs/capabilities.md has a line
    for each field."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    kernel_id: Name
    priority: Annotated[int, Field(ge=0, le=100)]
    source: str  # where the claims come from: entry point and document or file

    # the device
    platform: DeviceType | None = None  # that of the backend, which fills it in
    min_sm: Positive | None = None  # CUDA compute capability, 10 * major + minor
    max_sm: Positive | None = None
    requires_isa: tuple[str, ...] = ()  # instruction sets of a CPU, in Linux's names

    # tensors
    dtypes: tuple[str, ...] = ()  # of every floating-point tensor of the call
    index_dtypes: tuple[str, ...] = ()  # of the tensors that ipc/vocabulary/ops.py calls indices
    requires_dtype: str | None = None  # the one dtype that data must have
    produces_dtype: str | None = None  # of results; None: that of the data
    min_ndim: int = 0  # of the first tensor argument
    max_ndim: int | None = None
    supports_empty: bool = False  # tensors with an extent of 0
    requires_contiguous: bool = False  # every input row-major without gaps
    requires_last_dim_stride1: bool = False
    optional_args: tuple[str, ...] = ()  # optional tensor arguments that may be given
    required_args: tuple[str, ...] = ()  # optional tensor arguments that must be given
    attrs: dict[str, tuple[Attr, ...]] = {}  # attribute -> allowed values
    optional_attrs: tuple[str, ...] = ()  # attributes that calls may lack, and that may be given

    # quantized data
    supported_quant_dtypes: tuple[QuantDtype, ...] = ()
    quantization_scale_granularities: tuple[Granularity, ...] = ()
    quantization_zero_point: bool = False  # asymmetric data is taken

    # attention and, of rope, the head_dim limits
    requires_layouts: tuple[Layout, ...] = ()
    produces_layout: Layout | None = None  # of results; None: that of the call
    min_head_dim: Positive = 1
    max_head_dim: Positive | None = None
    head_dim_multiple: Positive = 1
    equal_head_dims: bool = False  # that of values is that of queries and keys
    max_seq_len: Positive | None = None
    supports_gqa: bool = False  # query head h uses key head h // group; kernels with another rule say false
    attn_mask_types: tuple[Literal["bool", "float"], ...] = ()
    attn_mask_layouts: tuple[Literal["broadcast", "per_head"], ...] = ("broadcast", "per_head")
    supports_causal_mask: bool = False  # a mask beside the causal rule
    causal_alignments: tuple[Literal["top_left", "bottom_right"], ...] = ()
    masked_rows: Literal["zero", "mean_v", "nan"] | None = None  # what the library does by itself; providers give zero
    supports_scale: bool = True  # other scales than 1/sqrt(head_dim)
    supports_dropout: bool = False
    lse_base: Literal["e", "2"] | None = None  # of the log-sum-exp it can return; None: it returns none
    page_size_multiple: Positive = 1  # of the blocks of a paged cache, in keys
    max_page_size: Positive | None = None
    supports_kv_cache_layouts: tuple[Literal["NHD", "HND"], ...] = ()
    supports_kv_cache_dtypes: tuple[str, ...] = ()

    # weights
    requires_packed_weights: bool = False
    supports_prepack: bool = False  # the provider can pack them

    # tokenize, detokenize; None: any
    tokenizer_formats: tuple[str, ...] = ()
    supports_offsets: bool = False
    tokenizer_ids: tuple[str, ...] | None = None
    vocab_hashes: tuple[str, ...] | None = None
    merges_hashes: tuple[str, ...] | None = None
    added_tokens_hashes: tuple[str, ...] | None = None
    supports_normalizers: tuple[str, ...] | None = None

    # semantics
    compute_dtype: str = "same"  # accumulation dtype; "same" is that of the inputs
    deterministic: bool
    # Draws no random numbers, those of a given seed, those that docs/ops.md gives for a seed and an offset, or any.
    rng: Literal["none", "seeded", "philox4x32", "global"] = "none"
    is_cuda_graph_safe: bool = False
    mutates_inputs: bool = False
    copies_inputs: bool = False  # the library copies inputs into its own memory
    copies_outputs: bool = False  # results are copied into the caller's memory

    # cost
    needs_jit: bool = False  # it is compiled before it can run
    compiled_for: tuple[Facet, ...] | None = None  # in what calls agree that one compilation serves; None: in all
    new_shape_us: Annotated[int, Field(ge=0)] = 0  # more for a first call of a shape, in each worker anew
    transform_cost_hint: Annotated[int, Field(ge=0)] = 0  # in points of the score
    fuses_ops: tuple[str, ...] = ()  # adjacent ops that it does in the same pass
    workspace_bytes: Annotated[int, Field(ge=0)] = 0  # beyond the caller's memory, for any call
    workspace_factor: Annotated[float, Field(ge=0)] = 0.0  # likewise, times the bytes of all inputs and outputs

    @model_validator(mode="after")
    def _complete(self) -> KernelCapability:
        single = [d for d in (self.requires_dtype, self.produces_dtype) if d is not None]
        unknown = [
            d for d in (*self.dtypes, *self.index_dtypes, *self.supports_kv_cache_dtypes, *single) if d not in ITEMSIZE
        ]
        if self.compute_dtype != "same" and self.compute_dtype not in ITEMSIZE:
            unknown.append(self.compute_dtype)
        if unknown:
            raise ValueError(f"unknown dtypes {unknown}; known: {', '.join(ITEMSIZE)}")
        if self.requires_dtype is not None and self.requires_dtype not in self.dtypes:
            raise ValueError(f"requires_dtype {self.requires_dtype!r} is not among dtypes {list(self.dtypes)}")
        for low, high in (("min_head_dim", "max_head_dim"), ("min_sm", "max_sm"), ("min_ndim", "max_ndim")):
            least, most = getattr(self, low), getattr(self, high)
            if least is not None and most is not None and most < least:
                raise ValueError(f"{high} {most} is below {low} {least}")
        if self.deterministic and self.rng == "global":
            raise ValueError('deterministic is true and rng is "global": one of the two is wrong')
        if self.compiled_for is not None and not self.needs_jit:
            raise ValueError("compiled_for is given and needs_jit is false: leave one out")
        if self.supported_quant_dtypes and not self.quantization_scale_granularities:
            raise ValueError("supported_quant_dtypes needs quantization_scale_granularities")
        return self


class Capability(BaseModel):
    """One backend's descriptor."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    schema_version: Literal["1.0"]
    backend: Name
    backend_version: str
    platform: DeviceType
    not_run: bool = False  # by this project, on any machine: it is built and probed only where somebody names it
    ops: dict[str, tuple[KernelCapability, ...]]

    @model_validator(mode="before")
    @classmethod
    def _hand_down_platform(cls, data: Any) -> Any:
        """Kernels that name no platform have their backend's. Anything odd is left to the checks that follow."""
        if not isinstance(data, dict) or not isinstance(data.get("ops"), dict) or "platform" not in data:
            return data
        given = {"platform": data["platform"]}
        ops = {
            op: [given | kernel if isinstance(kernel, dict) else kernel for kernel in kernels]
            if isinstance(kernels, (list, tuple))
            else kernels
            for op, kernels in data["ops"].items()
        }
        return {**data, "ops": ops}

    @model_validator(mode="after")
    def _unambiguous(self) -> Capability:
        ids = [kernel.kernel_id for kernels in self.ops.values() for kernel in kernels]
        twice = sorted({k for k in ids if ids.count(k) > 1})
        if twice:
            raise ValueError(f"kernel ids must be unique in a backend; given twice: {', '.join(twice)}")
        for op, kernels in self.ops.items():
            foreign = [k.kernel_id for k in kernels if k.platform != self.platform]
            if foreign:
                raise ValueError(f"{foreign[0]}: platform is not the backend's {self.platform!r}; leave it out")
            if not kernels:
                raise ValueError(f"op {op!r} lists no kernel")
            for kernel in kernels:
                if op in TOKENIZER_OPS:
                    missing = [] if kernel.tokenizer_formats else ["tokenizer_formats"]
                elif op in PLAIN_OPS:
                    missing = []
                else:
                    missing = [] if kernel.dtypes else ["dtypes"]
                    if op in ATTENTION_OPS:
                        missing += [
                            f
                            for f in ("requires_layouts", "causal_alignments", "masked_rows")
                            if not getattr(kernel, f)
                        ]
                    if op in VARLEN_OPS and not kernel.causal_alignments:
                        missing.append("causal_alignments")
                    if op in OPS and OPS[op].indices and not kernel.index_dtypes:
                        missing.append("index_dtypes")
                    if op in DRAWING and kernel.rng != "philox4x32":
                        missing.append('rng "philox4x32"')
                if missing:
                    raise ValueError(f"{kernel.kernel_id}: missing constraint {', '.join(missing)} (fail closed)")
        return self

    @property
    def kernel_ids(self) -> tuple[str, ...]:
        """Of all ops."""
        return tuple(kernel.kernel_id for kernels in self.ops.values() for kernel in kernels)

    @property
    def hash(self) -> str:
        """SHA-256 of the canonical form; part of every cached decision. Whether we have run it changes no decision."""
        return hashlib.sha256(self.model_dump_json(exclude={"not_run"}).encode()).hexdigest()


def parse(text: str, origin: str) -> Capability:
    """Validate a descriptor's JSON. Raises DescriptorError naming file, field, value and what is allowed."""
    try:
        return Capability.model_validate_json(text)
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "descriptor"
        is_version = first["loc"] == ("schema_version",)
        said = _unknown_field(first["loc"]) if first["type"] == "extra_forbidden" else first["msg"]
        more = f"; {exc.error_count()} mistakes in all" if exc.error_count() > 1 else ""
        raise DescriptorError(
            f"{origin}: {where}: {said} (got {first.get('input')!r:.120}{more})",
            Reason.CAPABILITIES_SCHEMA_MISMATCH if is_version else Reason.CAPABILITIES_INVALID,
        ) from exc


def _unknown_field(place: tuple[int | str, ...]) -> str:
    """`place`: where pydantic found a field that the models do not have."""
    known = Capability.model_fields if len(place) == 1 else KernelCapability.model_fields
    near = difflib.get_close_matches(str(place[-1]), known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
    return f"unknown field {place[-1]!s:.80}; {hint}"


def load(path: Path) -> Capability:
    """Read one descriptor file."""
    return parse(read_text(path), str(path))


def read_text(path: Path) -> str:
    """A descriptor file's text. Raises DescriptorError."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            text = f"{path}: cannot be read: no regular file of at most {MAX_BYTES:,} bytes"
            raise DescriptorError(text, Reason.CAPABILITIES_INVALID)
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise DescriptorError(f"{path}: cannot be read: {exc}", Reason.CAPABILITIES_INVALID) from exc
