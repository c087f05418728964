"""The express lanes of a worker's clients: which doorbells to watch, and what each lane may run."""

from __future__ import annotations

import os
import select
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.shm import lane
from layerzero.ipc.shm.recent_calls import ChainRecord
from layerzero.ipc.spinning import Spin
from layerzero.ipc.vocabulary.neighbours import Neighbourhood
from layerzero.workers.provider import Bound, Call
from layerzero.workers.serving import Claimed, Line, line_of

MAX_READY = 4 * lane.DEPTH  # calls of a lane that need no second look
MAX_CHAINS = 64
MAX_TAKES = 64  # tries to take a ring that must come at once
Ready: TypeAlias = tuple[tuple[Bound, ...], ChainRecord]  # a chain: its calls, and what is noted of them


@dataclass(eq=False)
class Lane:
    """`ready` has the calls that were found to be allowed and whole, by plan and references; `neighbours` those of
    plans' neighbours that were found to be allowed, by plan and extents; `chains` chains whose calls are ready, by what
    a call says of them."""

    number: int
    client: int
    page: lane.Page
    doorbell: int
    answer: socket.socket  # the ringing end
    ready: dict[tuple[int, bytes], Bound] = field(default_factory=dict)
    neighbours: dict[tuple[int, bytes], Call] = field(default_factory=dict)
    chains: dict[bytes, Ready] = field(default_factory=dict)
    line: Line = field(init=False)

    @property
    def last_call(self) -> int:
        return self.line.last_call

    def claim(self) -> Claimed | None:
        """(number, plan, references) of the next call; None when its client has taken it back. Raises ProtocolError for
        a ring without a call."""
        if not lane.take(self.doorbell):
            return None
        call = self.last_call + 1
        found = self.page.get_call(call)
        if found is None:
            raise ProtocolError(self.rings_for_nothing())
        self.line.last_call = call
        return call, *found

    def rings_for_nothing(self) -> str:
        return f"the client of lane {self.number} rings for call {self.last_call + 1}, which it has not put"

    def end(self, call: int, status: int, plan: int = 0, kernel_ns: int = 0, said: bytes = b"") -> None:
        """Tell the client how its call ended."""
        self.page.put_end(call, status, plan, kernel_ns, said)
        self.line.tell(call)

    def remember(self, plan: int, refs: bytes, bound: Bound) -> None:
        if len(self.ready) >= MAX_READY:
            del self.ready[next(iter(self.ready))]
        self.ready[plan, refs] = bound

    def remember_chain(self, body: bytes, ready: Ready) -> None:
        if len(self.chains) >= MAX_CHAINS:
            del self.chains[next(iter(self.chains))]
        self.chains[body] = ready

    def forget(self) -> None:
        """What may be run, or where, has changed: each call gets its second look again."""
        self.ready.clear()
        self.neighbours.clear()
        self.chains.clear()

    def remember_neighbour(self, plan: int, extents: bytes, call: Call) -> None:
        if len(self.neighbours) >= MAX_READY:
            del self.neighbours[next(iter(self.neighbours))]
        self.neighbours[plan, extents] = call


