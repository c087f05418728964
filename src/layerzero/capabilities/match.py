"""One call against one kernel's constraints: every rule that refuses it, with the offending and the allowed value.

Every value that a rule reads must be in SelectionContext.validity_key; a property test holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from layerzero.capabilities.context import SelectionContext, has_dense_rows
from layerzero.capabilities.descriptor import PLAIN_OPS, TOKENIZER_OPS, KernelCapability
from layerzero.capabilities.device import holds_tensors_of
from layerzero.capabilities.reasons import Reason
from layerzero.capabilities.type_rules import computes_in
from layerzero.ipc.vocabulary.ops import ATTENTION_OPS, FUNCTION, OPS, PAGED_OPS, VARLEN_OPS, Heads, aligns
from layerzero.ipc.vocabulary.tensors import FLOAT_DTYPES, ITEMSIZE


@dataclass(frozen=True, slots=True)
class Rejection:
    """`code` is stable; `detail` names the offending value and what is allowed. `repair`: the command or the change
    that removes a cause which lies not in the call; empty where there is none."""

    code: Reason
    detail: str
    repair: str = ""

    def __str__(self) -> str:
        """One line, for people."""
        return f"{self.code.value}: {self.detail}" + (f"; repair: {self.repair}" if self.repair else "")


Found = Iterator[tuple[Reason, str]]


def match(context: SelectionContext, kernel: KernelCapability) -> list[Rejection]:
    """All reasons why `kernel` cannot run this call; an empty list means that it can. Not about memory."""
    return [Rejection(code, detail) for code, detail in findings(context, kernel)]


def findings(context: SelectionContext, kernel: KernelCapability) -> Found:
    """As `match`, one at a time: for those who may stop at the first."""
    op = context.op
    yield from _device(context, kernel)
    yield from _arguments(context, kernel)
    yield from _conditions(context, kernel)
    if op in TOKENIZER_OPS:
        yield from _tokenizer(context, kernel)
    elif op not in PLAIN_OPS:
        yield from _tensors(context, kernel)
        yield from _data(context, kernel)
    if context.heads is not None:
        yield from _heads(context.heads, kernel)
        yield from _attention_features(context, kernel)
    if op in ATTENTION_OPS:
        yield from _attention(context, kernel)
    elif op in VARLEN_OPS:
        yield from _causal_alignment(context, kernel, "sequences")
    elif op in PAGED_OPS:
        yield from _pages(context, kernel)


def memory_rejection(context: SelectionContext, kernel: KernelCapability) -> Rejection | None:
    """Whether running the kernel would leave less memory free than policy wants (spec 7.8).

    None as well where no headroom is set or free memory is not known.
    """
    headroom, free = context.memory_headroom_bytes, context.free_memory_bytes
    if headroom is None or free is None:
        return None
    needed = workspace_bytes(context, kernel)
    if free - needed >= headroom:
        return None
    text = f"needs {needed} bytes of {free} free ones; allowed: {max(free - headroom, 0)}, which keeps {headroom} free"
    return Rejection(Reason.MEMORY_HEADROOM_EXCEEDED, text)


def workspace_bytes(context: SelectionContext, kernel: KernelCapability) -> int:
    """Memory that a kernel takes beyond the caller's: its declared workspace, and the copies it makes."""
    inputs = sum(spec.numel * spec.itemsize for spec in context.given.values())
    outputs = sum(spec.numel * spec.itemsize for spec in context.outputs)
    copies = inputs * kernel.copies_inputs + outputs * kernel.copies_outputs
    return copies + kernel.workspace_bytes + round(kernel.workspace_factor * (inputs + outputs))


def _device(context: SelectionContext, kernel: KernelCapability) -> Found:
    device = context.device
    platform = None if context.op == FUNCTION else kernel.platform  # a function's arrays lie where its caller's do
    if platform is not None and (needed := holds_tensors_of(platform)) != device.device_type:
        yield Reason.PLATFORM_MISMATCH, f"the device is {device.device_type}; the kernel needs {needed}"
        return
    sm = device.sm_version
    if kernel.min_sm is not None and (sm is None or sm < kernel.min_sm):
        yield Reason.DEVICE_CAPABILITY_UNSUPPORTED, f"SM {sm or 'unknown'}; allowed: at least {kernel.min_sm}"
    if kernel.max_sm is not None and (sm is None or sm > kernel.max_sm):
        yield Reason.DEVICE_CAPABILITY_UNSUPPORTED, f"SM {sm or 'unknown'}; allowed: at most {kernel.max_sm}"
    lacking = [name for name in kernel.requires_isa if name not in device.isa]
    if lacking:
        text = (
            f"the CPU has {', '.join(device.isa) or 'no known instruction sets'}; needed as well: {', '.join(lacking)}"
        )
        yield Reason.DEVICE_CAPABILITY_UNSUPPORTED, text


