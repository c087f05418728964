"""Mixtures of experts: Transformers' experts function, the projections of all experts by one lz.grouped_linear each,
or where no kernel has that, those of each expert by lz.linear or lz.matmul."""

from __future__ import annotations

import itertools
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.integrations.moe import grouped_mm_experts_forward

import layerzero as lz
from layerzero.client.connection import arena as arenas
from layerzero.transformers import running
from layerzero.transformers.running import HandedOver

# Experts with rows whose own calls are as fast as one for all, on a CPU: a decoder's single token has 2 in Mixtral, and
# linear has kernels that are faster than grouped_linear's.
FEW = 2


def experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The sum of what the chosen experts make of each token: hidden_states (tokens, hidden), top_k_index and
    top_k_weights (tokens, k) -> (tokens, hidden). `self` has the weights."""
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
    ids = top_k_index.reshape(-1)
    order = torch.argsort(ids, stable=True)
    sorted_by = _Counts(torch.bincount(ids, minlength=self.num_experts))
    rows = hidden_states[order // chosen]
    if self.has_gate:
        rows = self._apply_gate(_project(self, "gate_up_proj", rows, sorted_by))
    else:
        rows = self.act_fn(_project(self, "up_proj", rows, sorted_by))
    rows = _project(self, "down_proj", rows, sorted_by)
    if self.has_post_expert_norm:
        rows = self.post_expert_norm(rows)
    rows = rows * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0], device=order.device)
    return rows[back].view(tokens, chosen, rows.shape[-1]).sum(1).to(hidden_states.dtype)


class _Counts:
    """How many rows each expert has."""

    def __init__(self, counts: Tensor) -> None:
        self.counts = counts

    @cached_property
    def numbers(self) -> list[int]:
        """Of which a GPU has to be waited for."""
        found: list[int] = self.counts.tolist()
        return found

    @cached_property
    def ends(self) -> Tensor:
        return self.counts.cumsum(0, dtype=torch.int32)

    @cached_property
    def of_some(self) -> Tensor:
        """The experts that have rows."""
        return self.counts.nonzero().reshape(-1)


def _project(self: Any, name: str, rows: Tensor, counts: _Counts) -> Tensor:
    """Rows, sorted by expert, by the projection of each."""
    weights = getattr(self, name)
    biases = getattr(self, f"{name}_bias") if self.has_bias else None
    project = _Projection(rows.to(weights.dtype), weights, biases, counts, self.is_transposed)
    if rows.device.type == "cpu" and len(counts.of_some) <= FEW:
        return project.by_calls()
    try:
        return project.by_one_call()
    except HandedOver:  # each expert's says why, where no kernel has that either
        return project.by_calls()


class _Projection(NamedTuple):
    rows: Tensor
    weights: Tensor
    biases: Tensor | None
    counts: _Counts
    is_transposed: bool

    def by_one_call(self) -> Tensor:
        weights, biases, ends = self.weights, self.biases, self.counts.ends
        if _crosses(weights) and len(self.counts.of_some) < len(ends):  # then of these experts alone
            which = self.counts.of_some
            weights, ends = _chosen(weights, which), ends[which]
            biases = None if biases is None else biases[which]
        weights = weights.transpose(1, 2) if self.is_transposed else weights
        found: Tensor = running.try_call("grouped_linear", self.rows, weights, ends, biases)
        return found

    def by_calls(self) -> Tensor:
        found: list[Tensor] = []
        ends = itertools.pairwise((0, *itertools.accumulate(self.counts.numbers)))
        for expert, (start, end) in enumerate(ends):
            if start < end or not (found or len(self.rows)):  # of no rows, one has the result's shape
                found.append(self._of_expert(self.rows[start:end], expert))
        return torch.cat(found)

    def _of_expert(self, rows: Tensor, expert: int) -> Tensor:
        bias = None if self.biases is None else self.biases[expert]
        if not self.is_transposed:
            return running.call("linear", rows, self.weights[expert], bias)
        out = running.call("matmul", rows, self.weights[expert])
        return out if bias is None else out + bias


def _crosses(weights: Tensor) -> bool:
    """Whether a call has to copy them to where workers reach them."""
    is_on_cpu = type(weights) in (Tensor, torch.nn.Parameter) and weights.device.type == "cpu"
    return is_on_cpu and arenas.pool.find(weights.data_ptr(), 1) is None


def _chosen(weights: Tensor, which: Tensor) -> Tensor:
    """Those of some experts, in shared memory unless gradients are wanted."""
    if torch.is_grad_enabled() and weights.requires_grad:
        return weights[which]
    try:
        chosen: Tensor = lz.empty((len(which), *weights.shape[1:]), weights.dtype)
    except lz.LayerZeroError as error:
        raise HandedOver(f"error {error.code}") from error
    return torch.index_select(weights, 0, which, out=chosen)
