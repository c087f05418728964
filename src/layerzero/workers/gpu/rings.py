"""The rings of a worker's clients: calls on GPUs that come past the broker (docs/protocol.md, section 14)."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.shm import lane, recent_calls
from layerzero.ipc.shm.memory import ControlPage
from layerzero.ipc.shm.ring import Ring
from layerzero.ipc.shm.ring_words import ENQUEUED, LEFT, REPLAYED, RingCall
from layerzero.ipc.shm.timeline_words import TimelinePoint, is_before
from layerzero.ipc.vocabulary.worker_codes import EXECUTING, IDLE, mark
from layerzero.workers.gpu.client_link import Link
from layerzero.workers.gpu.executor import Gpus
from layerzero.workers.gpu.plan import Plan

BURST = 16  # calls of a ring before it is the others' turn


@dataclass(eq=False)
class _Lane:
    number: int
    client: int
    gpu: str
    ring: Ring
    doorbell: int
    plans: set[int] = field(default_factory=set)


class Rings:
    """Doorbells are watched by `poll`, which the worker waits on while it is asleep."""

    def __init__(
        self,
        poll: select.poll,
        gpus: Gpus,
        plans: Mapping[int, Plan],
        page: ControlPage,
        leave: Callable[[int, int, Exception | None], None],
        open_ring: Callable[[int], Ring] = Ring,
    ) -> None:
        """`plans`: those on GPUs that were prepared. `leave(lane, call, error)` tells the broker that a call is its."""
        self._poll, self._gpus, self._plans, self._page = poll, gpus, plans, page
        self._leave, self._open_ring = leave, open_ring
        self._lanes: dict[int, _Lane] = {}
        self._whole: list[_Lane] = []  # those whose clients write what makes sense
        self._by_doorbell: dict[int, _Lane] = {}
        self._allowed: dict[int, set[int]] = {}  # leases may come before their lane

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def open(self, number: int, client: int, gpu: str, fds: list[int]) -> None:
        """`fds` are the ring and its doorbell; they are the lane's from here on, or closed when it cannot be opened."""
        try:
            if len(fds) != 2 or number in self._lanes:
                raise ProtocolError(f"ring {number} comes with {len(fds)} descriptors; needed: 2, once")
            page, doorbell = fds
            ring = self._open_ring(page)
            self._poll.register(doorbell, select.POLLIN)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        os.close(page)
        made = _Lane(number, client, gpu, ring, doorbell, self._allowed.pop(number, set()))
        self._lanes[number] = self._by_doorbell[doorbell] = made
        self._whole.append(made)

    def close(self, number: int) -> None:
        """The client is gone."""
        self._allowed.pop(number, None)
        gone = self._lanes.pop(number, None)
        if gone is None:
            return
        self._poll.unregister(gone.doorbell)
        del self._by_doorbell[gone.doorbell]
        if gone in self._whole:
            self._whole.remove(gone)
        gone.ring.close()
        os.close(gone.doorbell)
        self._gpus.release(gone.client, gone.gpu)

    def allow(self, number: int, plan: int) -> None:
        known = self._lanes.get(number)
        (self._allowed.setdefault(number, set()) if known is None else known.plans).add(plan)

    def forget_plan(self, plan: int) -> None:
        """It is gone; as Lanes.forget_plan."""
        for one in self._lanes.values():
            one.plans.discard(plan)
        for number, plans in list(self._allowed.items()):
            plans.discard(plan)
            if not plans:
                del self._allowed[number]

    def serve(self) -> bool:
        """Some calls of each ring that has any. Whether there were any."""
        came = False
        for one in self._whole:
            if one.ring.has_call:
                came = True
                self._serve(one)
        return came

    def catch_up(self, client: int, gpu: str, point: TimelinePoint) -> None:
        """Enqueue what the client put onto its ring before this call of the broker, as far as its lane's earlier calls
        show that: in our streams a lane's calls must come in their order. What came after it may wait for it."""
        for one in self._whole:
            if (one.client, one.gpu) == (client, gpu):
                ahead = one.ring.ahead()
                own = [
                    n
                    for n, of in enumerate(ahead, 1)
                    if of.timeline == point.timeline and is_before(of.value, point.value)
                ]
                if own:
                    self._serve(one, own[-1])

    def sleep(self, is_asleep: bool) -> None:
        """Whether clients must ring."""
        for one in self._whole:
            one.ring.sleep(is_asleep)

    def silence(self, events: Iterable[tuple[int, int]]) -> None:
        """Take the rings of the doorbells that `poll` returned."""
        for fd, _ in events:
            if fd in self._by_doorbell:
                lane.take(fd)

    def _serve(self, one: _Lane, count: int = BURST) -> None:
        link = self._gpus.link((one.client, one.gpu))
        if link is None:
            self._take(one, None, count)
        else:
            with link.context:  # once for all of them
                self._take(one, link, count)
        self._page.write(0, IDLE)

    def _take(self, one: _Lane, link: Link | None, count: int) -> None:
        ring = one.ring
        for _ in range(count):
            try:
                call = ring.take()
            except ProtocolError as exc:
                print(f"client {one.client} is not served by ring {one.number} any more: {exc}", file=sys.stderr)
                self._whole = [other for other in self._whole if other is not one]
                return
            if call is None:
                return
            error: Exception | None = None
            self._page.write(mark(one.number, call.call), EXECUTING)
            noted, elapsed_ns, how = self._page.recent.begin(call.plan), 0, recent_calls.DECLINED
            try:
                status, elapsed_ns = (LEFT, 0) if link is None else self._enqueue(one, link, call)
            except Exception as exc:  # whatever a library raises is this call's outcome, not the worker's
                self._gpus.check(exc)
                status, error, how = LEFT, exc, recent_calls.RAISED
            self._page.recent.end(how if status == LEFT else recent_calls.ENQUEUED, elapsed_ns, noted)
            ring.note(call.call, status)
            if status == LEFT:
                self._leave(one.number, call.call, error)

    def _enqueue(self, one: _Lane, link: Link, call: RingCall) -> tuple[int, int]:
        """What to note of it, and its time where that was measured."""
        gpus = self._gpus
        plan = self._plans.get(call.plan)
        if plan is None or call.plan not in one.plans or plan.gpu != one.gpu:
            return LEFT, 0
        task = plan.tasks.get((one.client, call.refs))
        if task is None:
            if not gpus.has_arenas(plan, one.client, call.refs):
                return LEFT, 0
            task = gpus.task(plan, one.client, call.refs)
        elapsed_ns, _, is_replayed = gpus.enqueue(plan, task, link, call.point)
        if elapsed_ns:
            one.ring.note_time(call.plan, elapsed_ns)
        return REPLAYED if is_replayed else ENQUEUED, elapsed_ns