def _arguments(context: SelectionContext, kernel: KernelCapability) -> Found:
    op, given, attrs = context.op, context.given, context.attrs
    for name in OPS[op].inputs:
        is_judged_elsewhere = name == "attn_mask"  # by attn_mask_types
        if name not in OPS[op].optional or name not in given or is_judged_elsewhere:
            continue
        if name not in kernel.optional_args and name not in kernel.required_args:
            yield Reason.ARG_UNSUPPORTED, f"argument {name!r} is given; the kernel takes none"
    for name in kernel.required_args:
        if name not in given:
            yield Reason.ARG_REQUIRED, f"argument {name!r} is missing; the kernel needs it"
    for name in OPS[op].attrs:
        if name in OPS[op].options and name in attrs and name not in kernel.optional_attrs:
            yield Reason.ATTR_UNSUPPORTED, f"{name}={attrs[name]!r}; allowed: none"
    for name, allowed in kernel.attrs.items():
        if name in attrs and attrs[name] not in allowed:
            yield Reason.ATTR_UNSUPPORTED, f"{name}={attrs[name]!r}; allowed: {', '.join(map(repr, allowed))}"


def _conditions(context: SelectionContext, kernel: KernelCapability) -> Found:
    """What the kernel does besides computing, against what caller and policy permit."""
    if context.requires_deterministic and not (kernel.deterministic and kernel.rng != "global"):
        yield Reason.NON_DETERMINISTIC, f"deterministic={kernel.deterministic}, rng={kernel.rng!r}; allowed: repeatable"
    if kernel.needs_jit and not context.allow_jit_compile:
        yield Reason.JIT_DISABLED, "needs_jit=True; allow_jit_compile=False allows only kernels that are compiled"
    if kernel.mutates_inputs and not kernel.copies_inputs:
        yield Reason.INPUT_MUTATED, "mutates_inputs=True on the caller's memory; allowed: on copies"


def _tensors(context: SelectionContext, kernel: KernelCapability) -> Found:
    for name, spec in context.given.items():
        allowed = kernel.index_dtypes if name in OPS[context.op].indices else kernel.dtypes
        if name in OPS[context.op].singles:
            allowed = ("float32",)
        is_bool_mask = name == "attn_mask" and spec.dtype == "bool"  # attn_mask_types covers it
        is_scaled = name in ("k_cache", "v_cache") and context.kv_cache_dtype is not None  # supports_kv_cache_dtypes
        if spec.dtype not in allowed and not is_bool_mask and not is_scaled:
            yield Reason.DTYPE_UNSUPPORTED, f"{name} is {spec.dtype}; allowed: {', '.join(allowed) or 'none'}"
        if spec.numel == 0 and not kernel.supports_empty:
            yield Reason.EMPTY_UNSUPPORTED, f"{name} has shape {list(spec.shape)}; extents of 0 are not supported"
        if kernel.requires_contiguous and not spec.is_contiguous:
            yield Reason.NOT_CONTIGUOUS, f"{name} has shape {list(spec.shape)} and strides {list(spec.strides)}"
        elif kernel.requires_last_dim_stride1 and not has_dense_rows(spec):
            yield Reason.STRIDE_LAST_DIM, f"{name} has stride {spec.strides[-1]} in its last dimension; needed: 1"
    singles = OPS[context.op].singles
    floats = {spec.dtype for name, spec in context.given.items() if name not in singles and spec.dtype in FLOAT_DTYPES}
    if len(floats) > 1:
        yield Reason.DTYPE_MIXED, f"inputs are {' and '.join(sorted(floats))}; they must agree"
    if context.outputs and kernel.requires_contiguous and not kernel.copies_outputs:
        out = context.outputs[0]
        if not out.is_contiguous:
            yield Reason.NOT_CONTIGUOUS, f"out has strides {list(out.strides)} for shape {list(out.shape)}"
    if context.first is not None:
        ndim = context.first.ndim
        if ndim < kernel.min_ndim:
            yield Reason.RANK_UNSUPPORTED, f"{ndim} dimensions; needed: at least {kernel.min_ndim}"
        if kernel.max_ndim is not None and ndim > kernel.max_ndim:
            yield Reason.RANK_UNSUPPORTED, f"{ndim} dimensions; allowed: at most {kernel.max_ndim}"


