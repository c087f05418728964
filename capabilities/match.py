"""One call against one kernel's constraints: every rule that refuses it, with the offending and the allowed value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layerzero.capabilities.context import SelectionContext
from layerzero.capabilities.descriptor import TOKENIZER_OPS, KernelCapability
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.ops import OPS
from layerzero.ipc.tensors import FLOAT_DTYPES, TensorSpec


@dataclass(frozen=True, slots=True)
class Rejection:
    """`code` is stable; `detail` names the offending value and what is allowed."""

    code: Reason
    detail: str


def match(context: SelectionContext, kernel: KernelCapability) -> list[Rejection]:
    """All reasons why `kernel` cannot run this call; an empty list means that it can."""
    op, given, attrs = context.op, context.given, context.attrs
    rules = [_arguments(op, kernel, given), _attributes(op, kernel, attrs)]
    if op in TOKENIZER_OPS:
        rules.append(_tokenizer(kernel, attrs))
    elif op != "null":
        rules.append(_tensors(kernel, given, context.outputs))
    if op == "attention":
        rules.append(_attention(kernel, given, attrs))
    return [Rejection(code, detail) for rule in rules for code, detail in rule]


def memory_rejection(context: SelectionContext, kernel: KernelCapability) -> Rejection | None:
    """Whether running the kernel would leave less memory than policy wants to stay free (spec 7.8)."""
    if context.memory_headroom_bytes is None or context.free_memory_bytes is None:
        return None
    needed = workspace_bytes(context, kernel)
    left = context.free_memory_bytes - needed
    if left >= context.memory_headroom_bytes:
        return None
    return Rejection(
        Reason.MEMORY_HEADROOM_EXCEEDED,
        f"needs {needed:,} bytes of {context.free_memory_bytes:,} free ones, which leaves {max(left, 0):,}; "
        f"policy keeps {context.memory_headroom_bytes:,}",
    )


def workspace_bytes(context: SelectionContext, kernel: KernelCapability) -> int:
    """Memory a kernel takes beyond the caller's: its declared workspace, and the copies it makes."""
    inputs = sum(spec.numel * spec.itemsize for spec in context.given.values())
    outputs = sum(spec.numel * spec.itemsize for spec in context.outputs)
    copies = inputs * kernel.copies_inputs + outputs * kernel.copies_outputs
    return copies + kernel.workspace_bytes + round(kernel.workspace_factor * (inputs + outputs))


Found = Iterator[tuple[Reason, str]]


def _arguments(op: str, kernel: KernelCapability, given: Mapping[str, TensorSpec]) -> Found:
    optional = OPS[op].optional - ({"attn_mask"} if op == "attention" else set())
    for name in sorted(optional & given.keys()):
        if name not in kernel.optional_args and name not in kernel.required_args:
            yield Reason.ARG_UNSUPPORTED, f"argument {name!r} is given; the kernel takes none"
    for name in kernel.required_args:
        if name not in given:
            yield Reason.ARG_REQUIRED, f"argument {name!r} is missing; the kernel needs it"


def _attributes(op: str, kernel: KernelCapability, attrs: Mapping[str, Any]) -> Found:
    for name, allowed in kernel.attrs.items():
        if name in attrs and attrs[name] not in allowed:
            yield Reason.ATTR_UNSUPPORTED, f"{name}={attrs[name]!r}; allowed: {', '.join(map(repr, allowed))}"


