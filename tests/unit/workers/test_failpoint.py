"""Failpoints: off unless asked for, at the phase and passage that were asked for, and never by accident."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.shm import lane, memory
from layerzero.ipc.shm.ring import Ring, create_page
from layerzero.ipc.shm.ring_words import ENQUEUED, LEFT
from layerzero.ipc.transport import wire
from layerzero.ipc.transport.wire import Kind
from layerzero.ipc.vocabulary.worker_codes import EXECUTING, IDLE, MAPPED, WRITTEN, mark
from layerzero.workers.failpoint import NO_STATUS, PHASES, SPOILERS, STALE_BY, Failpoints, Faults

SPOILT = {
    "garbage": b"\xff" * 64,
    "stale": wire.pack(Kind.RAN, seq=7 + STALE_BY),
    "truncated": wire.pack(Kind.RAN, seq=7)[: wire.HEADER_BYTES // 2],
    "silent": b"",
}


def test_empty_text_arms_nothing() -> None:
    """A worker that was asked for nothing does not even load this module."""
    points = Failpoints("")
    assert [points.hit(phase) for phase in PHASES] == [""] * len(PHASES)


def test_armed_phase_tells_what_becomes_of_the_answer() -> None:
    """Faults of the answer are for who gives it."""
    for action in SPOILERS:
        points = Failpoints(f"written={action}")
        assert [points.hit(phase) for phase in PHASES] == ["", "", "", action, ""]


def test_number_fires_at_that_passage_only() -> None:
    """A fault in the middle of a run needs the calls before and after it to go well."""
    points = Failpoints("written=stale@3")
    assert [points.hit("written") for _ in range(5)] == ["", "", "stale", "", ""]


def test_phases_count_apart() -> None:
    """A passage of one is none of another."""
    points = Failpoints("mapped=raise@2,written=garbage@1")
    assert [points.hit("written"), points.hit("mapped")] == ["garbage", ""]
    with pytest.raises(RuntimeError):
        points.hit("mapped")


def test_raise_raises_with_its_own_name() -> None:
    """A report must not look like a library's failure."""
    with pytest.raises(RuntimeError, match="failpoint executing=raise"):
        Failpoints("executing=raise").hit("executing")


@pytest.mark.parametrize(
    "text", ["nowhere=kill", "written=explode", "written", "=kill", "written=kill@x", "written=@1", "sent=silent"]
)
def test_misspelt_failpoint_is_refused(text: str) -> None:
    """A test whose fault never happens passes for nothing."""
    with pytest.raises(ValueError, match=r"failpoint|invalid literal"):
        Failpoints(text)


@pytest.mark.parametrize(
    ("action", "exit_code"),
    [("kill", -signal.SIGKILL), ("segv", -signal.SIGSEGV), ("abort", -signal.SIGABRT), ("exit0", 0)],
)
def test_deadly_action_ends_the_process_as_named(action: str, exit_code: int) -> None:
    """The faults are real, not exceptions that look like them."""
    hit = f"Failpoints('executing={action}').hit('executing')"
    code = f"from layerzero.workers.failpoint import Failpoints; {hit}; exit(9)"
    done = subprocess.run([sys.executable, "-c", code], env=dict(os.environ), stderr=subprocess.DEVNULL, check=False)
    assert done.returncode == exit_code