def _data(context: SelectionContext, kernel: KernelCapability) -> Found:
    """dtypes of results and of computing, quantization, weights."""
    attrs, dtype = context.attrs, context.dtype
    if kernel.requires_dtype is not None and dtype != kernel.requires_dtype:
        yield Reason.DTYPE_UNSUPPORTED, f"data is {dtype}; allowed: {kernel.requires_dtype}"
    if kernel.produces_dtype is not None and context.outputs and context.outputs[0].dtype != kernel.produces_dtype:
        yield Reason.DTYPE_UNSUPPORTED, f"out is {context.outputs[0].dtype}; the kernel gives {kernel.produces_dtype}"
    wanted = attrs.get("compute_dtype")
    if wanted is not None:
        given = context.outputs[0].dtype if context.outputs else ""
        actual = None if dtype is None else computes_in(kernel, dtype, given)
        if wanted not in ITEMSIZE or actual is None or ITEMSIZE[actual] < ITEMSIZE[wanted]:
            yield Reason.ATTR_UNSUPPORTED, f"compute_dtype={wanted!r}; the kernel computes in {actual}"
    if context.quant_dtype is not None:
        yield from _quantization(context, kernel)
    yield from _scaled_cache(context, kernel)
    if kernel.requires_packed_weights and context.packed_weights_id is None:
        yield Reason.PACKED_WEIGHTS_REQUIRED, "packed_weights_id=None; the kernel takes packed weights only"
    elif context.packed_weights_id is not None and not (kernel.requires_packed_weights or kernel.supports_prepack):
        yield Reason.ATTR_UNSUPPORTED, f"packed_weights_id={context.packed_weights_id!r}; allowed: plain weights"


def _scaled_cache(context: SelectionContext, kernel: KernelCapability) -> Found:
    dtype, dtypes = context.kv_cache_dtype, kernel.supports_kv_cache_dtypes
    if dtype is not None and dtype not in dtypes:
        text = f"caches with scales are {dtype}; allowed: {', '.join(dtypes) or 'none'}"
        yield Reason.KV_CACHE_DTYPE_MISMATCH, text


def _quantization(context: SelectionContext, kernel: KernelCapability) -> Found:
    known = kernel.supported_quant_dtypes
    if context.quant_dtype not in known:
        yield Reason.DTYPE_UNSUPPORTED, f"quant_dtype={context.quant_dtype!r}; allowed: {', '.join(known) or 'none'}"
    granularity, granularities = context.quant_scale_granularity, kernel.quantization_scale_granularities
    if granularity not in granularities:
        text = f"quant_scale_granularity={granularity!r}; allowed: {', '.join(granularities) or 'none'}"
        yield Reason.ATTR_UNSUPPORTED, text
    if context.quant_zero_point and not kernel.quantization_zero_point:
        yield Reason.ATTR_UNSUPPORTED, "quant_zero_point=True; allowed: False"


def _heads(heads: Heads, kernel: KernelCapability) -> Found:
    """head_dim and grouped heads."""
    for name, dim in heads.dims:
        if dim < kernel.min_head_dim:
            yield Reason.HEAD_DIM_INVALID, f"{name} head_dim {dim}; allowed: at least {kernel.min_head_dim}"
        if kernel.max_head_dim is not None and dim > kernel.max_head_dim:
            yield Reason.HEAD_DIM_TOO_LARGE, f"{name} head_dim {dim}; allowed: at most {kernel.max_head_dim}"
        if dim % kernel.head_dim_multiple:
            yield Reason.HEAD_DIM_ALIGNMENT, f"{name} head_dim {dim}; allowed: multiples of {kernel.head_dim_multiple}"
    if kernel.equal_head_dims and len({dim for _, dim in heads.dims}) > 1:
        text = " and ".join(f"{name} head_dim {dim}" for name, dim in heads.dims)
        yield Reason.HEAD_DIM_INVALID, f"{text}; allowed: equal ones"
    count, kv_heads = heads.query, heads.key
    if heads.value != kv_heads or count % max(kv_heads, 1):
        text = f"{count} query, {kv_heads} key and {heads.value} value heads"
        yield Reason.GQA_HEADS_MISMATCH, f"{text}; allowed: as many values as keys, queries a multiple of them"
    elif count != kv_heads and not kernel.supports_gqa:
        text = f"{count} query heads on {kv_heads} key heads; the kernel needs equal numbers"
        yield Reason.GQA_UNSUPPORTED, text