class Lanes:
    """Doorbells are watched by `poll`, which the worker waits on."""

    def __init__(self, poll: select.poll, open_page: Callable[[int], lane.Page] = lane.Page, spin_ns: int = 0) -> None:
        """`spin_ns`: for how long a lane's page may be looked at for its next call."""
        self._poll, self._open_page = poll, open_page
        self._spin = Spin(spin_ns)
        self.server: Any = None  # takes the place of `claimed` and `watch`, where there is one
        self._latest: Lane | None = None  # it had a call just now
        self._lanes: dict[int, Lane] = {}
        self._by_doorbell: dict[int, Lane] = {}
        # Leases may come before their lane. Of each plan, what else than its own call it may be run for.
        self._plans: dict[int, dict[int, Neighbourhood | None]] = {}

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def open(self, number: int, client: int, fds: list[int]) -> None:
        """`fds` are the page, the doorbell and the ringing end of the answer bell; they are the lane's from here on,
        or closed when it cannot be opened."""
        try:
            if len(fds) != 3 or number in self._lanes:
                raise ProtocolError(f"lane {number} comes with {len(fds)} descriptors; needed: 3, once")
            page, doorbell, answer = fds
            made = Lane(number, client, self._open_page(page), doorbell, socket.socket(fileno=answer))
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        os.close(page)
        self._poll.register(doorbell, select.POLLIN)
        end = None if self._open_page is lane.Page else made.end
        made.line = line_of(made, number, made.page, (doorbell, made.answer), made.ready, end)
        if self.server is not None:
            self.server.add(made.line)
        self._lanes[number] = self._by_doorbell[doorbell] = made

    def close(self, number: int) -> None:
        gone = self._lanes.pop(number, None)
        self._plans.pop(number, None)
        if gone is not None:
            self._unhear(gone)
            self._latest = None
            gone.forget()  # it and its line have each other: what it could run would hold memory of its client for long
            gone.page.close()
            os.close(gone.doorbell)
            gone.answer.close()

    def allow(self, number: int, plan: int, neighbours: Neighbourhood | None = None) -> None:
        self._plans.setdefault(number, {})[plan] = neighbours
        if number in self._lanes:
            self._lanes[number].forget()

    def allows(self, number: int, plan: int) -> bool:
        return plan in self._plans.get(number, ())

    def neighbours(self, number: int, plan: int) -> Neighbourhood | None:
        return self._plans.get(number, {}).get(plan)

    def forget_plan(self, plan: int) -> None:
        """It is gone. Numbers are not given again, so that what is not forgotten would be kept for ever."""
        for number, plans in list(self._plans.items()):
            plans.pop(plan, None)
            if not plans:
                del self._plans[number]
        self.forget_ready()

    def forget_ready(self) -> None:
        """An arena, or a plan, is gone."""
        for one in self._lanes.values():
            one.forget()

    def claimed(self, events: Iterable[tuple[int, int]]) -> Iterator[tuple[Lane, Claimed]]:
        """Lanes, among what `poll` returned, with a call that this worker has claimed."""
        for fd, _ in events:
            found = self._by_doorbell.get(fd)
            if found is not None and (call := self._claim(found)) is not None:
                self._latest = found
                yield found, call

    def _claim(self, one: Lane) -> Claimed | None:
        """Who rings for nothing could keep a worker awake for ever: it is not listened to any more."""
        try:
            return one.claim()
        except ProtocolError as exc:
            print(exc, file=sys.stderr)
            self._unhear(one)
            return None

    def mute(self, one: Lane) -> None:
        """As `claimed` does of a lane whose client rings for nothing."""
        print(one.rings_for_nothing(), file=sys.stderr)
        self._unhear(one)

    def _unhear(self, one: Lane) -> None:
        if self._by_doorbell.pop(one.doorbell, None) is not None:
            self._poll.unregister(one.doorbell)
            if self.server is not None:
                self.server.remove(one.line)

    def are_doorbells(self, events: Iterable[tuple[int, int]]) -> bool:
        """Whether `poll` returned nothing else."""
        for fd, _ in events:  # noqa: SIM110  # each call's way: all() makes a generator
            if fd not in self._by_doorbell:
                return False
        return True

    def watch(self) -> tuple[Lane, Claimed] | None:
        """The lane that had the last call, if it has the next one soon: it is claimed then, and nobody slept."""
        found, self._latest = self._latest, None
        if found is None:
            return None
        if not found.page.has_call(found.last_call + 1):
            within_ns = self._spin.next_ns()
            if not within_ns:
                return None
            took_ns = found.page.await_call(found.last_call + 1, within_ns)
            self._spin.note(took_ns)
            if took_ns is None:
                return None
        for _ in range(MAX_TAKES):
            if found.doorbell not in self._by_doorbell:
                break
            call = self._claim(found)
            if call is not None:
                self._latest = found
                return found, call
        return None
