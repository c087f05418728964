"""The broker's hold on the timeline pages and memory offers of clients' GPUs: it lends them to workers, sees which
calls are done, and ends those that nobody will finish."""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

from layerzero.broker.core.model import Call
from layerzero.ipc.cuda.handles import STAGED, ArenaHandle
from layerzero.ipc.cuda.offer import Offer
from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.shm import memory
from layerzero.ipc.shm.timeline_page import TimelinePage
from layerzero.ipc.shm.timeline_words import RUNG, SILENT, TimelinePoint
from layerzero.ipc.transport import unwanted
from layerzero.ipc.transport.messages import AddGpu, MapGpu


@dataclass(frozen=True)
class Gpu:
    """What came with an add_gpu. Owns its descriptors: the page, and what was offered if its transport has one."""

    message: AddGpu
    page: TimelinePage
    fds: tuple[int, ...]

    @classmethod
    def of(cls, message: AddGpu, fds: list[int]) -> Gpu:
        """Takes the descriptors over. Raises ProtocolError; then they are still the caller's."""
        offer = Offer.from_wire(message.offer)
        if offer.handle.gpu != message.gpu:
            raise ProtocolError(f"add_gpu of {message.gpu!r:.80} offers memory of {offer.handle.gpu!r:.80}")
        if not fds:
            raise ProtocolError("add_gpu carries a timeline page")
        check_handle_fds(offer.handle, fds[1:])
        return cls(message, TimelinePage(fds[0]), tuple(fds))

    @property
    def transport(self) -> str:
        return Offer.from_wire(self.message.offer).handle.transport

    def has_page_of(self, other: Gpu) -> bool:
        """Whether both mean the same memory, by whatever descriptors."""
        mine, others = os.fstat(self.fds[0]), os.fstat(other.fds[0])
        return (mine.st_dev, mine.st_ino) == (others.st_dev, others.st_ino)

    def close(self) -> None:
        self.page.close()
        unwanted.close_all(self.fds)


class TimelinePages:
    def __init__(self) -> None:
        self._gpus: dict[tuple[int, str], Gpu] = {}  # by client's number and UUID

    def __bool__(self) -> bool:
        return bool(self._gpus)

    def uuids(self) -> set[str]:
        """GPUs that clients use."""
        return {gpu for _, gpu in self._gpus}

    def get(self, client: int, gpu: str) -> Gpu | None:
        return self._gpus.get((client, gpu))

    def put(self, client: int, gpu: Gpu) -> None:
        """Takes the place of the client's earlier offer of that GPU."""
        self.close(client, gpu.message.gpu)
        self._gpus[client, gpu.message.gpu] = gpu

    def lend(self, client: int, gpu: str, slot: int) -> tuple[MapGpu, tuple[int, ...]]:
        """What a worker is told, and the descriptors to go with it."""
        held = self._gpus[client, gpu]
        message = MapGpu(
            client=client, gpu=gpu, slot=slot, has_memops=held.message.has_memops, offer=held.message.offer
        )
        return message, held.fds

    def look(self, calls: Iterable[Call]) -> tuple[list[int], list[int]]:
        """Dispatches of the enqueued calls that are done, and of those whose inputs are there."""
        done, ready = [], []
        for call in calls:
            held = call.point and self._gpus.get((call.point.client.number, call.point.gpu))
            if not held or call.point is None:
                continue
            if held.page.is_done(call.point.point):
                done.append(call.dispatch)
            elif held.page.is_ready(call.point.point):
                ready.append(call.dispatch)
        return done, ready

    def busy_graph_slots(self, calls: Iterable[Call]) -> dict[int, int]:
        """Of these bound calls, by dispatches: the words of those that are rung, or taken and not done."""
        busy = {}
        for call in calls:
            held = self._gpus.get((call.client.number, call.gpu))
            if held is None or call.graph_slot is None:
                continue
            word = held.page.graph_slot(call.graph_slot)
            if word == RUNG or (word != SILENT and not held.page.is_graph_slot_done(call.graph_slot)):
                busy[call.dispatch] = word
        return busy

    def reached(self, keys: Iterable[tuple[int, str, TimelinePoint]]) -> list[tuple[int, str, TimelinePoint]]:
        """Those of these points (client's number, GPU, place) whose inputs are there."""
        return [key for key in keys if (held := self._gpus.get(key[:2])) is not None and held.page.is_ready(key[2])]

    def fail(self, client: int, gpu: str, point: TimelinePoint, code: str) -> None:
        held = self._gpus.get((client, gpu))
        if held is not None:  # else the client was dropped by what came before
            held.page.fail(point, error_number(code))

    def release(self, client: int, gpu: str, point: TimelinePoint) -> None:
        held = self._gpus.get((client, gpu))
        if held is not None and not held.page.is_ready(point):  # the word may be ahead already, and must not go back
            held.page.store_ready(point)

    def bump_lift_epochs(self) -> None:
        """No client may launch lifted calls before it has asked again."""
        for held in self._gpus.values():
            held.page.bump_lift_epoch()

    def last_lifted(self, client: int) -> set[int]:
        """Numbers of the lifted calls that the client launched last, on all its GPUs."""
        return {number for (its, _), held in self._gpus.items() if its == client for number in held.page.last_lifted()}

    def close(self, client: int, gpu: str) -> None:
        held = self._gpus.pop((client, gpu), None)
        if held is not None:
            held.close()

    def close_all(self) -> None:
        for client, gpu in list(self._gpus):
            self.close(client, gpu)


def error_number(code: str) -> int:
    """Of an error code in a timeline page: its CRC-32, the same in every version. Never 0, which means none."""
    return zlib.crc32(code.encode()) or 1


def check_handle_fds(handle: ArenaHandle, fds: list[int]) -> None:
    """Refuse descriptors that are not those of a handle's transport. Raises ProtocolError."""
    if len(fds) != handle.has_fd:
        raise ProtocolError(
            f"memory of transport {handle.transport!r} comes with {int(handle.has_fd)} descriptors, got {len(fds)}"
        )
    if handle.transport in STAGED:
        memory.check_memfd(fds[0], handle.nbytes)
    elif fds and stat.S_ISSOCK(os.fstat(fds[0]).st_mode):  # whoever closes it last may wait
        raise ProtocolError(f"memory of transport {handle.transport!r} comes with a socket")
