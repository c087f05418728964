"""The other process of a GPU test: it does what it is told over a socket, and dies with the test.

Run by `Peer`, which is the test's end of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack

from layerzero.ipc.cuda import driver as cuda
from layerzero.ipc.cuda.handles import ArenaHandle, Key
from layerzero.ipc.cuda.mappings import Mappings
from layerzero.ipc.cuda.memory import InPlace
from layerzero.ipc.cuda.offer import Offer
from layerzero.ipc.cuda.offer_client import Trial
from layerzero.ipc.cuda.offer_worker import sign
from layerzero.ipc.cuda.streams import WorkerOrder
from layerzero.ipc.errors import LayerZeroError, NoTransport, from_wire
from layerzero.ipc.shm.timeline_page import TimelinePage
from layerzero.ipc.shm.timeline_words import TimelinePoint

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0  # a first context takes seconds on a busy machine
MAX_BYTES = 1 << 20


class Peer:
    """A process that answers `ask`. Errors of ours that it meets are raised here."""

    def __init__(self, *prefix: str, **environment: str) -> None:
        """`prefix`: a command that runs it, such as unshare."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *sys.path])
        with theirs:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "tests.gpu.peer", str(theirs.fileno())],
                env={**os.environ, "PYTHONPATH": path, **environment},
                pass_fds=(theirs.fileno(),),
            )
        self.pid = self._process.pid
        self._socket = ours
        ours.settimeout(PATIENCE_S)

    def ask(self, what: str, *fds: int, **arguments: Any) -> Any:
        """Raises TimeoutError when no answer comes."""
        socket.send_fds(self._socket, [msgpack.packb([what, arguments])], list(fds))
        answer = msgpack.unpackb(self._socket.recv(MAX_BYTES))
        if "error" in answer:
            raise from_wire(answer["error"])
        return answer["value"]

    def tries(self, context: cuda.Context, number: int, transport: str, **changes: Any) -> str:
        """Offer memory by a transport: why it does not reach this worker and come back, or "". `changes`: of the
        offer."""
        trial = Trial(context, "c1", number, transport)
        offer = replace(trial.offer, **changes)
        reason: str = self.ask("sign", *(() if trial.fd is None else (trial.fd,)), offer=offer.to_wire(), slot=number)
        if not reason:
            reason = "" if trial.is_signed(number) else "the client saw other bytes than the worker wrote"
            self.ask("retire", key=offer.handle.key, streams=[])
            self.reap(offer.handle.key)
        trial.close()
        return reason

    def open(self, handle: ArenaHandle, fd: int | None) -> Any:
        return self.ask("open", *(() if fd is None else (fd,)), handle=handle.to_wire())

    def reap(self, *keys: Key) -> None:
        """Wait until the worker has unmapped these arenas."""
        left, deadline_s = {*keys}, time.monotonic() + PATIENCE_S
        while left:
            left -= {(client, arena, generation) for client, arena, generation in self.ask("reap")}
            assert time.monotonic() < deadline_s, f"still mapped after {PATIENCE_S:g} s: {left}"

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(PATIENCE_S)

    def close(self) -> None:
        self._socket.close()
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()