class Table:
    """The control page of a worker with failpoints, what it sends, and an express lane and a ring of a client."""

    def __init__(self, text: str) -> None:
        sizes = {"control": memory.PAGE_BYTES, "lane": lane.PAGE_BYTES}
        pages = {name: memory.create_memfd(name, nbytes) for name, nbytes in sizes.items()}
        self.faults = Faults(text, pages["control"])
        self.page = memory.ControlPage(pages["control"], writable=False)
        self.lane, self.client_lane = self.faults.open_lane(pages["lane"]), lane.Page(pages["lane"])
        pages["ring"] = create_page()
        self.ring, self.client_ring = self.faults.open_ring(pages["ring"]), Ring(pages["ring"])
        for fd in pages.values():
            os.close(fd)
        self.sent: list[bytes] = []
        self.dealer = self.faults.dealer(SimpleNamespace(send=self.sent.append))  # type: ignore[arg-type]
        self.seen: list[tuple[str, tuple[int, int]]] = []
        hit = self.faults.points.hit

        def see(phase: str) -> str:
            self.seen.append((phase, self.page.read()))
            return hit(phase)

        self.faults.points.hit = see  # type: ignore[method-assign]

    def call_on_cpu(self) -> None:
        for phase in (MAPPED, EXECUTING, WRITTEN):
            self.faults.page.write(7, phase)

    def end(self) -> None:
        self.faults.page.write(0, IDLE)


def test_failpoints_of_a_call_are_where_its_phases_are() -> None:
    """A report names the phase that the control page says: a fault must strike within it."""
    table = Table("written=silent")
    table.call_on_cpu()
    table.dealer.send(wire.pack(Kind.RAN, seq=7))
    table.end()
    assert table.seen == [
        ("received", (7, MAPPED)),
        ("mapped", (7, MAPPED)),
        ("executing", (7, EXECUTING)),
        ("written", (7, WRITTEN)),
        ("sent", (7, WRITTEN)),
    ]


def test_failpoints_of_a_call_on_a_ring_strike_after_the_page_names_it() -> None:
    """Its worker is blamed by that word. Nobody answers: what is sent is noted on the ring, or left to the broker."""
    table = Table("written=silent@9")
    launch = table.faults.around_kernel(lambda: None)
    for status in (ENQUEUED, LEFT):
        table.faults.gpu_page.write(mark(3, 1), EXECUTING)
        launch()
        table.ring.note(1, status)
    assert [phase for phase, _ in table.seen] == [*PHASES, *PHASES[:-1]]
    table.dealer.send(wire.pack(Kind.LEFT, seq=1))
    assert table.seen[-1] == ("sent", (mark(3, 1), EXECUTING))
    assert {page for _, page in table.seen} == {(mark(3, 1), EXECUTING)}


@pytest.mark.parametrize("spoiler", SPOILERS)
def test_an_answer_is_spoilt_once_whoever_takes_it(spoiler: str) -> None:
    """The next call's is whole: a fault that lasts would hide what the first one does."""
    table = Table(f"written={spoiler}@1")
    whole = wire.pack(Kind.RAN, seq=7)
    table.call_on_cpu()
    table.dealer.send(whole)
    table.call_on_cpu()
    table.dealer.send(whole)
    assert table.sent == [frame for frame in (SPOILT[spoiler], whole) if frame]


def test_an_express_lanes_answer_is_spoilt() -> None:
    """A client must not take it for its own."""
    table = Table("written=stale@1")
    table.call_on_cpu()
    table.lane.put_end(1, lane.OK)
    with pytest.raises(ProtocolError):
        table.client_lane.get_end(1)
    for text in ("garbage", "truncated"):
        table = Table(f"written={text}")
        table.call_on_cpu()
        table.lane.put_end(1, lane.OK)
        with pytest.raises(ProtocolError):
            table.client_lane.get_end(1)
    table = Table("written=silent@1")
    table.call_on_cpu()
    table.lane.put_end(1, lane.OK)
    assert table.client_lane.get_end(1) is None


def test_a_rings_note_is_spoilt() -> None:
    """Without a note its client cannot tell a call that runs from one that is left."""
    for text, expected in (("garbage", NO_STATUS), ("silent", 0)):
        table = Table(f"written={text}@1")
        launch = table.faults.around_kernel(lambda: None)
        for call, status in ((1, expected), (2, ENQUEUED)):
            table.faults.gpu_page.write(mark(3, call), EXECUTING)
            launch()
            table.ring.note(call, ENQUEUED)
            assert table.client_ring.status(call) == status