def _attention(context: SelectionContext, kernel: KernelCapability) -> Found:
    """Layout, length, masks and the causal rule."""
    q, k = context.given["q"], context.given["k"]
    layout = context.layout
    if layout not in kernel.requires_layouts:
        yield Reason.LAYOUT_UNSUPPORTED, f"layout {layout}; allowed: {', '.join(kernel.requires_layouts)}"
    if kernel.produces_layout not in (None, layout) and not kernel.copies_outputs:
        yield Reason.LAYOUT_UNSUPPORTED, f"out has layout {layout}; the kernel gives {kernel.produces_layout}"
    longest = max(q.shape[2], k.shape[2])
    if kernel.max_seq_len is not None and longest > kernel.max_seq_len:
        yield Reason.SEQ_TOO_LONG, f"sequence length {longest}; allowed: at most {kernel.max_seq_len}"
    kind, mask_layout = context.attn_mask_type, context.attn_mask_layout
    if kind != "none":
        if kind not in kernel.attn_mask_types:
            yield Reason.ATTN_MASK_UNSUPPORTED, f"{kind} mask; allowed: {', '.join(kernel.attn_mask_types) or 'none'}"
        elif mask_layout not in kernel.attn_mask_layouts:
            yield Reason.ATTN_MASK_UNSUPPORTED, f"{mask_layout} mask; allowed: {', '.join(kernel.attn_mask_layouts)}"
        if context.is_causal and not kernel.supports_causal_mask:
            yield Reason.ATTN_MASK_UNSUPPORTED, f"{kind} mask with is_causal=True; allowed: one of them"
        if context.attn_mask_problem is not None:
            yield Reason.ATTN_MASK_INVALID, context.attn_mask_problem
    if q.shape[2] != k.shape[2]:
        yield from _causal_alignment(context, kernel, f"{q.shape[2]} queries and {k.shape[2]} keys")


def _causal_alignment(context: SelectionContext, kernel: KernelCapability, what: str) -> Found:
    alignment, alignments = context.causal_alignment, kernel.causal_alignments
    if aligns(context.given, context.attrs) and alignment not in alignments:
        yield Reason.CAUSAL_ALIGNMENT_UNSUPPORTED, f"{alignment} with {what}; allowed: {', '.join(alignments)}"


def _pages(context: SelectionContext, kernel: KernelCapability) -> Found:
    page, multiple = context.given["k_cache"].shape[1], kernel.page_size_multiple
    if page % multiple:
        yield Reason.PAGE_SIZE_MISMATCH, f"blocks of {page} keys; allowed: multiples of {multiple}"
    elif kernel.max_page_size is not None and page > kernel.max_page_size:
        yield Reason.PAGE_SIZE_MISMATCH, f"blocks of {page} keys; allowed: at most {kernel.max_page_size}"


def _attention_features(context: SelectionContext, kernel: KernelCapability) -> Found:
    """Scale, dropout, log-sum-exp and layouts of paged caches."""
    if not kernel.supports_scale and not context.has_default_scale:
        yield Reason.ATTR_UNSUPPORTED, f"scale={context.scale!r}; allowed: 1/sqrt({context.head_dim})"
    if context.dropout_p and not kernel.supports_dropout:
        yield Reason.ATTR_UNSUPPORTED, f"dropout_p={context.dropout_p!r}; allowed: 0"
    if context.dropout_p and context.requires_deterministic and kernel.rng != "seeded":
        yield Reason.NON_DETERMINISTIC, f"dropout with rng={kernel.rng!r}; allowed: 'seeded'"
    base = context.attrs.get("lse_base")
    if base is not None and base != kernel.lse_base:
        text = f"lse_base={base!r}; the kernel gives {'none' if kernel.lse_base is None else repr(kernel.lse_base)}"
        yield Reason.ATTR_UNSUPPORTED, text
    layout, layouts = context.kv_cache_layout, kernel.supports_kv_cache_layouts
    if layout is not None and layout not in layouts:
        text = f"kv_cache_layout={layout!r}; allowed: {', '.join(layouts) or 'no paged cache'}"
        yield Reason.KV_CACHE_LAYOUT_MISMATCH, text


# Field of the kernel, property of the context, code. A kernel limited to some of them refuses calls that say nothing.
_TOKENIZER_LIMITS = (
    ("tokenizer_ids", "tokenizer_id", Reason.TOKENIZER_ID_MISMATCH),
    ("vocab_hashes", "vocab_hash", Reason.VOCAB_HASH_MISMATCH),
    ("merges_hashes", "merges_hash", Reason.MERGES_HASH_MISMATCH),
    ("added_tokens_hashes", "added_tokens_hash", Reason.ADDED_TOKENS_MISMATCH),
    ("supports_normalizers", "normalizer_id", Reason.NORMALIZER_MISMATCH),
)


def _tokenizer(context: SelectionContext, kernel: KernelCapability) -> Found:
    form = context.attrs["tokenizer_format"]
    if form not in kernel.tokenizer_formats:
        text = f"tokenizer file format {form!r}; readable: {', '.join(kernel.tokenizer_formats)}"
        yield Reason.TOKENIZER_FORMAT_UNSUPPORTED, text
    if context.return_offsets and not kernel.supports_offsets:
        yield Reason.ATTR_UNSUPPORTED, "return_offsets=True; the kernel gives no offsets"
    for field, name, code in _TOKENIZER_LIMITS:
        allowed = getattr(kernel, field)
        if allowed is not None and getattr(context, name) not in allowed:
            yield code, f"{name}={getattr(context, name)!r}; allowed: {', '.join(allowed) or 'none'}"
