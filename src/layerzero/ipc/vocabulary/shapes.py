"""What the tensors and attributes of one call must have to do with each other: one shape function for each op, from its
inputs and attributes to the dtypes and shapes of its outputs.

The broker checks every signature with it, and the worker every plan, before a provider sees them: a native kernel
believes what it is told, and reads and writes beyond its tensors where they do not belong together. docs/ops.md has the
formulas; ipc/vocabulary/ops.py says how tensors are laid out. What lies in a tensor (lengths, tables, slots, ids) is
for providers to check.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from layerzero.ipc.vocabulary.elementwise_shapes import ELEMENTWISE
from layerzero.ipc.vocabulary.norm_shapes import NORMS
from layerzero.ipc.vocabulary.ops import ACTIVATIONS, LINEAR_ACTIVATIONS, OPS, TOKENIZER_ATTRS
from layerzero.ipc.vocabulary.quantized_shapes import QUANTIZED
from layerzero.ipc.vocabulary.sampling_shapes import SAMPLING
from layerzero.ipc.vocabulary.shape_checks import (
    INDEX_DTYPES as INDEX_DTYPES,
)
from layerzero.ipc.vocabulary.shape_checks import (
    Attrs,
    Inputs,
    Output,
    broadcast,
    choice,
    equal,
    flag,
    float_dtype,
    grouped_heads,
    indices,
    integer,
    least_ndim,
    number,
    of_ndim,
    refuse,
    required,
    same_dtype,
    short_text,
)
from layerzero.ipc.vocabulary.tensors import FLOAT_DTYPES, MAX_NBYTES, MAX_NDIM, TensorSpec

LAYOUTS = ("BHSD", "BSHD")
CAUSAL_ALIGNMENTS = ("top_left", "bottom_right")
GELU_APPROXIMATIONS = ("none", "tanh")


def check_call(
    op: str, inputs: Sequence[TensorSpec | None], outputs: Sequence[TensorSpec], attrs: Mapping[str, Any]
) -> None:
    """Refuse inputs, outputs and attributes that do not belong together. `inputs` and `outputs` are as many as the op
    has, in its order, and those that it requires are there. Raises InvalidArgument, which names what does not fit."""
    given = OPS[op]
    wanted = outputs_of(op, inputs, attrs)
    for name, spec, (dtype, shape) in zip(given.outputs, outputs, wanted, strict=True):
        if (spec.dtype, spec.shape) != (dtype, shape):
            refuse(op, f"output {name} is {spec}", f"{dtype}{list(shape)}, as its inputs say")
        if overlaps(spec):
            refuse(op, f"output {name} has shape {list(spec.shape)} and strides {list(spec.strides)}", "no overlap")
        if name in given.in_place and spec != inputs[given.inputs.index(name)]:
            refuse(op, f"output {name} is {spec} in other strides than the input", "the input itself")


def outputs_of(op: str, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> tuple[Output, ...]:
    """The dtypes and shapes of an op's outputs, by those of its inputs and by its attributes; those of an op whose
    sizes depend on the data have a leading extent of 0. Raises InvalidArgument for what does not belong together."""
    found = _SHAPES[op](op, inputs, attrs)
    for _, shape in found:
        if len(shape) > MAX_NDIM or math.prod(shape) > MAX_NBYTES:
            refuse(op, f"an output of shape {list(shape)}", f"{MAX_NDIM} dimensions and {MAX_NBYTES} bytes at most")
    return found


def overlaps(spec: TensorSpec) -> bool:
    """Whether elements of a tensor may share memory. False when each dimension steps over all that lies below it; exact
    for slices and transposes of dense memory."""
    if spec.numel == 0:
        return False
    last = 0
    for stride, extent in sorted((s, n) for n, s in zip(spec.shape, spec.strides, strict=True) if n > 1):
        if stride <= last:
            return True
        last += (extent - 1) * stride
    return False


def _attention(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    q, k, v = required(inputs, 3)
    mask = inputs[3]
    dtype = float_dtype(op, (q, k, v), ("q", "k", "v"))
    for name, spec in (("q", q), ("k", k), ("v", v)):
        of_ndim(op, name, spec, 4)
    equal(op, "batch", q=q.shape[0], k=k.shape[0], v=v.shape[0])
    equal(op, "heads", k=k.shape[1], v=v.shape[1])
    equal(op, "sequence length", k=k.shape[2], v=v.shape[2])
    equal(op, "head_dim", q=q.shape[3], k=k.shape[3])
    grouped_heads(op, q.shape[1], k.shape[1])
    is_causal = flag(op, attrs, "is_causal")
    if mask is not None:
        if mask.dtype not in ("bool", dtype):
            refuse(op, f"attn_mask is {mask.dtype}", f"bool, or {dtype} like q")
        target = (*q.shape[:3], k.shape[2])
        if len(mask.shape) != 4 or any(n not in (1, m) for n, m in zip(mask.shape, target, strict=True)):
            refuse(op, f"attn_mask has shape {list(mask.shape)}", f"4 dimensions that broadcast to {list(target)}")
        if is_causal:
            refuse(op, "attn_mask and is_causal are both given", "one of them")
    number(op, attrs, "scale")
    choice(op, attrs, "causal_alignment", CAUSAL_ALIGNMENTS)
    choice(op, attrs, "layout", LAYOUTS)
    return ((dtype, (*q.shape[:3], v.shape[3])),)


def _attention_forward(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    (out,) = _attention(op, inputs, attrs)
    return out, ("float32", out[1][:3])


def _attention_backward(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    grad_out, q, k, v, output, lse = required(inputs, 6)
    out, rows = _attention_forward(op, (q, k, v, inputs[6]), attrs)
    for name, spec, (dtype, shape) in (("grad_out", grad_out, out), ("output", output, out), ("lse", lse, rows)):
        if (spec.dtype, spec.shape) != (dtype, shape):
            refuse(op, f"{name} is {spec}", f"{dtype}{list(shape)}, as q, k and v say")
    return tuple((out[0], spec.shape) for spec in (q, k, v))


def _attention_varlen(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    q, k, v, ends_q, ends_k = required(inputs, 5)
    dtype = float_dtype(op, (q, k, v), ("q", "k", "v"))
    for name, spec in (("q", q), ("k", k), ("v", v)):
        of_ndim(op, name, spec, 3)
    indices(op, "cu_seqlens_q", ends_q, 1)
    indices(op, "cu_seqlens_k", ends_k, 1)
    equal(op, "entries", cu_seqlens_q=ends_q.shape[0], cu_seqlens_k=ends_k.shape[0])
    if not ends_q.shape[0]:
        refuse(op, "cu_seqlens_q is empty", "one more entry than there are sequences")
    equal(op, "tokens", k=k.shape[0], v=v.shape[0])
    equal(op, "heads", k=k.shape[1], v=v.shape[1])
    equal(op, "head_dim", q=q.shape[2], k=k.shape[2])
    grouped_heads(op, q.shape[1], k.shape[1])
    flag(op, attrs, "is_causal")
    number(op, attrs, "scale")
    choice(op, attrs, "causal_alignment", CAUSAL_ALIGNMENTS)
    return ((dtype, (*q.shape[:2], v.shape[2])),)


def _paged_attention(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    q, k_cache, v_cache, tables, lengths = required(inputs, 5)
    dtype = float_dtype(op, (q, k_cache, v_cache), ("q", "k_cache", "v_cache"))
    of_ndim(op, "q", q, 3)
    _caches(op, k_cache, v_cache)
    indices(op, "block_tables", tables, 2)
    indices(op, "seq_lens", lengths, 1)
    equal(op, "rows", q=q.shape[0], block_tables=tables.shape[0], seq_lens=lengths.shape[0])
    equal(op, "head_dim", q=q.shape[2], k_cache=k_cache.shape[3])
    grouped_heads(op, q.shape[1], k_cache.shape[2])
    number(op, attrs, "scale")
    return ((dtype, (*q.shape[:2], v_cache.shape[3])),)


def _caches(op: str, k_cache: TensorSpec, v_cache: TensorSpec) -> None:
    of_ndim(op, "k_cache", k_cache, 4)
    of_ndim(op, "v_cache", v_cache, 4)
    equal(op, "blocks, their size and heads", k_cache=k_cache.shape[:3], v_cache=v_cache.shape[:3])


def _append_kv(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    key, value, k_cache, v_cache, slots = required(inputs, 5)
    dtype = same_dtype(op, (key, value, k_cache, v_cache), ("key", "value", "k_cache", "v_cache"))
    of_ndim(op, "key", key, 3)
    of_ndim(op, "value", value, 3)
    _caches(op, k_cache, v_cache)
    indices(op, "slots", slots, 1, INDEX_DTYPES)
    equal(op, "rows", key=key.shape[0], value=value.shape[0], slots=slots.shape[0])
    equal(op, "heads and head_dim", key=key.shape[1:], k_cache=k_cache.shape[2:])
    equal(op, "heads and head_dim", value=value.shape[1:], v_cache=v_cache.shape[2:])
    return ((dtype, k_cache.shape), (dtype, v_cache.shape))


def _rope(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    x, cos, sin = required(inputs, 3)
    dtype = float_dtype(op, (x, cos, sin), ("x", "cos", "sin"))
    of_ndim(op, "x", x, 4)
    of_ndim(op, "cos", cos, 3)
    equal(op, "shape", cos=cos.shape, sin=sin.shape)
    if cos.shape[0] not in (1, x.shape[0]) or cos.shape[1] != x.shape[1]:
        refuse(op, f"cos has shape {list(cos.shape)}", f"(1 or {x.shape[0]}, {x.shape[1]}, pairs)")
    if not 2 <= 2 * cos.shape[2] <= x.shape[3]:
        refuse(op, f"cos has {cos.shape[2]} columns and x a head_dim of {x.shape[3]}", "1 to half of it")
    flag(op, attrs, "interleaved")
    return ((dtype, x.shape),)


def _matmul(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    a, b = required(inputs, 2)
    dtype = _numeric(op, (a, b), ("a", "b"))
    least_ndim(op, "a", a, 2)
    least_ndim(op, "b", b, 2)
    if a.shape[-1] != b.shape[-2]:
        refuse(op, f"a has shape {list(a.shape)} and b {list(b.shape)}", "a's last extent, b's second to last")
    return ((dtype, (*broadcast(op, a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])),)


def _addmm(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    x, a, b = required(inputs, 3)
    dtype = float_dtype(op, (x, a, b), ("x", "a", "b"))
    for name, spec in (("x", x), ("a", a), ("b", b)):
        of_ndim(op, name, spec, 2)
    if a.shape[1] != b.shape[0]:
        refuse(op, f"a has shape {list(a.shape)} and b {list(b.shape)}", "a's last extent, b's first")
    shape = (a.shape[0], b.shape[1])
    if any(n not in (1, wanted) for n, wanted in zip(x.shape, shape, strict=True)):
        refuse(op, f"x has shape {list(x.shape)}", f"1 or {list(shape)}")
    number(op, attrs, "beta")
    number(op, attrs, "alpha")
    return ((dtype, shape),)


def _numeric(op: str, inputs: Inputs, names: Sequence[str]) -> str:
    dtype = same_dtype(op, inputs, names)
    if dtype == "bool":
        refuse(op, f"{names[0]} is bool", "numbers")
    return dtype


def _linear(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    x, weight = required(inputs, 2)
    bias = inputs[2]
    dtype = _numeric(op, inputs, ("x", "weight", "bias"))
    least_ndim(op, "x", x, 2)
    of_ndim(op, "weight", weight, 2)
    if x.shape[-1] != weight.shape[1]:
        refuse(op, f"x has shape {list(x.shape)} and weight {list(weight.shape)}", "equal last extents")
    if bias is not None and bias.shape != weight.shape[:1]:
        refuse(op, f"bias has shape {list(bias.shape)}", f"{list(weight.shape[:1])}, weight's first extent")
    if attrs["activation"] != "":
        choice(op, attrs, "activation", LINEAR_ACTIVATIONS)
        float_dtype(op, (x,), ("x",))
    return ((dtype, (*x.shape[:-1], weight.shape[0])),)


def _gated_mlp(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    x, gate_up, down = required(inputs, 3)
    dtype = float_dtype(op, (x, gate_up, down), ("x", "gate_up", "down"))
    least_ndim(op, "x", x, 2)
    of_ndim(op, "gate_up", gate_up, 2)
    of_ndim(op, "down", down, 2)
    if x.shape[-1] != gate_up.shape[1]:
        refuse(op, f"x has shape {list(x.shape)} and gate_up {list(gate_up.shape)}", "equal last extents")
    if gate_up.shape[0] != 2 * down.shape[1]:
        refuse(op, f"gate_up has shape {list(gate_up.shape)} and down {list(down.shape)}", "twice down's last extent")
    choice(op, attrs, "activation", LINEAR_ACTIVATIONS)
    return ((dtype, (*x.shape[:-1], down.shape[0])),)


def _softmax(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    (x,) = required(inputs, 1)
    dtype = float_dtype(op, inputs, ("x",))
    least_ndim(op, "x", x, 1)
    integer(op, attrs, "dim", 0, x.ndim - 1)
    if attrs["dtype"] != "":
        dtype = choice(op, attrs, "dtype", sorted(FLOAT_DTYPES))
    return ((dtype, x.shape),)


def _gelu(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    choice(op, attrs, "approximate", GELU_APPROXIMATIONS)
    return _silu(op, inputs, attrs)


def _silu(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    (x,) = required(inputs, 1)
    return ((float_dtype(op, inputs, ("x",)), x.shape),)


def _swiglu(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    gate, up = required(inputs, 2)
    dtype = float_dtype(op, inputs, ("gate", "up"))
    equal(op, "shape", gate=gate.shape, up=up.shape)
    return ((dtype, gate.shape),)


def _geglu(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    choice(op, attrs, "approximate", GELU_APPROXIMATIONS)
    return _swiglu(op, inputs, attrs)


def _embedding(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    ids, weight = required(inputs, 2)
    indices(op, "ids", ids, ids.ndim, INDEX_DTYPES)
    of_ndim(op, "weight", weight, 2)
    return ((weight.dtype, (*ids.shape, weight.shape[1])),)


def _tokenize(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    _texts(op, inputs, attrs, ("uint8", "uint8", "int64"))
    flag(op, attrs, "add_special_tokens")
    flag(op, attrs, "return_offsets")
    if attrs["max_length"] is not None:
        integer(op, attrs, "max_length", 0, MAX_NBYTES)
    return (("int32", (0,)), ("int64", (0,)), ("int32", (0, 2)))


def _detokenize(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    _texts(op, inputs, attrs, ("uint8", "int32", "int64"))
    flag(op, attrs, "skip_special_tokens")
    return (("uint8", (0,)), ("int64", (0,)))


def _function(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    required(inputs, 1)
    for name, spec in zip(OPS[op].inputs, inputs, strict=True):
        if spec is not None and spec != TensorSpec.contiguous("uint8", (0,)):
            refuse(op, f"{name} is {spec}", "uint8[0]: calls say how long it is")
    return (("uint8", (0,)),)


def _texts(op: str, inputs: Inputs, attrs: Attrs, dtypes: Sequence[str]) -> None:
    """As long as the bytes that each call gives: their extents are 0."""
    for name, spec, dtype in zip(OPS[op].inputs, required(inputs, 3), dtypes, strict=True):
        if spec != TensorSpec.contiguous(dtype, (0,)):
            refuse(op, f"{name} is {spec}", f"{dtype}[0]: calls say how long it is")
    for name in TOKENIZER_ATTRS:
        short_text(op, attrs, name)


_SHAPES: dict[str, Callable[[str, Inputs, Attrs], tuple[Output, ...]]] = {
    "attention": _attention,
    "attention_forward": _attention_forward,
    "attention_backward": _attention_backward,
    "attention_varlen": _attention_varlen,
    "paged_attention": _paged_attention,
    "append_kv": _append_kv,
    "rope": _rope,
    "matmul": _matmul,
    "addmm": _addmm,
    "linear": _linear,
    "gated_mlp": _gated_mlp,
    "softmax": _softmax,
    "log_softmax": _softmax,
    **NORMS,
    "gelu": _gelu,
    "silu": _silu,
    "swiglu": _swiglu,
    "geglu": _geglu,
    "reglu": _swiglu,
    **dict.fromkeys(ACTIVATIONS, _silu),
    **ELEMENTWISE,
    **QUANTIZED,
    "embedding": _embedding,
    **SAMPLING,
    "tokenize": _tokenize,
    "detokenize": _detokenize,
    "null": lambda op, inputs, attrs: (),
    "function": _function,
}
