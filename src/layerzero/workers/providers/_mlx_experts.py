"""Products by groups and mixtures of experts by MLX. Used by mlx.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from layerzero.workers.provider import Call
from layerzero.workers.providers._experts import checked_offsets, checked_order, refuse_id
from layerzero.workers.providers._mlx_activations import activated


def builders(mx: Any) -> Mapping[str, Callable[[Call], Callable[..., Any]]]:
    """By name of the op: `call -> compute(*arrays)`."""
    made = _Experts(mx)
    return {
        "grouped_linear": made.grouped_linear,
        "moe_route": made.route,
        "moe_permute": made.permute,
        "moe_combine": made.combine,
        "moe_mlp": made.mlp,
    }


class _Experts:
    """One method per op. Products are in float32 at least: MLX's of half precision lose digits."""

    def __init__(self, mx: Any) -> None:
        self.mx = mx

    def _wide(self, x: Any) -> Any:
        return x if x.dtype == self.mx.float64 else x.astype(self.mx.float32)

    def grouped_linear(self, call: Call) -> Callable[..., Any]:
        mx = self.mx

        def compute(x: Any, weight: Any, offsets: Any, bias: Any) -> Any:
            ends = checked_offsets(offsets.tolist(), len(x))
            parts = []
            for g, (start, end) in enumerate(itertools.pairwise((0, *ends))):
                if start < end:
                    made = mx.matmul(self._wide(x[start:end]), self._wide(weight[g]).T)
                    parts.append(made if bias is None else made + self._wide(bias[g]))
            rest = len(x) - (ends[-1] if ends else 0)
            if rest:
                parts.append(mx.zeros((rest, weight.shape[1]), self._wide(x[:1]).dtype))
            return mx.concatenate(parts).astype(x.dtype)

        return compute

    def route(self, call: Call) -> Callable[..., Any]:
        mx, attrs = self.mx, call.attrs
        top_k, groups, kept = (attrs[name] for name in ("top_k", "num_groups", "top_groups"))
        is_softmax = attrs["scoring"] == "softmax"

        def compute(logits: Any, bias: Any) -> Any:
            wide = self._wide(logits)
            scores = mx.softmax(wide, axis=-1, precise=True) if is_softmax else mx.sigmoid(wide)
            # The order of scores is that of logits, which are not rounded.
            by = wide if bias is None else scores + bias
            if kept < groups:
                best = by if attrs["group_score"] == "max" or bias is not None else scores
                best = mx.sort(best.reshape((len(best), groups, -1)), axis=-1)
                each = best[..., -1]
                if attrs["group_score"] == "top2" and best.shape[-1] > 1:
                    each = each + best[..., -2]
                chosen = self._first(each, kept)
                is_kept = mx.any(chosen[..., None] == mx.arange(groups), axis=1)
                is_kept = mx.repeat(is_kept, by.shape[-1] // groups, axis=-1)
                by = mx.where(is_kept, by, mx.array(-mx.inf, by.dtype))
            found = self._first(by, top_k)
            picked = mx.take_along_axis(scores, found, axis=-1)
            if attrs["normalize"]:
                picked = picked / (mx.sum(picked, axis=-1, keepdims=True) + 1e-20)
            return (picked * attrs["scale"]).astype(mx.float32), found.astype(mx.int64)

        return compute

    def _first(self, by: Any, count: int) -> Any:
        """The places of the greatest; MLX's sort on the CPU is stable, so of equal ones the first."""
        return self.mx.argsort(-by, axis=-1)[..., :count]

    def permute(self, call: Call) -> Callable[..., Any]:
        experts = call.attrs["num_experts"]

        def compute(x: Any, ids: Any) -> Any:
            order, offsets = self._sorted(ids, experts)
            return x[order // ids.shape[1]], order, offsets.astype(self.mx.int32)

        return compute

    def _sorted(self, ids: Any, experts: int) -> tuple[Any, Any]:
        """The order of experts' rows, those of negative ids last, and the ends of experts'."""
        mx = self.mx
        flat = ids.reshape(-1).astype(mx.int64)
        most = int(mx.max(flat).item())
        if most >= experts:
            refuse_id(most, experts)
        flat = mx.where(flat < 0, experts, flat)
        # No two are equal: a sort need not be stable.
        order = mx.argsort(flat * len(flat) + mx.arange(len(flat), dtype=mx.int64)).astype(mx.int64)
        counts = mx.zeros(experts + 1, mx.int64).at[flat].add(mx.array(1, mx.int64))
        return order, mx.cumsum(counts)[:experts]

    def combine(self, call: Call) -> Callable[..., Any]:
        mx = self.mx

        def compute(rows: Any, order: Any, weights: Any) -> Any:
            known = mx.sort(order.astype(mx.int64))
            checked_order(len(rows), bool(mx.all(known == mx.arange(len(rows))).item()))
            return self._combined(rows, order, weights).astype(rows.dtype)

        return compute

    def _combined(self, rows: Any, order: Any, weights: Any) -> Any:
        each = self._wide(rows[self.mx.argsort(order)]).reshape((*weights.shape, -1))
        return self.mx.sum(each * weights.astype(each.dtype)[..., None], axis=1)

    def mlp(self, call: Call) -> Callable[..., Any]:
        mx, activation = self.mx, call.attrs["activation"]

        def compute(x: Any, gate_up: Any, down: Any, ids: Any, weights: Any) -> Any:
            order, offsets = self._sorted(ids, len(down))
            rows, parts = self._wide(x)[order // ids.shape[1]], []
            for expert, (start, end) in enumerate(itertools.pairwise((0, *offsets.tolist()))):
                if start < end:
                    made = mx.matmul(rows[start:end], self._wide(gate_up[expert]).T)
                    gate, up = mx.split(made, 2, axis=-1)
                    parts.append(mx.matmul(activated(mx, activation, gate) * up, self._wide(down[expert]).T))
            rest = len(rows) - sum(len(part) for part in parts)
            if rest:
                parts.append(mx.zeros((rest, down.shape[1]), rows.dtype))
            return self._combined(mx.concatenate(parts), order, weights).astype(x.dtype)

        return compute
