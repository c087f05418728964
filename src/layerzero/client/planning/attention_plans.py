"""As plans.py, of attention and of its backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from layerzero.client.planning.checks import (
    Shape,
    attention_scale,
    choice,
    finite,
    flag,
    fresh,
    listed,
    number,
    refuse,
    same_float_dtype,
)
from layerzero.client.planning.plans import BSHD_AXES, Plan, Scalar, remember
from layerzero.ipc.vocabulary.attention_shapes import CAUSAL_ALIGNMENTS, LAYOUTS, MAX_WINDOW
from layerzero.ipc.vocabulary.tensors import TensorSpec


@remember
def plan_attention(
    q: TensorSpec,
    k: TensorSpec,
    v: TensorSpec,
    attn_mask: TensorSpec | None = None,
    sinks: TensorSpec | None = None,
    alibi_slopes: TensorSpec | None = None,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    layout: str = "BHSD",
    causal_alignment: str = "top_left",
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    mask_block_size: tuple[int, int] | None = None,
) -> Plan:
    """torch.nn.functional.scaled_dot_product_attention, with the memory order, the causal rule and more named."""
    op, options = "attention", _options(is_causal, scale, enable_gqa, layout, causal_alignment)
    if number(op, "dropout_p", dropout_p) != 0.0:
        refuse(op, f"dropout_p is {dropout_p}", "0.0, because kernels draw no random numbers", "drop it, or call torch")
    options |= {"window_size": window_size, "softcap": softcap, "mask_block_size": mask_block_size}
    inputs, attrs = _forward(op, q, k, v, attn_mask, **options)
    inputs = (*inputs, *_of_heads(op, inputs, sinks, alibi_slopes, attrs, causal_alignment))
    output, result = _out(op, inputs, q.ndim, layout)
    return Plan(op, inputs, attrs, (output,), (result,))


@remember
def plan_attention_forward(
    q: TensorSpec,
    k: TensorSpec,
    v: TensorSpec,
    attn_mask: TensorSpec | None = None,
    sinks: TensorSpec | None = None,
    alibi_slopes: TensorSpec | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    layout: str = "BHSD",
    causal_alignment: str = "top_left",
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    mask_block_size: tuple[int, int] | None = None,
) -> Plan:
    """Attention, and the log-sum-exp of its rows."""
    op, options = "attention_forward", _options(is_causal, scale, enable_gqa, layout, causal_alignment)
    options |= {"window_size": window_size, "softcap": softcap, "mask_block_size": mask_block_size}
    inputs, attrs = _forward(op, q, k, v, attn_mask, **options)
    inputs = (*inputs, *_of_heads(op, inputs, sinks, alibi_slopes, attrs, causal_alignment))
    output, result = _out(op, inputs, q.ndim, layout)
    rows = output.shape[:3]
    lse, lse_result = TensorSpec.contiguous("float32", rows), fresh(op, "float32", rows[4 - q.ndim :])
    return Plan(op, inputs, attrs, (output, lse), (result, lse_result))


@remember
def plan_attention_backward(
    grad_out: TensorSpec,
    q: TensorSpec,
    k: TensorSpec,
    v: TensorSpec,
    output: TensorSpec,
    lse: TensorSpec,
    attn_mask: TensorSpec | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    layout: str = "BHSD",
    causal_alignment: str = "top_left",
) -> Plan:
    """The gradients of attention by q, k and v."""
    op, options = "attention_backward", _options(is_causal, scale, enable_gqa, layout, causal_alignment)
    same_float_dtype(op, grad_out=grad_out, q=q, k=k, v=v, output=output)
    inputs, attrs = _forward(op, q, k, v, attn_mask, **options)
    _, like = _out(op, inputs, q.ndim, layout)
    for name, spec in (("grad_out", grad_out), ("output", output)):
        if spec.shape != like.shape:
            refuse(
                op, f"{name} has shape {list(spec.shape)}", f"{list(like.shape)}, that of the result", "pass all of it"
            )
    q4 = inputs[0]
    assert q4 is not None
    rows = q4.shape[:3][4 - q.ndim :]
    if (lse.dtype, lse.shape) != ("float32", rows):
        refuse(op, f"lse is {lse}", f"float32{list(rows)}", "pass what attention_forward returned")
    lse3 = lse
    while lse3.ndim < 3:
        lse3 = lse3.unsqueeze(0)
    grad4, output4 = (_bhsd(op, name, spec, layout) for name, spec in (("grad_out", grad_out), ("output", output)))
    pairs = [_like(op, spec, q.ndim, layout) for spec in inputs[:3] if spec is not None]
    outputs, results = zip(*pairs, strict=True)
    return Plan(op, (grad4, *inputs[:3], output4, lse3, inputs[3]), attrs, outputs, results)


@remember
def plan_merge_attention(
    out0: TensorSpec,
    lse0: TensorSpec,
    out1: TensorSpec,
    lse1: TensorSpec,
    *more: TensorSpec | None,
    layout: str = "BHSD",
) -> Plan:
    """Results of parts of the keys, merged."""
    op = "merge_attention"
    choice(op, "layout", layout, LAYOUTS)
    names = ("out0", "lse0", "out1", "lse1", *(f"{name}{n}" for n in (2, 3) for name in ("out", "lse")))
    args = (out0, lse0, out1, lse1, *more)
    given = {name: spec for name, spec in zip(names, args, strict=False) if spec is not None}
    if len(given) % 2 or tuple(given) != names[: len(given)]:
        refuse(op, f"{', '.join(given)} are given", "parts one after the other, each with its lse", "pass both of each")
    outs = {name: spec for name, spec in given.items() if name.startswith("out")}
    same_float_dtype(op, **outs)
    shape = out0.shape
    dims = f"out0 has shape {list(shape)}"
    if layout == "BSHD" and len(shape) != 4:
        refuse(op, dims, "(batch, sequence, heads, value_dim) with layout='BSHD'", "unsqueeze it to 4 dimensions")
    if len(shape) < 2:
        refuse(op, dims, "2 dimensions or more, the last one value_dim", "unsqueeze it")
    rows = (shape[0], shape[2], shape[1]) if layout == "BSHD" else shape[:-1]
    for name, spec in given.items():
        if name in outs:
            if spec.shape != shape:
                refuse(op, f"{name} has shape {list(spec.shape)} and out0 {list(shape)}", "equal shapes", "check both")
        elif spec.dtype != "float32" or spec.shape != rows:
            text = "pass what attention_forward returned beside it"
            refuse(op, f"{name} is {spec}", f"float32{list(rows)}, one for each row of out{name[-1]}", text)
    inputs = [spec.permute(0, 2, 1) if name not in outs and layout == "BSHD" else spec for name, spec in given.items()]
    lse = fresh(op, "float32", rows)
    results = (fresh(op, out0.dtype, shape), lse)
    outputs = (results[0], lse.permute(0, 2, 1) if layout == "BSHD" else lse)
    return Plan(op, (*inputs, *[None] * (len(names) - len(inputs))), {}, outputs, results)


def _of_heads(
    op: str,
    inputs: Sequence[TensorSpec | None],
    sinks: TensorSpec | None,
    slopes: TensorSpec | None,
    attrs: dict[str, Scalar],
    causal_alignment: str,
) -> tuple[TensorSpec | None, TensorSpec | None]:
    """Sinks and slopes as the op has them. Distances depend on the alignment."""
    q, k = inputs[:2]
    assert q is not None
    assert k is not None
    if slopes is not None and q.shape[2] != k.shape[2]:
        attrs["causal_alignment"] = causal_alignment
    return of_heads(op, q.dtype, q.shape[:2], sinks, slopes)


def of_heads(
    op: str, dtype: str, shape: tuple[int, ...], sinks: TensorSpec | None, slopes: TensorSpec | None
) -> tuple[TensorSpec | None, TensorSpec | None]:
    """Sinks and slopes as kernels take them, of q's dtype and of so many sequences and heads."""
    batch, heads = shape
    if sinks is not None:
        if sinks.dtype != dtype:
            refuse(op, f"sinks is {sinks.dtype}", f"{dtype} like q", f"convert it to {dtype}")
        if sinks.shape != (heads,):
            refuse(op, f"sinks has shape {list(sinks.shape)}", f"[{heads}], one for each head of q", "reshape it")
    if slopes is not None:
        if slopes.dtype != "float32":
            refuse(op, f"alibi_slopes is {slopes.dtype}", "float32", "convert it to float32")
        if slopes.shape not in ((heads,), (1, heads), (batch, heads)):
            text = f"[{heads}], or [1 or {batch}, {heads}], one for each head of q"
            refuse(op, f"alibi_slopes has shape {list(slopes.shape)}", text, "reshape it")
        slopes = slopes.unsqueeze(0) if slopes.ndim == 1 else slopes
    return sinks, slopes


