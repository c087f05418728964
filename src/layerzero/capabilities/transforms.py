"""Changes of a call, one function for each kind of refusal. capabilities/fixes.py applies them and checks the result.

A transform returns the changed call, or None where it knows no change. It may change too little: then match() says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from layerzero.capabilities.context import SelectionContext
from layerzero.capabilities.descriptor import KernelCapability
from layerzero.capabilities.match import workspace_bytes
from layerzero.ipc.vocabulary.ops import ATTENTION_OPS, OPS
from layerzero.ipc.vocabulary.tensors import FLOAT_DTYPES, ITEMSIZE, NARROW_DTYPES, TensorSpec


@dataclass(frozen=True, slots=True)
class Step:
    """`change` in words, `transforms` as "verb argument details"."""

    context: SelectionContext
    change: str
    transforms: tuple[str, ...] = ()


Transform = Callable[[SelectionContext, KernelCapability], Step | None]


def _with(
    context: SelectionContext,
    tensors: Mapping[str, TensorSpec | None],
    outputs: Mapping[int, TensorSpec] | None = None,
    attrs: Mapping[str, Any] | None = None,
) -> SelectionContext:
    op = OPS[context.op]
    inputs = tuple(tensors.get(name, spec) for name, spec in zip(op.inputs, context.inputs, strict=True))
    changed = {i: spec for i, name in enumerate(op.outputs) if (spec := tensors.get(name)) is not None}
    changed.update(outputs or {})
    outs = tuple(changed.get(i, spec) for i, spec in enumerate(context.outputs))
    return replace(context, inputs=inputs, outputs=outs, attrs={**context.attrs, **(attrs or {})})


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(names)


def copy(context: SelectionContext, kernel: KernelCapability) -> Step | None:
    """Copy what has gaps into dense memory; the result as well, where the kernel writes it there itself."""
    dense = {n: TensorSpec.contiguous(s.dtype, s.shape) for n, s in context.given.items() if not s.is_contiguous}
    outputs = {}
    if not kernel.copies_outputs and context.outputs and not context.outputs[0].is_contiguous and not dense:
        out = context.outputs[0]
        outputs[0] = TensorSpec.contiguous(out.dtype, out.shape)
        return Step(_with(context, {}, outputs), "take the result in a contiguous out=", ("contiguous out",))
    if not dense:
        return None
    return Step(_with(context, dense), f"make {_listed(dense)} contiguous", tuple(f"contiguous {n}" for n in dense))


def relayout(context: SelectionContext, kernel: KernelCapability) -> Step | None:
    """Copy tensors into memory of a layout that the kernel takes. The views keep their order of dimensions."""
    target = kernel.produces_layout or next(iter(kernel.requires_layouts), None)
    if target is None or target == context.layout or target not in kernel.requires_layouts:
        return None
    beside = ("attn_mask", "lse", "sinks", "alibi_slopes")
    moved = {n: _in_layout(spec, target) for n, spec in context.given.items() if n not in beside}
    outputs = {i: _in_layout(spec, target) for i, spec in enumerate(context.outputs) if spec.ndim == 4}
    transforms = [f"layout {context.layout}->{target}", *(f"contiguous {name}" for name in moved)]
    if not kernel.copies_outputs and outputs:
        transforms.append("contiguous out")
    changed = _with(context, moved, outputs, {"layout": target})
    return Step(changed, f"pass {_listed(moved)} in layout {target}", tuple(transforms))


def _in_layout(spec: TensorSpec, layout: str) -> TensorSpec:
    b, h, s, d = spec.shape
    if layout == "BHSD":
        return TensorSpec.contiguous(spec.dtype, spec.shape)
    return TensorSpec.contiguous(spec.dtype, (b, s, h, d)).permute(0, 2, 1, 3)


def cast(context: SelectionContext, kernel: KernelCapability) -> Step | None:
    """Cast data to the narrowest dtype that keeps its values, else to the widest there is; indices likewise."""
    if context.quant_dtype is not None:
        return None
    data = _nearest(context.dtype, kernel.dtypes if kernel.requires_dtype is None else (kernel.requires_dtype,))
    target: dict[str, str] = {}
    for name, spec in context.given.items():
        if name in OPS[context.op].singles:
            continue
        if name in OPS[context.op].indices:
            wanted = _nearest(spec.dtype, kernel.index_dtypes)
        elif spec.dtype in FLOAT_DTYPES:
            wanted = data
        else:
            continue
        if wanted is None:
            return None
        if wanted != spec.dtype:
            target[name] = wanted
    cast_to = {
        name: TensorSpec(dtype, s.shape, s.strides) for name, dtype in target.items() for s in [context.given[name]]
    }
    words = [f"cast {name} {context.given[name].dtype}->{dtype}" for name, dtype in target.items()]
    outputs = {}
    if context.outputs and context.outputs[0].dtype in FLOAT_DTYPES:
        out, result = context.outputs[0], kernel.produces_dtype or data
        if result is not None and result != out.dtype:
            outputs[0] = TensorSpec(result, out.shape, out.strides)
            words.append(f"cast out {result}->{out.dtype}")
    return Step(_with(context, cast_to, outputs), ", ".join(words), tuple(words)) if words else None


def _nearest(dtype: str | None, allowed: tuple[str, ...]) -> str | None:
    """Of the same kind: the same, else the narrowest that is wider, else the widest."""
    if dtype is None or dtype in allowed:
        return dtype
    floats = {*FLOAT_DTYPES, *NARROW_DTYPES}
    same_kind = [a for a in allowed if (a in floats) == (dtype in floats) and a != "bool"]
    wider = [a for a in same_kind if ITEMSIZE[a] > ITEMSIZE[dtype]]
    return min(wider, key=ITEMSIZE.__getitem__) if wider else max(same_kind, key=ITEMSIZE.__getitem__, default=None)


def leave_out(context: SelectionContext, kernel: KernelCapability) -> Step | None:
    """Without the optional arguments that the kernel does not take; the caller applies them to the result."""
    taken = {*kernel.optional_args, *kernel.required_args, "attn_mask"}
    extra = {name: None for name in context.given if name in OPS[context.op].optional and name not in taken}
    if not extra:
        return None
    return Step(_with(context, extra), f"leave out {_listed(extra)} and apply it to the result yourself")


def pass_neutral(context: SelectionContext, kernel: KernelCapability) -> Step | None:
    """With values that change nothing for the arguments that the kernel needs."""
    if context.first is None or context.dtype is None:
        return None
    ndim = context.attrs.get("ndim")
    if isinstance(ndim, int) and 0 < ndim <= context.first.ndim:
        shape = context.first.shape[context.first.ndim - ndim :]
    elif context.op == "linear" and ndim is None:
        shape = context.given["weight"].shape[:1]
    else:
        return None
    missing = {n: TensorSpec.contiguous(context.dtype, shape) for n in kernel.required_args if n not in context.given}
    words = [f"{'ones' if name == 'weight' else 'zeros'}({list(shape)}) as {name}" for name in missing]
    return Step(_with(context, missing), f"pass {' and '.join(words)}") if missing else None


def set_attribute(context: SelectionContext, kernel: KernelCapability) -> Step | None:
    """With a value that the kernel takes for one attribute."""
    attrs = context.attrs
    for name, allowed in kernel.attrs.items():
        if allowed and name in attrs and attrs[name] not in allowed:
            return Step(
                _with(context, {}, attrs={name: allowed[0]}), f"pass {name}={allowed[0]!r}, which changes the result"
            )
    if not kernel.supports_scale and not context.has_default_scale and context.head_dim and context.scale is not None:
        default = context.head_dim**-0.5
        text = f"multiply q by {context.scale / default:.6g} and leave out scale"
        return Step(_with(context, {}, attrs={"scale": default}), text, ("scale q",))
    switches = {
        "return_offsets": (context.return_offsets and not kernel.supports_offsets, False),
        "dropout_p": (context.dropout_p > 0 and not kernel.supports_dropout, 0.0),
        "lse_base": (attrs.get("lse_base") not in (None, kernel.lse_base), kernel.lse_base),
        "packed_weights_id": (
            context.packed_weights_id is not None and not (kernel.requires_packed_weights or kernel.supports_prepack),
            None,
        ),
    }
    for name, (is_refused, value) in switches.items():
        if is_refused:
            return Step(_with(context, {}, attrs={name: value}), f"pass {name}={value!r}, which changes the result")
    return None


def pad_heads(context: SelectionContext, kernel: KernelCapability) -> Step | None:
    """With zeros behind each head. They add nothing to q kᵀ, and the result has zeros there; the scale is the same."""
    if context.op != "attention":
        return None
    q, k, v = context.given["q"], context.given["k"], context.given["v"]

    def padded(dim: int) -> int:
        return -(-max(dim, kernel.min_head_dim) // kernel.head_dim_multiple) * kernel.head_dim_multiple

    grown: dict[str, TensorSpec] = {}
    for name, spec in (("q", q), ("k", k), ("v", v)):
        if padded(spec.shape[3]) != spec.shape[3]:
            shape = (*spec.shape[:3], padded(spec.shape[3]))
            moved = TensorSpec.contiguous(spec.dtype, shape)
            grown[name] = _in_layout(moved, context.layout or "BHSD")
    if not grown:
        return None
    outputs = {}
    if "v" in grown and context.outputs:
        out = context.outputs[0]
        wide = TensorSpec.contiguous(out.dtype, (*out.shape[:3], padded(v.shape[3])))
        outputs[0] = _in_layout(wide, context.layout or "BHSD")
    sizes = sorted({f"{context.given[name].shape[3]} to {spec.shape[3]}" for name, spec in grown.items()})
    text = f"pad head_dim of {_listed(grown)} with zeros from {' and '.join(sizes)}"
    if outputs:
        text += ", and drop the padding of the result"
    return Step(_with(context, grown, outputs), text, tuple(f"pad {name}" for name in grown))


def repeat_heads(context: SelectionContext, kernel: KernelCapability) -> Step | None:
    """With as many key and value heads as query heads."""
    if context.op != "attention":
        return None
    heads, kv_heads = context.num_heads, context.num_kv_heads
    if not heads or not kv_heads or heads % kv_heads or heads == kv_heads:
        return None
    repeated = {}
    for name in ("k", "v"):
        spec = context.given[name]
        b, _, s, d = spec.shape
        repeated[name] = _in_layout(TensorSpec.contiguous(spec.dtype, (b, heads, s, d)), context.layout or "BHSD")
    text = f"repeat each head of k and v {heads // kv_heads} times (repeat_interleave)"
    return Step(_with(context, repeated), text, ("repeat k", "repeat v"))


def convert_mask(context: SelectionContext, kernel: KernelCapability) -> Step | None:
    """A bool mask as one to add, a float mask in the dtype of q, one mask for all heads as one for each."""
    mask, q = context.given.get("attn_mask"), context.given["q"]
    if mask is None:
        return None
    kind = context.attn_mask_type
    if kind == "float" and mask.dtype != q.dtype:
        text = f"cast attn_mask {mask.dtype}->{q.dtype}"
        return Step(_with(context, {"attn_mask": TensorSpec(q.dtype, mask.shape, mask.strides)}), text, (text,))
    if kind == "bool" and kind not in kernel.attn_mask_types:
        added = TensorSpec.contiguous(q.dtype, mask.shape)
        text = f"pass attn_mask as {q.dtype}: 0 where it is True, -inf where it is False"
        return Step(_with(context, {"attn_mask": added}), text, (f"cast attn_mask bool->{q.dtype}",))
    if context.attn_mask_layout == "broadcast" and kernel.attn_mask_layouts == ("per_head",) and q.shape[1] > 1:
        shape = (mask.shape[0], q.shape[1], *mask.shape[2:])
        return Step(
            _with(context, {"attn_mask": TensorSpec.contiguous(mask.dtype, shape)}),
            f"repeat attn_mask for each of the {q.shape[1]} heads",
            ("repeat attn_mask",),
        )
    return None


def spell_out_causal(context: SelectionContext, kernel: KernelCapability) -> Step | None:
    """With the causal rule as a mask."""
    if context.op not in ATTENTION_OPS or "attn_mask" in context.given or not context.is_causal:
        return None
    q, k = context.given["q"], context.given["k"]
    dtype = "bool" if "bool" in kernel.attn_mask_types else q.dtype
    mask = TensorSpec.contiguous(dtype, (1, 1, q.shape[2], k.shape[2]))
    text = f"pass the {context.causal_alignment} causal rule as a {dtype} attn_mask instead of is_causal=True"
    return Step(_with(context, {"attn_mask": mask}, attrs={"is_causal": False}), text)


def pack_weights(context: SelectionContext, kernel: KernelCapability) -> Step | None:
    """With weights that the provider has packed."""
    if not kernel.supports_prepack:
        return None
    changed = _with(context, {}, attrs={"packed_weights_id": kernel.kernel_id})
    return Step(changed, f"pack the weights for {kernel.kernel_id}", ("pack weight",))


def allow_nondeterminism(context: SelectionContext, kernel: KernelCapability) -> Step | None:
    """Policy."""
    return Step(replace(context, requires_deterministic=False), "set requires_deterministic: false in the policy")


def allow_jit(context: SelectionContext, kernel: KernelCapability) -> Step | None:
    """Policy."""
    return Step(replace(context, allow_jit_compile=True), "set allow_jit_compile: true in the policy")


def lower_headroom(context: SelectionContext, kernel: KernelCapability) -> Step | None:
    """Policy; None where the memory is not there at all."""
    left = (context.free_memory_bytes or 0) - workspace_bytes(context, kernel)
    if left < 0:
        return None
    return Step(
        replace(context, memory_headroom_bytes=left), f"set memory_headroom_bytes to {left} or less in the policy"
    )