def _tensors(kernel: KernelCapability, given: Mapping[str, TensorSpec], outputs: Sequence[TensorSpec]) -> Found:
    for name, spec in given.items():
        is_index = name == "ids"
        allowed = kernel.index_dtypes if is_index else kernel.dtypes
        is_bool_mask = name == "attn_mask" and spec.dtype == "bool"  # attn_mask_types covers it
        if spec.dtype not in allowed and not is_bool_mask:
            yield Reason.DTYPE_UNSUPPORTED, f"{name} is {spec.dtype}; allowed: {', '.join(allowed) or 'none'}"
        if spec.numel == 0 and not kernel.supports_empty:
            yield Reason.EMPTY_UNSUPPORTED, f"{name} has shape {list(spec.shape)}; extents of 0 are not supported"
        if kernel.requires_contiguous and not spec.is_contiguous:
            yield Reason.NOT_CONTIGUOUS, f"{name} has shape {list(spec.shape)} and strides {list(spec.strides)}"
        elif kernel.requires_last_dim_stride1 and spec.ndim and spec.shape[-1] > 1 and spec.strides[-1] != 1:
            yield Reason.STRIDE_LAST_DIM, f"{name} has stride {spec.strides[-1]} in its last dimension; needed: 1"
    floats = {spec.dtype for spec in given.values() if spec.dtype in FLOAT_DTYPES}
    if len(floats) > 1:
        yield Reason.DTYPE_MIXED, f"inputs are {' and '.join(sorted(floats))}; they must agree"
    if outputs and kernel.requires_contiguous and not kernel.copies_outputs and not outputs[0].is_contiguous:
        yield Reason.NOT_CONTIGUOUS, f"out has strides {list(outputs[0].strides)} for shape {list(outputs[0].shape)}"
    first = next(iter(given.values()), None)
    if first is not None:
        if first.ndim < kernel.min_ndim:
            yield Reason.RANK_UNSUPPORTED, f"{first.ndim} dimensions; needed: at least {kernel.min_ndim}"
        if kernel.max_ndim is not None and first.ndim > kernel.max_ndim:
            yield Reason.RANK_UNSUPPORTED, f"{first.ndim} dimensions; allowed: at most {kernel.max_ndim}"


def _attention(kernel: KernelCapability, given: Mapping[str, TensorSpec], attrs: Mapping[str, Any]) -> Found:
    q, k, v, mask = given["q"], given["k"], given["v"], given.get("attn_mask")
    layout = attrs["layout"]
    if layout not in kernel.requires_layouts:
        yield Reason.LAYOUT_UNSUPPORTED, f"layout {layout}; allowed: {', '.join(kernel.requires_layouts)}"
    for name, dim in (("query and key", q.shape[-1]), ("value", v.shape[-1])):
        if dim < kernel.min_head_dim:
            yield Reason.HEAD_DIM_INVALID, f"{name} head_dim {dim}; allowed: at least {kernel.min_head_dim}"
        if kernel.max_head_dim is not None and dim > kernel.max_head_dim:
            yield Reason.HEAD_DIM_TOO_LARGE, f"{name} head_dim {dim}; allowed: at most {kernel.max_head_dim}"
        if dim % kernel.head_dim_multiple:
            yield Reason.HEAD_DIM_ALIGNMENT, f"{name} head_dim {dim}; allowed: multiples of {kernel.head_dim_multiple}"
    longest = max(q.shape[2], k.shape[2])
    if kernel.max_seq_len is not None and longest > kernel.max_seq_len:
        yield Reason.SEQ_TOO_LONG, f"sequence length {longest}; allowed: at most {kernel.max_seq_len}"
    if q.shape[1] != k.shape[1] and not kernel.supports_gqa:
        yield (
            Reason.GQA_UNSUPPORTED,
            f"{q.shape[1]} query heads on {k.shape[1]} key heads; the kernel needs equal numbers",
        )
    if mask is not None:
        kind = "bool" if mask.dtype == "bool" else "float"
        if kind not in kernel.attn_mask_types:
            yield Reason.ATTN_MASK_UNSUPPORTED, f"{kind} mask; allowed: {', '.join(kernel.attn_mask_types) or 'none'}"
    alignment = attrs["causal_alignment"]
    if attrs["is_causal"] and q.shape[2] != k.shape[2] and alignment not in kernel.causal_alignments:
        yield (
            Reason.CAUSAL_ALIGNMENT_UNSUPPORTED,
            f"{alignment} with {q.shape[2]} queries and {k.shape[2]} keys; "
            f"allowed: {', '.join(kernel.causal_alignments)}",
        )


def _tokenizer(kernel: KernelCapability, attrs: Mapping[str, Any]) -> Found:
    if attrs["tokenizer_format"] not in kernel.tokenizer_formats:
        yield (
            Reason.TOKENIZER_FORMAT_UNSUPPORTED,
            f"tokenizer file format {attrs['tokenizer_format']!r}; readable: {', '.join(kernel.tokenizer_formats)}",
        )
    if attrs.get("return_offsets") and not kernel.supports_offsets:
        yield Reason.ATTR_UNSUPPORTED, "return_offsets=True; the kernel gives no offsets"
