"""What one rank offers another is looked at before memory is made for it; and calls on GPUs that nobody has waited for,
without a GPU."""

from __future__ import annotations

import math
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from layerzero.groups import calls, points
from layerzero.groups.arrays import Given, Result
from layerzero.groups.nccl import _ALL, Nccl
from layerzero.groups.peers import OFFER, POINT
from layerzero.ipc.errors import ProtocolError, RanksDisagree
from layerzero.ipc.transport.plain import pack_body


class Told:
    """Of Peers, what has come from rank 1."""

    name, rank = "tp", 0

    def __init__(self, message: bytes) -> None:
        self._message = message

    def take(self, kind: bytes, ranks: list[int], until_s: float) -> dict[int, bytes]:
        assert (kind, ranks) == (POINT, [1])
        return {1: self._message}


def offered(what: Any, rest: bytes = b"") -> Any:
    return points._offered(Told(points._offer(what) + rest), 1, math.inf)  # type: ignore[arg-type]


def test_an_offer_is_read_as_it_was_made() -> None:
    offer, data = offered(["float32", [2, 3], 24, 7], b"x" * 24)
    assert (str(offer), offer.nbytes, offer.area_of, offer.place, data) == ("float32[2, 3]", 24, 7, None, b"x" * 24)
    offer, _ = offered(["bfloat16", [], 2, 0, "", "H200 a"])
    assert (str(offer), offer.place) == ("bfloat16[] of a GPU", ("", "H200 a"))


@pytest.mark.parametrize(
    "what",
    [
        ["float32", [2, 3], 20, 0],  # bytes that are not the shape's
        ["float32", [1 << 62, 4], 1 << 4, 0],
        ["float32", [-2, -3], 24, 0],
        ["float32", [2.0, 3], 24, 0],
        ["float32", [True], 4, 0],
        ["float32", [1] * 17, 4, 0],
        ["float33", [1], 4, 0],
        ["float32", [1], 4],
        ["float32", [1], 4, 0, ""],
        ["float32", [1], 4, 0, "", 5],
        {"dtype": "float32"},
        7,
    ],
)
def test_what_is_no_array_is_no_offer(what: Any) -> None:
    with pytest.raises(ProtocolError, match="rank 1 offered what is no array"):
        offered(what)


def test_who_cannot_send_says_why() -> None:
    with pytest.raises(RanksDisagree, match="rank 1 cannot send: x is too odd"):
        offered("x is too odd")


@pytest.mark.parametrize("is_on_gpu", [True, False])
def test_an_answer_is_of_what_was_offered(is_on_gpu: bool) -> None:
    right, other = b"PA" + (pack_body(["", "H200 a"]) if is_on_gpu else b""), b"PA" + pack_body([1, 2])
    assert points._accepted(Told(right), 1, math.inf, is_on_gpu=is_on_gpu)[0] == ""  # type: ignore[arg-type]
    for message in (other, b"PA" + pack_body("what"), b"nothing"):
        with pytest.raises(ProtocolError, match="of what it was offered"):
            points._accepted(Told(message), 1, math.inf, is_on_gpu=is_on_gpu)  # type: ignore[arg-type]
    with pytest.raises(RanksDisagree, match="send to each other at once"):
        points._accepted(Told(OFFER), 1, math.inf, is_on_gpu=is_on_gpu)  # type: ignore[arg-type]


class Endless(Nccl):
    """Of a GPU that never comes to the end."""

    current: Any = None  # stream
    is_done = False

    def _stream(self) -> Any:
        return self.current

    def _recorded(self) -> Any:
        stream = self.current
        return SimpleNamespace(query=lambda: self.is_done or stream in self.done)

    done: tuple[str, ...] = ()  # streams that have come to the end


def test_a_call_of_nothing_connects_nobody(tmp_path: Path) -> None:
    """The next one, which does, must still be waited for in a thread: this one hears of the other ranks meanwhile."""
    nccl = Endless(tmp_path, "tp", 1, 0, 0)
    peers: Any = SimpleNamespace(ends=list, is_ending=bool)
    given = Given(np.empty(0, np.float32))
    result = Result(given, (0,), None, may_be_input=False)
    nccl.run(peers, calls.Call(calls.ALL_GATHER, 0, 2, given, result, "", math.inf, is_waited=False))
    assert not nccl._connected
    nccl.drop()


def test_who_waits_for_one_stream_has_not_waited_for_another(tmp_path: Path) -> None:
    """Ranks may go while calls on that run, and a thread is to see it."""
    nccl = Endless(tmp_path, "tp", 1, 0, 0)
    peers: Any = SimpleNamespace(ends=list, is_ending=bool, look=lambda until_s: None)
    nccl.done = ("second", "third")
    for nccl.current, is_waited in (("first", False), ("second", False), ("third", True)):
        nccl._go(peers, (_ALL, True), None, math.inf, is_waited=is_waited)
    assert not nccl._is_done()
    assert nccl.void() == 1
    nccl.done = ("first", *nccl.done)
    nccl.wait(peers, math.inf)
    assert nccl._is_done()
    assert nccl.void() == 0
    nccl.drop()


def test_a_gpu_that_failed_keeps_no_rank_from_saying_so(tmp_path: Path) -> None:
    """Its events raise: the others would wait for their deadline."""

    class Failed(Endless):
        def _recorded(self) -> Any:
            def query() -> bool:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

            return SimpleNamespace(query=query)

    nccl = Failed(tmp_path, "tp", 1, 0, 0)
    peers: Any = SimpleNamespace(ends=list, is_ending=bool)
    nccl._go(peers, (_ALL, True), None, math.inf, is_waited=False)
    assert nccl.void() == 1
    nccl.drop()


def test_graphs_that_nobody_has_are_not_held(tmp_path: Path) -> None:
    class Graph:
        def let_go(self) -> None: ...

    nccl = Nccl(tmp_path, "tp", 1, 0, 0)
    for _ in range(3):
        graph = Graph()
        nccl.hold(weakref.WeakMethod(graph.let_go))
        del graph
    assert len(nccl._held) == 1


def test_calls_of_all_ranks_are_counted_as_void_and_those_of_two_are_not(tmp_path: Path) -> None:
    """`group.completed` has the first alone."""
    nccl = Endless(tmp_path, "tp", 1, 0, 0)
    peers: Any = SimpleNamespace(ends=list, is_ending=bool)
    for other, void in ((1, 0), (_ALL, 1), (1, 1), (_ALL, 2)):
        nccl._go(peers, (other, True), None, math.inf, is_waited=False)
        assert nccl.void() == void
    nccl.drop()
