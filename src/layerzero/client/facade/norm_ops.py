"""Norms of channels, and the gradients of norms of the last dimensions, which are in ops.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from layerzero.client.arrays.array_types import ArrayT
from layerzero.client.connection.call import Request
from layerzero.client.facade.ops import extents_of
from layerzero.client.facade.running import perform
from layerzero.client.planning import norm_plans, plans
from layerzero.ipc.vocabulary.tensors import TensorSpec

if TYPE_CHECKING:
    from layerzero.client.arrays.array_types import AnyArray


def add_rms_norm(
    input: ArrayT,
    residual: AnyArray,
    normalized_shape: int | Sequence[int],
    weight: AnyArray | None = None,
    eps: float | None = None,
    *,
    out: tuple[ArrayT, ArrayT] | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> tuple[ArrayT, ArrayT]:
    """rms_norm of input + residual, and that sum: (out, summed), of the shape and dtype of input.

    input, residual: (..., *normalized_shape), one shape and float dtype. normalized_shape, weight, eps: as rms_norm.
    Half precision is computed in float32; out is the norm of the sum before or after that is rounded to its dtype, as
    the kernel has it. out=(a, b) writes the norm to a and the sum to b, which may be input and residual: the call then
    works on memory of its own and its results are copied, as the report says. Raises InvalidArgument.
    Source: rms_norm's; as fused_add_rms_norm of vLLM and FlashInfer.
    """
    params = {"normalized_shape": extents_of(normalized_shape), "eps": eps}
    planner = norm_plans.plan_add_rms_norm
    return perform(Request("add_rms_norm", (input, residual, weight), params, planner, out, backend, timeout_s))


def group_norm(
    input: ArrayT,
    num_groups: int,
    weight: AnyArray | None = None,
    bias: AnyArray | None = None,
    eps: float = 1e-5,
    activation: str | None = None,
    *,
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """(x - mean) / sqrt(var + eps) * weight + bias, with a mean and a variance of each sample and group of channels.

    input: (batch, channels, ...), any float dtype. num_groups: a divisor of channels; a group is of channels that
    follow each other, with all that belongs to them. weight, bias: (channels), of the dtype of input. var is the biased
    variance. activation: of that, "relu", "gelu" (by erf), "gelu_tanh" or "silu"; None for none. Half precision is
    computed in float32. Returns an array like input. Raises InvalidArgument.
    Source: Wu and He 2018, eq. 1 to 7; torch.nn.functional.group_norm.
    """
    params = {"num_groups": num_groups, "eps": eps, "activation": activation}
    planner = norm_plans.plan_group_norm
    return perform(Request("group_norm", (input, weight, bias), params, planner, out, backend, timeout_s))


def instance_norm(
    input: ArrayT,
    *,
    weight: AnyArray | None = None,
    bias: AnyArray | None = None,
    eps: float = 1e-5,
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """group_norm with a group for each channel: a mean and a variance of each sample and channel.

    input: (batch, channels, length, ...), any float dtype. weight, bias: (channels), of that dtype; by name alone,
    since torch has running statistics in their place: batch_norm takes those. Returns an array like input. Raises
    InvalidArgument. Source: Ulyanov, Vedaldi and Lempitsky 2016, eq. 2; torch.nn.functional.instance_norm.
    """
    planner = norm_plans.plan_instance_norm
    return perform(Request("instance_norm", (input, weight, bias), {"eps": eps}, planner, out, backend, timeout_s))


def batch_norm(
    input: ArrayT,
    running_mean: AnyArray,
    running_var: AnyArray,
    weight: AnyArray | None = None,
    bias: AnyArray | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """(x - running_mean) / sqrt(running_var + eps) * weight + bias of each channel, as a trained model computes it.

    input: (batch, channels, ...), any float dtype; all other arrays (channels), of that dtype. training must be False:
    no statistics are taken of input, and none are changed; momentum, which torch has for that, does nothing. Half
    precision is computed in float32. Returns an array like input. Raises InvalidArgument.
    Source: Ioffe and Szegedy 2015, algorithm 2, line 11; torch.nn.functional.batch_norm.
    """
    params = {"training": training, "momentum": momentum, "eps": eps}
    args = (input, running_mean, running_var, weight, bias)
    return perform(Request("batch_norm", args, params, norm_plans.plan_batch_norm, out, backend, timeout_s))


def layer_norm_backward(
    grad_out: ArrayT,
    input: AnyArray,
    normalized_shape: int | Sequence[int],
    weight: AnyArray | None = None,
    eps: float = 1e-5,
    *,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> tuple[ArrayT, ArrayT, ArrayT]:
    """The gradients of layer_norm by input, weight and bias: (grad_input, grad_weight, grad_bias), of one dtype.

    grad_out: the gradient by the norm's result, of its shape and dtype. input, normalized_shape, weight, eps: as there;
    a bias changes no gradient. grad_input has the shape of input, the others have normalized_shape; without a weight
    grad_weight is that of a weight of ones. With r = 1 / sqrt(var + eps), n = (input - mean) r, g = grad_out weight:
    grad_input = r (g - mean(g) - n mean(g n)), and over all rows grad_weight = sum(grad_out n), grad_bias =
    sum(grad_out). Half precision is summed in float32. Raises InvalidArgument.
    """
    params = {"normalized_shape": extents_of(normalized_shape), "eps": eps}
    args = (grad_out, input, weight)
    return perform(Request("layer_norm_backward", args, params, _plan_layer_norm, None, backend, timeout_s))


def rms_norm_backward(
    grad_out: ArrayT,
    input: AnyArray,
    normalized_shape: int | Sequence[int],
    weight: AnyArray | None = None,
    eps: float | None = None,
    *,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> tuple[ArrayT, ArrayT]:
    """The gradients of rms_norm by input and weight: (grad_input, grad_weight), of one dtype.

    Arguments as layer_norm_backward, eps as rms_norm. With r = 1 / sqrt(mean(input^2) + eps), n = input r, g = grad_out
    weight: grad_input = r (g - n mean(g n)), grad_weight = sum(grad_out n) over all rows. Raises InvalidArgument.
    """
    params = {"normalized_shape": extents_of(normalized_shape), "eps": eps}
    args = (grad_out, input, weight)
    return perform(Request("rms_norm_backward", args, params, _plan_rms_norm, None, backend, timeout_s))


def _plan_layer_norm(
    grad: TensorSpec, x: TensorSpec, w: TensorSpec | None, *, normalized_shape: Any, eps: float
) -> plans.Plan:
    return plans.plan_layer_norm_backward(grad, x, normalized_shape, w, eps)


def _plan_rms_norm(
    grad: TensorSpec, x: TensorSpec, w: TensorSpec | None, *, normalized_shape: Any, eps: float | None
) -> plans.Plan:
    return plans.plan_rms_norm_backward(grad, x, normalized_shape, w, eps)
