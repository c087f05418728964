"""Norms of channels by torch, on every device. Used by torch_cpu.py and torch_cuda.py.

torch's own kernels multiply x and its mean by one factor and subtract then, which loses the digits that a large mean
has: 6e-4 of a result of 1 at a mean of 10^4 and a deviation of 1 in float32 (torch 2.13). Where means are large beside
deviations they are subtracted first, which takes three times as long; on a GPU always, where nobody waits for means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from layerzero.workers.provider import Call
from layerzero.workers.providers._torch_ops import Builder, Run, in_place

LARGE = 16.0  # of a mean, in deviations


class ChannelNorms:
    """Three Builders."""

    def __init__(self, torch: Any, *, is_gpu: bool) -> None:
        self.torch, self.is_gpu = torch, is_gpu

    def builders(self) -> Mapping[str, Builder]:
        return {"group_norm": self.group_norm, "instance_norm": self.group_norm, "batch_norm": self.batch_norm}

    def group_norm(self, views: Sequence[Any], call: Call) -> Run:
        """Of instance_norm each channel is a group."""
        x, weight, bias = views
        torch, eps, groups = self.torch, call.attrs["eps"], call.attrs.get("num_groups", x.shape[1])
        activate = in_place(torch, call.attrs["activation"]) if "activation" in call.attrs else None

        def run(out: Any) -> None:
            # Of weights that have gaps it reads the gaps (torch 2.13, on the CPU).
            multiplied, added = (None if one is None else one.contiguous() for one in (weight, bias))
            if not self.is_gpu:
                extents = (x.shape[0], x.shape[1], x.numel() // (x.shape[0] * x.shape[1]), groups)
                given = (x.contiguous(), multiplied, added)
                found, mean, factor = torch.ops.aten.native_group_norm(*given, *extents, eps)
                if _are_small(mean, factor):
                    out.copy_(found if activate is None else activate(found))
                    return
            grouped = self._wide(x).reshape(x.shape[0], groups, -1)
            centred = (grouped - grouped.mean(-1, keepdim=True)).view(x.shape)
            multiplied, added = (None if one is None else self._wide(one) for one in (multiplied, added))
            found = torch.group_norm(centred, groups, multiplied, added, eps)  # nn.functional refuses one element
            out.copy_(found if activate is None else activate(found))

        return run

    def batch_norm(self, views: Sequence[Any], call: Call) -> Run:
        x, mean, var, weight, bias = views
        torch, eps = self.torch, call.attrs["eps"]
        shape = (-1, *[1] * (x.ndim - 2))  # beside channels

        def run(out: Any) -> None:
            factor = torch.rsqrt(self._wide(var) + eps)
            if not self.is_gpu and _are_small(mean, factor):
                out.copy_(torch.nn.functional.batch_norm(x, mean, var, weight, bias, eps=eps))
                return
            if weight is not None:
                factor = factor * self._wide(weight)
            scaled = torch.sub(x, self._wide(mean).view(shape)).mul_(factor.view(shape))
            out.copy_(scaled if bias is None else scaled.add_(self._wide(bias).view(shape)))

        return run

    def _wide(self, tensor: Any) -> Any:
        return tensor if tensor.dtype == self.torch.float64 else tensor.float()


def _are_small(mean: Any, factor: Any) -> bool:
    """False where one is not a number, too."""
    return bool((mean * factor).abs_().max() <= LARGE)
