"""What a broker knows of this process on one GPU: the page that orders calls, the offer that workers sign, arenas."""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from layerzero.client.connection import retained
from layerzero.client.connection.arena_registry import ArenaRegistry
from layerzero.client.connection.link import Link
from layerzero.client.gpu import fastpath_library
from layerzero.client.gpu.graph_slots import GraphSlots, tell_orphans
from layerzero.client.gpu.memory import GpuMemory
from layerzero.ipc.cuda.abi import CAPTURE_RELAXED
from layerzero.ipc.cuda.handles import TRANSPORTS
from layerzero.ipc.cuda.memory import Arena
from layerzero.ipc.cuda.offer_client import Trial
from layerzero.ipc.cuda.streams import ClientOrder
from layerzero.ipc.errors import CudaError, DeadlineExceeded, InvalidArgument, NotConnected, NoTransport, OutOfMemory
from layerzero.ipc.shm import lane
from layerzero.ipc.shm.timeline_page import create_page
from layerzero.ipc.shm.timeline_words import MASK, TimelinePoint
from layerzero.ipc.transport import messages

if TYPE_CHECKING:
    from layerzero.client.gpu.capture import Captured
    from layerzero.client.gpu.outcomes import Sent

REQUIRED = "LAYERZERO_GPU_TRANSPORT"  # variable: the only transport that may be used
MAX_AHEAD = 256  # calls of one stream that are not done
LOOK_S = 0.0001
WORKERS_END_S = 0.5  # so long after a broker's death none of its workers is left: the kernel kills them with it
LOST = 1  # error code on the page
LOST_LOOK_S = 0.02
NEWS_S = 0.05  # while graphs may be replayed, when nobody of this process may be reading answers
FAILED_LOOK_S = 0.001  # for graph slots that nobody answers
STALE_AFTER = 256  # new arenas; then those whose memory is gone are given up
_NONE: frozenset[int] = frozenset()


