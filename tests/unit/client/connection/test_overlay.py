"""Overlays: what is asked for in one place must not be heard in another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from layerzero.client.connection import overlay
from layerzero.client.connection.overlay import Overlay, Scope
from layerzero.ipc.errors import InvalidArgument


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """What holds for the process goes with the test."""
    before = overlay.process()
    yield
    overlay.change(lambda _: before)


def wish(name: str) -> Overlay:
    return Overlay.of({"origin": "lz.prefer", "values": {"rules": [{"prefer": [name]}]}})


def names() -> list[str]:
    """Who is preferred here, in order."""
    found = overlay.current()
    layers = found.layers if found is not None else ()
    return [layer["values"]["rules"][0]["prefer"][0] for layer in layers if layer["origin"] == "lz.prefer"]


def test_nothing_is_asked_for_by_default() -> None:
    """The usual case costs a look at two variables."""
    assert overlay.current() is None


def test_scopes_nest_and_end_in_any_order() -> None:
    """An exit must take away its own wish and no other."""
    outer, inner = Scope(wish("a")), Scope(wish("b"))
    assert names() == ["a", "b"]
    outer.end()
    assert names() == ["b"]
    inner.end()
    assert overlay.current() is None
    with outer:
        assert names() == ["a"]
    assert names() == []


def test_scope_ends_with_its_block_also_by_an_error() -> None:
    """Or one failed call would steer all calls after it."""
    with pytest.raises(KeyError), Scope(wish("a")):
        raise KeyError
    assert names() == []


def test_threads_do_not_hear_each_other() -> None:
    """Two threads of a server prefer different backends at the same time."""
    barrier = threading.Barrier(2, timeout=30)
    seen: dict[str, list[str]] = {}

    def work(name: str) -> None:
        with Scope(wish(name)):
            barrier.wait()
            seen[name] = names()
            barrier.wait()
        seen[f"{name} after"] = names()

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    with Scope(wish("main")):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert names() == ["main"]
    assert seen == {"a": ["a"], "b": ["b"], "a after": [], "b after": []}


def test_tasks_do_not_hear_each_other_and_inherit() -> None:
    """Tasks of one thread interleave at every await; one that is started inside a block is part of it."""
    seen: dict[str, list[str]] = {}

    async def work(name: str, here: asyncio.Event, there: asyncio.Event) -> None:
        with Scope(wish(name)):
            here.set()
            await there.wait()
            seen[name] = names()
            seen[f"{name} in a thread"] = await asyncio.to_thread(names)

    async def main() -> None:
        one, two = asyncio.Event(), asyncio.Event()
        with Scope(wish("outer")):
            tasks = [asyncio.create_task(work("a", one, two)), asyncio.create_task(work("b", two, one))]
        await asyncio.gather(*tasks)
        assert names() == []

    asyncio.run(main())
    assert seen == {key: ["outer", key[0]] for key in ("a", "b", "a in a thread", "b in a thread")}


def test_process_wide_parts_come_first_and_hold_in_all_threads() -> None:
    """call > environment, and a block's wish over both."""
    overlay.set_environment([{"origin": "LAYERZERO_STRICT_MODE", "values": {"strict_mode": "1"}}])
    overlay.change(lambda old: replace(old, locks={"silu": "a.silu"}, settings={"strict_mode": False}))
    with Scope(wish("a")):
        found = overlay.current()
    assert found is not None
    origins = [layer["origin"] for layer in found.layers]
    assert origins == ["LAYERZERO_STRICT_MODE", "lz.lock", "lz.configure", "lz.prefer"]
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(overlay.current()))
    thread.start()
    thread.join()
    assert [layer["origin"] for layer in seen[0].layers] == origins[:3]
    overlay.set_environment([])
    overlay.change(lambda old: replace(old, locks={}, settings={}))
    assert overlay.current() is None


def test_equal_wishes_have_equal_texts() -> None:
    """A block in a loop must not make a new route each time."""
    texts = set()
    for _ in range(3):
        with Scope(wish("a")):
            found = overlay.current()
            assert found is not None
            assert overlay.current() is found
            texts.add(found.text)
    assert len(texts) == 1


def test_overlay_keeps_a_copy_of_plain_values() -> None:
    """What the caller changes later must not change what was checked."""
    names_given = ["a"]
    found = Overlay.of({"origin": "x", "values": {"avoid_sources": names_given}})
    names_given.append("b")
    assert found.to_wire() == {"layers": [{"origin": "x", "values": {"avoid_sources": ["a"]}}]}
    for wrong in (object(), float("nan"), {1, 2}):
        with pytest.raises(InvalidArgument, match=r"lz\.configure: .*allowed: text"):
            Overlay.of({"origin": "lz.configure", "values": {"weights": wrong}})
