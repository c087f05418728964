"""Memory that a lifted call's steps use between them: one block for each stream, whose calls come one after the other.

Threads may enqueue to one stream: the steps of two calls must not mix, so a stream's block has a lock, which is held
while a call's steps are enqueued.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from layerzero.client.gpu.lifting.loaded import relaxed
from layerzero.client.gpu.memory import GpuMemory
from layerzero.ipc.cuda.memory import Block
from layerzero.ipc.lifting.program import SCRATCH_STEP

Room = tuple[int, int, Callable[[], object], Callable[[], object]]  # address, bytes; take and release its lock


class ScratchRooms:
    """Of one connection on one GPU. Threads may share it. `rooms`: by stream, for the C, too."""

    def __init__(self, memory: GpuMemory) -> None:
        self._memory, self._pool = memory, memory.pool("ipc")
        self._lock = threading.Lock()
        self._blocks: dict[Any, Block] = {}
        self._captured: dict[tuple[int | None, int], Block] = {}
        self.rooms: dict[Any, Room] = {}

    def take(self, key: Any, stream: int, nbytes: int) -> int:
        """The address of at least so many bytes for a call on the stream that `key` stands for, whose lock is taken:
        `release` follows. Raises CudaError."""
        with self._lock:
            room = self.rooms.get(key)
            if room is None:
                lock = threading.Lock()
                room = self.rooms[key] = (0, 0, lock.acquire, lock.release)
        _, _, acquire, release = room
        acquire()
        try:
            address, has, _, _ = self.rooms[key]
            if has < nbytes:
                block = self._take(nbytes, stream)
                before, self._blocks[key] = self._blocks.get(key), block
                if before is not None:  # later work of the stream may have it
                    self._pool.give(before)
                address = _aligned(block.address)
                self.rooms[key] = (address, block.address + block.nbytes - address, acquire, release)
        except BaseException:
            release()
            raise
        return address

    def release(self, key: Any) -> None:
        """All steps are enqueued."""
        self.rooms[key][3]()

    def captured(self, capture: int | None, stream: int, nbytes: int) -> int:
        """As `take`, for a graph, which may be replayed beside anything: its own for ever, since nobody says when a
        graph is gone that is not torch's."""
        with self._lock:
            block = self._captured.get((capture, stream))
            if block is None or block.address + block.nbytes - _aligned(block.address) < nbytes:
                block = self._captured[capture, stream] = self._take(nbytes, stream)
            return _aligned(block.address)

    def _take(self, nbytes: int, stream: int) -> Block:
        with relaxed(self._memory):
            return self._pool.take(nbytes + SCRATCH_STEP, stream)

    def close(self) -> None:
        """No call is begun any more. What is enqueued still uses it, and later work of the streams comes after that."""
        for key, block in list(self._blocks.items()):
            acquire, release = self.rooms[key][2:]
            acquire()
            self._pool.give(block)
            release()
        self._blocks.clear()


def _aligned(address: int) -> int:
    return -(-address // SCRATCH_STEP) * SCRATCH_STEP
