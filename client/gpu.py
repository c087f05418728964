"""What a broker knows of this process on one GPU: the page that orders calls, the offer that workers sign, arenas."""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from dataclasses import replace

from layerzero.client.gpu_memory import GpuMemory
from layerzero.client.lent import Lent
from layerzero.client.link import Link
from layerzero.ipc import messages
from layerzero.ipc.cuda_handles import RUNGS
from layerzero.ipc.cuda_memory import Arena
from layerzero.ipc.cuda_order import ClientOrder
from layerzero.ipc.cuda_pair import Trial
from layerzero.ipc.errors import CudaError, DeadlineExceeded, InvalidArgument, NotConnected, NoTransport, OutOfMemory
from layerzero.ipc.order import MASK, Turn, create_page

REQUIRED = "LAYERZERO_GPU_TRANSPORT"  # variable: the only rung that may be used
MAX_AHEAD = 256  # calls of one stream that are not done
LOOK_S = 0.0001
WORKERS_END_S = 0.5  # so long after a broker's death none of its workers is left: the kernel kills them with it
LOST = 1  # error code on the page
LOST_LOOK_S = 0.02
STALE_AFTER = 256  # new arenas; then those whose memory is gone are given up


class Gpu:
    """Of one connection. Thread-safe where it does not say otherwise."""

    def __init__(self, link: Link, lent: Lent, memory: GpuMemory) -> None:
        """Raises NoTransport when this process can offer its memory in no way."""
        self.memory = memory
        self.uuid = memory.uuid
        self.settling = threading.RLock()  # held by a call that is the first of its route or worker
        self.lock = threading.RLock()  # held from READY to EXECUTE: a lane's calls are sent in their order
        self._link, self._lent = link, lent
        self._numbers: weakref.WeakKeyDictionary[Arena, tuple[str, int]] = weakref.WeakKeyDictionary()
        self._signed: set[tuple[str, int]] = set()
        self._trials: list[Trial] = []  # workers may have each of them mapped
        self._fresh = 0
        self._page = create_page()
        self.order = ClientOrder(memory.context, self._page, has_memops=not memory.why_no_memops)
        self._rejected: dict[str, str] = {}
        self._rungs = list(RUNGS)
        required = os.environ.get(REQUIRED)
        if required:
            if required not in RUNGS:
                raise InvalidArgument(f"{REQUIRED} is {required!r}; allowed: {', '.join(RUNGS)}")
            self._rungs = [required]
        self.rung = ""
        try:
            self.step_down("", "")
        except BaseException:
            self.order.close()
            os.close(self._page)
            raise
        self._end = os.eventfd(0, os.EFD_CLOEXEC)
        self._watcher = threading.Thread(target=self._watch, name="lz-gpu", daemon=True)
        self._watcher.start()

    @property
    def transport_note(self) -> str:
        """For reports: which way memory crosses, and why no better one."""
        told = "".join(f"; {rung}: {why}" for rung, why in self._rejected.items())
        return f"GPU {self.uuid}, memory crosses by {self.rung}{told}"

    def step_down(self, rung: str, reason: str) -> None:
        """Offer memory in the next best way, since `rung` does not work; unless another thread has done so already.

        Raises NoTransport without a next.
        """
        with self.lock:
            if self.rung != rung:
                return
            if self.rung:
                self._rejected[self.rung] = reason
            while self._rungs:
                rung = self._rungs.pop(0)
                try:
                    number = self._lent.reserve()  # workers know arenas and offers by one sort of number
                    trial = Trial(self.memory.context, self.memory.client, number, rung)
                except (CudaError, OutOfMemory) as exc:
                    if isinstance(exc, CudaError) and exc.is_sticky:
                        raise
                    self._rejected[rung] = exc.message
                    continue
                fds = (self._page,) if trial.fd is None else (self._page, trial.fd)
                offer = trial.offer.to_wire()
                has_memops = not self.memory.why_no_memops
                try:
                    self._link.add_gpu(messages.AddGpu(gpu=self.uuid, has_memops=has_memops, offer=offer), fds)
                except BaseException:
                    trial.close()
                    raise
                self._trials.append(trial)
                self.rung = rung
                return
            told = "; ".join(f"{rung}: {why}" for rung, why in self._rejected.items())
            raise NoTransport(f"no way to share GPU memory with the workers works: {told}", reasons=self._rejected)

    def is_signed(self, slot: int) -> bool:
        """Whether bytes cross between this process and the worker of that slot, both ways. Looks once for each."""
        trial = self._trials[-1]
        key = (trial.rung, slot)
        if key in self._signed:
            return True
        if not slot or not trial.is_signed(slot):
            return False
        self._signed.add(key)
        return True

    def number(self, arena: Arena, rung: str) -> int:
        """By which the broker knows an arena on a rung; shows it one that is new."""
        known = self._numbers.get(arena)
        if known is not None and known[0] == rung:
            return known[1]
        with self.lock:
            handle, fd = arena.offer(rung)

            def show(number: int) -> None:
                message = messages.AddGpuArena(arena=number, handle=replace(handle, arena=number).to_wire())
                self._link.add_gpu_arena(message, () if fd is None else (fd,))

            number = self._lent.show(show)
            self._numbers[arena] = (rung, number)
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
                self._link.retire_arena(known[1])

    def wait_for_room(self, turn: Turn) -> None:
        """Until not too many calls of the lane are on their way: the GPU's queues are finite, too."""
        self._wait(Turn(turn.lane, turn.number - MAX_AHEAD & MASK), None)

    def wait_for(self, turn: Turn) -> None:
        """Until a call is done or has failed."""
        self._wait(turn, None)

    def wait_all(self, timeout_s: float | None = None) -> None:
        """Until every call so far is done or has failed. Raises DeadlineExceeded."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        for turn in self.order.last_turns():
            self._wait(turn, until_s)

    def _wait(self, turn: Turn, until_s: float | None) -> None:
        while not self.order.page.is_done(turn):
            if until_s is not None and time.monotonic() >= until_s:
                raise DeadlineExceeded(f"call {turn.number} on {self.uuid} is not done yet")
            time.sleep(LOOK_S)

    def _watch(self) -> None:
        """When the broker is gone nobody ends the open calls, and who waits for a stream would wait for ever.

        Takes no lock: a thread that holds one may be waiting for such a stream.
        """
        end, both = select.poll(), select.poll()
        end.register(self._end, select.POLLIN)
        both.register(self._end, select.POLLIN)
        self._link.watch_hang_up(both)
        both.poll()
        if isinstance(self._link.lost, NotConnected) or end.poll(1000 * WORKERS_END_S):
            return  # the session is being closed; its calls may still be with their workers
        while not end.poll(1000 * LOST_LOOK_S):
            self._link.read_nowait()  # no call can be sent after it, but one may be on its way to that
            for turn in self.order.last_turns():
                self.order.page.fail(turn, LOST)

    def close(self) -> None:
        """Once no call is open, or the broker is gone. With a call that is open all the same the page stays: a stream
        waits for a word of it."""
        os.eventfd_write(self._end, 1)
        self._watcher.join()
        os.close(self._end)
        os.close(self._page)
        if all(self.order.page.is_done(turn) for turn in self.order.last_turns()):
            self.order.close()
        else:
            _abandoned.append(self.order)


_abandoned: list[ClientOrder] = []
