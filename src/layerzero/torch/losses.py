"""Losses: their entries, fake functions and gradient formulas, as table.py, fakes.py and gradients.py have them of
others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import layerzero as lz
from layerzero.torch import autocasting
from layerzero.torch.gradients import Call, Gradients
from layerzero.torch.op_entry import ANY, OpEntry


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    **options: Any,
) -> Tensor:
    """lz.cross_entropy, whose settings go by name: torch has others between them."""
    settings = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    return lz.cross_entropy(input, target, weight, **settings, **options)  # type: ignore[arg-type]


def cross_entropy_fake(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    **_: Any,
) -> Tensor:
    """As `target`, or a number."""
    if input.dim() - 1 != target.dim() or target.is_floating_point():
        raise lz.InvalidArgument(
            f"cross_entropy: input has {input.dim()} dimensions and target {target.dim()} of {target.dtype}; allowed: "
            "class indices, of input's shape without its classes; check both"
        )
    return input.new_empty(target.shape if reduction == "none" else ())


def cross_entropy_gradients(grad: Tensor, call: Call) -> Gradients:
    """With p the softmax, w the weights, t the index, e the smoothing and C classes, of each prediction that counts
    p ((1 - e) w_t + e / C sum(w)) - (1 - e) w_t [c = t] - e / C w_c, times its gradient, which of a mean is divided by
    the sum of the w_t."""
    if "weight" in call.needs:
        raise lz.InvalidArgument(
            "layerzero::cross_entropy has no gradient by weight; allowed: weights that need none; pass weight.detach()"
        )
    x, target, weight = call["input"], call["target"], call["weight"]
    smoothing, reduction = call["label_smoothing"], call["reduction"]
    wide = x if x.dtype == torch.float64 else x.float()
    axis = 0 if x.dim() == 1 else 1
    chosen = target.to(torch.int64)
    counts = chosen != call["ignore_index"]
    chosen = torch.where(counts, chosen, 0)
    weights = torch.ones_like(wide.select(axis, 0).flatten()[:1]).expand(x.shape[axis]) if weight is None else weight
    weights = weights.to(wide.dtype)
    shares = torch.where(counts, weights.index_select(0, chosen.reshape(-1)).reshape(chosen.shape), 0.0)
    per = grad.to(wide.dtype).expand(target.shape)
    if reduction == "mean":
        per = per / shares.sum()
    even = smoothing / x.shape[axis]
    own = (1.0 - smoothing) * shares
    by_p = own + even * weights.sum() * counts
    found = torch.softmax(wide, axis) * (by_p * per).unsqueeze(axis)
    found = found.scatter_add(axis, chosen.unsqueeze(axis), -(own * per).unsqueeze(axis))
    if smoothing:
        beside = weights.view([-1 if dim == axis else 1 for dim in range(x.dim())])
        found = found - even * beside * (per * counts).unsqueeze(axis)
    # Where nothing counts a mean is NaN, and so is its gradient by what counts: none. Others have none of it.
    return {"input": torch.where(counts.unsqueeze(axis), found, 0.0).to(x.dtype)}


ENTRIES = (
    OpEntry(
        "cross_entropy",
        "Tensor input, Tensor target, Tensor? weight=None, int ignore_index=-100, "
        'str reduction="mean", float label_smoothing=0.0',
        cross_entropy_fake,
        cross_entropy_gradients,
        {"input": ANY, "target": ANY, "weight": ANY},
        autocasting.always_single,
        runs=cross_entropy,
    ),
)
