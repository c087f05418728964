"""Attention within sequences, packed or in a paged cache, with its options and the log-sum-exp of its rows, by torch,
on every device: one sequence after the other. Reads where they begin on the host: on a GPU it waits for that. And what
moves rows and blocks of a paged cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from layerzero.ipc.errors import InvalidArgument
from layerzero.workers.provider import Call
from layerzero.workers.providers._sequences import checked_blocks, checked_ends, pages
from layerzero.workers.providers._torch_attention import Composed
from layerzero.workers.providers._torch_ops import Builder, Run, as_bits

Attend = Callable[..., tuple[Any, Any]]
GATHERED = 1 << 26  # elements of latent vectors at a time


def builders(
    torch: Any, attend: Attend | None, store: Builder, rounded: Callable[[Any, str], Any], *, is_gpu: bool
) -> Mapping[str, Builder]:
    """By name of the op; "scaled" are those of caches with scales. `attend` as Composed has it; `store`: append_kv
    without scales; `rounded(numbers, dtype)` as Quantized has it. What moves rows and blocks of a cache looks at its
    indices on a CPU; on a GPU it does not wait for them."""

    def one(call: Call, number: int, tensors: Sequence[Any], beside: Sequence[Any], targets: Sequence[Any]) -> None:
        """A sequence, all tensors (tokens, heads, extent), and lse (tokens, heads). `beside`: sinks and slopes."""
        sinks, slopes = beside
        if slopes is not None and len(slopes) > 1:
            slopes = slopes[number : number + 1]
        views = [tensor.transpose(0, 1).unsqueeze(0) for tensor in tensors]
        out, lse = targets
        made = out.transpose(0, 1).unsqueeze(0), lse.transpose(0, 1).unsqueeze(0)
        Composed(torch, attend, (*views, None, sinks, slopes), call).forward(made)

    def varlen(views: Sequence[Any], call: Call) -> Run:
        q, k, v, ends_q, ends_k, *beside = views

        def run(targets: Any) -> None:
            starts_q, starts_k = (
                checked_ends(given.tolist(), len(tokens), name, call.op)
                for given, tokens, name in ((ends_q, q, "cu_seqlens_q"), (ends_k, k, "cu_seqlens_k"))
            )
            for n in range(len(starts_q) - 1):
                rows, keys = slice(*starts_q[n : n + 2]), slice(*starts_k[n : n + 2])
                one(call, n, (q[rows], k[keys], v[keys]), beside, [target[rows] for target in targets])

        return run

    def paged(views: Sequence[Any], call: Call) -> Run:
        q, *caches, tables, lengths, ends, sinks, slopes, k_scale, v_scale = views
        scales = k_scale, v_scale
        placed = replace(call, attrs={**call.attrs, "causal_alignment": "bottom_right"})

        def run(targets: Any) -> None:
            counts = lengths.tolist()
            starts = list(range(len(counts) + 1))
            if ends is not None:
                starts = checked_ends(ends.tolist(), len(q), "cu_seqlens_q", call.op)
            held = caches if k_scale is None else [as_bits(torch, cache) for cache in caches]
            for b, k, v in gathered(torch, held, tables, counts, call, starts):
                rows = slice(*starts[b : b + 2])
                tensors = q[rows], k, v
                if k_scale is not None:
                    tensors = q[rows].float(), *map(_numbers, (k, v), caches, scales)
                one(placed, b, tensors, (sinks, slopes), [target[rows] for target in targets])

        return run

    def decode(views: Sequence[Any], call: Call) -> Run:
        """Of a cache with scales."""
        whole = paged(
            (*views[:5], None, None, None, *views[5:]), replace(call, attrs={**call.attrs, "is_causal": False})
        )
        return lambda out: whole((out, out.new_empty(out.shape[:2], dtype=torch.float32)))

    def append(views: Sequence[Any], call: Call) -> Run:
        key, value, k_cache, v_cache, slots, *scales = views
        spec = call.inputs[2]
        assert spec is not None

        def run(caches: Any) -> None:
            steps = (scale.reshape(-1, 1) for scale in scales)
            rows = (rounded(given.float() / step, spec.dtype) for given, step in zip((key, value), steps, strict=True))
            store((*rows, k_cache, v_cache, slots, None, None), call)(caches)

        return run

    def latent(views: Sequence[Any], call: Call) -> Run:
        *queries, ckv, kpe, tables, lengths = views
        blocks, room = ckv.shape[0], ckv.shape[1] * tables.shape[1]
        each = max(GATHERED // max(room * (ckv.shape[2] + kpe.shape[2]), 1), 1)  # sequences at a time

        def by_length(targets: Any) -> None:
            for b, *cached in gathered(torch, (ckv, kpe), tables, lengths.tolist(), call):
                rows = slice(b, b + 1)
                given = [query[rows] for query in queries], [one.unsqueeze(0) for one in cached]
                _latent(torch, *given, None, call, [target[rows] for target in targets])

        def by_room(targets: Any) -> None:
            """Does not wait for the lengths: as many keys as the tables have room for."""
            if not blocks or not room:
                targets[0].zero_()
                targets[1].fill_(-math.inf)
                return
            for start in range(0, len(tables), each):
                rows = slice(start, start + each)
                chosen = tables[rows].clamp(0, blocks - 1).flatten()  # entries that are not used may hold anything
                seen = torch.arange(room, device=tables.device) < lengths[rows].unsqueeze(1)
                # 0 in place of what no key is in: infinities there would reach the result
                cached = [
                    cache.index_select(0, chosen).view(len(seen), room, -1).masked_fill_(~seen.unsqueeze(-1), 0)
                    for cache in (ckv, kpe)
                ]
                given = [query[rows] for query in queries], cached
                _latent(torch, *given, seen, call, [target[rows] for target in targets])

        return by_room if is_gpu else by_length

    def gather(views: Sequence[Any], call: Call) -> Run:
        *caches, slots, k_scale, v_scale = views
        blocks, page = caches[0].shape[:2]
        room = blocks * page

        def run(targets: Any) -> None:
            wanted = slots.clone().long()  # the caller can write to its own while they are used
            if not is_gpu:
                _check_below(call.op, "slot", wanted, room, f"the {blocks} blocks of {page} of the caches; check slots")
            if not room:
                for target in targets:
                    as_bits(torch, target).zero_()
                return
            is_kept = ((wanted >= 0) & (wanted < room)).view(-1, 1, 1)
            places = wanted.clamp(0, room - 1)
            where = torch.div(places, page, rounding_mode="floor"), places % page
            for target, cache, scale in zip(targets, caches, (k_scale, v_scale), strict=True):
                rows = as_bits(torch, cache)[where].masked_fill_(~is_kept, 0)
                if scale is None:
                    as_bits(torch, target).copy_(rows)
                else:
                    target.copy_(_numbers(rows, cache, scale))

        return run

    def copy_blocks(views: Sequence[Any], call: Call) -> Run:
        """Pairs that copy nothing become the first one that does, or where none does copy a block to itself."""
        cache, _, sources, targets = views
        blocks = cache.shape[0]
        if not sources.numel():
            return lambda caches: None

        def run(caches: Any) -> None:
            origins, places = (given.clone().long() for given in (sources, targets))
            if not is_gpu:
                for name, given in (("sources", origins), ("targets", places)):
                    _check_below(call.op, "block", given, blocks, f"the blocks of the caches; check {name}")
                _check_apart(torch, origins, places)
            if not blocks:
                return
            is_kept = (origins >= 0) & (places >= 0) & (origins < blocks) & (places < blocks)
            first = is_kept.to(torch.uint8).argmax().view(1)
            to = torch.where(is_kept, places, places.index_select(0, first)).clamp(0, blocks - 1)
            of = torch.where(is_kept, origins, origins.index_select(0, first)).clamp(0, blocks - 1)
            of = torch.where(is_kept.any(), of, to)
            for target in caches:
                bits = as_bits(torch, target)
                bits[to] = bits[of]

        return run

    return {
        "attention_varlen_forward": varlen,
        "paged_attention_forward": paged,
        "mla_decode": latent,
        "gather_kv": gather,
        "copy_kv_blocks": copy_blocks,
        "paged_attention.scaled": decode,
        "paged_attention_forward.scaled": paged,
        "append_kv.scaled": append,
        "gather_kv.scaled": gather,
    }


def _numbers(rows: Any, cache: Any, scale: Any) -> Any:
    """What rows of a cache (tokens, heads, extent), given as integers of its size, stand for."""
    return rows.view(cache.dtype).float().mul_(scale.reshape(-1, 1))


def _latent(
    torch: Any, queries: Sequence[Any], cached: Sequence[Any], seen: Any, call: Call, targets: Sequence[Any]
) -> None:
    """Latent attention of queries (sequences, heads, extent) to rows (sequences, keys, extent), of which `seen` says
    which are keys; all of them without."""
    wide = torch.float64 if queries[0].dtype == torch.float64 else torch.float32
    rows = [one.to(wide) for one in cached]
    nope, rotated = (torch.matmul(query.to(wide), one.mT) for query, one in zip(queries, rows, strict=True))
    scores = nope.add_(rotated).mul_(call.attrs["scale"])
    if seen is not None:
        scores.masked_fill_(~seen.unsqueeze(1), -math.inf)
    lse = torch.logsumexp(scores, -1)
    shares = scores.sub_(lse.unsqueeze(-1)).exp_().masked_fill_((lse == -math.inf).unsqueeze(-1), 0.0)
    targets[0].copy_(torch.matmul(shares, rows[0]))
    targets[1].copy_(lse)


def _check_below(op: str, what: str, given: Any, limit: int, whose: str) -> None:
    high = int(given.max()) if given.numel() else -1
    if high >= limit:
        raise InvalidArgument(f"{op}: {what} {high} is outside [0, {limit}), {whose}", **{what: high})


def _check_apart(torch: Any, sources: Any, targets: Any) -> None:
    moved = (sources >= 0) & (targets >= 0) & (sources != targets)
    both = targets[moved & torch.isin(targets, sources[moved])].tolist()
    if both:
        raise InvalidArgument(
            f"copy_kv_blocks: block {both[0]} is the target of one pair and the source of another; allowed: one of "
            "both, so that a call can be run again; copy in two calls",
            block=both[0],
        )


def gathered(
    torch: Any, caches: Sequence[Any], tables: Any, counts: Sequence[int], call: Call, starts: Sequence[int] = ()
) -> Iterator[tuple[int, Any, Any]]:
    """Of each sequence: its number, its keys and its values, (tokens, heads, extent), without blocks that lie before
    the window of its first query."""
    blocks, page = caches[0].shape[:2]
    for b, entries, keys in pages(call, counts, page, tables.shape[1], starts):
        used = tables[b, entries].clone()
        checked_blocks(call, used.tolist(), b, blocks)
        k, v = (cache.index_select(0, used).flatten(0, 1)[:keys] for cache in caches)
        yield b, k, v
