"""The rules of losses, as functions.py has those of other functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from layerzero.torch import registration  # noqa: F401  # defines the ops

if TYPE_CHECKING:
    from layerzero.torch.acceleration.functions import Planned

_op = torch.ops.layerzero.cross_entropy.default
_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}  # of torch's op, by number


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Planned:
    if size_average is not None or reduce is not None:
        return "size_average or reduce, which torch has deprecated"
    if target.is_floating_point():
        return "class probabilities in place of indices"
    if target.dtype is not torch.int64:
        return "indices of classes that are not int64"
    if weight is not None and weight.requires_grad:
        return "gradients of the weights of classes"
    if input.is_cuda:
        return "cross_entropy on a GPU, where ours waits for it to check the indices"
    if reduction == "none" and not input.is_contiguous():
        return "not row-major: torch's losses have its strides, ours have not"
    return _op, (input, target, weight, ignore_index, reduction, label_smoothing)


def cross_entropy_op(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Planned:
    """That of torch's op."""
    name = _REDUCTIONS.get(reduction, "")  # another is an error, torch's and ours
    return cross_entropy(input, target, weight, None, ignore_index, None, name, label_smoothing)
