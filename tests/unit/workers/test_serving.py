"""Calls of express lanes served in C (workers/_serving.c), with the test for client and loop."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.gpu.peer import PATIENCE_S

from layerzero.ipc.shm import lane, memory, recent_calls
from layerzero.ipc.vocabulary.worker_codes import EXECUTING, IDLE, WRITTEN, mark
from layerzero.workers import serving
from layerzero.workers.lanes import Lane, Lanes
from layerzero.workers.serving import Claimed

pytestmark = pytest.mark.skipif(serving.library is None, reason="no C was compiled")
SYS_FUTEX = {"x86_64": 202, "aarch64": 98}
NAPS, DONE, WAKES = (lane.LAYOUT[number] for number in (4, 5, 6))


class Client:
    """Its end of a lane, and the worker's."""

    def __init__(self, lanes: Lanes, number: int) -> None:
        fd, self.doorbell = memory.create_memfd("page", lane.PAGE_BYTES), lane.create_doorbell(counts=True)
        ringing, self.hearing = lane.create_answer_bell()
        self.page, self.calls = lane.Page(fd), 0
        lanes.open(number, number, [fd, os.dup(self.doorbell), ringing.detach()])
        self.one = lanes._lanes[number]

    def put(self, *kernels: Callable[[], Any]) -> None:
        """Calls that are ready, each of a plan of its own."""
        for kernel in kernels:
            self.calls += 1
            self.one.remember(self.calls, b"refs", kernel)
            self.page.put_call(self.calls, self.calls, b"refs", waits=False)
        lane.ring(self.doorbell, len(kernels))

    def statuses(self) -> list[int | None]:
        ends = [self.page.get_end(call) for call in range(1, self.calls + 1)]
        return [None if end is None else end[0] for end in ends]

    def close(self) -> None:
        self.page.close()
        self.hearing.close()
        os.close(self.doorbell)


class Table:
    def __init__(self) -> None:
        fd = memory.create_memfd("control", memory.PAGE_BYTES)
        self.page, self.lanes = memory.ControlPage(fd, writable=True), Lanes(select.poll())
        os.close(fd)
        self.broker, self.control = socket.socketpair(), socket.socketpair()
        self.left: list[tuple[int, Claimed]] = []  # to Python
        self.finished: list[tuple[int, int, Any]] = []
        self.muted: list[int] = []
        self.is_wanted = False
        self.lanes.server = serving.server_of(
            self.serve,
            lambda one, call, plan, ns, outcome: self.finished.append((call, plan, outcome)),
            self.mute,
            self.page,
            (self.broker[0].fileno(), self.control[0].fileno()),
            spoils_calls=False,
        )
        self.clients = [Client(self.lanes, 1), Client(self.lanes, 2)]

    def serve(self, one: Lane, claimed: Claimed) -> bool:
        self.left.append((one.number, claimed))
        if claimed[1] == lane.NO_PLAN:
            one.end(claimed[0], lane.DECLINED)
        return self.is_wanted

    def mute(self, one: Lane) -> None:
        self.muted.append(one.number)
        self.lanes.mute(one)

    def tell(self) -> None:
        """Something comes from the broker."""
        self.broker[1].send(b"x")

    def run(self) -> list[int]:
        return [fd for fd, _ in self.lanes.server.serve()]

    def close(self) -> None:
        for number in (1, 2):
            self.lanes.close(number)
        self.lanes.server = None  # it leads back here
        for end in (*self.broker, *self.control, *self.clients, self.page):
            end.close()


@pytest.fixture
def table() -> Iterator[Table]:
    made = Table()
    yield made
    made.close()


def test_a_server_that_is_gone_leaves_no_descriptor() -> None:
    """Nor does a lane of its."""
    gc.collect()
    before = os.listdir("/proc/self/fd")
    made = Table()
    made.clients[0].put(made.tell)
    assert made.run()
    made.close()
    assert os.listdir("/proc/self/fd") == before


def test_calls_are_served_until_a_socket_has_something(table: Table) -> None:
    """The control page says where the worker is, also within the call that the news came in."""
    client, said = table.clients[0], []
    client.put(lambda: said.append(table.page.read()), table.tell)
    assert table.run() == [table.broker[0].fileno()]
    assert client.statuses() == [lane.OK, lane.OK]
    assert said == [(mark(1, 1), EXECUTING)]
    assert table.page.read() == (0, IDLE)
    assert client.page.last_time()[:2] == (2, 2)


def test_what_is_not_ready_or_says_more_is_pythons(table: Table) -> None:
    """A call is claimed by then; its end is Python's to write."""
    client = table.clients[0]

    def refuse() -> None:
        raise ValueError("no")

    client.put(lambda: {"a": 1}, refuse, lambda: None)
    client.one.forget()
    client.one.remember(1, b"refs", lambda: {"a": 1})
    client.one.remember(2, b"refs", refuse)
    table.tell()
    while len(table.left) < 1:
        table.run()
    assert table.left == [(1, (3, 3, b"refs"))]
    assert [(call, plan, type(outcome)) for call, plan, outcome in table.finished] == [(1, 1, dict), (2, 2, ValueError)]
    assert client.statuses() == [None] * 3
    assert client.one.last_call == 3


def test_the_loop_gets_its_turn_where_a_call_left_it_something(table: Table) -> None:
    """A message that came while a call waited for its arena: no socket tells of it."""
    table.is_wanted = True
    table.clients[0].put(lambda: None)
    table.clients[0].one.forget()
    assert table.run() == []
    assert table.left == [(1, (1, 1, b"refs"))]


