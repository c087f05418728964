"""Losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerzero.client.arrays.array_types import ArrayT
from layerzero.client.connection.call import Request
from layerzero.client.facade.running import perform
from layerzero.client.planning import loss_plans

if TYPE_CHECKING:
    from layerzero.client.arrays.array_types import AnyArray


def cross_entropy(
    input: ArrayT,
    target: AnyArray,
    weight: AnyArray | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """Minus the logarithm of the softmax of input over its classes, at the class that target names.

    input: (classes), (batch, classes) or (batch, classes, ...), any float dtype. target: int32 or int64 indices of
    classes, of that shape without classes; where it is ignore_index the loss is 0 and does not count. weight: (classes)
    of the dtype of input, what a loss of each class is multiplied by. label_smoothing: the share, from 0 to 1, of the
    loss that all classes have evenly. reduction: "none" gives a loss for each index, "sum" their sum, "mean" that
    divided by the sum of the weights that count: NaN where none does. Half precision is computed in float32.
    Returns an array of the dtype of input. Raises InvalidArgument, also of an index of no class.
    Source: torch.nn.functional.cross_entropy; Szegedy et al. 2016, section 7 (smoothing).
    """
    params = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    planner = loss_plans.plan_cross_entropy
    return perform(Request("cross_entropy", (input, target, weight), params, planner, out, backend, timeout_s))
