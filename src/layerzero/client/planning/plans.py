"""From the arguments of a public op to its canonical call: checks, views and output shapes. Pure; no memory is touched.

The rules and formulas are in docs/ops.md. Plans are remembered by their arguments: the functions run on every call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, TypeVar

from layerzero.client.planning.checks import (
    Shape,
    broadcast,
    choice,
    epsilon,
    extents,
    floating,
    fresh,
    normalized,
    refuse,
    same_dtype,
    same_float_dtype,
)
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.ops import LINEAR_ACTIVATIONS, OPS
from layerzero.ipc.vocabulary.shapes import GELU_APPROXIMATIONS, INDEX_DTYPES, overlaps
from layerzero.ipc.vocabulary.tensors import FLOAT_DTYPES, TensorSpec, contiguous_strides

Scalar = str | int | float | bool | None

# torch.finfo(t).eps of the type t that torch computes in: float32 for the half types.
RMS_EPS = {"float16": 2.0**-23, "bfloat16": 2.0**-23, "float32": 2.0**-23, "float64": 2.0**-52}
BSHD_AXES = (0, 2, 1, 3)  # from BSHD to BHSD, and back
_REMEMBERED = 4096


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Plan:
    """One call in canonical form (ipc/vocabulary/ops.py). Compared and hashed by identity; equal arguments give the
    same plan while it is remembered.

    `inputs` are views of the arguments' memory: the first element is where the caller's is. A result lies
    row-major in fresh memory: `results` is the caller's view of it, `outputs` the worker's. Outputs that are inputs as
    well (ipc/vocabulary/ops.py) have the inputs' specs, and no result.
    """

    op: str
    inputs: tuple[TensorSpec | None, ...]
    attrs: dict[str, Scalar]
    outputs: tuple[TensorSpec, ...]
    results: tuple[TensorSpec, ...]


_F = TypeVar("_F", bound=Callable[..., Plan])


def remember(plan: _F) -> _F:
    # typed: True, 1 and 1.0 are equal, but not all of them are allowed everywhere
    remembered = functools.lru_cache(maxsize=_REMEMBERED, typed=True)(plan)

    @functools.wraps(plan)
    def planned(*args: Any, **kwargs: Any) -> Plan:
        try:
            return remembered(*args, **kwargs)
        except TypeError:  # an argument that cannot be hashed, such as a list: the plan's own check names it
            return plan(*args, **kwargs)

    return planned  # type: ignore[return-value]


@remember
def plan_matmul(a: TensorSpec, b: TensorSpec) -> Plan:
    """torch.matmul, 1-D arguments included."""
    op = "matmul"
    same_dtype(op, a=a, b=b)
    if a.dtype == "bool":
        refuse(op, "a is bool", "numbers", "convert it to an integer or float dtype")
    if not a.ndim or not b.ndim:
        refuse(op, f"a has {a.ndim} dimensions and b {b.ndim}", "at least 1 each", "multiply scalars with *")
    a2 = a.unsqueeze(0) if a.ndim == 1 else a
    b2 = b.unsqueeze(1) if b.ndim == 1 else b
    if a2.shape[-1] != b2.shape[-2]:
        refuse(
            op,
            f"a has shape {list(a.shape)} and b {list(b.shape)}",
            f"a's last dimension ({a2.shape[-1]}) equal to b's {'second to last' if b.ndim > 1 else 'only'} "
            f"({b2.shape[-2]})",
            "transpose one of them",
        )
    batch = broadcast(op, a2.shape[:-2], b2.shape[:-2])
    rows, columns = a2.shape[-2:-1], b2.shape[-1:]
    result = fresh(op, a.dtype, batch + (rows if a.ndim > 1 else ()) + (columns if b.ndim > 1 else ()))
    return Plan(op, (a2, b2), {}, (TensorSpec.contiguous(a.dtype, batch + rows + columns),), (result,))


@remember
def plan_linear(
    x: TensorSpec, weight: TensorSpec, bias: TensorSpec | None = None, activation: str | None = None
) -> Plan:
    """torch.nn.functional.linear, x @ weight.T + bias, and the activation of that."""
    op = "linear"
    same_dtype(op, x=x, weight=weight, bias=bias)
    if x.dtype == "bool":
        refuse(op, "x is bool", "numbers", "convert it to an integer or float dtype")
    if x.ndim == 0:
        refuse(op, "x has no dimensions", "(..., in_features)", "unsqueeze it")
    if weight.ndim not in (1, 2):
        refuse(
            op, f"weight has shape {list(weight.shape)}", "(out_features, in_features) or (in_features,)", "reshape it"
        )
    weight2 = weight.unsqueeze(0) if weight.ndim == 1 else weight
    if weight2.shape[1] != x.shape[-1]:
        refuse(
            op,
            f"x has shape {list(x.shape)} and weight {list(weight.shape)}",
            f"{x.shape[-1]} in_features in both last dimensions",
            "pass the weight as (out_features, in_features)",
        )
    out_features = weight.shape[:-1]  # () for a vector
    if bias is not None and bias.shape != out_features:
        refuse(op, f"bias has shape {list(bias.shape)}", f"{list(out_features)}, weight's out_features", "reshape it")
    if activation is not None:
        choice(op, "activation", activation, LINEAR_ACTIVATIONS)
        floating(op, "x", x)
    if bias is not None and bias.ndim == 0:
        bias = bias.unsqueeze(0)
    x2 = x.unsqueeze(0) if x.ndim == 1 else x
    output = TensorSpec.contiguous(x.dtype, (*x2.shape[:-1], weight2.shape[0]))
    attrs: dict[str, Scalar] = {"activation": activation or ""}
    return Plan(op, (x2, weight2, bias), attrs, (output,), (fresh(op, x.dtype, x.shape[:-1] + out_features),))


@remember
def plan_softmax(x: TensorSpec, dim: int, dtype: str | None = None) -> Plan:
    """torch.nn.functional.softmax; `dim` is required."""
    return _over("softmax", x, dim, dtype)


@remember
def plan_log_softmax(x: TensorSpec, dim: int, dtype: str | None = None) -> Plan:
    """torch.nn.functional.log_softmax; `dim` is required."""
    return _over("log_softmax", x, dim, dtype)


def _over(op: str, x: TensorSpec, dim: int, dtype: str | None) -> Plan:
    """Along one dimension, in `dtype`."""
    floating(op, "x", x)
    if isinstance(dim, bool) or not isinstance(dim, Integral):
        refuse(op, f"dim is {dim!r}", "an integer", "pass dim=-1 for the last dimension")
    ndim = max(x.ndim, 1)  # a scalar counts as a vector of one
    if not -ndim <= dim < ndim:
        refuse(op, f"dim is {dim} for shape {list(x.shape)}", f"{-ndim} to {ndim - 1}", "pass one of them")
    if dtype is not None:
        choice(op, "dtype", dtype, tuple(sorted(FLOAT_DTYPES)))
    x1, to = x if x.ndim else x.unsqueeze(0), dtype or x.dtype
    attrs: dict[str, Scalar] = {"dim": int(dim) % ndim, "dtype": "" if to == x.dtype else to}
    return Plan(op, (x1,), attrs, (TensorSpec.contiguous(to, x1.shape),), (fresh(op, to, x.shape),))


def plan_layer_norm(
    x: TensorSpec,
    normalized_shape: Sequence[int],
    weight: TensorSpec | None = None,
    bias: TensorSpec | None = None,
    eps: float = 1e-5,
) -> Plan:
    """torch.nn.functional.layer_norm."""
    return _plan_layer_norm(x, extents("layer_norm", normalized_shape), weight, bias, eps)


@remember
def _plan_layer_norm(
    x: TensorSpec, shape: Shape, weight: TensorSpec | None, bias: TensorSpec | None, eps: float
) -> Plan:
    op = "layer_norm"
    same_float_dtype(op, x=x, weight=weight, bias=bias)
    ndim = normalized(op, x, shape, weight=weight, bias=bias)
    attrs: dict[str, Scalar] = {"ndim": ndim, "eps": epsilon(op, eps)}
    return same_shape(op, (x, weight, bias), attrs)


def plan_rms_norm(
    x: TensorSpec,
    normalized_shape: Sequence[int],
    weight: TensorSpec | None = None,
    eps: float | None = None,
) -> Plan:
    """torch.nn.functional.rms_norm."""
    return _plan_rms_norm(x, extents("rms_norm", normalized_shape), weight, eps)


@remember
def _plan_rms_norm(x: TensorSpec, shape: Shape, weight: TensorSpec | None, eps: float | None) -> Plan:
    op = "rms_norm"
    same_float_dtype(op, x=x, weight=weight)
    ndim = normalized(op, x, shape, weight=weight)
    attrs: dict[str, Scalar] = {"ndim": ndim, "eps": RMS_EPS[x.dtype] if eps is None else epsilon(op, eps)}
    return same_shape(op, (x, weight), attrs)


def plan_layer_norm_backward(
    grad_out: TensorSpec,
    x: TensorSpec,
    normalized_shape: Sequence[int],
    weight: TensorSpec | None = None,
    eps: float = 1e-5,
) -> Plan:
    """The gradients of layer_norm by x, weight and bias."""
    op = "layer_norm_backward"
    return _plan_norm_backward(op, grad_out, x, extents(op, normalized_shape), weight, eps)


def plan_rms_norm_backward(
    grad_out: TensorSpec,
    x: TensorSpec,
    normalized_shape: Sequence[int],
    weight: TensorSpec | None = None,
    eps: float | None = None,
) -> Plan:
    """The gradients of rms_norm by x and weight."""
    op = "rms_norm_backward"
    return _plan_norm_backward(op, grad_out, x, extents(op, normalized_shape), weight, eps)


@remember
def _plan_norm_backward(
    op: str, grad_out: TensorSpec, x: TensorSpec, shape: Shape, weight: TensorSpec | None, eps: float | None
) -> Plan:
    same_float_dtype(op, grad_out=grad_out, x=x, weight=weight)
    ndim = normalized(op, x, shape, weight=weight)
    if grad_out.shape != x.shape:
        refuse(
            op, f"grad_out has shape {list(grad_out.shape)}", f"{list(x.shape)}, that of the result", "pass all of it"
        )
    if eps is None and op == "rms_norm_backward":
        eps = RMS_EPS[x.dtype]
    attrs: dict[str, Scalar] = {"ndim": ndim, "eps": epsilon(op, eps)}
    shapes = (x.shape, *(shape for _ in OPS[op].outputs[1:]))
    outputs = tuple(TensorSpec.contiguous(x.dtype, one) for one in shapes)
    return Plan(op, (grad_out, x, weight), attrs, outputs, tuple(fresh(op, x.dtype, one) for one in shapes))


@remember
def plan_gelu(x: TensorSpec, approximate: str = "none") -> Plan:
    """torch.nn.functional.gelu."""
    floating("gelu", "x", x)
    choice("gelu", "approximate", approximate, GELU_APPROXIMATIONS)
    return same_shape("gelu", (x,), {"approximate": approximate})


@remember
def plan_silu(x: TensorSpec) -> Plan:
    """torch.nn.functional.silu."""
    floating("silu", "x", x)
    return same_shape("silu", (x,), {})


@remember
def plan_embedding(ids: TensorSpec, weight: TensorSpec) -> Plan:
    """torch.nn.functional.embedding without its training arguments."""
    op = "embedding"
    if ids.dtype not in INDEX_DTYPES:
        refuse(op, f"ids is {ids.dtype}", " or ".join(INDEX_DTYPES), "convert it to int64")
    if weight.ndim != 2:
        refuse(op, f"weight has shape {list(weight.shape)}", "(rows, features)", "reshape it to 2 dimensions")
    result = fresh(op, weight.dtype, (*ids.shape, weight.shape[1]))
    return Plan(op, (ids, weight), {}, (result,), (result,))


@remember
def plan_null() -> Plan:
    """An op without arguments and effect: measures dispatch."""
    return Plan("null", (), {}, (), ())


@functools.lru_cache(maxsize=_REMEMBERED)
def plan_out(plan: Plan, *outs: TensorSpec) -> Plan:
    """The plan that writes its results into the caller's `outs`, as many, which may be strided but must not overlap
    themselves."""
    if len(plan.results) != len(outs):
        found = f"{len(plan.results)} results and out= {len(outs)} arrays"
        raise InvalidArgument(f"{plan.op} has {found}; pass one for each")
    views = []
    for name, out, wanted, output in zip(OPS[plan.op].outputs, outs, plan.results, plan.outputs, strict=True):
        if (out.dtype, out.shape) != (wanted.dtype, wanted.shape):
            refuse(plan.op, f"{name} is {out}", str(wanted), "pass an out of this dtype and shape; it is never resized")
        refuse_overlapping(plan.op, name, out)
        is_permuted = plan.attrs.get("layout") == "BSHD"
        views.append(out.permute(*BSHD_AXES) if is_permuted else _padded(out, output.shape))
    return replace(plan, outputs=tuple(views), results=outs)


def _padded(spec: TensorSpec, shape: Shape) -> TensorSpec:
    """The view of `spec` in `shape`, which has the same extents and more of 1 among them."""
    kept = iter([s for n, s in zip(spec.shape, spec.strides, strict=True) if n != 1])
    plain = contiguous_strides(shape)  # of an extent of 1: any stride will do
    return TensorSpec(spec.dtype, shape, tuple(next(kept) if n != 1 else s for n, s in zip(shape, plain, strict=True)))


def refuse_overlapping(op: str, name: str, spec: TensorSpec) -> None:
    """For what is written: an element must not share memory with another."""
    if overlaps(spec):
        refuse(
            op,
            f"{name} has shape {list(spec.shape)} and strides {list(spec.strides)}, so elements share memory",
            "one place per element",
            "pass a tensor that was not expanded",
        )


def same_shape(op: str, inputs: tuple[TensorSpec | None, ...], attrs: dict[str, Scalar]) -> Plan:
    x = inputs[0]
    assert x is not None
    result = fresh(op, x.dtype, x.shape)
    return Plan(op, inputs, attrs, (result,), (result,))
