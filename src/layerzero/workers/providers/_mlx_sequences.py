"""Attention within sequences, packed or in a paged cache, by MLX, one after the other, and rows of such a cache. Of a
cache the blocks that a call names are read, and the slots written; all else of MLX's ops is copied whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.workers.provider import Bind, Block, Bound, Call
from layerzero.workers.providers._mlx_quantized import narrowed, widened
from layerzero.workers.providers._sequences import checked_blocks, checked_ends, checked_slots, pages

_FORMAT: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}


class Memory(Protocol):
    """What mlx.py knows of memory."""

    mx: Any
    unsigned: dict[int, Any]

    def reader(self, block: Block) -> Callable[[], Any]: ...

    def writer(self, block: Block) -> Callable[[Any], None]: ...


def binds(memory: Memory) -> Mapping[str, Bind]:
    """By name of the kernel; "scaled" are those of caches with scales."""
    made = _Sequences(memory)
    return {
        "attention_varlen": made.bind(made.varlen),
        "attention_varlen_forward": made.bind(made.varlen),
        "paged_attention": made.bind(made.paged),
        "paged_attention.scaled": made.bind(made.paged),
        "paged_attention_forward": made.bind(made.paged),
        "paged_attention_forward.scaled": made.bind(made.paged),
        "mla_decode": made.bind(made.latent),
        "gather_kv": made.bind(made.gather),
        "gather_kv.scaled": made.bind(made.gather),
        "append_kv.scaled": made.append,
    }


@dataclass(frozen=True)
class _Cache:
    """A paged cache in memory: blocks of it as arrays (keys, heads, extent)."""

    memory: Memory
    block: Block
    scale: Callable[[], Any] | None = None
    as_bits: bool = False

    def rows(self, numbers: Sequence[int]) -> Any:
        """These blocks, one after the other; in float32 unless `as_bits`."""
        mx, spec = self.memory.mx, self.block.spec
        one = TensorSpec(spec.dtype, spec.shape[1:], spec.strides[1:])
        span = one.span_bytes // one.itemsize
        flat = self.block.host[: spec.span_bytes].cast(_FORMAT[spec.itemsize])
        parts = [mx.array(flat[n * spec.strides[0] :][:span]) for n in numbers]
        if not one.is_contiguous:
            parts = [mx.as_strided(part, one.shape, one.strides) for part in parts]
        none = mx.zeros((0, *one.shape[1:]), self.memory.unsigned[spec.itemsize])
        found = mx.concatenate([none, *(part.reshape(one.shape) for part in parts)])
        if self.as_bits:
            return found
        if self.scale is None:
            return found.view(getattr(mx, spec.dtype)).astype(mx.float32)
        steps = self.scale().reshape((-1, 1))
        return widened(mx, found.view(getattr(mx, spec.dtype, mx.uint8)), spec.dtype) * steps


class _Sequences:
    """One method per op, each `(call, inputs) -> compute()`, which gives the op's results."""

    def __init__(self, memory: Memory) -> None:
        self.memory, self.mx = memory, memory.mx

    def bind(self, build: Callable[[Call, Sequence[Block | None]], Callable[[], Sequence[Any]]]) -> Bind:
        def bind(call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
            compute = build(call, inputs)
            writers = [self.memory.writer(block) for block in outputs]
            dtypes = [getattr(self.mx, block.spec.dtype, None) for block in outputs]

            def bound() -> None:
                for write, dtype, result in zip(writers, dtypes, compute(), strict=False):
                    write(result if dtype is None or call.op == "gather_kv" else result.astype(dtype))

            return bound

        return bind

    def _read(self, *blocks: Block | None) -> list[Callable[[], Any]]:
        """Functions that give arrays; None for what is left out."""
        return [_nothing if block is None else self.memory.reader(block) for block in blocks]

    def _cache(self, block: Block | None, scale: Block | None = None) -> _Cache:
        assert block is not None
        return _Cache(self.memory, block, None if scale is None else self.memory.reader(scale))

    def varlen(self, call: Call, inputs: Sequence[Block | None]) -> Callable[[], Sequence[Any]]:
        readers = self._read(*inputs, *[None] * (7 - len(inputs)))

        def compute() -> Sequence[Any]:
            q, k, v, ends_q, ends_k, sinks, slopes = (read() for read in readers)
            starts_q, starts_k = (
                checked_ends(given.tolist(), len(tokens), name, call.op)
                for given, tokens, name in ((ends_q, q, "cu_seqlens_q"), (ends_k, k, "cu_seqlens_k"))
            )
            is_last = call.attrs["causal_alignment"] == "bottom_right"
            made = []
            for n in range(len(starts_q) - 1):
                rows, keys = slice(*starts_q[n : n + 2]), slice(*starts_k[n : n + 2])
                made.append(self._attend((q[rows], k[keys], v[keys]), (sinks, _of(slopes, n)), call, is_last))
            return self._joined(made)

        return compute

    def paged(self, call: Call, inputs: Sequence[Block | None]) -> Callable[[], Sequence[Any]]:
        q, k_cache, v_cache, tables, lengths, *beside, k_scale, v_scale = inputs
        caches = self._cache(k_cache, k_scale), self._cache(v_cache, v_scale)
        readers = self._read(q, tables, lengths, *beside, *[None] * (3 - len(beside)))
        blocks, page = caches[0].block.spec.shape[:2]

        def compute() -> Sequence[Any]:
            q, tables, lengths, ends, sinks, slopes = (read() for read in readers)
            counts, rows_of = lengths.tolist(), tables.tolist()
            starts = list(range(len(counts) + 1))
            if ends is not None:
                starts = checked_ends(ends.tolist(), len(q), "cu_seqlens_q", call.op)
            made = []
            for b, entries, keys in pages(call, counts, page, tables.shape[1], starts):
                used = checked_blocks(call, rows_of[b][entries], b, blocks)
                k, v = (cache.rows(used)[:keys] for cache in caches)
                rows = slice(*starts[b : b + 2])
                made.append(self._attend((q[rows], k, v), (sinks, _of(slopes, b)), call, True))
            return self._joined(made)

        return compute

    def latent(self, call: Call, inputs: Sequence[Block | None]) -> Callable[[], Sequence[Any]]:
        """Attention of one head of keys, latent vectors beside rotated keys, of which the former are the values."""
        *queries, ckv, kpe, tables, lengths = inputs
        readers = self._read(*queries, tables, lengths)
        given = [cache for cache in (ckv, kpe) if cache is not None]
        caches = [_Cache(self.memory, Block(cache.memory, cache.spec.unsqueeze(2))) for cache in given]
        blocks, page = caches[0].block.spec.shape[:2]

        def compute() -> Sequence[Any]:
            nope, rotated, tables, lengths = (read() for read in readers)
            q, rows_of = self.mx.concatenate([nope, rotated], axis=-1), tables.tolist()
            made = []
            for b, entries, keys in pages(call, lengths.tolist(), page, tables.shape[1]):
                used = checked_blocks(call, rows_of[b][entries], b, blocks)
                latent, beside = (cache.rows(used)[:keys] for cache in caches)
                k = self.mx.concatenate([latent, beside], axis=-1)
                made.append(self._attend((q[b : b + 1], k, latent), (None, None), call, True))
            return self._joined(made)

        return compute

    def _attend(self, tensors: Sequence[Any], beside: Sequence[Any], call: Call, is_last: bool) -> tuple[Any, Any]:
        """Result (queries, heads, extent) and log-sum-exp (queries, heads) of a sequence, in float32. `is_last`: the
        place of the last query is the last key."""
        mx, attrs, (sinks, slopes) = self.mx, call.attrs, beside
        q, k, v = (tensor.astype(mx.float32) for tensor in tensors)
        (queries, heads, _), keys = q.shape, k.shape[0]
        if not queries or not keys:
            least = mx.array(-math.inf) if sinks is None else sinks.astype(mx.float32)
            return mx.zeros((queries, heads, v.shape[2])), mx.broadcast_to(least, (queries, heads))
        shape = (k.shape[1], heads // k.shape[1] * queries, -1)  # heads that share keys are rows of one product
        product = mx.matmul(mx.swapaxes(q, 0, 1).reshape(shape), k.transpose(1, 2, 0))
        scores, cap = product.reshape((heads, queries, keys)) * attrs["scale"], attrs.get("softcap")
        if cap is not None:
            scores = cap * mx.tanh(scores / cap)
        distance = mx.arange(keys)[None, :] - mx.arange(queries)[:, None] - (keys - queries if is_last else 0)
        if slopes is not None:
            scores = scores - slopes[:, None, None] * mx.abs(distance)
        left, right = attrs.get("window_left"), 0 if attrs.get("is_causal") else attrs.get("window_right")
        if left is not None:
            scores = mx.where(distance >= -left, scores, -math.inf)
        if right is not None:
            scores = mx.where(distance <= right, scores, -math.inf)
        top = mx.max(scores, axis=-1, keepdims=True)
        if sinks is not None:
            top = mx.maximum(top, sinks.astype(mx.float32)[:, None, None])
        top = mx.where(top == -math.inf, 0.0, top)
        weights = mx.exp(scores - top)
        total = mx.sum(weights, axis=-1, keepdims=True)
        if sinks is not None:
            total = total + mx.exp(sinks.astype(mx.float32)[:, None, None] - top)
        out = mx.matmul(weights.reshape(shape), mx.swapaxes(v, 0, 1)).reshape((heads, queries, -1))
        out = out / mx.where(total == 0.0, 1.0, total)
        return mx.swapaxes(out, 0, 1), mx.swapaxes((mx.log(total) + top)[..., 0], 0, 1)

    def _joined(self, made: Sequence[tuple[Any, Any]]) -> Sequence[Any]:
        return [self.mx.concatenate(list(parts)) for parts in zip(*made, strict=True)]

    def gather(self, call: Call, inputs: Sequence[Block | None]) -> Callable[[], Sequence[Any]]:
        k_cache, v_cache, slots, k_scale, v_scale = inputs
        mx, (read,) = self.mx, self._read(slots)
        made = [self._cache(*pair) for pair in ((k_cache, k_scale), (v_cache, v_scale))]
        caches = [_Cache(self.memory, one.block, one.scale, as_bits=one.scale is None) for one in made]
        blocks, page = caches[0].block.spec.shape[:2]
        dtype = None if k_scale is None else getattr(mx, call.attrs["dtype"])

        def compute() -> Sequence[Any]:
            wanted = checked_slots(call, read().tolist(), blocks, page)
            used = sorted({slot // page for slot in wanted if slot >= 0})
            first = {block: number * page for number, block in enumerate(used)}
            places = mx.array([first[slot // page] + slot % page if slot >= 0 else 0 for slot in wanted])
            is_kept = mx.array([slot >= 0 for slot in wanted])[:, None, None]
            found = []
            for cache in caches:
                rows = cache.rows(used or [0])
                rows = mx.where(is_kept, mx.take(rows, places, axis=0), mx.array(0, rows.dtype))
                found.append(rows if dtype is None else rows.astype(dtype))
            return found

        return compute

    def append(self, call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        """Numbers by MLX, and their bytes into their slots."""
        mx, (key, value, _, _, slots, k_scale, v_scale) = self.mx, inputs
        readers = self._read(key, value, slots, k_scale, v_scale)
        blocks, page = outputs[0].spec.shape[:2]

        def bound() -> None:
            *rows, wanted, k_steps, v_steps = (read() for read in readers)
            places = checked_slots(call, wanted.tolist(), blocks, page)
            for given, steps, block in zip(rows, (k_steps, v_steps), outputs, strict=True):
                parts = narrowed(mx, given.astype(mx.float32) / steps.reshape((-1, 1)), block.spec.dtype)
                dense = mx.contiguous(parts).view(mx.uint8).reshape(-1)
                mx.eval(dense)
                _store(memoryview(dense), block, places)

        return bound


def _nothing() -> None:
    return None


def _of(slopes: Any, number: int) -> Any:
    """The slopes of a sequence."""
    return None if slopes is None else slopes[number if slopes.shape[0] > 1 else 0]


def _store(rows: memoryview, block: Block, places: Sequence[int]) -> None:
    """Tokens of one byte an element into the slots of a cache; negative ones are none."""
    _, page, heads, extent = block.spec.shape
    of_block, of_row, of_head, step = block.spec.strides
    memory, number = block.host, 0
    for place in places:
        start = place // page * of_block + place % page * of_row
        for head in range(heads):
            if place >= 0:
                first = start + head * of_head
                memory[first : first + (extent - 1) * step + 1 : step] = rows[number : number + extent]
            number += extent
