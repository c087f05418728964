"""What it costs to let another process work on this one's GPU memory, in order, with no CPU that waits. Writes
results/gpu_transport.md.

    python bench/gpu_transport.py [--quick] [--out FILE]

Floor: the same copies on a stream of this process. Peer: what torch.multiprocessing and most servers do, a message to
the worker, which waits for its stream and answers. All in one run on one GPU, for each way in which memory can cross.
Needs an NVIDIA GPU and msgpack, no framework.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgpack

from layerzero.ipc.cuda import driver as cuda
from layerzero.ipc.cuda.handles import ArenaHandle
from layerzero.ipc.cuda.mappings import Mapping, Mappings
from layerzero.ipc.cuda.memory import Arena
from layerzero.ipc.cuda.streams import ClientOrder, WorkerOrder
from layerzero.ipc.errors import CudaError
from layerzero.ipc.shm.timeline_page import create_page
from layerzero.ipc.shm.timeline_words import TimelinePoint

RESULTS = Path(__file__).parent / "results" / "gpu_transport.md"
NBYTES = 64 << 10  # of the copy that stands for a kernel: a few microseconds
ARENA_BYTES = 4 << 20
BATCH = 500  # calls that a worker enqueues for one message


# --- the worker


class Worker:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._context: cuda.Context | None = None
        self._mappings = Mappings(self._context_of)

    def _context_of(self, gpu: str) -> cuda.Context:
        if self._context is None:
            self._context = cuda.Context(cuda.load(), gpu)
        return self._context

    def serve(self) -> None:
        driver = cuda.load()
        data, fds, _, _ = socket.recv_fds(self._sock, 1 << 16, 2)
        setup = msgpack.unpackb(data)
        handle = ArenaHandle.from_wire(setup["handle"])
        with self._context_of(handle.gpu):  # making the context is not what is measured
            driver.synchronize()
        start_ns = time.perf_counter_ns()
        mapping = self._mappings.open(handle, fds[0] if handle.has_fd else None)
        opened_us = (time.perf_counter_ns() - start_ns) / 1e3
        order = WorkerOrder(mapping.context, fds[-1], has_memops=True)
        with mapping.context:
            stream = driver.create_stream()
            self._sock.send(msgpack.packb(opened_us))
            while data := self._sock.recv(1 << 16):
                timeline, first, count, is_synchronous = msgpack.unpackb(data)
                for value in range(first, first + count):
                    point = TimelinePoint(timeline, value)
                    if not is_synchronous:
                        order.await_ready(stream, point)
                    _work(driver, mapping, stream)
                    order.done(stream, point)
                if is_synchronous:
                    driver.synchronize_stream(stream)
                    self._sock.send(b"\xc0")
        os._exit(0)


def _work(driver: cuda.Driver, mapping: Mapping, stream: int) -> None:
    mapping.collect(0, NBYTES, stream)
    driver.copy_on_device(mapping.at(NBYTES, NBYTES), mapping.at(0, NBYTES), NBYTES, stream)
    mapping.publish(NBYTES, NBYTES, stream)


# --- the client


class Link(NamedTuple):
    arena: Arena
    transport: str
    order: ClientOrder
    sock: socket.socket
    opened_us: float

    def call(self, stream: int) -> TimelinePoint:
        """What a client enqueues for a call: nobody is told, the worker knows what comes."""
        self.arena.publish(self.transport, 0, NBYTES, stream)
        point = self.order.begin(stream)
        self.order.await_done(stream, point)
        self.arena.collect(self.transport, NBYTES, NBYTES, stream)
        return point

    def expect(self, timeline: int, first: int, count: int) -> None:
        self.sock.send(msgpack.packb([timeline, first, count, False]))

    def ask(self, stream: int, driver: cuda.Driver) -> None:
        """The peer: both CPUs wait."""
        driver.synchronize_stream(stream)
        point = self.order.begin(stream)
        self.sock.send(msgpack.packb([point.timeline, point.value, 1, True]))
        self.sock.recv(16)
        self.order.await_done(stream, point)


@contextlib.contextmanager
def link(context: cuda.Context, transport: str, number: int) -> Iterator[Link]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    worker = subprocess.Popen([sys.executable, __file__, "--worker", str(theirs.fileno())], pass_fds=[theirs.fileno()])
    theirs.close()
    arena = Arena(context, "bench", number, ARENA_BYTES, kind="vmm" if transport == "vmm" else "plain")
    page = create_page()
    order = ClientOrder(context, page, has_memops=True)
    handle, fd = arena.offer(transport)
    fds = [page] if fd is None else [fd, page]
    socket.send_fds(ours, [msgpack.packb({"handle": handle.to_wire()})], fds)
    opened_us = msgpack.unpackb(ours.recv(64))
    try:
        yield Link(arena, transport, order, ours, opened_us)
    finally:
        ours.close()
        worker.wait()
        order.close()
        os.close(page)
        arena.close()


def per_call_us(run: Callable[[], None], count: int, rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start_ns = time.perf_counter_ns()
        for _ in range(count):
            run()
        times.append((time.perf_counter_ns() - start_ns) / count / 1e3)
    return statistics.median(times)


def measure(context: cuda.Context, transports: tuple[str, ...], rounds: int) -> Iterator[list[str]]:
    driver, numbers = context.driver, itertools.count(1)
    for transport in transports:
        with link(context, transport, next(numbers)) as made, context:
            stream = driver.create_stream()
            timeline = made.order.begin(stream).timeline  # settles which one the stream has
            made.expect(timeline, 1, 1)
            driver.synchronize_stream(stream)
            figures = []
            for _ in range(rounds):
                figures.append(_round(driver, made, stream, timeline))
            host_us, wall_us, local_us, peer_us = (statistics.median(column) for column in zip(*figures, strict=True))
            yield [
                transport,
                f"{made.opened_us:,.0f} us",
                f"{host_us:.1f} us",
                f"{wall_us:.1f} us",
                f"{local_us:.1f} us",
                f"{peer_us:.1f} us",
                f"{wall_us / local_us:.2f}; peer {peer_us / local_us:.2f}",
            ]
            driver.destroy_stream(stream)


def _round(driver: cuda.Driver, made: Link, stream: int, timeline: int) -> tuple[float, float, float, float]:
    """us per call: the client's CPU, start to end, in this process alone, and with both CPUs waiting."""
    first = made.order.begin(stream).value
    made.expect(timeline, first, BATCH + 1)
    host_ns = 0
    start_ns = time.perf_counter_ns()
    for _ in range(BATCH):
        before_ns = time.perf_counter_ns()
        made.call(stream)
        host_ns += time.perf_counter_ns() - before_ns
    driver.synchronize_stream(stream)
    wall_us = (time.perf_counter_ns() - start_ns) / BATCH / 1e3
    base = made.arena.address
    start_ns = time.perf_counter_ns()
    for _ in range(BATCH):
        driver.copy_on_device(base + NBYTES, base, NBYTES, stream)
    driver.synchronize_stream(stream)
    local_us = (time.perf_counter_ns() - start_ns) / BATCH / 1e3
    peer_us = per_call_us(lambda: made.ask(stream, driver), BATCH // 5, 1)
    driver.synchronize_stream(stream)
    return host_ns / BATCH / 1e3, wall_us, local_us, peer_us


HEADINGS = ("way", "first open", "client's CPU a call", "a call in a row", "in process", "peer: CPUs wait", "ratio")


def save(context: cuda.Context, rows: list[list[str]], command: str, out: Path) -> None:
    driver = context.driver
    major, minor = divmod(driver.version() // 10, 100)
    lines = [
        "# GPU memory between processes",
        "",
        f"- date: {datetime.date.today().isoformat()}",
        f"- GPU: {driver.name(context.ordinal)}, driver {_driver_version()}, CUDA {major}.{minor}",
        f"- machine: {os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}",
        f"- command: `{command}`",
        f"- a call is a copy of {NBYTES >> 10} KiB on the device, by the worker, between words that both streams wait "
        "for; no message, and no CPU that waits. Staged ways copy those bytes through host memory, four times a call",
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "| --- " + "| ---: " * (len(HEADINGS) - 2) + "| --- |",
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
    ]
    out.write_text("\n".join(lines))


def _driver_version() -> str:
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, nothing saved")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        Worker(socket.socket(fileno=args.worker)).serve()
        return
    try:
        gpus = cuda.load().gpus()
    except (OSError, CudaError) as exc:
        sys.exit(f"no NVIDIA GPU: {exc}")
    if not gpus:
        sys.exit("the NVIDIA driver sees no GPU")
    context = cuda.Context(cuda.load(), gpus[0].uuid)
    rows = []
    print(" | ".join(HEADINGS))
    for row in measure(context, ("ipc", "vmm", "staged"), 3 if args.quick else 15):
        print(" | ".join(row), flush=True)
        rows.append(row)
    if not args.quick:
        save(context, rows, "python bench/gpu_transport.py", args.out)


if __name__ == "__main__":
    main()
