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

from layerzero.ipc.vocabulary.attention_shapes import ATTENTION
from layerzero.ipc.vocabulary.elementwise_shapes import ELEMENTWISE
from layerzero.ipc.vocabulary.expert_shapes import EXPERTS
from layerzero.ipc.vocabulary.loss_shapes import LOSSES
from layerzero.ipc.vocabulary.norm_shapes import NORMS
from layerzero.ipc.vocabulary.ops import ACTIVATIONS, FUNCTION_ON_GPU, LINEAR_ACTIVATIONS, OPS, TOKENIZER_ATTRS
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
from layerzero.ipc.vocabulary.tensors import FLOAT_DTYPES, ITEMSIZE, MAX_NBYTES, MAX_NDIM, NARROW_DTYPES, TensorSpec
from layerzero.ipc.vocabulary.vision_shapes import VISION

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


def _rope(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    x, cos, sin = required(inputs, 3)
    float_dtype(op, (x, cos, sin), ("x", "cos", "sin"))
    of_ndim(op, "x", x, 4)
    return _rotated(op, "x", x, cos, sin, attrs)


def _rotated(op: str, name: str, x: TensorSpec, cos: TensorSpec, sin: TensorSpec, attrs: Attrs) -> tuple[Output, ...]:
    of_ndim(op, "cos", cos, 3)
    equal(op, "shape", cos=cos.shape, sin=sin.shape)
    if cos.shape[0] not in (1, x.shape[0]) or cos.shape[1] != x.shape[1]:
        refuse(op, f"cos has shape {list(cos.shape)}", f"(1 or {x.shape[0]}, {x.shape[1]}, pairs)")
    if not 2 <= 2 * cos.shape[2] <= x.shape[3]:
        refuse(op, f"cos has {cos.shape[2]} columns and {name} a head_dim of {x.shape[3]}", "1 to half of it")
    flag(op, attrs, "interleaved")
    return ((x.dtype, x.shape),)


def _rope_qk(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    """As rope, twice; q and k differ in their heads alone."""
    q, k, cos, sin = required(inputs, 4)
    dtype = float_dtype(op, (q, k, cos, sin), ("q", "k", "cos", "sin"))
    for name, spec in (("q", q), ("k", k)):
        of_ndim(op, name, spec, 4)
    (of_q,) = _rotated(op, "q", q, cos, sin, attrs)
    equal(op, "batch, sequence and head_dim", q=_but_heads(q), k=_but_heads(k))
    return of_q, (dtype, k.shape)


def _but_heads(x: TensorSpec) -> tuple[int, ...]:
    return (*x.shape[:2], x.shape[3])


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
    if dtype in NARROW_DTYPES:
        refuse(op, f"{names[0]} is {dtype}", "floats and integers; scaled_linear takes it, with its scales")
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


def _function_on_gpu(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    required(inputs, 1)
    dtype, *extents = str(attrs["result"]).split(" ")
    if dtype not in ITEMSIZE or not all(one.isdecimal() and one.isascii() and len(one) < 20 for one in extents):
        refuse(op, f"result is {attrs['result']!r:.80}", "a dtype and extents, such as 'float32 2 3'")
    return ((dtype, tuple(map(int, extents))),)


_SHAPES: dict[str, Callable[[str, Inputs, Attrs], tuple[Output, ...]]] = {
    **ATTENTION,
    "rope": _rope,
    "rope_qk": _rope_qk,
    "matmul": _matmul,
    "addmm": _addmm,
    "linear": _linear,
    "gated_mlp": _gated_mlp,
    "softmax": _softmax,
    "log_softmax": _softmax,
    **EXPERTS,
    **LOSSES,
    **NORMS,
    "gelu": _gelu,
    "silu": _silu,
    "swiglu": _swiglu,
    "geglu": _geglu,
    "reglu": _swiglu,
    **dict.fromkeys(ACTIVATIONS, _silu),
    **ELEMENTWISE,
    **VISION,
    **QUANTIZED,
    "embedding": _embedding,
    **SAMPLING,
    "tokenize": _tokenize,
    "detokenize": _detokenize,
    "null": lambda op, inputs, attrs: (),
    "function": _function,
    FUNCTION_ON_GPU: _function_on_gpu,
}
