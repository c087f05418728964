"""Sequences and their blocks. No tensor of a cache is touched: what has to be copied or written is said by numbers."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from layerzero.ipc.errors import InvalidArgument, OutOfMemory

MAX_BLOCKS = (1 << 31) - 1  # as far as the integers of tables reach


class Growth(NamedTuple):
    """slots: int64 (tokens), of all new tokens, one sequence after the other, as lz.append_kv takes them. sources,
    targets: int32, blocks to be copied before, as lz.copy_kv_blocks takes them."""

    slots: NDArray[np.int64]
    sources: NDArray[np.int32]
    targets: NDArray[np.int32]


class BlockTables:
    """Blocks of a paged cache, and the sequences that have them, by any names of the caller's. Sequences share blocks
    after a fork, until one of them writes to a block. Of free blocks the lowest is given. Not for several threads at a
    time. Source: Kwon et al. 2023, 4.2 to 4.4; vLLM's block tables."""

    def __init__(self, *, blocks: int, block_size: int) -> None:
        self.blocks = _count("blocks", blocks, 0, MAX_BLOCKS)
        self.block_size = _count("block_size", block_size, 1, MAX_BLOCKS)
        self._free = list(range(self.blocks))  # a heap
        self._sharers = [0] * self.blocks
        self._held: dict[Hashable, list[int]] = {}
        self._lengths: dict[Hashable, int] = {}

    @property
    def free_blocks(self) -> int:
        """How many blocks no sequence has."""
        return len(self._free)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._held

    def __len__(self) -> int:
        return len(self._held)

    def length(self, sequence: Hashable) -> int:
        """Its tokens."""
        return self._lengths[self._known(sequence)]

    def grow(self, tokens: Mapping[Any, int]) -> Growth:
        """Give each of these sequences room for so many tokens more; those that are not known begin. A block that is
        written to and that others share is replaced by another one, which has to be a copy of it first. Raises
        OutOfMemory where blocks are too few: nothing has changed then, and freeing sequences helps."""
        for sequence, count in tokens.items():
            _count(f"tokens of {sequence!r}", count, 0, MAX_BLOCKS)
        needed = sum(self._needed(tokens))
        if needed > len(self._free):
            raise OutOfMemory(
                f"{needed} blocks are needed and {len(self._free)} of {self.blocks} are free; allowed: as many as are "
                "free; free sequences first, or make longer caches",
                needed=needed,
                free=len(self._free),
            )
        slots: list[NDArray[np.int64]] = []
        copied: list[tuple[int, int]] = []
        for sequence, count in tokens.items():
            held, length = self._held.setdefault(sequence, []), self._lengths.get(sequence, 0)
            last = length // self.block_size
            if count and last < len(held) and self._sharers[held[last]] > 1:
                self._sharers[held[last]] -= 1
                copied.append((held[last], self._take()))
                held[last] = copied[-1][1]
            while len(held) * self.block_size < length + count:
                held.append(self._take())
            self._lengths[sequence] = length + count
            slots.append(self._slots(held, length, length + count))
        pairs = np.array(copied, np.int32).reshape(-1, 2)
        found = np.concatenate(slots) if slots else np.zeros(0, np.int64)
        return Growth(found, pairs[:, 0].copy(), pairs[:, 1].copy())

    def fork(self, sequence: Hashable, new: Hashable) -> None:
        """Begin a sequence that has the same tokens, in the same blocks."""
        held = self._held[self._known(sequence)]
        if new in self._held:
            raise InvalidArgument(f"{new!r} is a sequence already; allowed: a new name; free it first")
        for block in held:
            self._sharers[block] += 1
        self._held[new], self._lengths[new] = list(held), self._lengths[sequence]

    def cut(self, sequence: Hashable, length: int) -> None:
        """Forget the tokens from `length` on, as drafts that were not accepted: blocks without others become free."""
        held = self._held[self._known(sequence)]
        _count(f"length of {sequence!r}", length, 0, self._lengths[sequence])
        kept = -(-length // self.block_size)
        self._give(held[kept:])
        del held[kept:]
        self._lengths[sequence] = length

    def free(self, sequence: Hashable) -> None:
        """End a sequence: blocks that no other one has become free."""
        self._give(self._held.pop(self._known(sequence)))
        del self._lengths[sequence]

    def arrays(
        self, sequences: Iterable[Hashable], *, columns: int | None = None
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """block_tables (sequences, columns) and seq_lens (sequences), int32, as lz.paged_attention takes them. columns:
        as many as the longest of them has blocks, or more, that graphs and compiled kernels see one shape. Entries that
        no key is in are -1."""
        names = list(sequences)
        rows = [self._held[self._known(name)] for name in names]
        most = max(map(len, rows), default=0)
        wide = most if columns is None else _count("columns", columns, most, MAX_BLOCKS)
        tables = np.full((len(rows), wide), -1, np.int32)
        for row, held in zip(tables, rows, strict=True):
            row[: len(held)] = held
        return tables, np.array([self._lengths[name] for name in names], np.int32)

    def slots(self, sequence: Hashable, start: int = 0, stop: int | None = None) -> NDArray[np.int64]:
        """Of its tokens from `start` up to `stop`, as lz.gather_kv takes them."""
        held, length = self._held[self._known(sequence)], self._lengths[sequence]
        last = length if stop is None else _count("stop", stop, 0, length)
        return self._slots(held, _count("start", start, 0, last), last)

    def compact(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Move what is held to the lowest blocks, so that all others are free: sources and targets, int32, to be copied
        by lz.copy_kv_blocks before the cache is used again."""
        used = self.blocks - len(self._free)
        targets = sorted(block for block in self._free if block < used)
        sources = [block for block in range(used, self.blocks) if self._sharers[block]]
        moved = dict(zip(sources, targets, strict=True))
        for held in self._held.values():
            held[:] = [moved.get(block, block) for block in held]
        for source, target in moved.items():
            self._sharers[target], self._sharers[source] = self._sharers[source], 0
        self._free = list(range(used, self.blocks))
        return np.array(sources, np.int32), np.array(targets, np.int32)

    def _needed(self, tokens: Mapping[Any, int]) -> Iterable[int]:
        """Blocks that each of these sequences would take. Of several that share a block, the last one to write keeps
        it."""
        sharers: dict[int, int] = {}
        for sequence, count in tokens.items():
            held, length = self._held.get(sequence, []), self._lengths.get(sequence, 0)
            more = max(-(-(length + count) // self.block_size) - len(held), 0)
            last = length // self.block_size
            if count and last < len(held):
                block = held[last]
                left = sharers.setdefault(block, self._sharers[block])
                more += left > 1
                sharers[block] = left - 1
            yield more

    def _slots(self, held: list[int], start: int, stop: int) -> NDArray[np.int64]:
        places = np.arange(start, stop, dtype=np.int64)
        return np.array(held, np.int64)[places // self.block_size] * self.block_size + places % self.block_size

    def _take(self) -> int:
        block = heapq.heappop(self._free)
        self._sharers[block] = 1
        return block

    def _give(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._sharers[block] -= 1
            if not self._sharers[block]:
                heapq.heappush(self._free, block)

    def _known(self, sequence: Hashable) -> Hashable:
        if sequence not in self._held:
            raise InvalidArgument(f"{sequence!r} is no sequence; allowed: one of {len(self._held)} that grew; grow it")
        return sequence


def _count(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= value <= high:
        raise InvalidArgument(f"{name} is {value!r}; allowed: an integer from {low} to {high}; check what was passed")
    return int(value)
