"""Block tables against a cache of token numbers: whatever sequences do, each finds its own tokens where it is told."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerzero.ipc.errors import InvalidArgument, OutOfMemory
from layerzero.paging import BlockTables, Growth


class Cache:
    """A cache of one number a slot, and what each sequence has written."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.tables = BlockTables(blocks=blocks, block_size=block_size)
        self.slots = np.full((blocks, block_size), -1)
        self.written: dict[str, list[int]] = {}
        self.count = 0

    def copy(self, sources: np.ndarray, targets: np.ndarray) -> None:
        assert not set(sources.tolist()) & set(targets.tolist())  # which lz.copy_kv_blocks refuses
        assert len(set(targets.tolist())) == len(targets)
        self.slots[targets] = self.slots[sources]

    def grow(self, tokens: dict[str, int]) -> Growth:
        made = self.tables.grow(tokens)
        self.copy(made.sources, made.targets)
        new = list(range(self.count, self.count + len(made.slots)))
        self.count += len(new)
        self.slots.reshape(-1)[made.slots] = new
        for name, count in tokens.items():
            self.written.setdefault(name, []).extend(new[:count])
            del new[:count]
        return made

    def check(self) -> None:
        """By slots, and by tables as attention reads them; blocks that nobody has are free."""
        page, names = self.tables.block_size, list(self.written)
        arrays, lengths = self.tables.arrays(names)
        for name, row, length in zip(names, arrays, lengths, strict=True):
            held = [self.slots[row[j // page], j % page] for j in range(length)]
            assert held == self.written[name] == self.slots.reshape(-1)[self.tables.slots(name)].tolist()
            assert (row[-(-length // page) :] == -1).all()
        used = set(arrays[arrays >= 0].tolist())
        assert self.tables.free_blocks == self.tables.blocks - len(used)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["grow", "both", "fork", "cut", "free", "compact"]), st.integers(0, 9), st.integers(0, 9)
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(STEPS, st.integers(1, 4), st.integers(1, 14))
def test_each_sequence_finds_its_own_tokens(steps: list[tuple[str, int, int]], page: int, blocks: int) -> None:
    cache = Cache(blocks, page)
    for number, (what, which, count) in enumerate(steps):
        names = list(cache.written)
        name = names[which % len(names)] if names else ""
        try:
            if what == "grow" or not names:
                cache.grow({f"s{which % 4}": count})
            elif what == "both":
                cache.grow(dict.fromkeys(names[-3:], 1 + count % 3))
            elif what == "fork":
                cache.tables.fork(name, f"f{number}")
                cache.written[f"f{number}"] = list(cache.written[name])
            elif what == "cut":
                del cache.written[name][count:]
                cache.tables.cut(name, len(cache.written[name]))
            elif what == "free":
                cache.tables.free(name)
                del cache.written[name]
            else:
                cache.copy(*cache.tables.compact())
                held, _ = cache.tables.arrays(list(cache.written))
                assert held.max(initial=-1) < blocks - cache.tables.free_blocks
        except OutOfMemory:  # the other test says when
            pass
        cache.check()


def test_a_block_that_is_shared_is_copied_before_one_writes() -> None:
    """The last of those that have it keeps it; full blocks stay shared."""
    cache = Cache(8, 4)
    cache.grow({"a": 6})
    cache.tables.fork("a", "b")
    cache.written["b"] = list(cache.written["a"])
    assert cache.tables.free_blocks == 6
    made = cache.grow({"a": 1, "b": 1})
    assert (made.sources.tolist(), made.targets.tolist()) == ([1], [2])
    assert made.slots.tolist() == [2 * 4 + 2, 1 * 4 + 2]
    assert cache.tables.arrays(["a", "b"], columns=3)[0].tolist() == [[0, 2, -1], [0, 1, -1]]
    cache.check()


def test_too_few_blocks_change_nothing() -> None:
    held = BlockTables(blocks=3, block_size=4)
    held.grow({"a": 5})
    held.fork("a", "b")
    with pytest.raises(OutOfMemory, match=r"2 blocks are needed and 1 of 3 are free; .*free sequences first"):
        held.grow({"a": 1, "c": 1})
    assert "c" not in held
    assert (len(held), held.length("a"), held.free_blocks) == (2, 5, 1)
    assert held.grow({"a": 1, "b": 3}).sources.tolist() == [1]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda held: held.free("x"), "'x' is no sequence"),
        (lambda held: held.fork("a", "a"), "'a' is a sequence already"),
        (lambda held: held.cut("a", 6), "length of 'a' is 6; allowed: an integer from 0 to 5"),
        (lambda held: held.grow({"a": -1}), "tokens of 'a' is -1"),
        (lambda held: held.grow({"a": True}), "tokens of 'a' is True"),
        (lambda held: held.slots("a", 3, 2), "start is 3; allowed: an integer from 0 to 2"),
        (lambda held: held.arrays(["a"], columns=1), "columns is 1; allowed: an integer from 2"),
        (lambda held: BlockTables(blocks=1, block_size=0), "block_size is 0"),
    ],
)
def test_what_makes_no_sense_is_refused(call: object, says: str) -> None:
    held = BlockTables(blocks=3, block_size=4)
    held.grow({"a": 5})
    with pytest.raises(InvalidArgument, match=says):
        call(held)  # type: ignore[operator]
