"""Gradients of norms by torch, on every device. Used by torch_cpu.py and torch_cuda.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from layerzero.workers.provider import Call
from layerzero.workers.providers._torch_ops import Builder, Run

Gradients = Callable[[Any, Any, Any, Sequence[int], float], Sequence[Any]]
"""From grad_out and x, contiguous, weight, what is normalized over, and epsilon, to the gradients in the op's order."""


class NormGradients:
    """Two Builders. `is_gpu`: by kernels that have float32 inside of half precision, and one of RMSNorm's gradients. On
    CPUs torch keeps means, and sums over rows, in half precision: calls are widened before."""

    def __init__(self, torch: Any, *, is_gpu: bool) -> None:
        self.torch, self.aten, self.is_gpu = torch, torch.ops.aten, is_gpu

    def builders(self) -> Mapping[str, Builder]:
        rms_norm = self._fused_rms_norm if self.is_gpu else self._rms_norm
        return {"layer_norm_backward": self._build(self._layer_norm), "rms_norm_backward": self._build(rms_norm)}

    def _build(self, gradients: Gradients) -> Builder:
        def build(views: Sequence[Any], call: Call) -> Run:
            grad, x, weight = views
            shape, eps = x.shape[x.ndim - call.attrs["ndim"] :], call.attrs["eps"]
            if not x.numel():
                return _zeros

            def run(targets: Any) -> None:
                given = self._ready(weight) if weight is not None else self.torch.ones(shape, **self._kind(x))
                found = gradients(self._ready(grad), self._ready(x), given, shape, eps)
                for target, made in zip(targets, found, strict=True):
                    target.copy_(made)

            return run

        return build

    def _layer_norm(self, grad: Any, x: Any, weight: Any, shape: Sequence[int], eps: float) -> Sequence[Any]:
        n, mean, factor = self.aten.native_layer_norm(x, shape, None, None, eps)
        if self.is_gpu:
            return self._layer_norm_of(grad, x, shape, mean, factor, weight)
        # That kernel loses digits where means are large: it gets rows that are normalized already.
        by_n, *sums = self._layer_norm_of(
            grad, n, shape, self.torch.zeros_like(mean), self.torch.ones_like(factor), weight
        )
        return by_n.mul_(factor), *sums

    def _layer_norm_of(
        self, grad: Any, x: Any, shape: Sequence[int], mean: Any, factor: Any, weight: Any
    ) -> Sequence[Any]:
        """Of a bias the kernel reads that there is one."""
        found: Sequence[Any] = self.aten.native_layer_norm_backward(
            grad, x, shape, mean, factor, weight, weight, [True, True, True]
        )
        return found

    def _fused_rms_norm(self, grad: Any, x: Any, weight: Any, shape: Sequence[int], eps: float) -> Sequence[Any]:
        _, factor = self.aten._fused_rms_norm(x, shape, None, eps)
        found: Sequence[Any] = self.aten._fused_rms_norm_backward(grad, x, shape, factor, weight, [True, True])
        return found

    def _rms_norm(self, grad: Any, x: Any, weight: Any, shape: Sequence[int], eps: float) -> Sequence[Any]:
        """As it is defined (docs/ops.md), in rows."""
        columns = weight.numel()
        rows, g, w = x.view(-1, columns), grad.view(-1, columns), weight.view(columns)
        factor = self.torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
        n = rows * factor
        product = g * n
        along = self.torch.mv(product, w).div_(columns).unsqueeze(-1)
        by_x = (g * w).addcmul_(n, along, value=-1).mul_(factor)
        return by_x.view(x.shape), product.sum(0).view(weight.shape)

    def _ready(self, tensor: Any) -> Any:
        return tensor.contiguous().to(self._kind(tensor)["dtype"])

    def _kind(self, like: Any) -> dict[str, Any]:
        is_half = like.dtype in (self.torch.float16, self.torch.bfloat16)
        dtype = self.torch.float32 if is_half and not self.is_gpu else like.dtype
        return {"dtype": dtype, "device": like.device}


def _zeros(targets: Any) -> None:
    """Sums over no rows."""
    for target in targets:
        target.zero_()