class Gpu:
    """Of one connection. Thread-safe where it does not say otherwise."""

    def __init__(
        self,
        link: Link,
        arena_registry: ArenaRegistry,
        memory: GpuMemory,
        on_failed_replay: Callable[[Captured], None],
        unbind_gone: Callable[[Gpu], None],
    ) -> None:
        """Raises NoTransport when this process can offer its memory in no way."""
        self.memory = memory
        self.uuid = memory.uuid
        self._has_mps = memory.context.driver.has_mps(memory.context.ordinal)
        self.settling = threading.RLock()  # held by a call that is the first of its route or worker
        self.lock = threading.RLock()  # held from READY to EXECUTE: a timeline's calls are sent in their order
        self._link, self._arena_registry = link, arena_registry
        self.counters = link.counters
        self._numbers: weakref.WeakKeyDictionary[Arena, tuple[str, int]] = weakref.WeakKeyDictionary()
        self._signed: set[tuple[str, int]] = set()
        self._reached: dict[int, set[int]] = {}  # slot of a worker -> arenas on which it has run a call
        self._trials: list[Trial] = []  # workers may have each of them mapped
        self._fresh = 0
        self._page = create_page()
        self.on_the_way: dict[int, Sent] = {}  # by timeline: its last call by the broker, if it may be unanswered
        self.order = ClientOrder(memory.context, self._page, has_memops=not memory.why_no_memops)
        self.graph_slots = GraphSlots(self.order, memory.context)
        self._on_failed_replay, self._unbind_gone = on_failed_replay, unbind_gone
        self._rejected: dict[str, str] = {}
        self._transports = list(TRANSPORTS)
        required = os.environ.get(REQUIRED)
        if required:
            if required not in TRANSPORTS:
                raise InvalidArgument(f"{REQUIRED} is {required!r}; allowed: {', '.join(TRANSPORTS)}")
            self._transports = [required]
        self.transport = ""
        try:
            self.step_down("", "")
        except BaseException:
            self.order.close()
            os.close(self._page)
            raise
        self._is_ending = self._is_orphaned = False
        self._has_transport = threading.Event()  # for the last time
        self._wake = lane.create_doorbell()
        self._watcher = threading.Thread(target=self._watch, name="lz-gpu", daemon=True)
        self._watcher.start()

    @property
    def transport_note(self) -> str:
        """For reports: which way memory crosses, and why no better one."""
        told = "".join(f"; {transport}: {why}" for transport, why in self._rejected.items())
        path = f"; calls are made by the Python alone: {fastpath_library.why_not}" if fastpath_library.why_not else ""
        shared = ", shared by MPS" if self._has_mps else ""
        return f"GPU {self.uuid}{shared}, memory crosses by {self.transport}{told}{path}"

    def step_down(self, transport: str, reason: str) -> None:
        """Offer memory in the next best way, since `transport` does not work; unless another thread has done so.

        Raises NoTransport without a next.
        """
        with self.lock:
            if self.transport != transport:
                return
            if self.transport:
                self._rejected[self.transport] = reason
            while self._transports:
                transport = self._transports.pop(0)
                try:
                    number = self._arena_registry.reserve()  # workers know arenas and offers by one sort of number
                    trial = Trial(self.memory.context, self.memory.client, number, transport)
                except (CudaError, OutOfMemory) as exc:
                    if isinstance(exc, CudaError) and exc.is_sticky:
                        raise
                    self._rejected[transport] = exc.message
                    continue
                fds = (self._page,) if trial.fd is None else (self._page, trial.fd)
                offer = trial.offer.to_wire()
                has_memops = not self.memory.why_no_memops
                try:
                    self._link.add_gpu(messages.AddGpu(gpu=self.uuid, has_memops=has_memops, offer=offer), fds)
                except BaseException:  # such as a refusal while graphs hold graph slots
                    trial.close()
                    self._transports.insert(0, transport)
                    raise
                self._trials.append(trial)
                self.transport = transport
                return
            told = "; ".join(f"{transport}: {why}" for transport, why in self._rejected.items())
            raise NoTransport(f"no way to share GPU memory with the workers works: {told}", reasons=self._rejected)

    def is_signed(self, slot: int) -> bool:
        """Whether bytes cross between this process and the worker of that slot, both ways. Looks once for each."""
        trial = self._trials[-1]
        key = (trial.transport, slot)
        if key in self._signed:
            return True
        if not slot or not trial.is_signed(slot):
            return False
        self._signed.add(key)
        return True

    def note_reached(self, slot: int, arenas: frozenset[int]) -> None:
        """The worker of that slot has enqueued a call on them."""
        self._reached.setdefault(slot, set()).update(arenas)

    def has_reached(self, slot: int, arenas: frozenset[int]) -> bool:
        """Whether that worker has all of them mapped."""
        return arenas <= self._reached.get(slot, _NONE)

    def number(self, arena: Arena, transport: str) -> int:
        """By which the broker knows an arena on a transport; shows it one that is new."""
        known = self._numbers.get(arena)
        if known is not None and known[0] == transport:
            return known[1]
        with self.lock:
            handle, fd = arena.offer(transport)

            def show(number: int) -> None:
                message = messages.AddGpuArena(arena=number, handle=replace(handle, arena=number).to_wire())
                self._link.add_gpu_arena(message, () if fd is None else (fd,))

            number = self._arena_registry.show(show)
            self._numbers[arena] = (transport, number)
            self._fresh += 1
            if self._fresh >= STALE_AFTER:
                self._fresh = 0
                self._give_up_stale()
            return number

    def _give_up_stale(self) -> None:
        with self.memory.context:
            stale = self.memory.in_place.take_stale()
        for arena in stale:
            known = self._numbers.pop(arena, None)
            if known is not None:
                for reached in list(self._reached.values()):
                    reached.discard(known[1])
                self._link.retire_arena(known[1])

    def wait_for_room(self, point: TimelinePoint) -> None:
        """Until not too many calls of the timeline are on their way: the GPU's queues are finite, too."""
        self._wait(TimelinePoint(point.timeline, point.value - MAX_AHEAD & MASK), None)

    def wait_for(self, point: TimelinePoint) -> None:
        """Until a call is done or has failed."""
        self._wait(point, None)

    def wait_all(self, timeout_s: float | None = None) -> None:
        """Until every call so far is done or has failed. Raises DeadlineExceeded."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        for point in self.order.last_points():
            self._wait(point, until_s)

    def _wait(self, point: TimelinePoint, until_s: float | None) -> None:
        while not self.order.page.is_done(point):
            if until_s is not None and time.monotonic() >= until_s:
                raise DeadlineExceeded(f"call {point.value} on {self.uuid} is not done yet")
            time.sleep(LOOK_S)

    def give_up(self, stream: int, point: TimelinePoint, hold: object) -> None:
        """End a point in its stream. A worker may have the call all the same, and write to the memory that `hold`
        keeps."""
        if hold is not None:
            retained.keep(hold)
        self.order.abandon(stream, point)

    def is_behind(self) -> bool:
        """Whether a call that went by the broker is unanswered. One on a ring must not pass it, also in another
        timeline: that may wait for this one. `lock` is held."""
        for its, sent in list(self.on_the_way.items()):
            if sent.is_done:
                del self.on_the_way[its]
        return bool(self.on_the_way)

    def watch_graph_slots(self) -> None:
        """Graphs of this process hold graph slots from now on."""
        os.eventfd_write(self._wake, 1)

    def _watch(self) -> None:
        """When the broker is gone nobody ends the open calls, and who waits for a stream would wait for ever. The same
        holds for graph slots that no worker answers any more.

        Takes no lock that is held while a stream is waited for.
        """
        poll, link, graph_slots = select.poll(), self._link, self.graph_slots
        self.memory.context.driver.exchange_capture_mode(
            CAPTURE_RELAXED
        )  # nothing here breaks the application's captures
        poll.register(self._wake, select.POLLIN)
        link.watch_hang_up(poll)
        while not self._is_ending:
            look_s = FAILED_LOOK_S if graph_slots.has_failed else NEWS_S if graph_slots else None
            is_lost = any(fd != self._wake for fd, _ in poll.poll(None if look_s is None else 1000 * look_s))
            lane.take(self._wake)
            if is_lost:
                self._watch_lost()
                break
            if graph_slots:
                self._unbind_gone(self)
                link.read_nowait()  # the thread that replays may be waiting for its stream
                for captured in graph_slots.end_failed():
                    self._on_failed_replay(captured)
        while not self._is_ending:  # the session is being closed
            poll.poll()
        if self._is_orphaned:
            self._attend_orphans()

    def _watch_lost(self) -> None:
        """Until the session is closed. Its own hang-up is no loss: its calls may still be with their workers."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if isinstance(self._link.lost, NotConnected) or (poll.poll(1000 * WORKERS_END_S) and self._is_ending):
            return
        self.graph_slots.fail_all()
        while not self._is_ending:
            self._link.read_nowait()  # no call can be sent after it, but one may be on its way to that
            for point in self.order.last_points():
                self.order.page.fail(point, LOST)
            self.graph_slots.end_failed()
            poll.poll(1000 * LOST_LOOK_S)

    def _attend_orphans(self) -> None:
        """Graphs that outlive the session and are replayed all the same must not hang."""
        self.graph_slots.fail_all()
        is_told = False
        while True:
            self.graph_slots.gone()
            if not self.graph_slots:
                self._has_transport.wait()
                os.close(self._wake)
                return
            if self.graph_slots.end_failed() and not is_told:
                tell_orphans()
                is_told = True
            time.sleep(LOST_LOOK_S)

    def close(self) -> None:
        """Once no call is open, or the broker is gone. With a call that is open all the same, or in a graph of the
        application, the page stays: a stream waits for a word of it, or will."""
        self._is_orphaned = bool(self.graph_slots)
        self._is_ending = True
        os.eventfd_write(self._wake, 1)
        self._has_transport.set()
        if not self._is_orphaned:
            self._watcher.join()
            os.close(self._wake)
        os.close(self._page)
        if not self._is_orphaned and all(self.order.page.is_done(point) for point in self.order.last_points()):
            self.order.close()
            for trial in self._trials:
                if trial.transport != "ipc":  # the only memory that must not go before who maps it
                    trial.close()
        else:
            retained.keep((self.order, self._trials))
