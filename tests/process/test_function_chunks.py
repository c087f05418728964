"""Items of a map that cross as one call: `f.map(xs, chunksize=n)`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process import isolated_chunks as fn
from tests.process.function_site import serving
from tests.process.harness import Site, wait_until

import layerzero as lz


@pytest.fixture(scope="module", autouse=True)
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    one = Site(tmp_path_factory.mktemp("store"), restart_budget=100, backoff_s=0.01)
    with serving(one, fn.PLAIN):
        yield one


@pytest.mark.parametrize("chunksize", [1, 2, 7, 70, 1000])
def test_results_are_those_of_single_calls(chunksize: int) -> None:
    numbers = [0, -1, 2**70, 1.5, "a", b"b", (1, 2), [3], {"k": None}, True] * 7
    others = [1, 1, 1, 1, "a", b"b", (3,), [4], None, 1] * 7
    pairs = [(one, other) for one, other in zip(numbers, others, strict=True) if other is not None]
    found = list(fn.add.map(*zip(*pairs, strict=True), chunksize=chunksize))
    assert found == [one + other for one, other in pairs]
    assert list(fn.add.map([1, 2, 3], chunksize=chunksize)) == [2, 3, 4]
    assert list(fn.add.map([], chunksize=chunksize)) == []


def test_many_results_are_fetched_that_the_first_answer_has_no_room_for() -> None:
    texts = [str(n) * 500 for n in range(300)]
    assert list(fn.add.map(texts, texts, chunksize=100)) == [text + text for text in texts]


def test_what_a_call_raises_comes_at_its_place_and_ends_its_chunk(tmp_path: Path) -> None:
    results = fn.halve.map([str(tmp_path)] * 6, [0, 2, 3, 4, 6, 8], chunksize=4)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(lz.RemoteError, match="ValueError: 3 is odd") as caught:
        next(results)
    assert caught.value.type == "ValueError"
    assert "in halve" in caught.value.traceback
    assert list(results) == []
    wait_until(lambda: fn.runs(tmp_path) == ["0", "2", "3", "6", "8"])  # the second one was sent before


def test_a_result_that_cannot_cross_is_an_error_at_its_place() -> None:
    results = fn.strange.map(range(5), chunksize=5)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(lz.InvalidArgument, match="strange has run, and result"):
        next(results)


def _notes(results: Iterator[Any]) -> list[str]:
    """Of the error that they end in."""
    with pytest.raises(lz.LayerZeroError) as caught:
        list(results)
    return getattr(caught.value, "__notes__", [])


@pytest.mark.parametrize("chunksize", [1, 2, 4, 100])
def test_an_error_names_the_item_of_the_map(tmp_path: Path, chunksize: int) -> None:
    """Counted from 0, whichever chunk it is in; a death is of its chunk."""
    folders, (one, many) = [str(tmp_path)] * 8, ("in item {} of {}.map", "in items {} to {} of {}.map, one call")
    name = "tests.process.isolated_chunks."
    failed = fn.halve.map(folders, [0, 2, 4, 6, 8, 1, 3, 5], chunksize=chunksize)
    assert _notes(failed) == [one.format(5, f"{name}halve")]
    assert _notes(fn.strange.map(range(5), chunksize=chunksize)) == [one.format(3, f"{name}strange")]
    assert _notes(fn.add.map([1] * 3, [1] * 3, [1] * 3, chunksize=chunksize)) == [one.format(0, f"{name}add")]
    assert _notes(fn.add.map([1, 1, object(), 1, 1], chunksize=chunksize)) == [one.format(2, f"{name}add")]
    (tmp_path / "runs").unlink()
    dies = _notes(fn.dies_once.map(folders[:5], range(5), chunksize=chunksize))
    first, last = {1: (2, 2), 2: (2, 3), 4: (0, 3), 100: (0, 4)}[chunksize]
    label = f"{name}dies_once"
    assert dies == [one.format(2, label) if first == last else many.format(first, last, label)]


def test_a_death_is_one_of_all_calls_that_crossed_together(tmp_path: Path) -> None:
    """Once more only where the function may run twice; else the fallback has each."""
    folders = [str(tmp_path)] * 4
    with pytest.raises(lz.BackendError, match="it may have run in part"):
        list(fn.dies_once.map(folders, range(4), chunksize=4))
    (tmp_path / "runs").unlink()
    again = fn.dies_once.options(idempotent=True)
    assert list(again.map(folders, range(4), chunksize=4)) == [0, 1, 2, 3]
    assert fn.runs(tmp_path) == ["0", "1", "2", "0", "1", "2", "3"]
    (tmp_path / "runs").unlink()
    safe = fn.dies_once.options(fallback=lambda folder, number: -number)
    assert list(safe.map(folders, range(4), chunksize=4)) == [0, -1, -2, -3]
    assert safe.last_report().failures


def test_a_chunk_has_the_time_of_its_calls() -> None:
    slow = fn.slow.options(timeout_s=2.0)
    assert list(slow.map([0.75] * 4, chunksize=4)) == [0.75] * 4
    with pytest.raises(lz.DeadlineExceeded):
        list(fn.slow.options(timeout_s=0.3).map([30.0, 30.0], chunksize=2))


def test_sizes_and_kinds_that_cannot_be_are_refused() -> None:
    for size in (0, -1, 1.5, True, "4", 1 << 17):
        with pytest.raises(lz.InvalidArgument, match="chunksize is"):
            fn.add.map([1], chunksize=size)  # type: ignore[arg-type]
    for function in (
        fn.later,
        fn.add.options(keep=True),
        fn.add.options(shadow=0.5),
        fn.slow.options(shapes=lambda seconds: ((2,), "float32")),
    ):
        with pytest.raises(lz.InvalidArgument, match="allowed: 1 for generators and coroutine functions"):
            function.map([1], chunksize=2)  # type: ignore[attr-defined]
    with pytest.raises(lz.InvalidArgument, match="too many positional arguments"):
        list(fn.add.map([1], [2], [3], chunksize=2))
    with pytest.raises(lz.InvalidArgument, match="object"):
        list(fn.add.map([object()], chunksize=2))
