"""Attention in Triton for Hopper: one kernel for prompts, and one that splits the keys for few queries over many of
them. Used by triton.py.

What Triton compiles anew for is dtypes, head_dim, the causal rule and the tile, and nothing else: tensors come to it
aligned (TMA wants it, too), and no integer is specialised on. The first call of a dtype and head_dim has all of that
compiled. Strides are in units of 16 bytes, so that the compiler knows of their alignment. The tables hold what was
fastest on an H200. Sources: Dao 2023, algorithm 1 (FlashAttention-2); Dao et al. 2023, "Flash-Decoding for long-context
inference".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from layerzero.workers.provider import Call
from layerzero.workers.providers._torch_cuda import TorchCuda, is_aligned
from layerzero.workers.providers._torch_ops import Run

ROWS = 16  # of queries times grouped heads, that a program of decode has: the least that a tensor core multiplies
UNIT = 8  # elements in 16 bytes
MAX_SPLITS = 128
COMBINED_ELEMENTS = 4096  # of parts that `combine` holds at a time
SHORT = 1024  # keys, up to which a prompt's tiles come in plain order


class Tile(NamedTuple):
    """What a kernel is compiled for, beyond dtypes and head_dim."""

    rows: int
    keys: int
    warps: int
    stages: int
    is_split: bool = False  # prefill: tiles that need no mask have a loop of their own


def prefill_tiles(dim: int) -> tuple[Tile, Tile]:
    """What `prefill_tile` chooses from: for few programs and for many."""
    if dim <= 64:
        return Tile(64, 128, 4, 2, True), Tile(64, 64, 4, 2, True)
    if dim <= 128:
        return Tile(64, 64, 4, 3, True), Tile(64, 32, 4, 2, True)
    return Tile(64, 64, 4, 3), Tile(128, 64, 8, 2, True)


def prefill_tile(dim: int, tiles: int, keys: int, group: int) -> Tile:
    """`tiles`: of 128 queries, over all heads."""
    few, many = prefill_tiles(dim)
    if dim > 128:
        return many if tiles > 128 else few
    return many if tiles > 256 and keys <= SHORT and (dim <= 64 or group > 1) else few


def decode_tile(dim: int) -> Tile:
    return {64: Tile(ROWS, 128, 4, 3), 128: Tile(ROWS, 64, 4, 4)}.get(dim, Tile(ROWS, 64, 4, 3))


def splits_for(programs: int, tiles: int, dim: int, sms: int) -> int:
    """Parts of the keys. The tiles of one program keep an SM's memory busy, but for small ones where many SMs wait."""
    slots = 2 * sms if dim <= 64 and programs <= sms // 2 else sms
    return max(min(tiles, MAX_SPLITS, slots // programs), 1)


class Kernels(NamedTuple):
    prefill: Any
    decode: Any
    combine: Any


def kernels(triton: Any, tl: Any) -> Kernels:
    @triton.jit  # type: ignore[untyped-decorator]
    def attend(  # type: ignore[no-untyped-def]
        acc, total, top, q, k_tiles, v_tiles, batch, head, first, last, rows, keys, offset, scale,
        BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    ):  # fmt: skip
        """Rows that see none of these keys keep what they have."""
        for start in tl.range(first, last, BLOCK_N):
            k = k_tiles.load([batch, head, start, 0]).reshape([BLOCK_N, WIDTH])
            scores = tl.dot(q, k.T)
            if MASKED:
                columns = start + tl.arange(0, BLOCK_N)
                visible = columns[None, :] < keys
                if CAUSAL:
                    visible = visible & (columns[None, :] <= rows[:, None] + offset)
                scores = tl.where(visible, scores * scale, float("-inf"))
                top_next = tl.maximum(top, tl.max(scores, 1))
                base = tl.where(top_next == float("-inf"), 0.0, top_next)
                weights = tl.exp2(scores - base[:, None])
                fade = tl.exp2(top - base)
            else:
                top_next = tl.maximum(top, tl.max(scores, 1) * scale)
                weights = tl.exp2(scores * scale - top_next[:, None])
                fade = tl.exp2(top - top_next)
            total = total * fade + tl.sum(weights, 1)
            v = v_tiles.load([batch, head, start, 0]).reshape([BLOCK_N, WIDTH])
            acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None])
            top = top_next
        return acc, total, top

    @triton.jit(  # type: ignore[untyped-decorator]
        do_not_specialize=["scale", "batch_heads", "heads", "group", "queries", "keys", "offset", "wave"]
    )
    def prefill(  # type: ignore[no-untyped-def]
        q_tiles, k_tiles, v_tiles, out_tiles,
        scale: tl.float32, batch_heads: tl.int32, heads: tl.int32, group: tl.int32,
        queries: tl.int32, keys: tl.int32, offset: tl.int32, wave: tl.int32,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr, SPLIT: tl.constexpr,
    ):  # fmt: skip
        """`scale` has log2 e in it and is not negative. Row i sees the keys up to i + offset."""
        place = tl.program_id(0)
        if CAUSAL:
            # The heaviest tiles come first, and every other wave backwards: an SM that began with a heavy one gets a
            # light one beside it.
            first = place // wave * wave
            if (place // wave) % 2 == 1:
                place = first + tl.minimum(first + wave, tl.num_programs(0)) - 1 - place
            tile = tl.cdiv(queries, BLOCK_M) - 1 - place // batch_heads
        else:
            tile = place // batch_heads
        head = place % batch_heads
        batch, head = head // heads, head % heads
        row = tile * BLOCK_M
        rows = row + tl.arange(0, BLOCK_M)
        full = keys // BLOCK_N * BLOCK_N
        end = keys
        if CAUSAL:
            end = tl.maximum(tl.minimum(keys, row + BLOCK_M + offset), 0)
            full = tl.maximum(tl.minimum(full, (row + offset + 1) // BLOCK_N * BLOCK_N), 0)
        q = q_tiles.load([batch, head, row, 0]).reshape([BLOCK_M, WIDTH])
        acc = tl.zeros([BLOCK_M, WIDTH], dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        if SPLIT:
            acc, total, top = attend(
                acc, total, top, q, k_tiles, v_tiles, batch, head // group, 0, full, rows, keys, offset, scale,
                BLOCK_N, WIDTH, False, CAUSAL,
            )  # fmt: skip
        else:
            full = 0
        acc, total, top = attend(
            acc, total, top, q, k_tiles, v_tiles, batch, head // group, full, end, rows, keys, offset, scale,
            BLOCK_N, WIDTH, True, CAUSAL,
        )  # fmt: skip
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        out_tiles.store([batch, head, row, 0], acc.to(out_tiles.dtype).reshape([1, 1, BLOCK_M, WIDTH]))

    @triton.jit(  # type: ignore[untyped-decorator]
        do_not_specialize=[
            *("scale", "kv_heads", "group", "rows", "row_tiles", "keys", "offset", "splits"),
            *("q_b", "q_h", "q_s", "k_b", "k_h", "k_s", "v_b", "v_h", "v_s", "out_b", "out_h", "out_s", "out_d"),
        ],
        do_not_specialize_on_alignment=["out"],
    )
    def decode(  # type: ignore[no-untyped-def]
        q, k, v, out, partial, lse,
        scale: tl.float32, kv_heads: tl.int32, group: tl.int32, rows: tl.int32, row_tiles: tl.int32,
        keys: tl.int32, offset: tl.int32, splits: tl.int32,
        q_b: tl.int64, q_h: tl.int64, q_s: tl.int64, k_b: tl.int64, k_h: tl.int64, k_s: tl.int64,
        v_b: tl.int64, v_h: tl.int64, v_s: tl.int64, out_b: tl.int64, out_h: tl.int64, out_s: tl.int64, out_d: tl.int64,
        ROWS: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    ):  # fmt: skip
        """Row r is of query r // group and head r % group of a group. It sees the keys up to r // group + offset.

        `partial` (tiles of rows, splits, ROWS, WIDTH) and `lse`, its log-sum-exp base 2, hold what each split makes.
        """
        place = tl.program_id(0)
        row_tile = place % row_tiles
        split = place // row_tiles % splits
        head = place // row_tiles // splits
        slot = head * row_tiles + row_tile
        batch = (head // kv_heads).to(tl.int64)
        head = (head % kv_heads).to(tl.int64)
        row = row_tile * ROWS + tl.arange(0, ROWS)
        query, member = (row // group).to(tl.int64), head * group + row % group
        is_row = row < rows
        lanes = tl.arange(0, WIDTH)
        is_lane = lanes < DIM
        limit = tl.minimum(row // group + offset + 1, keys)
        q += batch * (q_b * 8)
        q_rows = tl.load(
            q + (member * (q_h * 8) + query * (q_s * 8))[:, None] + lanes[None, :],
            mask=is_row[:, None] & is_lane[None, :],
            other=0.0,
        )
        tiles = tl.cdiv(keys, BLOCK_N)
        columns = tl.arange(0, BLOCK_N)
        k += batch * (k_b * 8) + head * (k_h * 8)
        v += batch * (v_b * 8) + head * (v_h * 8)
        k_lanes = (columns.to(tl.int64) * (k_s * 8))[:, None] + lanes[None, :]
        v_lanes = (columns.to(tl.int64) * (v_s * 8))[:, None] + lanes[None, :]
        acc = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
        total = tl.zeros([ROWS], dtype=tl.float32)
        top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        for tile in tl.range(tiles * split // splits, tiles * (split + 1) // splits):
            start = tile * BLOCK_N
            is_key = (start + columns < keys)[:, None]
            if DIM < WIDTH:
                is_key = is_key & is_lane[None, :]
            k_tile = tl.load(k + start.to(tl.int64) * (k_s * 8) + k_lanes, mask=is_key, other=0.0)
            scores = tl.dot(q_rows, k_tile.T) * scale
            scores = tl.where((start + columns)[None, :] < limit[:, None], scores, float("-inf"))
            top_next = tl.maximum(top, tl.max(scores, 1))
            base = tl.where(top_next == float("-inf"), 0.0, top_next)
            weights = tl.exp2(scores - base[:, None])
            fade = tl.exp2(top - base)
            total = total * fade + tl.sum(weights, 1)
            v_tile = tl.load(v + start.to(tl.int64) * (v_s * 8) + v_lanes, mask=is_key, other=0.0)
            acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * fade[:, None])
            top = top_next
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        out += batch * out_b
        targets = out + (member * out_h + query * out_s)[:, None] + lanes[None, :] * out_d
        stored = is_row[:, None] & is_lane[None, :]
        if splits == 1:
            tl.store(targets, acc.to(out.dtype.element_ty), mask=stored)
        else:
            numbers = tl.arange(0, ROWS)
            tl.extra.cuda.gdc_launch_dependents()  # `combine` waits for the end of all of this
            part = slot.to(tl.int64) * splits + split
            inner = numbers[:, None] * WIDTH + lanes[None, :]
            tl.store(partial + part * (ROWS * WIDTH) + inner, acc, mask=stored)
            tl.store(lse + part * ROWS + numbers, tl.where(total == 0.0, float("-inf"), top + tl.log2(total)))

    @triton.jit(  # type: ignore[untyped-decorator]
        do_not_specialize=["kv_heads", "group", "rows", "row_tiles", "splits", "out_b", "out_h", "out_s", "out_d"],
        do_not_specialize_on_alignment=["out"],
    )
    def combine(  # type: ignore[no-untyped-def]
        partial, lse, out, kv_heads: tl.int32, group: tl.int32, rows: tl.int32, row_tiles: tl.int32, splits: tl.int32,
        out_b: tl.int64, out_h: tl.int64, out_s: tl.int64, out_d: tl.int64,
        ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
    ):  # fmt: skip
        """One row of what `decode` leaves. It is launched while that still runs."""
        tl.extra.cuda.gdc_wait()
        place = tl.program_id(0)
        row = place % rows
        head = place // rows
        slot = head * row_tiles + row // ROWS
        part = slot.to(tl.int64) * splits
        lanes = tl.arange(0, WIDTH)
        total = 0.0
        top = float("-inf")
        acc = tl.zeros([WIDTH], dtype=tl.float32)
        for first in tl.range(0, splits, PARTS):
            parts = part + first + tl.arange(0, PARTS)
            is_part = first + tl.arange(0, PARTS) < splits
            ends = tl.load(lse + parts * ROWS + row % ROWS, mask=is_part, other=float("-inf"))
            values = tl.load(
                partial + (parts * ROWS + row % ROWS)[:, None] * WIDTH + lanes[None, :],
                mask=is_part[:, None] & (lanes < DIM)[None, :],
                other=0.0,
            )
            top_next = tl.maximum(top, tl.max(ends, 0))
            base = tl.where(top_next == float("-inf"), 0.0, top_next)
            shares = tl.exp2(ends - base)
            fade = tl.exp2(top - base)
            total = total * fade + tl.sum(shares, 0)
            acc = acc * fade + tl.sum(values * shares[:, None], 0)
            top = top_next
        acc = acc / tl.where(total == 0.0, 1.0, total)
        member = (head % kv_heads) * group + row % group
        out += (
            (head // kv_heads).to(tl.int64) * out_b + member.to(tl.int64) * out_h + (row // group).to(tl.int64) * out_s
        )
        tl.store(out + lanes * out_d, acc.to(out.dtype.element_ty), mask=lanes < DIM)

    return Kernels(prefill, decode, combine)


def up(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


def is_described(tensor: Any) -> bool:
    """TMA takes it as it lies; it has no strides of 0."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return is_aligned(tensor) and all(stride or extent == 1 for extent, stride in pairs)


class Attention:
    """Builders of the two kernels."""

    def __init__(self, torch: Any, triton: Any, tl: Any, descriptor: Any, gpu: TorchCuda) -> None:
        self.torch = torch
        self.descriptor = descriptor
        self.gpu = gpu
        self.kernels = kernels(triton, tl)
        self.ready: set[tuple[str, Any, int, Any]] = set()

    def prefill(self, views: Sequence[Any], call: Call) -> Run:
        q, k, v, *_ = views
        if k.shape[2] == 0:
            return lambda out: out.zero_()
        (batch, heads, queries, dim), keys, group = q.shape, k.shape[2], q.shape[1] // k.shape[1]
        is_causal, scale = bool(call.attrs["is_causal"]), float(call.attrs["scale"])
        width, tile = up(dim), prefill_tile(dim, batch * heads * -(-queries // 128), keys, group)
        self.ready_prefill(q, width)
        give_q, give_k, give_v = (self.described(tensor) for tensor in (q, k, v))
        sms = self.torch.cuda.get_device_properties(q.device).multi_processor_count
        offset = keys - queries if is_causal and call.attrs["causal_alignment"] == "bottom_right" else 0
        grid = (-(-queries // tile.rows) * batch * heads,)
        wave = grid[0] if keys <= SHORT else sms

        def run(out: Any) -> None:
            target = out if is_described(out) else self.torch.empty(out.shape, dtype=out.dtype, device=out.device)
            # Scores are scaled after their largest is taken, which a negative scale would make the smallest.
            given = [-give_q() if scale < 0 else give_q(), give_k(), give_v(), target]
            self.kernels.prefill[grid](
                *self.tiles(given, tile, width),
                *(abs(scale) * math.log2(math.e), batch * heads, heads, group, queries, keys, offset, wave),
                *(tile.rows, tile.keys, width, is_causal, tile.is_split),
                num_warps=tile.warps,
                num_stages=tile.stages,
            )
            if target is not out:
                out.copy_(target)

        return run

    def decode(self, views: Sequence[Any], call: Call) -> Run:
        q, k, v, *_ = views
        (batch, heads, queries, dim), (_, kv_heads, keys, _) = q.shape, k.shape
        is_causal = bool(call.attrs["is_causal"])
        offset = keys
        if is_causal:
            offset = keys - queries if call.attrs["causal_alignment"] == "bottom_right" else 0
            keys = min(keys, queries + offset)
        if keys <= 0:
            return lambda out: out.zero_()
        torch, tile, group = self.torch, decode_tile(dim), heads // kv_heads
        rows, width = queries * group, up(dim)
        self.ready_combine(q, width)
        row_tiles = -(-rows // ROWS)
        sms = torch.cuda.get_device_properties(q.device).multi_processor_count
        programs = batch * kv_heads * row_tiles
        splits = splits_for(programs, -(-keys // tile.keys), dim, sms)
        parts = programs * splits if splits > 1 else 0
        scale = float(call.attrs["scale"]) * math.log2(math.e)
        inputs = [self.gpu.aligned(tensor) for tensor in (q, k, v)]
        counts = [kv_heads, group, rows, row_tiles]

        def run(out: Any) -> None:
            given = [give() for give in inputs]
            partial, lse = (torch.empty(parts * ROWS * n, dtype=torch.float32, device=q.device) for n in (width, 1))
            strides = [stride // UNIT for tensor in given for stride in tensor.stride()[:3]]
            self.kernels.decode[(programs * splits,)](
                *(*given, out, partial, lse, scale, *counts, keys, offset, splits),
                *(*strides, *out.stride(), ROWS, tile.keys, dim, width),
                num_warps=tile.warps,
                num_stages=tile.stages,
            )
            if splits > 1:
                self.kernels.combine[(batch * kv_heads * rows,)](
                    *(partial, lse, out, *counts, splits, *out.stride()),
                    *(ROWS, dim, width, COMBINED_ELEMENTS // width),
                    launch_pdl=True,
                )

        return run

    def ready_prefill(self, q: Any, width: int) -> None:
        """Compile all that calls of this dtype and head_dim may come to, which one compilation stands for."""
        key = ("prefill", q.dtype, q.shape[3], q.device)
        if key in self.ready:
            return
        sample = self.torch.empty((1, 1, 1, q.shape[3]), dtype=q.dtype, device=q.device)
        for tile, is_causal in itertools.product(prefill_tiles(q.shape[3]), (False, True)):
            self.kernels.prefill.warmup(
                *self.tiles([sample] * 4, tile, width),
                *(1.0, 1, 1, 1, 1, 1, 0, 1),
                *(tile.rows, tile.keys, width, is_causal, tile.is_split),
                grid=(1,),
                num_warps=tile.warps,
                num_stages=tile.stages,
            )
        self.ready.add(key)

    def ready_combine(self, q: Any, width: int) -> None:
        """As ready_prefill."""
        key = ("combine", q.dtype, q.shape[3], q.device)
        if key in self.ready:
            return
        single = self.torch.float32
        sizes = (1, 1, 1, 1, 2, 1, 1, 1, 1, ROWS, q.shape[3], width, COMBINED_ELEMENTS // width)
        self.kernels.combine.warmup(single, single, q.dtype, *sizes, grid=(1,), launch_pdl=True)
        self.ready.add(key)

    def described(self, tensor: Any) -> Callable[[], Any]:
        """The tensor as TMA can load it, a copy where it does not lie so."""
        if is_described(tensor):
            return lambda: tensor
        return lambda: tensor.clone(memory_format=self.torch.contiguous_format)

    def tiles(self, tensors: Sequence[Any], tile: Tile, width: int) -> list[Any]:
        """Descriptors for TMA of q, k, v and out. It checks the strides of extents of 1, too, which may be anything:
        they are set as if outermost."""
        made = []
        for tensor, rows in zip(tensors, (tile.rows, tile.keys, tile.keys, tile.rows), strict=True):
            pairs = list(zip(tensor.shape, tensor.stride(), strict=True))
            span = max(extent * stride for extent, stride in pairs if extent > 1)
            strides = [stride if extent > 1 else span for extent, stride in pairs]
            made.append(self.descriptor(tensor, list(tensor.shape), strides, [1, 1, rows, width]))
        return made
