"""Sampling by MLX, in float64, which it has on the CPU: each step one arithmetic operation. Used by mlx.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.sampling import COEFFICIENTS, HALVINGS, LEAST, weight_bits
from layerzero.workers.philox import uniforms
from layerzero.workers.provider import Call
from layerzero.workers.providers._sampling import check_highest, check_masses, check_parents, check_rows, check_settings


class Sampling:
    """One method per op: `call -> compute(*arrays)`."""

    def __init__(self, mx: Any) -> None:
        self.mx = mx

    def builders(self) -> Mapping[str, Callable[[Call], Callable[..., Any]]]:
        return {
            "penalize_logits": self.penalize_logits,
            "filter_logits": self.filter_logits,
            "sample": self.sample,
            "speculative_verify": self.speculative_verify,
            "tree_accept": self.tree_accept,
        }

    def penalize_logits(self, call: Call) -> Callable[..., Any]:
        mx = self.mx

        def compute(logits: Any, token_ids: Any, *given: Any) -> Any:
            repetition, presence, frequency = self._settings(call, given)
            x, (rows, vocabulary) = logits.astype(mx.float64), logits.shape
            if token_ids.size:
                check_highest(call.op, mx.max(token_ids).item(), vocabulary)
            places = mx.where(token_ids >= 0, token_ids, mx.array(vocabulary, token_ids.dtype))  # the last: no token
            counts = mx.zeros((rows, vocabulary + 1), mx.float64)
            counts = counts.at[mx.arange(rows)[:, None], places].add(self._number(1.0))[:, :vocabulary]
            found = x if repetition is None else mx.where(x > 0, x / repetition, x * repetition)
            if frequency is not None:
                found = found - frequency * counts
            if presence is not None:
                found = found - presence
            return mx.where(counts > 0, found, x).astype(logits.dtype)

        return compute

    def filter_logits(self, call: Call) -> Callable[..., Any]:
        mx = self.mx

        def compute(logits: Any, *given: Any) -> Any:
            temperature, *filters = self._settings(call, given)
            x = logits.astype(mx.float64)
            top = mx.max(x, axis=1, keepdims=True)
            _, kept = self._weights(x, top, temperature, *filters)
            scaled = mx.where(kept, x if temperature is None else x / temperature, self._number(-math.inf))
            scaled = mx.where(top == -math.inf, top, scaled)
            is_odd = mx.any(mx.isnan(x) | (x == math.inf), axis=1, keepdims=True)
            return mx.where(is_odd, self._number(math.nan), scaled).astype(logits.dtype)

        return compute

    def sample(self, call: Call) -> Callable[..., Any]:
        mx = self.mx

        def compute(logits: Any, seed: Any, offset: Any, *given: Any) -> Any:
            temperature, *filters = self._settings(call, given)
            x = logits.astype(mx.float64)
            top = mx.max(x, axis=1, keepdims=True)
            check_rows(call.op, mx.isfinite(mx.sum(top, axis=1)).tolist())
            steps = None if temperature is None else mx.where(temperature > 0, temperature, self._number(1.0))
            weights, _ = self._weights(x, top, steps, *filters)
            sums = mx.cumsum(weights, axis=1)
            numbers = mx.array(uniforms(seed.tolist(), offset.tolist(), x.shape[0]), mx.float64)[:, None]
            tokens = mx.sum(sums <= numbers * sums[:, -1:], axis=1).astype(mx.int64)
            if temperature is None:
                return tokens
            largest = mx.argmax(x, axis=1).astype(mx.int64)
            return mx.where(mx.broadcast_to(temperature, (x.shape[0], 1))[:, 0] > 0, tokens, largest)

        return compute

    def speculative_verify(self, call: Call) -> Callable[..., Any]:
        mx, nothing = self.mx, self._number(0.0)

        def compute(target: Any, draft_ids: Any, draft: Any, seed: Any, offset: Any) -> Any:
            (rows, steps, vocabulary), ids = target.shape, draft_ids.astype(mx.int64)
            check_highest(call.op, mx.max(ids).item(), vocabulary)
            for name, one in (("target_probs", target), ("draft_probs", draft)):
                if one is not None:
                    total = mx.sum(one.astype(mx.float64)).item()  # NaN and infinity are seen in it
                    check_masses(call.op, name, mx.min(one).item(), total)
            p_all = target.astype(mx.float64)
            q_all = None if draft is None else draft.astype(mx.float64)
            is_there, places = ids >= 0, mx.maximum(ids, 0)
            p = mx.take_along_axis(p_all[:, :-1], places[..., None], axis=2)[..., 0]
            q = self._number(1.0) if q_all is None else mx.take_along_axis(q_all, places[..., None], axis=2)[..., 0]
            drawn = [uniforms(seed.tolist(), offset.tolist(), rows, draw) for draw in range(steps)]
            numbers = mx.transpose(mx.array(drawn, mx.float64))
            is_taken = is_there & (numbers[:, :-1] * q < p)
            count = mx.sum(mx.cumprod(is_taken.astype(mx.int64), axis=1), axis=1, keepdims=True).astype(mx.int64)
            masses = mx.take_along_axis(p_all, count[..., None], axis=1)[:, 0]
            last = mx.minimum(count, steps - 2)
            if q_all is None:
                of_draft = mx.where(mx.arange(vocabulary) == mx.take_along_axis(places, last, axis=1), 1.0, 0.0)
            else:
                of_draft = mx.take_along_axis(q_all, last[..., None], axis=1)[:, 0]
            more = mx.maximum(masses - of_draft.astype(mx.float64), nothing)
            is_refused = (count < steps - 1) & mx.take_along_axis(is_there, last, axis=1)
            masses = mx.where(is_refused & (mx.max(more, axis=1, keepdims=True) > 0), more, masses)
            top = mx.max(masses, axis=1, keepdims=True)
            scale = self._number(2.0 ** weight_bits(vocabulary))
            sums = mx.cumsum(mx.floor(masses / top * scale), axis=1)
            token = mx.sum(sums <= numbers[:, -1:] * sums[:, -1:], axis=1, keepdims=True).astype(mx.int64)
            token = mx.where(top > 0, token, mx.array(-1, mx.int64))
            columns, padded = mx.arange(steps), mx.pad(ids, [(0, 0), (0, 1)], constant_values=-1)
            tokens = mx.where(columns < count, padded, mx.where(columns == count, token, mx.array(-1, mx.int64)))
            return tokens, count[:, 0]

        return compute

    def tree_accept(self, call: Call) -> Callable[..., Any]:
        mx = self.mx

        def compute(draft_ids: Any, above: Any, target_ids: Any) -> Any:
            drafts, parents, wanted = (one.astype(mx.int64) for one in (draft_ids, above, target_ids))
            (rows, count), columns, no = drafts.shape, mx.arange(drafts.shape[1]), mx.array(-1, mx.int64)
            is_late = parents >= columns
            if mx.any(is_late).item():
                check_parents(call.op, [divmod(mx.argmax(is_late.reshape(-1)).item(), count)], parents)
            node = mx.zeros((rows, 1), mx.int64)
            is_on, path, tokens = mx.ones((rows, 1), mx.bool_), [node], []
            for _ in range(count):
                token = mx.take_along_axis(wanted, node, axis=1)
                fit = (parents == node) & (columns > node) & (drafts == token) & (drafts >= 0) & is_on
                was_on, is_on = is_on, mx.any(fit, axis=1, keepdims=True)
                tokens.append(mx.where(was_on, token, no))  # that of the next node, and at last the target's own
                if not mx.any(is_on).item():
                    break
                following = mx.argmax(fit, axis=1, keepdims=True).astype(mx.int64)
                path.append(mx.where(is_on, following, no))
                node = mx.where(is_on, following, node)
            pads = [[(0, 0), (0, count - len(found))] for found in (tokens, path)]
            found, nodes = (
                mx.pad(mx.concatenate(one, axis=1), pad, constant_values=-1)
                for one, pad in zip((tokens, path), pads, strict=True)
            )
            return found, nodes, mx.sum(nodes >= 0, axis=1).astype(mx.int64) - 1

        return compute

    def _number(self, value: float) -> Any:
        return self.mx.array(value, self.mx.float64)

    def _settings(self, call: Call, given: Sequence[Any]) -> list[Any]:
        """As columns (1|rows, 1): the last inputs of the op, None where one is left out."""
        found: list[Any] = []
        for name, one in zip(OPS[call.op].inputs[-len(given) :], given, strict=True):
            if one is not None:
                check_settings(call.op, name, one.tolist())
            wide = self.mx.int64 if name == "top_k" else self.mx.float64
            found.append(None if one is None else one.astype(wide)[:, None])
        return found

    def _weights(self, x: Any, top: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any) -> tuple[Any, Any]:
        """Of logits in float64, and of the largest of each row: weights, and which tokens are kept."""
        mx, vocabulary, nothing = self.mx, x.shape[1], self._number(0.0)
        shares = self._exponential(x - top if temperature is None else (x - top) / temperature)
        weights = mx.floor(shares * self._number(2.0 ** weight_bits(vocabulary)))
        kept = mx.ones(x.shape, mx.bool_)
        if top_k is not None:
            ordered = mx.sort(x, axis=1)
            places = mx.broadcast_to(vocabulary - mx.clip(top_k, 1, vocabulary), (x.shape[0], 1))
            least = mx.take_along_axis(ordered, places, axis=1)
            kept = kept & (x >= mx.where(top_k > 0, least, self._number(-math.inf)))
        if top_p is not None:
            weights = mx.where(kept, weights, nothing)
            ordered = -mx.sort(-weights, axis=1)
            sums = mx.cumsum(ordered, axis=1)
            count = mx.sum(sums - ordered < top_p * sums[:, -1:], axis=1, keepdims=True)
            lowest = mx.take_along_axis(ordered, mx.maximum(count, 1) - 1, axis=1)
            kept = kept & (weights >= mx.where(top_p < 1, lowest, nothing))
        if min_p is not None:
            kept = kept & (shares >= min_p)
        return mx.where(kept, weights, nothing), kept

    def _exponential(self, y: Any) -> Any:
        """That of ipc/vocabulary/sampling.py."""
        z = self.mx.maximum(y, self._number(LEAST)) * self._number(2.0**-HALVINGS)
        power = self._number(COEFFICIENTS[0])
        for coefficient in COEFFICIENTS[1:]:
            power = power * z + self._number(coefficient)
        for _ in range(HALVINGS):
            power = power * power
        return power
