"""Pages of counters: what a client writes, a reader finds; words that cannot be are refused."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

from layerzero.client.session import repeats
from layerzero.ipc import errors
from layerzero.ipc.errors import LayerZeroError, ProtocolError
from layerzero.ipc.shm import memory
from layerzero.ipc.shm.counter_page import PAGE_BYTES, ROW_BYTES, ROWS, CounterPage
from layerzero.ipc.shm.counter_words import BUCKETS, CODES, REST, Label, bucket_of

SILU = Label("silu", "alpha.silu", "express")


@pytest.fixture
def pages() -> Iterator[tuple[CounterPage, CounterPage]]:
    """The client's and the reader's."""
    fd = memory.create_memfd("counters", PAGE_BYTES)
    made = CounterPage(fd, writable=True), CounterPage(fd, writable=False)
    os.close(fd)
    yield made
    for page in made:
        page.close()


def test_what_has_grown_is_told_once(pages: tuple[CounterPage, CounterPage]) -> None:
    """And all of it, whatever was told before."""
    page, reader = pages
    assert reader.grown() == []
    row = page.open_row(SILU)
    page.count(row, 1_500, 32)
    page.note_error(row, "DEADLINE")
    page.note_fallback(row, "BACKEND_ERROR")
    page.note_fallback(row, "a code of a later version")
    [found] = reader.grown()
    assert found.label == SILU
    assert (found.buckets, found.sum_ns, found.copied_bytes) == ([0, 1, *[0] * (BUCKETS - 2)], 1500, 32)
    assert (found.errors, found.fallbacks) == ({"DEADLINE": 1}, {"BACKEND_ERROR": 1, "OTHER": 1})
    assert reader.grown() == []
    page.count(row, 900, 0, 5)
    page.note_copied(row, 8)
    [found] = reader.grown()
    assert (found.buckets[:2], found.sum_ns, found.copied_bytes) == ([5, 0], 4500, 8)


@pytest.mark.parametrize(
    ("ns", "bucket"),
    [(0, 0), (1, 0), (1000, 0), (1001, 1), (2000, 1), (2001, 2), (1 << 62, BUCKETS - 1), (1000 << 24, 24)],
)
def test_a_bucket_is_of_at_most_a_power_of_two_us(ns: int, bucket: int) -> None:
    """The bound itself is in it, as Prometheus has it."""
    assert bucket_of(ns) == bucket


@pytest.mark.skipif(repeats.library is None, reason="not compiled")
def test_the_c_counts_as_the_python_does(pages: tuple[CounterPage, CounterPage]) -> None:
    """Whatever the time is."""
    page, reader = pages
    rng, rows = random.Random(0), [page.open_row(SILU), page.open_row(SILU._replace(path="ring"))]
    for _ in range(2000):
        ns, nbytes = rng.randrange(1 << rng.randrange(40)), rng.randrange(3)
        page.count(rows[0], ns, nbytes, 2)
        repeats.library.count(page.address + ROW_BYTES * rows[1], ns, nbytes, 2)
    one, other = reader.grown()
    assert one[1:] == other[1:]
    assert sum(one.buckets) == 4000
    repeats.library.count(0, 1, 1, 1)  # of no page: nothing


def test_there_is_an_end_to_rows(pages: tuple[CounterPage, CounterPage]) -> None:
    """What comes then is counted in the last one, together."""
    page, reader = pages
    rows = [page.open_row(Label("silu", f"k{n}", "express")) for n in range(ROWS + 40)]
    assert len(set(rows)) == ROWS - 1
    for row in rows:
        page.count(row, 10, 0)
    found = reader.grown()
    assert sum(sum(one.buckets) for one in found) == ROWS + 40
    assert [one.label for one in found][-1] == REST


@pytest.mark.parametrize(
    "label", [Label("silu", "k" * 300, "express"), Label("silu", "two\nlines", "express"), Label("", "", "nowhere")]
)
def test_labels_that_no_row_can_have_are_those_of_the_rest_or_refused(
    pages: tuple[CounterPage, CounterPage], label: Label
) -> None:
    """A kernel's name that is too long costs its name, not its counts."""
    page, reader = pages
    page.count(page.open_row(label), 10, 0)
    if len(label.kernel_id) > 100:
        assert [one.label for one in reader.grown()] == [REST]
    else:
        with pytest.raises(ProtocolError):
            reader.grown()


def test_what_was_right_stays_when_a_word_goes_wrong(pages: tuple[CounterPage, CounterPage]) -> None:
    """All or nothing of what a look finds."""
    page, reader = pages
    row, other = page.open_row(SILU), page.open_row(SILU._replace(path="ring"))
    page.count(row, 10, 0)
    page.count(other, 10, 0)
    assert len(reader.grown()) == 2
    page.count(row, 10, 0)
    page._words[(other * ROW_BYTES + 256) // 8] = 0
    with pytest.raises(ProtocolError, match="grew by -1"):
        reader.grown()


def test_every_error_has_a_word() -> None:
    """A new one is added at the end: the place is on the wire."""
    kinds = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, LayerZeroError)]
    assert {one.code for one in kinds if one is not LayerZeroError} <= set(CODES)
    assert CODES[:5] == ("OTHER", "INVALID_ARGUMENT", "NOT_CONNECTED", "NO_BACKEND", "BACKEND_ERROR")
