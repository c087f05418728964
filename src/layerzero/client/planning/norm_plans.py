"""Plans of norms of channels, and of a norm of a sum. As client/planning/plans.py, whose rules hold here too."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

from layerzero.client.planning.checks import (
    Shape,
    choice,
    epsilon,
    extents,
    flag,
    fresh,
    normalized,
    number,
    refuse,
    same_float_dtype,
)
from layerzero.client.planning.plans import RMS_EPS, Plan, Scalar, remember, same_shape
from layerzero.ipc.vocabulary.ops import LINEAR_ACTIVATIONS
from layerzero.ipc.vocabulary.tensors import TensorSpec


def plan_add_rms_norm(
    x: TensorSpec,
    residual: TensorSpec,
    weight: TensorSpec | None = None,
    *,
    normalized_shape: Sequence[int],
    eps: float | None = None,
) -> Plan:
    """rms_norm of x + residual, and that sum."""
    return _plan_add_rms_norm(x, residual, weight, extents("add_rms_norm", normalized_shape), eps)


@remember
def _plan_add_rms_norm(
    x: TensorSpec, residual: TensorSpec, weight: TensorSpec | None, shape: Shape, eps: float | None
) -> Plan:
    op = "add_rms_norm"
    same_float_dtype(op, x=x, residual=residual, weight=weight)
    if residual.shape != x.shape:
        found = f"x has shape {list(x.shape)} and residual {list(residual.shape)}"
        refuse(op, found, "equal shapes", "expand the smaller")
    ndim = normalized(op, x, shape, weight=weight)
    attrs: dict[str, Scalar] = {"ndim": ndim, "eps": RMS_EPS[x.dtype] if eps is None else epsilon(op, eps)}
    results = (fresh(op, x.dtype, x.shape),) * 2
    return Plan(op, (x, residual, weight), attrs, results, results)


@remember
def plan_group_norm(
    x: TensorSpec,
    weight: TensorSpec | None = None,
    bias: TensorSpec | None = None,
    *,
    num_groups: int,
    eps: float = 1e-5,
    activation: str | None = None,
) -> Plan:
    """torch.nn.functional.group_norm, and the activation of that."""
    op = "group_norm"
    same_float_dtype(op, x=x, weight=weight, bias=bias)
    channels = _channels(op, x, 2, weight=weight, bias=bias)
    if isinstance(num_groups, bool) or not isinstance(num_groups, Integral) or num_groups < 1 or channels % num_groups:
        refuse(
            op, f"num_groups is {num_groups!r} for {channels} channels", "a divisor of x's channels", "pass one of them"
        )
    if num_groups > max(channels, 1):
        refuse(op, f"num_groups is {num_groups} and x has no channels", "1", "pass 1")
    attrs: dict[str, Scalar] = {"num_groups": int(num_groups), "eps": epsilon(op, eps)}
    if activation is not None:
        choice(op, "activation", activation, LINEAR_ACTIVATIONS)
        attrs["activation"] = activation
    return same_shape(op, (x, weight, bias), attrs)


@remember
def plan_instance_norm(
    x: TensorSpec, weight: TensorSpec | None = None, bias: TensorSpec | None = None, *, eps: float = 1e-5
) -> Plan:
    """torch.nn.functional.instance_norm of input statistics."""
    op = "instance_norm"
    same_float_dtype(op, x=x, weight=weight, bias=bias)
    _channels(op, x, 3, weight=weight, bias=bias)
    return same_shape(op, (x, weight, bias), {"eps": epsilon(op, eps)})


@remember
def plan_batch_norm(
    x: TensorSpec,
    running_mean: TensorSpec,
    running_var: TensorSpec,
    weight: TensorSpec | None = None,
    bias: TensorSpec | None = None,
    *,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Plan:
    """torch.nn.functional.batch_norm of a trained model."""
    op = "batch_norm"
    if flag(op, "training", training):
        refuse(op, "training is True", "False: kernels change no running statistics", "call torch.nn.functional's")
    number(op, "momentum", momentum)
    params = {"running_mean": running_mean, "running_var": running_var, "weight": weight, "bias": bias}
    same_float_dtype(op, x=x, **params)
    _channels(op, x, 2, **params)
    return same_shape(op, (x, *params.values()), {"eps": epsilon(op, eps)})


def _channels(op: str, x: TensorSpec, least: int, **params: TensorSpec | None) -> int:
    """How many channels x has, checked against the parameters, which have one number for each."""
    if x.ndim < least:
        allowed = "(batch, channels, ...)" if least == 2 else "(batch, channels, length, ...)"
        refuse(op, f"x has shape {list(x.shape)}", allowed, "unsqueeze it")
    channels = x.shape[1]
    for name, spec in params.items():
        if spec is not None and spec.shape != (channels,):
            refuse(op, f"{name} has shape {list(spec.shape)}", f"[{channels}], one for each channel of x", "reshape it")
    return channels
