"""Coroutines, asynchronous generators and methods of handles, through a real broker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process import forks
from tests.process import isolated_coroutines as fn
from tests.process.function_site import serving
from tests.process.harness import Site, wait_until

import layerzero as lz

count: Any = fn.count
store: Any = fn.Store


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    forks.start_server()
    one = Site(tmp_path_factory.mktemp("store"), restart_budget=100, backoff_s=0.01)
    with serving(one, fn.PLAIN):
        yield one


pytestmark = pytest.mark.usefixtures("site")


def test_a_coroutine_runs_there_to_its_end() -> None:
    async def both() -> list[int]:
        return list(await asyncio.gather(fn.total([1, 2, 3]), fn.total([4, 5])))

    assert asyncio.run(both()) == [6, 9]
    assert fn.total([1, 2]).result() == 3  # type: ignore[attr-defined]
    assert list(fn.total.map([[1], [2, 3]])) == [1, 5]
    assert asyncio.run(fn.total.local([1, 2])) == 3  # type: ignore[arg-type]
    pids = {fn.same_loop().result() for _ in range(3)}  # type: ignore[attr-defined]
    assert len(pids) == 1


def test_what_a_coroutine_raises_and_its_deadline_are_its_callers() -> None:
    async def call() -> None:
        await fn.fails("bread")

    with pytest.raises(lz.RemoteError, match="LookupError: bread") as raised:
        asyncio.run(call())
    assert raised.value.type == "LookupError"
    assert 'coroutines.py", line' in raised.value.traceback
    with pytest.raises(lz.DeadlineExceeded):
        fn.never_ends().result()  # type: ignore[attr-defined]
    assert fn.never_ends.options(fallback=lambda: "late")().result() == "late"  # type: ignore[attr-defined]
    with pytest.raises(lz.InvalidArgument, match="fallback async_here is asynchronous"):
        fn.fails.options(fallback=fn.async_here)


def test_an_asynchronous_generator_is_a_stream(tmp_path: Path) -> None:
    notes = tmp_path / "notes"

    async def taken(most: int) -> list[int]:
        found = []
        with count(5, str(notes)) as stream:
            async for number in stream:
                found.append(number)
                if len(found) == most:
                    break
        return found

    assert asyncio.run(taken(10)) == [0, 1, 2, 3, 4]
    assert notes.read_text() == "closed\n"
    assert asyncio.run(taken(2)) == [0, 1]  # closed by who took it: its `finally` has run
    assert notes.read_text() == "closed\n" * 2
    assert list(count(3, str(notes))) == [0, 1, 2]
    stream = count(3, str(notes))
    next(stream)
    del stream
    wait_until(lambda: notes.read_text() == "closed\n" * 4)


def test_methods_of_objects_may_be_coroutines() -> None:
    async def use() -> tuple[int, list[int]]:
        with store(2) as one:
            added = await one.add(1)
            return added, [number async for number in one.items()]

    assert asyncio.run(use()) == (3, [0, 1, 2])
    assert store.named().result() == "Store"
    with store(5) as one:
        with pytest.raises(lz.BackendError):
            one.die().result()
        assert one.add(1).result() == 6  # constructed again


def test_methods_and_attributes_of_handles() -> None:
    with fn.numbers([3, 1, 2]) as handle:
        handle.append(5)
        assert handle.index(1) == 1
        assert handle.count.submit(5).result() == 1
        assert handle.fetch() == [3, 1, 2, 5]
        with handle.copy.options(keep=True)() as copy:
            assert copy.pop() == 5
            assert list(copy) == [3, 1, 2]
        with pytest.raises(lz.RemoteError, match="AttributeError"):
            handle.nothing()
        with pytest.raises(AttributeError, match="nothing"):
            handle.value("nothing")
        with pytest.raises(AttributeError, match="underscore"):
            handle._private()
        with pytest.raises(lz.InvalidArgument, match="cannot go to another environment"):
            handle.value("append")
    with pytest.raises(lz.InvalidArgument, match="closed"):
        handle.append(1)
