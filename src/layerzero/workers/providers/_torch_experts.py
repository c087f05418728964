"""Products by groups and mixtures of experts by torch, on any device. Used by torch_cpu.py and torch_cuda.py."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from layerzero.workers.provider import Call
from layerzero.workers.providers._experts import checked_offsets, checked_order, refuse_id
from layerzero.workers.providers._torch_ops import Builder, Run, in_place


class Experts:
    """One method per op, each a Builder. On a GPU grouped_linear and moe_mlp wait once for where groups end, which the
    sizes of their products are; the others wait for nothing, so what they are given there is not refused."""

    def __init__(self, torch: Any, is_gpu: bool) -> None:
        self.torch = torch
        self.is_gpu = is_gpu

    def builders(self) -> Mapping[str, Builder]:
        return {
            "grouped_linear": self.grouped_linear,
            "moe_route": self.route,
            "moe_permute": self.permute,
            "moe_combine": self.combine,
            "moe_mlp": self.mlp,
        }

    def grouped_linear(self, views: Sequence[Any], call: Call) -> Run:
        x, weight, offsets, bias = views

        def run(out: Any) -> None:
            ends = checked_offsets(offsets.tolist(), len(x))
            for g, (start, end) in enumerate(itertools.pairwise((0, *ends))):
                if start < end:
                    self._linear(x[start:end], weight[g], None if bias is None else bias[g], out[start:end])
            out[ends[-1] if ends else 0 :] = 0

        return run

    def _linear(self, x: Any, weight: Any, bias: Any, out: Any) -> None:
        self.torch.ops.aten.linear.out(x, weight, bias, out=out)

    def route(self, views: Sequence[Any], call: Call) -> Run:
        torch, (logits, bias) = self.torch, views
        attrs = call.attrs
        top_k, groups, kept = (attrs[name] for name in ("top_k", "num_groups", "top_groups"))
        is_softmax = attrs["scoring"] == "softmax"

        def run(targets: Any) -> None:
            weights, ids = targets
            wide = logits if logits.dtype == torch.float64 else logits.float()
            scores = torch.softmax(wide, -1) if is_softmax else torch.sigmoid(wide)
            # The order of scores is that of logits, which are not rounded.
            by = wide if bias is None else scores + bias
            if kept < groups:
                best = (by if attrs["group_score"] == "max" or bias is not None else scores).unflatten(-1, (groups, -1))
                each = best.amax(-1)
                if attrs["group_score"] == "top2":
                    each = best.topk(min(2, best.shape[-1]), -1).values.sum(-1)
                chosen = self._first(each, kept)
                is_kept = torch.zeros_like(each, dtype=torch.bool).scatter_(-1, chosen, True)
                is_kept = is_kept.repeat_interleave(by.shape[-1] // groups, -1)
                by = by.masked_fill(~is_kept, -torch.inf)
            found = self._first(by, top_k)
            picked = scores.gather(-1, found)
            if attrs["normalize"]:
                picked = picked / (picked.sum(-1, keepdim=True) + 1e-20)
            weights.copy_(picked * attrs["scale"])
            ids.copy_(found)

        return run

    def _first(self, by: Any, count: int) -> Any:
        """The places of the greatest, of equal ones the first; torch.topk takes any of those."""
        return self.torch.sort(by, dim=-1, descending=True, stable=True).indices[..., :count]

    def permute(self, views: Sequence[Any], call: Call) -> Run:
        x, ids = views
        experts = call.attrs["num_experts"]

        def run(targets: Any) -> None:
            rows, order, offsets = targets
            if not self.is_gpu:
                self._check_ids(ids, experts)
            found, ends = self._sorted(ids, experts)
            order.copy_(found)
            offsets.copy_(ends)
            rows.copy_(x[found // max(ids.shape[1], 1)])

        return run

    def _check_ids(self, ids: Any, experts: int) -> None:
        if ids.numel() and int(ids.max()) >= experts:
            refuse_id(int(ids.max()), experts)

    def _sorted(self, ids: Any, experts: int) -> tuple[Any, Any]:
        """The order of experts' rows, those of ids that are of no expert last, and the ends of experts'."""
        torch = self.torch
        flat = ids.reshape(-1).long()
        flat = torch.where((flat < 0) | (flat >= experts), experts, flat)  # a copy: the caller can write to its own
        placed = torch.sort(flat, stable=True)
        return placed.indices, torch.searchsorted(placed.values, torch.arange(experts, device=ids.device), right=True)

    def combine(self, views: Sequence[Any], call: Call) -> Run:
        rows, order, weights = views

        def run(out: Any) -> None:
            places = order.to(self.torch.int64, copy=True)  # the caller can write to its own while they are used
            if not self.is_gpu:
                counts = self.torch.bincount(places.clamp(-1, len(rows)) + 1, minlength=len(rows) + 2)
                checked_order(len(rows), bool((counts[1:-1] == 1).all()))
            out.copy_(self._combined(rows, places, weights))

        return run

    def _combined(self, rows: Any, order: Any, weights: Any) -> Any:
        torch = self.torch
        wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        if self.is_gpu:  # where a sort makes places within the rows of anything that it is given
            back = torch.argsort(order, stable=True)
        else:
            back = torch.empty_like(order)
            back[order] = torch.arange(len(order))
        each = rows[back].to(wide).unflatten(0, weights.shape)
        return (each * weights.to(wide).unsqueeze(-1)).sum(1)

    def mlp(self, views: Sequence[Any], call: Call) -> Run:
        torch, (x, gate_up, down, ids, weights) = self.torch, views
        activate = in_place(torch, call.attrs["activation"])
        linear = torch.nn.functional.linear

        def run(out: Any) -> None:
            if not ids.numel():
                out.zero_()
                return
            order, offsets = self._sorted(ids, len(down))
            *ends, greatest = torch.cat((offsets, ids.amax().long().view(1))).tolist()
            if greatest >= len(down):
                refuse_id(greatest, len(down))
            tokens = order // max(ids.shape[1], 1)
            rows = torch.zeros(len(order), down.shape[1], dtype=x.dtype, device=x.device)
            for expert, (start, end) in enumerate(itertools.pairwise((0, *ends))):
                if start < end:
                    gate, up = linear(x[tokens[start:end]], gate_up[expert]).chunk(2, -1)
                    activate(gate)
                    self._linear(gate * up, down[expert], None, rows[start:end])
            out.copy_(self._combined(rows, order, weights))

        return run