def _windows(op: str, window_size: object, queries: int, keys: int, is_bottom_right: bool) -> tuple[int, int]:
    """How far a query sees to the left and to the right; -1 where that hides no key of any."""
    left, right = checked_window(op, window_size)
    first = keys - queries if is_bottom_right else 0  # the place of the first query
    return -1 if left >= first + queries - 1 else left, -1 if right >= keys - 1 - first else right


def checked_window(op: str, window_size: object) -> tuple[int, int]:
    """As a kernel takes it. Raises InvalidArgument for what is none."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        refuse(op, f"window_size is {window_size!r}", "(left, right)", "pass two integers, -1 for no limit")
    for one in window_size:
        if isinstance(one, bool) or not isinstance(one, Integral) or int(one) < -1:
            refuse(op, f"window_size is {window_size!r}", "integers from -1 on", "pass -1 for no limit")
    left, right = (min(int(one), MAX_WINDOW) for one in window_size)
    return left, right


def checked_blocks(op: str, mask_block_size: object, mask: TensorSpec | None) -> tuple[int, int]:
    """How many queries and keys an element of the mask is for. Raises InvalidArgument for what is none."""
    if mask_block_size is None:
        return 1, 1
    if not isinstance(mask_block_size, (tuple, list)) or len(mask_block_size) != 2:
        refuse(op, f"mask_block_size is {mask_block_size!r}", "(queries, keys)", "pass two integers, or None")
    for one in mask_block_size:
        if isinstance(one, bool) or not isinstance(one, Integral) or not 1 <= int(one) <= MAX_WINDOW:
            refuse(op, f"mask_block_size is {mask_block_size!r}", f"integers from 1 to {MAX_WINDOW}", "pass such")
    if mask is None or mask.dtype != "bool":
        given = "None" if mask is None else mask.dtype
        refuse(op, f"attn_mask is {given} with mask_block_size", "a bool mask", "pass which blocks are seen")
    rows, keys = mask_block_size
    return int(rows), int(keys)


def checked_softcap(op: str, softcap: float) -> float:
    """0.0 for none. Raises InvalidArgument for what is none."""
    cap = finite(op, "softcap", softcap, "0.0 for none")
    if cap < 0.0:
        refuse(op, f"softcap is {softcap!r}", "0.0 or more", "pass a positive number, or 0.0 for none")
    return cap


def _options(
    is_causal: bool, scale: float | None, enable_gqa: bool, layout: str, causal_alignment: str
) -> dict[str, Any]:
    return {
        "is_causal": is_causal,
        "scale": scale,
        "enable_gqa": enable_gqa,
        "layout": layout,
        "causal_alignment": causal_alignment,
    }


def _forward(
    op: str,
    q: TensorSpec,
    k: TensorSpec,
    v: TensorSpec,
    attn_mask: TensorSpec | None,
    *,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    layout: str,
    causal_alignment: str,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    mask_block_size: tuple[int, int] | None = None,
) -> tuple[tuple[TensorSpec | None, ...], dict[str, Scalar]]:
    """The views of q, k, v and the mask, and the attributes, that all ops of attention have."""
    is_causal = flag(op, "is_causal", is_causal)
    enable_gqa = flag(op, "enable_gqa", enable_gqa)
    choice(op, "layout", layout, LAYOUTS)
    choice(op, "causal_alignment", causal_alignment, CAUSAL_ALIGNMENTS)
    same_float_dtype(op, q=q, k=k, v=v)
    q4, k4, v4 = (_bhsd(op, name, spec, layout) for name, spec in (("q", q), ("k", k), ("v", v)))
    if not q.ndim == k.ndim == v.ndim:
        refuse(
            op,
            f"q, k and v have {q.ndim}, {k.ndim} and {v.ndim} dimensions",
            "the same number",
            "unsqueeze the smaller",
        )
    _attention_shapes(op, q4, k4, v4, enable_gqa=enable_gqa)

    batch, heads, seq_q, head_dim = q4.shape
    seq_k = k4.shape[2]
    left, right = _windows(op, window_size, seq_q, seq_k, causal_alignment == "bottom_right")
    if right == 0:  # the causal rule by another name
        is_causal = True
    cap = checked_softcap(op, softcap)
    rows, keys = checked_blocks(op, mask_block_size, attn_mask)
    masked = (batch, heads, -(-seq_q // rows), -(-seq_k // keys))
    of = "queries, keys" if rows == keys == 1 else "blocks of queries, of keys"
    mask4 = None if attn_mask is None else _mask(op, attn_mask, q, masked, of)
    has_places = is_causal or left >= 0 or right >= 0
    attrs: dict[str, Scalar] = {
        "is_causal": is_causal,
        "scale": attention_scale(op, scale, head_dim),
        # Without a mask to align, or with a square one, both rules say the same: one route serves them.
        "causal_alignment": causal_alignment if has_places and seq_q != seq_k else "top_left",
        "layout": layout,
    }
    if left >= 0:
        attrs["window_left"] = left
    if right > 0 and not is_causal:
        attrs["window_right"] = right
    if cap:
        attrs["softcap"] = cap
    if (rows, keys) != (1, 1):
        attrs |= {"mask_block_q": rows, "mask_block_k": keys}
    return (q4, k4, v4, mask4), attrs


def _out(op: str, inputs: tuple[TensorSpec | None, ...], ndim: int, layout: str) -> tuple[TensorSpec, TensorSpec]:
    """What a kernel writes and what the caller gets, in fresh memory, for q of so many dimensions."""
    q, _, v = inputs[:3]
    assert q is not None
    assert v is not None
    return _like(op, TensorSpec.contiguous(q.dtype, (*q.shape[:3], v.shape[3])), ndim, layout)


def _like(op: str, spec: TensorSpec, ndim: int, layout: str) -> tuple[TensorSpec, TensorSpec]:
    """A fresh tensor of this BHSD shape as a kernel writes it, and as the caller gets it."""
    if layout == "BSHD":
        result = fresh(op, spec.dtype, tuple(spec.shape[axis] for axis in BSHD_AXES))
        return result.permute(*BSHD_AXES), result
    return TensorSpec.contiguous(spec.dtype, spec.shape), fresh(op, spec.dtype, spec.shape[4 - ndim :])


def _bhsd(op: str, name: str, spec: TensorSpec, layout: str) -> TensorSpec:
    """The (batch, heads, sequence, head_dim) view of an argument with 2 to 4 dimensions."""
    dims = f"{name} has shape {list(spec.shape)}"
    if layout == "BSHD":
        if spec.ndim != 4:
            refuse(op, dims, "(batch, sequence, heads, head_dim) with layout='BSHD'", "unsqueeze it to 4 dimensions")
        return spec.permute(*BSHD_AXES)
    if spec.ndim < 2:
        refuse(op, dims, "2 to 4 dimensions, the last two (sequence, head_dim)", "unsqueeze it")
    if spec.ndim > 4:
        refuse(op, dims, "2 to 4 dimensions", f"flatten the leading ones: {name}.flatten(0, {spec.ndim - 4})")
    while spec.ndim < 4:
        spec = spec.unsqueeze(0)
    return spec


def _attention_shapes(op: str, q: TensorSpec, k: TensorSpec, v: TensorSpec, *, enable_gqa: bool) -> None:
    names = ("q batch", "k batch", "v batch")
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        refuse(
            op,
            listed(names, (q.shape[0], k.shape[0], v.shape[0])),
            "equal batches",
            "expand the smaller; that copies nothing",
        )
    if k.shape[1] != v.shape[1]:
        refuse(op, f"k has {k.shape[1]} heads and v {v.shape[1]}", "equal numbers", "expand the smaller")
    if k.shape[2] != v.shape[2]:
        refuse(op, f"k has sequence length {k.shape[2]} and v {v.shape[2]}", "equal lengths", "check the layout")
    if q.shape[3] != k.shape[3]:
        refuse(op, f"q has head_dim {q.shape[3]} and k {k.shape[3]}", "equal sizes", "check the layout")
    heads_q, heads_k = q.shape[1], k.shape[1]
    if heads_q == heads_k:
        return
    if not enable_gqa:
        refuse(op, f"q has {heads_q} heads and k {heads_k}", "equal numbers", "pass enable_gqa=True to share key heads")
    if heads_k == 0 or heads_q % heads_k:
        refuse(op, f"q has {heads_q} heads and k {heads_k}", "a multiple of k's heads for q", "check the layout")


def _mask(op: str, mask: TensorSpec, q: TensorSpec, target: Shape, of: str) -> TensorSpec:
    """The mask with leading extents of 1 up to 4 dimensions; it broadcasts to (B, Hq, Sq, Sk) in either layout. `of`:
    what its elements are of."""
    if mask.dtype not in ("bool", q.dtype):
        refuse(op, f"attn_mask is {mask.dtype}", f"bool, or {q.dtype} like q", f"convert it to {q.dtype}")
    shape = f"attn_mask has shape {list(mask.shape)}"
    if mask.ndim > q.ndim:
        refuse(op, shape, f"at most {q.ndim} dimensions, like q", "squeeze it")
    while mask.ndim < 4:
        mask = mask.unsqueeze(0)
    if any(given not in (1, wanted) for given, wanted in zip(mask.shape, target, strict=True)):
        refuse(op, shape, f"shapes that broadcast to (batch, heads, {of}) = {list(target)}", "check its order")
    return mask
