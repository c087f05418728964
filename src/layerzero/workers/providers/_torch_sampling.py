"""Sampling by torch, on every device. Used by torch_cpu.py and torch_cuda.py.

Each step is one of torch's own kernels for one arithmetic operation, so nothing is fused and all round as IEEE 754 has
it: weights are those of docs/ops.md, bit by bit. On a GPU nothing is read on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.sampling import COEFFICIENTS, HALVINGS, LEAST, weight_bits
from layerzero.workers.philox import FACTORS, ROUNDS, STEPS, WORD, uniforms
from layerzero.workers.provider import Call
from layerzero.workers.providers._sampling import check_highest, check_masses, check_parents, check_rows, check_settings
from layerzero.workers.providers._torch_ops import Builder, Run

FEW = 1024  # tokens


class Sampling:
    """One method per op, each a Builder."""

    def __init__(self, torch: Any, *, is_gpu: bool) -> None:
        self.torch, self.is_gpu = torch, is_gpu

    def builders(self) -> Mapping[str, Builder]:
        return {
            "penalize_logits": self.penalize_logits,
            "filter_logits": self.filter_logits,
            "sample": self.sample,
            "speculative_verify": self.speculative_verify,
            "tree_accept": self.tree_accept,
        }

    def penalize_logits(self, views: Sequence[Any], call: Call) -> Run:
        torch, (logits, token_ids, *given) = self.torch, views
        rows, vocabulary = logits.shape
        wide = torch.float64

        def run(out: Any) -> None:
            repetition, presence, frequency = self._settings(call, given)
            ids = token_ids.long()
            if not self.is_gpu and ids.numel():
                check_highest(call.op, int(ids.max()), vocabulary)
            counts = torch.zeros(rows, vocabulary + 1, dtype=wide, device=logits.device)  # the last: of no token
            places = torch.where((ids >= 0) & (ids < vocabulary), ids, vocabulary)
            counts.scatter_add_(1, places, torch.ones_like(places, dtype=wide))
            counts = counts[:, :vocabulary]
            x = logits.to(wide)
            found = x if repetition is None else torch.where(x > 0, x / repetition, x * repetition)
            if frequency is not None:
                found = found - frequency * counts
            if presence is not None:
                found = found - presence
            out.copy_(torch.where(counts > 0, found, x))

        return run

    def filter_logits(self, views: Sequence[Any], call: Call) -> Run:
        torch, (logits, *given) = self.torch, views

        def run(out: Any) -> None:
            temperature, *filters = self._settings(call, given)
            x = logits.double()
            top = x.amax(1, keepdim=True)
            _, kept = self._weights(x, top, weight_bits(x.shape[1]), temperature, *filters)
            scaled = x if temperature is None else x / temperature
            scaled = torch.where(kept, scaled, -torch.inf)
            scaled = torch.where(top == -torch.inf, -torch.inf, scaled)
            out.copy_(torch.where(top.isnan() | (top == torch.inf), torch.nan, scaled))

        return run

    def sample(self, views: Sequence[Any], call: Call) -> Run:
        torch, (logits, seed, offset, *given) = self.torch, views

        def run(out: Any) -> None:
            temperature, *filters = self._settings(call, given)
            top = logits.amax(1, keepdim=True)
            is_fit = top.isfinite()
            if not self.is_gpu:
                check_rows(call.op, is_fit.flatten().tolist())
                if temperature is not None and not temperature.any():
                    out.copy_(logits.argmax(1))
                    return
            steps = None if temperature is None else torch.where(temperature > 0, temperature, 1.0)
            few = None if self.is_gpu or filters[0] is None else self._largest(logits, filters[0])
            x = (logits if few is None else logits.gather(1, few)).double()
            weights, _ = self._weights(x, top.double(), weight_bits(logits.shape[1]), steps, *filters)
            sums = weights.cumsum_(1)
            tokens = (sums <= self._uniforms(seed, offset, x.shape[0]) * sums[:, -1:]).sum(1, keepdim=True)
            tokens = (tokens if few is None else few.gather(1, tokens)).squeeze(1)
            if temperature is not None:
                tokens = torch.where(temperature.squeeze(1) > 0, tokens, logits.argmax(1))
            out.copy_(torch.where(is_fit.squeeze(1), tokens, -1))

        return run

    def speculative_verify(self, views: Sequence[Any], call: Call) -> Run:
        torch, (target, draft_ids, draft, seed, offset) = self.torch, views
        rows, steps, vocabulary = target.shape
        bits = weight_bits(vocabulary)

        def run(outs: Any) -> None:
            tokens, accepted = outs
            if not rows:
                return
            ids = draft_ids.long()
            if not self.is_gpu:
                check_highest(call.op, int(ids.max()) if ids.numel() else -1, vocabulary)
                check_masses(call.op, "target_probs", *(float(one) for one in torch.aminmax(target)))
                if draft is not None and draft.numel():
                    check_masses(call.op, "draft_probs", *(float(one) for one in torch.aminmax(draft)))
            is_there = (ids >= 0) & (ids < vocabulary)
            places = torch.where(is_there, ids, 0).unsqueeze(2)
            p = target[:, :-1].gather(2, places).squeeze(2).double()
            q = torch.ones_like(p) if draft is None else draft.gather(2, places).squeeze(2).double()
            numbers = self._uniforms(seed, offset, rows, steps)
            taken = (is_there & (numbers[:, :-1] * q < p)).long().cumprod(1)
            count = taken.sum(1, keepdim=True)
            masses = self._step(target, count)
            if steps > 1:
                last = count.clamp(max=steps - 2)
                if draft is None:
                    of_draft = torch.zeros_like(masses).scatter_(1, self._step(places, last), 1.0)
                else:
                    of_draft = self._step(draft, last)
                more = (masses - of_draft).clamp_(min=0)
                is_refused = (count < steps - 1) & is_there.gather(1, last) & (more.amax(1, keepdim=True) > 0)
                masses = torch.where(is_refused, more, masses)
            top = masses.amax(1, keepdim=True)
            sums = (masses / top * 2.0**bits).floor_().cumsum_(1)
            drawn = (sums <= numbers[:, -1:] * sums[:, -1:]).sum(1, keepdim=True)
            drawn = torch.where(top > 0, drawn, -1)
            columns = torch.arange(steps, device=ids.device)
            padded = torch.nn.functional.pad(ids, (0, 1), value=-1)
            tokens.copy_(torch.where(columns < count, padded, torch.where(columns == count, drawn, -1)))
            accepted.copy_(count.squeeze(1))

        return run

    def _step(self, tensor: Any, step: Any) -> Any:
        """Of each row (steps, n) the one of a step, wide if it holds fractions."""
        found = tensor.gather(1, step.unsqueeze(2).expand(-1, 1, tensor.shape[2])).squeeze(1)
        return found.double() if found.is_floating_point() else found

    def tree_accept(self, views: Sequence[Any], call: Call) -> Run:
        torch, (draft_ids, above, target_ids) = self.torch, views
        rows, count = draft_ids.shape

        def run(outs: Any) -> None:
            if not rows:
                return
            drafts, parents, wanted = (one.long() for one in (draft_ids, above, target_ids))
            columns = torch.arange(count, device=drafts.device)
            if not self.is_gpu:
                check_parents(call.op, (parents >= columns).nonzero().tolist(), parents)
            node = torch.zeros(rows, 1, dtype=torch.int64, device=drafts.device)
            is_on, path, token = torch.ones_like(node, dtype=torch.bool), [node], []
            for _ in range(count - 1):
                fit = (parents == node) & (columns > node) & (drafts == wanted.gather(1, node)) & (drafts >= 0) & is_on
                is_on = fit.any(1, keepdim=True)
                if not self.is_gpu and not is_on.any():
                    break
                following = fit.long().argmax(1, keepdim=True)
                token.append(torch.where(is_on, drafts.gather(1, following), -1))
                path.append(torch.where(is_on, following, -1))
                node = torch.where(is_on, following, node)
            nodes = torch.nn.functional.pad(torch.cat(path, 1), (0, count - len(path)), value=-1)
            accepted = (nodes >= 0).sum(1, keepdim=True) - 1
            tokens = torch.cat([*token, *[torch.full_like(node, -1)] * (count - len(token))], 1)
            tokens = torch.where(columns == accepted, wanted.gather(1, node), tokens)
            for out, found in zip(outs, (tokens, nodes, accepted.squeeze(1)), strict=True):
                out.copy_(found)

        return run

    def _uniforms(self, seed: Any, offset: Any, rows: int, draws: int = 1) -> Any:
        """(rows, draws) of numbers in [0, 1), as those of workers/philox.py."""
        torch = self.torch
        if not self.is_gpu:
            seeds, offsets = seed.tolist(), offset.tolist()
            found = [uniforms(seeds, offsets, rows, draw) for draw in range(draws)]
            return torch.tensor(found, dtype=torch.float64).T
        keys, counts = (one.expand(rows).unsqueeze(1) for one in (seed, offset))
        draw = torch.arange(draws, device=seed.device).expand(rows, draws)
        place = torch.arange(rows, device=seed.device).unsqueeze(1) if seed.shape[0] == 1 else torch.zeros_like(keys)
        a, b, c, d = counts & WORD, counts >> 32 & WORD, place, draw
        left, right = keys & WORD, keys >> 32 & WORD
        for _ in range(ROUNDS):  # the products' bits are right, whatever sign int64 gives them
            one, other = a * FACTORS[0], c * FACTORS[1]
            a, b, c, d = other >> 32 & WORD ^ b ^ left, other & WORD, one >> 32 & WORD ^ d ^ right, one & WORD
            left, right = left + STEPS[0] & WORD, right + STEPS[1] & WORD
        return (b << 21 | a >> 11).double().mul_(2.0**-53)

    def _settings(self, call: Call, given: Sequence[Any]) -> list[Any]:
        """As columns (1|rows, 1): the last inputs of the op, None where one is left out."""
        found: list[Any] = []
        for name, one in zip(OPS[call.op].inputs[-len(given) :], given, strict=True):
            if one is None:
                found.append(None)
                continue
            wide = one.to(
                self.torch.int64 if name == "top_k" else self.torch.float64, copy=True
            )  # callers write theirs
            if not self.is_gpu:
                check_settings(call.op, name, wide.tolist())
            found.append(wide.unsqueeze(1))
        return found

    def _weights(
        self, x: Any, top: Any, bits: int, temperature: Any, top_k: Any, top_p: Any, min_p: Any
    ) -> tuple[Any, Any]:
        """Of logits in float64, and of the largest of each row: weights, and which tokens are kept."""
        torch = self.torch
        shares = self._exponential(x - top if temperature is None else (x - top) / temperature)
        weights = (shares * 2.0**bits).floor_()
        kept = torch.ones_like(x, dtype=torch.bool)
        if top_k is not None:
            kept &= x >= self._kth_largest(x, top_k)
        if top_p is not None:
            weights = torch.where(kept, weights, 0.0)
            ordered = weights.sort(dim=1, descending=True).values
            sums = ordered.cumsum(1)
            count = (sums - ordered < top_p * sums[:, -1:]).sum(1, keepdim=True).clamp_(min=1)
            lowest = ordered.gather(1, count - 1)
            kept &= weights >= torch.where(top_p < 1, lowest, 0.0)
        if min_p is not None:
            kept &= shares >= min_p
        return torch.where(kept, weights, 0.0), kept

    def _largest(self, logits: Any, top_k: Any) -> Any:
        """Where all tokens that top_k keeps are, in order and with others where rows differ, when they are few; else
        None. A sort of them takes a fraction of one of all."""
        least, most = int(top_k.min()), int(top_k.max())
        if not 0 < least <= most <= min(FEW, logits.shape[1] - 1):
            return None
        values, places = logits.topk(most, dim=1)
        lowest = values.gather(1, top_k.expand(len(logits), 1) - 1)
        if int((logits >= lowest).sum(1).max()) > most:  # ties of the last, which go on
            return None
        return places.sort(dim=1).values

    def _kth_largest(self, x: Any, top_k: Any) -> Any:
        """Of each row; -inf where that keeps all."""
        torch, vocabulary = self.torch, x.shape[1]
        if self.is_gpu:
            ordered = x.sort(dim=1, descending=True).values
        else:
            most = min(int(top_k.max()), vocabulary)
            ordered = x.topk(max(most, 1), dim=1).values
        places = top_k.clamp(1, vocabulary).expand(x.shape[0], 1) - 1
        found = ordered.gather(1, places.clamp(max=ordered.shape[1] - 1))
        return torch.where(top_k > 0, found, -torch.inf)

    def _exponential(self, y: Any) -> Any:
        """That of ipc/vocabulary/sampling.py."""
        z = y.clamp(min=LEAST).mul_(2.0**-HALVINGS)
        power = self.torch.full_like(z, COEFFICIENTS[0])
        for coefficient in COEFFICIENTS[1:]:
            power.mul_(z).add_(coefficient)
        for _ in range(HALVINGS):
            power.mul_(power)
        return power
