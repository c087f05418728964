"""Attention with the log-sum-exp of its rows, and its backward pass, by torch's flash attention for CPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from layerzero.workers.provider import Call
from layerzero.workers.providers._torch_ops import Run


class FlashAttention:
    """Two Builders. The kernels are aten::_scaled_dot_product_flash_attention_for_cpu and its backward, which torch's
    own autograd calls; both read grouped heads as ours, and align the causal rule top left."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self._forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        self._backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def forward(self, views: Sequence[Any], call: Call) -> Run:
        """Targets: out and lse."""
        q, k, v, mask = views
        width, scale = max(q.shape[3], v.shape[3]), call.attrs["scale"]
        is_empty = not (q.shape[0] * q.shape[1] * q.shape[2] and k.shape[2] and width)

        def run(targets: Any) -> None:
            out, lse = targets
            if is_empty:
                out.zero_()
                lse.fill_(-math.inf if k.shape[2] == 0 else math.log(k.shape[2]))
                return
            is_causal, bias = self._rule(q, k, mask, call)
            found, rows = self._forward(
                *(self._wide(tensor, width) for tensor in (q, k, v)), 0.0, is_causal, attn_mask=bias, scale=scale
            )
            out.copy_(found[..., : out.shape[3]])
            lse.copy_(rows)
            if bias is not None:  # the kernel gives 0 for a row that sees nothing
                lse.masked_fill_(~(bias > -math.inf).any(-1), -math.inf)

        return run

    def backward(self, views: Sequence[Any], call: Call) -> Run:
        """Targets: the gradients of q, k and v. In float64 forward runs again, for a log-sum-exp of that precision."""
        torch, (grad_out, q, k, v, output, lse, mask) = self.torch, views
        width, scale = max(q.shape[3], v.shape[3]), call.attrs["scale"]
        is_empty = not (q.shape[0] * q.shape[1] * q.shape[2] and k.shape[2] and width)

        def run(targets: Any) -> None:
            if is_empty:
                for target in targets:
                    target.zero_()
                return
            is_causal, bias = self._rule(q, k, mask, call)
            inputs = [self._wide(tensor, width) for tensor in (q, k, v)]
            if q.dtype == torch.float64:
                out, rows = self._forward(*inputs, 0.0, is_causal, attn_mask=bias, scale=scale)
            else:
                out, rows = self._wide(output, width), lse
            rows = rows.masked_fill(rows == -math.inf, 0.0)  # the weights there are exp(-inf - 0) = 0
            grad = self._wide(grad_out, width)
            found = self._backward(grad, *inputs, out, rows, 0.0, is_causal, attn_mask=bias, scale=scale)
            for target, made in zip(targets, found, strict=True):
                target.copy_(made[..., : target.shape[3]])

        return run

    def _wide(self, tensor: Any, width: int) -> Any:
        """As the kernels load it: one head_dim for all, since zeros that are added to it change nothing, rows without
        gaps, none of which overlap."""
        if tensor.shape[3] < width:
            return self.torch.nn.functional.pad(tensor, (0, width - tensor.shape[3]))
        is_plain = tensor.stride(3) == 1 and (tensor.shape[2] == 1 or tensor.stride(2) >= width)
        return tensor if is_plain else tensor.clone(memory_format=self.torch.contiguous_format)

    def _rule(self, q: Any, k: Any, mask: Any, call: Call) -> tuple[bool, Any]:
        """Whether the kernel applies its own causal rule, and the mask that it adds, dense in its last two
        dimensions."""
        torch, (queries, keys) = self.torch, (q.shape[2], k.shape[2])
        is_causal = call.attrs["is_causal"]
        if is_causal and queries != keys and call.attrs["causal_alignment"] == "bottom_right":
            mask = torch.ones(1, 1, queries, keys, dtype=torch.bool).tril_(keys - queries)
            is_causal = False
        if mask is None:
            return is_causal, None
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -math.inf)
        return False, mask.expand(*mask.shape[:2], queries, keys).contiguous()
