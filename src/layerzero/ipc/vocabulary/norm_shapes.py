"""The shape functions of norms and of their gradients; as ipc/vocabulary/shapes.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from layerzero.ipc.vocabulary.ops import LINEAR_ACTIVATIONS, OPS
from layerzero.ipc.vocabulary.shape_checks import (
    Attrs,
    Inputs,
    Output,
    choice,
    equal,
    float_dtype,
    integer,
    least_ndim,
    number,
    refuse,
    required,
)
from layerzero.ipc.vocabulary.tensors import TensorSpec


def _norm(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    """layer_norm and rms_norm."""
    (x,) = required(inputs, 1)
    names = OPS[op].inputs
    float_dtype(op, inputs, names)
    return _normalized(op, x, dict(zip(names[1:], inputs[1:], strict=True)), attrs)


def _normalized(op: str, x: TensorSpec, params: Mapping[str, TensorSpec | None], attrs: Attrs) -> tuple[Output, ...]:
    """The output, like x, whose last dimensions have the shape of the parameters."""
    least_ndim(op, "x", x, 1)
    shape = x.shape[x.ndim - integer(op, attrs, "ndim", 1, x.ndim) :]
    for name, spec in params.items():
        if spec is not None and spec.shape != shape:
            refuse(op, f"{name} has shape {list(spec.shape)}", f"{list(shape)}, what is normalized over")
    number(op, attrs, "eps", 0.0)
    return ((x.dtype, x.shape),)


def _add_norm(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    """As the norm, twice."""
    x, residual = required(inputs, 2)
    float_dtype(op, inputs, OPS[op].inputs)
    equal(op, "shape", x=x.shape, residual=residual.shape)
    (made,) = _normalized(op, x, {"weight": inputs[2]}, attrs)
    return made, made


def _norm_backward(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    """layer_norm_backward, with a gradient by bias, and rms_norm_backward."""
    grad_out, x = required(inputs, 2)
    weight = inputs[2]
    dtype = float_dtype(op, inputs, OPS[op].inputs)
    least_ndim(op, "x", x, 1)
    equal(op, "shape", grad_out=grad_out.shape, x=x.shape)
    shape = x.shape[x.ndim - integer(op, attrs, "ndim", 1, x.ndim) :]
    if weight is not None and weight.shape != shape:
        refuse(op, f"weight has shape {list(weight.shape)}", f"{list(shape)}, what is normalized over")
    number(op, attrs, "eps", 0.0)
    return ((dtype, x.shape), *((dtype, shape) for _ in OPS[op].outputs[1:]))


def _group_norm(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    made, channels = _channels(op, inputs, attrs, 2)
    if channels % integer(op, attrs, "num_groups", 1, max(channels, 1)):
        refuse(op, f"num_groups is {attrs['num_groups']}", f"a divisor of {channels}, the channels of x")
    if "activation" in attrs:
        choice(op, attrs, "activation", LINEAR_ACTIVATIONS)
    return made


def _instance_norm(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    return _channels(op, inputs, attrs, 3)[0]


def _batch_norm(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    required(inputs, 3)
    return _channels(op, inputs, attrs, 2)[0]


def _channels(op: str, inputs: Inputs, attrs: Attrs, least: int) -> tuple[tuple[Output, ...], int]:
    """The output, like x (N, C, ...), and C, which all other inputs have one number for."""
    (x,) = required(inputs, 1)
    names = OPS[op].inputs
    dtype = float_dtype(op, inputs, names)
    least_ndim(op, "x", x, least)
    channels = x.shape[1]
    for name, spec in zip(names[1:], inputs[1:], strict=True):
        if spec is not None and spec.shape != (channels,):
            refuse(op, f"{name} has shape {list(spec.shape)}", f"{[channels]}, x's channels")
    number(op, attrs, "eps", 0.0)
    return ((dtype, x.shape),), channels


NORMS: dict[str, Callable[[str, Inputs, Attrs], tuple[Output, ...]]] = {
    "layer_norm": _norm,
    "rms_norm": _norm,
    "add_rms_norm": _add_norm,
    "group_norm": _group_norm,
    "instance_norm": _instance_norm,
    "batch_norm": _batch_norm,
    "layer_norm_backward": _norm_backward,
    "rms_norm_backward": _norm_backward,
}