class Server:
    """What a worker does with CUDA, one method for each thing that a test asks."""

    def __init__(self) -> None:
        self._contexts: dict[str, cuda.Context] = {}
        self._mappings = Mappings(self._context)
        self._orders: dict[int, WorkerOrder] = {}
        self._streams: dict[int, int] = {}
        self._gpu = ""

    def _context(self, gpu: str) -> cuda.Context:
        self._gpu = gpu
        if gpu not in self._contexts:
            self._contexts[gpu] = cuda.Context(cuda.load(), gpu)
        return self._contexts[gpu]

    def _stream(self, number: int) -> int:
        if number not in self._streams:
            with self._context(self._gpu):
                self._streams[number] = cuda.load().create_stream()
        return self._streams[number]

    def gpus(self) -> list[str]:
        return [gpu.uuid for gpu in cuda.load().gpus()]

    def sign(self, fd: int | None = None, *, offer: Any, slot: int) -> str:
        """Why not, or ""."""
        try:
            sign(self._mappings, Offer.from_wire(offer), fd, slot)
        except NoTransport as exc:
            return str(exc.facts["reason"])
        return ""

    def tries_of_its_own(self, *, gpu: str, prefix: list[str], transports: list[str]) -> list[str]:
        """As a client, with a worker of its own: what came of each transport."""
        worker = Peer(*prefix)
        try:
            return [
                worker.tries(self._context(gpu), number, transport)
                for number, transport in enumerate(transports, start=1)
            ]
        finally:
            worker.close()

    def open(self, fd: int | None = None, *, handle: Any) -> None:
        self._mappings.open(ArenaHandle.from_wire(handle), fd)

    def retire(self, *, key: list[Any], streams: list[int]) -> None:
        self._mappings.retire((key[0], key[1], key[2]), [self._stream(number) for number in streams])

    def reap(self) -> list[list[Any]]:
        return [list(key) for key in self._mappings.reap(self._streams.values())]

    def read(self, *, key: list[Any], offset: int, nbytes: int) -> bytes:
        """Bytes of an arena, as the GPU sees them here."""
        mapping = self._mappings.get((key[0], key[1], key[2]))
        target = (ctypes.c_char * nbytes)()
        with mapping.context:
            driver, stream = cuda.load(), self._stream(0)
            mapping.collect(offset, nbytes, stream)
            driver.copy_to_host(ctypes.addressof(target), mapping.at(offset, nbytes), nbytes, stream)
            driver.synchronize_stream(stream)
        return bytes(target)

    def write(self, *, key: list[Any], offset: int, data: bytes) -> int:
        """Returns how many bytes were copied to make these visible to the client."""
        mapping = self._mappings.get((key[0], key[1], key[2]))
        source = (ctypes.c_char * len(data)).from_buffer_copy(data)
        with mapping.context:
            driver, stream = cuda.load(), self._stream(0)
            driver.copy_to_device(mapping.at(offset, len(data)), ctypes.addressof(source), len(data), stream)
            copied = mapping.publish(offset, len(data), stream)
            driver.synchronize_stream(stream)
        return copied

    def order(self, fd: int, *, gpu: str, number: int, has_memops: bool) -> None:
        self._orders[number] = WorkerOrder(self._context(gpu), fd, has_memops=has_memops)
        os.close(fd)

    def copy(
        self, *, order: int, point: list[int], key: list[Any], source: int, target: int, nbytes: int, stream: int
    ) -> bool:
        """One call whose kernel copies bytes within an arena. Answered when it is enqueued; True if it is not over."""
        mapping, words = self._mappings.get((key[0], key[1], key[2])), self._orders[order]
        with mapping.context:
            driver, own = cuda.load(), self._stream(stream)
            words.await_ready(own, TimelinePoint(*point))
            mapping.collect(source, nbytes, own)
            driver.copy_on_device(mapping.at(target, nbytes), mapping.at(source, nbytes), nbytes, own)
            mapping.publish(target, nbytes, own)
            words.done(own, TimelinePoint(*point))
            return not driver.is_stream_idle(own)

    def hang(self, *, order: int, point: list[int], stream: int) -> None:
        """A stream that waits for a call that never comes."""
        words = self._orders[order]
        with self._context(self._gpu):
            words.await_ready(self._stream(stream), TimelinePoint(*point))

    def fault(self, *, gpu: str, kernel: str) -> list[Any]:
        """Run a kernel that must not be run; then what the next ordinary call says."""
        found: list[Any] = []
        with self._context(gpu):
            driver = cuda.load()
            launch(driver, kernel, self._stream(9))
            for call in (lambda: driver.synchronize_stream(self._stream(9)), lambda: driver.allocate(2 << 20)):
                try:
                    call()
                except LayerZeroError as exc:
                    found.append([exc.facts["number"], exc.facts["name"], exc.facts["sticky"]])
        return found

    def in_place(self, *, gpu: str) -> str:
        """Why torch's memory must be copied, in this process with its allocator's settings."""
        import torch

        tensor = torch.ones(1000, device="cuda")
        with self._context(gpu) as context:
            found = InPlace(context, "c1", itertools.count(1)).find(tensor.data_ptr(), 4000)
        return found if isinstance(found, str) else ""

    def fail(self, fd: int, *, point: list[int], code: int) -> bool:
        """As the broker does it; returns whether this process has the driver loaded."""
        page = TimelinePage(fd)
        os.close(fd)
        page.fail(TimelinePoint(*point), code)
        page.close()
        return "libcuda.so" in Path("/proc/self/maps").read_text()


# A store to an address that is not there, and a kernel that gives up.
PTX = b"""
.version 6.3
.target sm_75
.address_size 64
.visible .entry illegal_address() {
  .reg .u64 %p; .reg .u32 %v;
  mov.u64 %p, 4096; mov.u32 %v, 1; st.global.u32 [%p], %v; ret;
}
.visible .entry trap() { trap; ret; }
"""


def launch(driver: cuda.Driver, kernel: str, stream: int) -> None:
    """Run a kernel of PTX with one thread. The product itself launches none."""
    library = ctypes.CDLL("libcuda.so.1")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    assert library.cuModuleLoadData(ctypes.byref(module), ctypes.c_char_p(PTX)) == 0
    assert library.cuModuleGetFunction(ctypes.byref(function), module, ctypes.c_char_p(kernel.encode())) == 0
    ones = [ctypes.c_uint(1)] * 6
    none = ctypes.c_void_p()
    assert library.cuLaunchKernel(function, *ones, ctypes.c_uint(0), ctypes.c_void_p(stream), none, none) == 0


def serve(sock: socket.socket) -> None:
    server = Server()
    while True:
        data, fds, _, _ = socket.recv_fds(sock, MAX_BYTES, 4)
        if not data:
            os._exit(0)  # what still waits on the GPU ends with the process
        what, arguments = msgpack.unpackb(data)
        handler: Callable[..., Any] = getattr(server, what)
        try:
            answer = {"value": handler(*fds, **arguments)}
        except LayerZeroError as exc:
            answer = {"error": exc.to_wire()}
        sock.send(msgpack.packb(answer))


if __name__ == "__main__":
    with contextlib.suppress(ConnectionResetError):
        serve(socket.socket(fileno=int(sys.argv[1])))
