"""The gradients of norms, for programs that need them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from layerzero.client.arrays.array_types import ArrayT
from layerzero.client.connection.call import Request
from layerzero.client.facade.ops import extents_of
from layerzero.client.facade.running import perform
from layerzero.client.planning import plans
from layerzero.ipc.vocabulary.tensors import TensorSpec

if TYPE_CHECKING:
    from layerzero.client.arrays.array_types import AnyArray


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
