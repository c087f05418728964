"""Losses by torch's arithmetic, in float32 for half precision. Used by torch_cpu.py and torch_cuda.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from layerzero.workers.provider import Call
from layerzero.workers.providers._losses import check_classes
from layerzero.workers.providers._torch_ops import Builder, Run


class Losses:
    """One method per op, each a Builder."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch

    def builders(self) -> Mapping[str, Builder]:
        return {"cross_entropy": self.cross_entropy}

    def cross_entropy(self, views: Sequence[Any], call: Call) -> Run:
        """Not by torch's own nll_loss, whose sum is in any order on a GPU, where a bad index ends the process. Reads
        the range of the indices on the host: on a GPU it waits for them."""
        torch, (x, target, weight), attrs = self.torch, views, call.attrs
        classes, smoothing, reduction = x.shape[1], attrs["label_smoothing"], attrs["reduction"]
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32

        def run(out: Any) -> None:
            chosen = target.to(torch.int64, copy=True)  # the caller can write to its own while they are used
            counts = chosen != attrs["ignore_index"]
            chosen = torch.where(counts, chosen, 0)
            if chosen.numel():
                low, high = (int(bound) for bound in torch.aminmax(chosen))
                check_classes(call.op, low, high, classes)
            scores = torch.log_softmax(x.to(wide), 1)
            losses = -scores.gather(1, chosen.unsqueeze(1)).squeeze(1)
            shares = torch.ones_like(losses)
            if weight is not None:
                weights = weight.to(wide)
                shares = weights[chosen]
                losses = losses * shares
                scores = scores * weights.view(-1, *[1] * (x.dim() - 2))
            if smoothing:
                losses = (1.0 - smoothing) * losses - smoothing / classes * scores.sum(1)
            losses = torch.where(counts, losses, 0.0)
            if reduction == "mean":
                losses = losses.sum() / torch.where(counts, shares, 0.0).sum()
            elif reduction == "sum":
                losses = losses.sum()
            out.copy_(losses)

        return run
