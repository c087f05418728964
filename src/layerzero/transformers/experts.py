"""Mixtures of experts: Transformers' experts function, each expert's projections by lz.linear or lz.matmul."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import grouped_mm_experts_forward

from layerzero.transformers import running
from layerzero.transformers.running import HandedOver


def experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The sum of what the chosen experts make of each token: hidden_states (tokens, hidden), top_k_index and
    top_k_weights (tokens, k) -> (tokens, hidden). `self` has the weights. Tokens of one expert are one call each."""
    try:
        out = _serve(self, hidden_states, top_k_index, top_k_weights)
    except HandedOver as why:
        running.count(self, "experts", f"handed to grouped_mm: {why}")
        return grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    running.count(self, "experts")
    return out


def _serve(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    if running.IS_DISABLED:
        raise HandedOver("LAYERZERO_DISABLE")
    if torch.compiler.is_compiling():
        raise HandedOver("compiled")  # how many tokens an expert has is known to nobody then
    if self._is_expert_parallel:
        raise HandedOver("expert parallelism")
    tokens, chosen = top_k_index.shape
    order = torch.argsort(top_k_index.reshape(-1), stable=True)
    counts = torch.bincount(top_k_index.reshape(-1), minlength=self.num_experts).tolist()
    rows = hidden_states[order // chosen]
    if self.has_gate:
        rows = self._apply_gate(_project(self, "gate_up_proj", rows, counts))
    else:
        rows = self.act_fn(_project(self, "up_proj", rows, counts))
    rows = _project(self, "down_proj", rows, counts)
    if self.has_post_expert_norm:
        rows = self.post_expert_norm(rows)
    rows = rows * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0], device=order.device)
    return rows[back].view(tokens, chosen, -1).sum(1).to(hidden_states.dtype)


def _project(self: Any, name: str, rows: Tensor, counts: list[int]) -> Tensor:
    """Rows, sorted by expert, by the projection of each."""
    weights = getattr(self, name)
    biases = getattr(self, f"{name}_bias") if self.has_bias else None
    found, start = [], 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        part, weight = rows[start : start + count].to(weights.dtype), weights[expert]
        bias = None if biases is None else biases[expert]
        if self.is_transposed:
            out = running.call("matmul", part, weight)
            found.append(out if bias is None else out + bias)
        else:
            found.append(running.call("linear", part, weight, bias))
        start += count
    return torch.cat(found)
