"""Faults on request, for tests: `phase=action[@N]` items in BootConfig.failpoints, off unless asked for.

Phases in order: received, mapped, executing, written, sent. `@N` fires at the N-th passage only.
Actions end or stop the process here (kill, segv, abort, exit0, hang), raise, or spoil the answer (garbage, stale,
truncated, silent).

A worker with failpoints uses the pages, socket and kernels of `Faults` in place of its own; without, this module is not
loaded, and nothing on a call's path asks for it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from layerzero.ipc.shm import lane
from layerzero.ipc.shm.memory import ControlPage
from layerzero.ipc.shm.ring import Ring
from layerzero.ipc.shm.ring_words import LEFT
from layerzero.ipc.transport import wire
from layerzero.ipc.transport.wire import HEADER_BYTES, Kind
from layerzero.ipc.vocabulary.worker_codes import EXECUTING, IDLE, LANE_CALL, MAPPED, WRITTEN

if TYPE_CHECKING:
    import zmq

PHASES = ("received", "mapped", "executing", "written", "sent")
SPOILERS = ("garbage", "stale", "truncated", "silent")  # what becomes of the reply
ACTIONS = ("kill", "segv", "abort", "exit0", "hang", "raise", *SPOILERS)
STALE_BY = 1_000_000  # calls: so far off is the number in a stale answer
NO_STATUS = 99  # of a call's end; there is none such

R = TypeVar("R")


class Failpoints:
    """Counts passages and acts."""

    def __init__(self, text: str) -> None:
        self._points: dict[str, tuple[str, int]] = {}
        self._passed: dict[str, int] = {}
        for item in filter(None, text.split(",")):
            phase, _, rest = item.partition("=")
            action, _, nth = rest.partition("@")
            if phase not in PHASES or action not in ACTIONS or (action in SPOILERS and phase != "written"):
                raise ValueError(f"failpoint {item!r}: phases {PHASES}, actions {ACTIONS}; {SPOILERS} in written only")
            self._points[phase] = (action, int(nth or 0))

    def hit(self, phase: str) -> str:
        """Act if this phase is armed; the returned action, or "", is for the caller to carry out."""
        if phase not in self._points:
            return ""
        action, nth = self._points[phase]
        self._passed[phase] = passed = self._passed.get(phase, 0) + 1
        if nth not in (0, passed):
            return ""
        match action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "segv":
                ctypes.string_at(0)
            case "abort":
                os.abort()
            case "exit0":
                os._exit(0)
            case "hang":
                threading.Event().wait()
            case "raise":
                raise RuntimeError(f"failpoint {phase}=raise")
        return action


class Faults:
    """What a worker with failpoints uses in place of its own. For the loop's thread."""

    def __init__(self, text: str, page: int) -> None:
        """`page`: descriptor of the control page. Raises ValueError for failpoints that there are not."""
        self.points = Failpoints(text)
        self.page: ControlPage = _Page(page, self.points, self)
        self.gpu_page: ControlPage = _GpuPage(page, self.points, self)
        self.is_on_ring = False  # the call that the GPU's side is in
        self._spoiler = ""

    def dealer(self, dealer: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
        return cast("zmq.Socket[bytes]", _Dealer(dealer, self))

    def open_lane(self, fd: int) -> lane.Page:
        return _LanePage(fd, self)

    def open_ring(self, fd: int) -> Ring:
        return _Ring(fd, self)

    def around_kernel(self, launch: Callable[..., R]) -> Callable[..., R]:
        """Of a call on a GPU: `launch` enqueues the kernel, and DONE comes after it."""

        def faulty(*call: Any) -> R:
            if self.is_on_ring:
                self.points.hit("mapped")
            self.points.hit("executing")
            result = launch(*call)
            self.note_written()
            return result

        return faulty

    def around_graph_slot(self, launch: Callable[..., None]) -> Callable[..., None]:
        """Of a call in a client's graph: `launch` enqueues its kernel and its answer."""

        def faulty(*call: Any) -> None:
            self.points.hit("executing")
            launch(*call)
            self.points.hit("sent")

        return faulty

    def note_written(self) -> None:
        """The outputs are: the answer may be spoilt."""
        self._spoiler = self.points.hit("written")

    def take_spoiler(self) -> str:
        """What is to become of the answer that is given now."""
        spoiler, self._spoiler = self._spoiler, ""
        return spoiler


class _Page(ControlPage):
    """A control page whose writer passes the phases of a call on the CPU, and the first and last of one on a GPU."""

    def __init__(self, fd: int, points: Failpoints, faults: Faults) -> None:
        super().__init__(fd, writable=True)
        self._points, self._faults = points, faults

    def write(self, dispatch: int, phase: int) -> None:
        if phase == EXECUTING:
            self._points.hit("mapped")
        elif phase == IDLE:
            self._points.hit("sent")
        super().write(dispatch, phase)
        if phase == MAPPED:
            self._points.hit("received")
        elif phase == EXECUTING:
            self._points.hit("executing")
        elif phase == WRITTEN:
            self._faults.note_written()


class _GpuPage(_Page):
    """The same page for calls on a GPU, which are executed when they are enqueued (`Faults.around_kernel`). Calls of a
    ring begin here."""

    def write(self, dispatch: int, phase: int) -> None:
        if phase == EXECUTING:
            self._faults.is_on_ring = bool(dispatch & LANE_CALL)
            if not self._faults.is_on_ring:
                self._points.hit("mapped")
        ControlPage.write(self, dispatch, phase)
        if phase == EXECUTING and self._faults.is_on_ring:
            self._points.hit("received")


class _Dealer:
    """A socket whose answers may be spoilt."""

    def __init__(self, dealer: zmq.Socket[bytes], faults: Faults) -> None:
        self._dealer, self._faults = dealer, faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dealer, name)

    def send(self, frame: bytes) -> None:
        header, spoiler = wire.unpack(frame), self._faults.take_spoiler()
        if spoiler:
            frame = {
                "garbage": b"\xff" * 64,
                "truncated": frame[: HEADER_BYTES // 2],
                "stale": wire.pack(Kind.RAN, seq=header.seq + STALE_BY, attempt=header.attempt),
                "silent": b"",
            }[spoiler]
        if frame:
            self._dealer.send(frame)
        if header.kind == Kind.LEFT:
            self._faults.points.hit("sent")


class _LanePage(lane.Page):
    """An express lane whose answers may be spoilt. Its doorbell is rung all the same."""

    def __init__(self, fd: int, faults: Faults) -> None:
        super().__init__(fd)
        self._faults = faults

    def put_end(self, call: int, status: int, plan: int = 0, kernel_ns: int = 0, said: bytes = b"") -> None:
        spoiler = self._faults.take_spoiler()
        if not spoiler:
            super().put_end(call, status, plan, kernel_ns, said)
        elif spoiler == "stale":
            self._put_end(call, call + STALE_BY, status, 0, 0, b"")
        elif spoiler != "silent":
            super().put_end(call, NO_STATUS)


class _Ring(Ring):
    """A ring whose answers may be spoilt."""

    def __init__(self, fd: int, faults: Faults) -> None:
        super().__init__(fd)
        self._faults = faults

    def note(self, call: int, status: int) -> None:
        spoiler = self._faults.take_spoiler()
        if not spoiler:
            super().note(call, status)
        elif spoiler == "garbage":
            super().note(call, NO_STATUS)
        if status != LEFT:
            self._faults.points.hit("sent")