def test_an_error_that_is_the_workers_own_ends_it(table: Table) -> None:
    """As in Python: a kernel that wants the process to end is not answered for."""

    def leave() -> None:
        raise SystemExit(3)

    table.clients[0].put(leave)
    with pytest.raises(SystemExit):
        table.run()
    assert table.page.read() == (mark(1, 1), EXECUTING)


def test_lanes_take_turns_while_several_have_calls(table: Table) -> None:
    """One call of each, however many one of them has put."""
    order: list[int] = []
    one, two = table.clients
    one.put(*[lambda: order.append(1)] * 20)
    two.put(*[lambda: order.append(2)] * 3, table.tell)
    while len(order) < 23:
        table.run()
    assert order[:6] == [1, 2] * 3
    assert order[6:] == [1] * 17


@pytest.mark.parametrize("number", [0, 1, 3, (1 << 64) - 1])
def test_who_rings_for_what_it_has_not_put_is_not_listened_to(table: Table, number: int) -> None:
    """A full doorbell would keep the worker awake. Others are served on."""
    client, other = table.clients
    client.put(lambda: None)
    client.page._words[(4096 + 3200) // 8] = number  # in place of call 2
    lane.ring(client.doorbell, 1 << 60)
    other.put(lambda: None, table.tell)
    while None in other.statuses():
        table.run()
    table.tell()
    table.run()
    assert table.muted == [1]
    assert client.page.done == 1


def test_a_lane_that_closes_within_its_call_is_left_alone(table: Table) -> None:
    """Its page is not mapped any more: to write the end there would end the worker, and others' calls with it."""
    client, other = table.clients

    def close() -> None:
        table.lanes.close(1)
        raise ValueError("nobody hears of it")

    client.put(close, lambda: None)
    other.put(lambda: None, table.tell)
    while None in other.statuses():
        table.run()
    assert client.statuses() == [None, None]
    assert table.finished == []
    assert table.page.read() == (0, IDLE)


def test_a_full_page_of_calls_that_was_withdrawn_in_part(table: Table) -> None:
    """What is withdrawn has the plan that there is none of, and is Python's to decline."""
    client = table.clients[0]
    client.put(*[lambda: None] * (lane.DEPTH - 1), table.tell)
    client.page.withdraw(5)
    while table.run() and client.page.done < lane.DEPTH:
        pass
    assert table.left == [(1, (5, lane.NO_PLAN, b"refs"))]
    assert client.statuses() == [lane.OK] * 4 + [lane.DECLINED] + [lane.OK] * (lane.DEPTH - 5)


def test_a_client_that_sleeps_on_the_page_is_woken_for_its_call_and_not_before(table: Table) -> None:
    """That is quicker than a bell, which it is not rung for then."""
    client, libc = table.clients[0], ctypes.CDLL(None, use_errno=True)
    words = client.page._words
    assert words[WAKES // 8] == 1
    timeout, at = (ctypes.c_long * 2)(int(PATIENCE_S), 0), ctypes.c_void_p(client.page.address + DONE)

    def sleep() -> None:
        while words[DONE // 8] < 2:
            done = words[DONE // 8]
            libc.syscall(SYS_FUTEX[os.uname().machine], at, 0, done, timeout, None, 0)

    words[NAPS // 8] = 2
    thread = threading.Thread(target=sleep)
    thread.start()
    client.put(lambda: None, table.tell)
    while client.page.done < 2:
        table.run()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert not select.select([client.hearing], [], [], 0)[0]


def test_calls_are_noted_on_the_control_page_as_python_does(table: Table) -> None:
    """What ran, how it ended, and the end of its references, where a neighbour's extents are."""
    one = mmap.mmap(-1, memory.PAGE_BYTES)
    expected = recent_calls.RecentCalls(one)

    def fail() -> None:
        raise ValueError("no")

    client = table.clients[0]
    client.put(lambda: None, fail, lambda: None)
    client.one.forget()
    for call, refs, bound in ((1, b"refs", lambda: None), (2, b"r" * 40, fail), (3, b"ab", lambda: None)):
        client.one.remember(call, refs, bound)
        client.page.put_call(call, call, refs, waits=False)
        expected.begin(call, refs)
        expected.end(recent_calls.RAISED if bound is fail else recent_calls.OK)
    client.put(table.tell)
    table.run()
    blank = {"begun_ns": 0, "took_ns": 0}
    found, wanted = (
        [call._replace(**blank) for call in recent_calls.read(page)] for page in (table.page.copy(), one[:])
    )
    assert found[:3] == wanted


def test_phases_and_ends_go_through_pages_with_faults(table: Table) -> None:
    """So that failpoints meet what is compiled, too."""
    written: list[tuple[int, int]] = []

    class Page(memory.ControlPage):
        def write(self, dispatch: int, phase: int) -> None:
            written.append((dispatch & 0xFFFF_FFFF, phase))

    ends: list[int] = []

    class Spoilt(lane.Page):
        def put_end(self, call: int, *end: Any) -> None:
            ends.append(call)

    fd = memory.create_memfd("control", memory.PAGE_BYTES)
    lanes = Lanes(select.poll(), Spoilt)
    page, sockets = Page(fd, writable=True), (table.broker[0].fileno(), table.control[0].fileno())
    lanes.server = serving.server_of(table.serve, lambda *_: None, lanes.mute, page, sockets, spoils_calls=True)
    client = Client(lanes, 3)
    client.put(table.tell)
    assert lanes.server.serve()
    assert [phase for _, phase in written] == [1, EXECUTING, WRITTEN, IDLE]
    assert ends == [1]
    assert client.statuses() == [None]
    lanes.close(3)
    lanes.server = None
    for end in (client, page):
        end.close()
    os.close(fd)
