"""Where sequences lie, one after the other or in a paged cache: what the caller's numbers say, checked. For providers
of every library."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from layerzero.ipc.errors import InvalidArgument
from layerzero.workers.provider import Call


def checked_lengths(lengths: list[int], room: int, op: str = "paged_attention") -> list[int]:
    """The lengths of sequences in a paged cache. Raises InvalidArgument for one that its row of the table lacks."""
    for b, length in enumerate(lengths):
        if not 0 <= length <= room:
            raise InvalidArgument(
                f"{op}: seq_lens[{b}] is {length}; allowed: 0 to {room}, what its row of block_tables has "
                "room for; pass longer tables",
                seq_len=length,
            )
    return lengths


def checked_ends(ends: list[int], tokens: int, name: str, op: str = "attention_varlen") -> list[int]:
    """The ends of sequences. Raises InvalidArgument where they are none."""
    if ends[0] or ends[-1] != tokens or any(low > high for low, high in itertools.pairwise(ends)):
        raise InvalidArgument(
            f"{op}: {name} is {str(ends)[:200]}; allowed: from 0 up to {tokens}, the number of tokens, and "
            "never down; pass the sums of the sequences' lengths"
        )
    return ends


def pages(
    call: Call, lengths: Sequence[int], page: int, wide: int, starts: Sequence[int] = ()
) -> Iterator[tuple[int, slice, int]]:
    """Of each sequence in a paged cache: its number, the entries of its row of the table that are read, and the keys in
    them. Without blocks that lie before the window of its first query: places are counted from the last key."""
    left = call.attrs.get("window_left")
    for b, length in enumerate(checked_lengths(list(lengths), page * wide, call.op)):
        first = 0
        if left is not None:
            first = max(length - (starts[b + 1] - starts[b]) - left, 0) // max(page, 1)
        used = slice(first, max(-(-length // page), first) if length else first)
        yield b, used, max(length - first * page, 0)


def checked_blocks(call: Call, used: list[int], number: int, blocks: int) -> list[int]:
    """Entries of a sequence's row of the table. Raises InvalidArgument for one that is no block."""
    bad = [block for block in used if not 0 <= block < blocks]
    if bad:
        raise InvalidArgument(
            f"{call.op}: block {bad[0]} of sequence {number} is outside [0, {blocks}), the blocks of the caches; check "
            "block_tables",
            block=bad[0],
        )
    return used


def checked_slots(call: Call, slots: list[int], blocks: int, page: int) -> list[int]:
    """Places of tokens in a paged cache; negative ones are none. Raises InvalidArgument for one beyond it."""
    high = max(slots, default=-1)
    if high >= blocks * page:
        raise InvalidArgument(
            f"{call.op}: slot {high} is outside [0, {blocks * page}), the {blocks} blocks of {page} of the caches; "
            "check slots",
            slot=high,
        )
    return slots
