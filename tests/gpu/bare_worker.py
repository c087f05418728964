"""A bare worker process for tests, with the test in the place of its client and its broker. GPU or not: the driver is
that of the client's context, and the worker's provider sees to its own."""

from __future__ import annotations

import itertools
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgpack
import zmq
from tests.gpu.conftest import finish, load, store, until
from tests.gpu.peer import PATIENCE_S, ROOT

from layerzero.ipc.cuda import driver
from layerzero.ipc.cuda.memory import Arena
from layerzero.ipc.cuda.offer import Offer
from layerzero.ipc.cuda.offer_client import Trial
from layerzero.ipc.cuda.streams import ClientOrder
from layerzero.ipc.errors import LayerZeroError, from_wire
from layerzero.ipc.lifting.specimen import Specimen
from layerzero.ipc.shm import lane, memory
from layerzero.ipc.shm.ring import Ring
from layerzero.ipc.shm.ring import create_page as create_ring
from layerzero.ipc.shm.timeline_page import create_page
from layerzero.ipc.shm.timeline_words import GRAPH_SLOTS, MASK, TIMELINES, TimelinePoint
from layerzero.ipc.transport import control, messages, sockets, wire
from layerzero.ipc.transport.wire import HEADER_BYTES, Header, Kind, Ref
from layerzero.ipc.vocabulary.tensors import TensorSpec

NBYTES = 64 << 10
SPEC = TensorSpec.contiguous("float32", (NBYTES // 4,))
PROVIDER = ROOT / "tests/gpu/backends/driver_toy.py"
PLANS = {"copy": 1, "raise": 2, "illegal": 3, "synchronize": 4}


class Answer(NamedTuple):
    """What a worker says about a kernel that it is to lift."""

    reason: str
    detail: str
    specimen: Specimen | None = None


class Worker:
    """A worker process, and the broker's end of its two connections."""

    def __init__(
        self,
        folder: Path,
        gpu: str,
        failpoints: str = "",
        *,
        provider: Path | str = PROVIDER,
        lifts: bool = False,
        prepares: bool = True,
    ) -> None:
        """`lifts`: as in BootConfig. `prepares`: the worker gets PLANS."""
        self.log = folder / "log"
        page = memory.create_memfd("page", memory.PAGE_BYTES)
        self._context = zmq.Context()
        self._router = sockets.bind_router(self._context, folder / "zmq", 4096)
        self._router.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        with control.listen(folder / "control") as listener, self.log.open("wb") as log:
            self.process = self._spawn(folder / "control", log.fileno(), failpoints, provider, lifts)
            listener.settimeout(PATIENCE_S)
            self._control, _ = listener.accept()
        self._control.settimeout(PATIENCE_S)
        control.receive(self._control, messages.Hello)
        self._identity = b"W" + secrets.token_bytes(16)
        welcome = messages.Welcome(
            protocol=wire.PROTOCOL, package="", broker="b", broker_pid=os.getpid(), endpoint=f"ipc://{folder / 'zmq'}",
            identity=self._identity, number=1, max_in_flight=1024, timeout_s=30.0,
        )  # fmt: skip
        control.send(self._control, welcome, (page,))
        self.page = memory.ControlPage(page, writable=False)
        os.close(page)
        assert self.answer()[0].kind == Kind.READY
        self.prepared: dict[int, messages.Prepare] = {}
        for name, plan in PLANS.items():
            prepare = self.prepared[plan] = messages.Prepare(
                op="silu", kernel_id=f"toy.{name}", inputs=[SPEC.to_wire()], outputs=[SPEC.to_wire()], attrs={},
                device=gpu, is_graph_safe=True,
            )  # fmt: skip
            if prepares:
                self.send(wire.pack(Kind.PREPARE, route=plan, body=messages.encode(prepare)))

    @staticmethod
    def _spawn(path: Path, log: int, failpoints: str, provider: Path | str, lifts: bool) -> subprocess.Popen[bytes]:
        boot = msgpack.packb({
            "control_path": str(path), "ticket": b"", "provider": str(provider),
            "backend": "toy", "parent_pid": os.getpid(), "package": "", "failpoints": failpoints, "lifts": lifts,
        })  # fmt: skip
        fd = memory.create_memfd("boot", len(boot))
        os.pwrite(fd, boot, 0)
        python_path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *sys.path])
        try:
            return subprocess.Popen(
                [sys.executable, "-m", "layerzero.workers", "--boot-fd", str(fd)],
                env={**os.environ, "PYTHONPATH": python_path, "CUDA_DEVICE_MAX_CONNECTIONS": "32"},
                pass_fds=(fd,),
                stdout=log,
                stderr=log,
            )
        finally:
            os.close(fd)

    def send(self, frame: bytes) -> None:
        self._router.send_multipart([self._identity, frame])

    def tell(self, message: messages.Message, *fds: int) -> None:
        control.send(self._control, message, fds)

    def lift(self, plan: int, alignments: Sequence[int], seeds: Sequence[int] = (1, 2)) -> Answer:
        """Lift a plan's kernel, and what came of it."""
        self.settle()
        call = messages.encode(self.prepared[plan])
        self.tell(messages.Lift(number=7, call=call, alignments=list(alignments), seeds=list(seeds)))
        message, fds = control.receive(self._control, messages.Lifted)
        assert (message.number, len(fds)) == (7, not message.reason)
        if message.reason:
            return Answer(message.reason, message.detail)
        with os.fdopen(fds[0], "rb") as file:
            return Answer("", "", Specimen.unpack(file.read()))

    def run(self, dispatch: int, client: Client, point: TimelinePoint, refs: bytes, kernel: str = "copy") -> None:
        flags, body = wire.pack_call(refs, point)
        self.send(wire.pack_run(flags, PLANS[kernel], dispatch, 1, client.number, body))

    def bind(self, client: Client, graph_slot: int, refs: bytes, kernel: str = "copy") -> tuple[Header, bytes]:
        """Bind a call to a graph slot; its answer."""
        flags, body = wire.pack_call(refs, graph_slot=graph_slot, binding=client.order.page.binding(graph_slot))
        self.send(wire.pack_run(flags, PLANS[kernel], graph_slot + 1, 1, client.number, body))
        return self.answer()

    def mute(self, client: Client, graph_slot: int, kernel: str = "copy") -> None:
        self.send(wire.pack(Kind.MUTE, route=PLANS[kernel], seq=graph_slot, aux=client.number))

    def allow(self, lane: int, kernel: str = "copy") -> None:
        self.send(wire.pack(Kind.ALLOW, route=PLANS[kernel], aux=lane))

    def answer(self) -> tuple[Header, bytes]:
        _, frame = self._router.recv_multipart()
        return wire.unpack(frame), frame[HEADER_BYTES:]

    def settle(self, client: Client | None = None) -> None:
        """Return when the worker has taken the frames before this."""
        self.send(
            wire.pack(Kind.RUN, route=PLANS["copy"], seq=1, attempt=1, aux=0 if client is None else client.number)
        )
        assert self.answer()[0].kind == Kind.RAISED

    def error(self) -> LayerZeroError:
        header, body = self.answer()
        assert header.kind == Kind.RAISED
        return from_wire(msgpack.unpackb(body))

    def is_silent(self, patience_ms: int = 50) -> bool:
        return self._router.poll(patience_ms) == 0

    def stop(self, patience_s: float = PATIENCE_S) -> int:
        self.send(wire.pack(Kind.STOP))
        return self.process.wait(patience_s)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        self.page.close()
        self._control.close()
        self._router.close(linger=0)
        self._context.term()


@dataclass
class Client:
    """A client's memory, timeline page and streams."""

    context: driver.Context
    number: int
    transport: str = "ipc"

    def __post_init__(self) -> None:
        self.driver = self.context.driver
        kind = "vmm" if self.transport == "vmm" else "plain"
        self.arena = Arena(self.context, "c", 1, 16 << 20, kind=kind)
        self.trial = Trial(self.context, "c", 2, self.transport)
        self.fd = create_page()
        self.order = ClientOrder(self.context, self.fd, has_memops=True)
        self.streams = [self.driver.create_stream() for _ in range(3)]
        self.fence = threading.Lock()
        self._lent: list[Lent] = []

    def lend(self, worker: Worker, number: int = 1, *kernels: str) -> Lent:
        """Give a worker a ring."""
        self._lent.append(Lent(self, worker, number, kernels or ("copy",)))
        return self._lent[-1]

    def join(self, worker: Worker, offer: Offer | None = None) -> None:
        """As the broker does before the client's first call."""
        offered = (offer or self.trial.offer).to_wire()
        gpu = messages.MapGpu(client=self.number, gpu=self.context.gpu, slot=7, has_memops=True, offer=offered)
        worker.tell(gpu, self.fd, *([] if self.trial.fd is None else [self.trial.fd]))
        self.map_arena(worker)

    def map_arena(self, worker: Worker) -> None:
        handle, fd = self.arena.offer(self.transport)
        arena = messages.MapGpuArena(client=self.number, arena=handle.arena, handle=handle.to_wire())
        worker.tell(arena, *(() if fd is None else (fd,)))

    def refs(self, source: int, target: int) -> bytes:
        return wire.pack_refs([Ref(self.arena.number, 0, block * NBYTES, NBYTES) for block in (source, target)])

    def begin(self, lane: int = 0) -> TimelinePoint:
        """What a call of the client enqueues; its stream goes on when somebody has written DONE."""
        point = self.order.begin(self.streams[lane])
        self.order.await_done(self.streams[lane], point)
        return point

    def write(self, block: int, data: bytes, lane: int = 0) -> None:
        store(self.driver, self.arena.address + block * NBYTES, data, self.streams[lane])
        self.arena.publish(self.transport, block * NBYTES, len(data), self.streams[lane])

    def read(self, block: int, lane: int = 0) -> bytes:
        finish(self.driver, self.streams[lane])
        self.arena.collect(self.transport, block * NBYTES, NBYTES, self.streams[lane])
        return load(self.driver, self.arena.address + block * NBYTES, NBYTES, self.streams[lane])

    def hold(self, lane: int = 0) -> Callable[[], None]:
        """Keep a lane's stream from going on until the function that this returns is called."""
        spare, event = self.streams[2], self.driver.create_event()
        gate = self.order.begin(spare)
        self.order.await_done(spare, gate)
        self.driver.record_event(event, spare)
        self.driver.wait_event(self.streams[lane], event)
        self.driver.destroy_event(event)
        return lambda: self.order.page.store_done(gate)

    def close(self) -> None:
        for graph_slot in range(GRAPH_SLOTS):
            self.order.page.store_graph_slot_done(graph_slot)
        for number in range(TIMELINES):  # whatever a failed test left waiting would make the driver wait, too
            self.order.page.store_done(TimelinePoint(number, 1000 & MASK))
        for stream in self.streams:
            finish(self.driver, stream)
            self.driver.destroy_stream(stream)
        for lent in self._lent:
            lent.close()
        self.order.close()
        os.close(self.fd)
        self.trial.close()
        self.arena.close()


class Lent:
    """A ring of a client to a worker, from the client's end."""

    def __init__(self, client: Client, worker: Worker, number: int = 1, kernels: tuple[str, ...] = ("copy",)) -> None:
        self.client, self.number, self.put = client, number, 0
        page, self.doorbell = create_ring(), lane.create_doorbell()
        self.ring = Ring(page)
        worker.tell(messages.MapLane(client=client.number, lane=number, gpu=client.context.gpu), page, self.doorbell)
        os.close(page)
        for kernel in kernels:
            worker.allow(number, kernel)
        worker.settle(client)

    def call(
        self, source: int, target: int, *, lane: int = 0, kernel: str = "copy", refs: bytes | None = None
    ) -> TimelinePoint:
        """All that a client does for a call."""
        client = self.client
        point = client.order.reserve(client.streams[lane])
        self.write(point, client.refs(source, target) if refs is None else refs, PLANS[kernel])
        client.order.enter(client.streams[lane], point)
        return point

    def write(self, point: TimelinePoint, refs: bytes, plan: int) -> None:
        self.put += 1
        self.ring.put(self.put, 1, plan, 100 + self.put, point, refs)
        with self.client.fence:
            pass
        if self.ring.is_asleep:
            lane.ring(self.doorbell)

    def status(self) -> int:
        """Of the last call, once it is known."""
        until(lambda: self.ring.status(self.put) != 0)
        return self.ring.status(self.put)

    def close(self) -> None:
        self.ring.close()
        os.close(self.doorbell)


class Spawn:
    """Starts workers, each in a folder of its own."""

    def __init__(self, folder: Path, gpu: str, provider: Path = PROVIDER) -> None:
        self._folder, self._gpu, self._provider = folder, gpu, provider
        self._made: list[Worker] = []

    def __call__(self, failpoints: str = "", *, lifts: bool = False) -> Worker:
        folder = self._folder / str(len(self._made))
        folder.mkdir()
        self._made.append(Worker(folder, self._gpu, failpoints, provider=self._provider, lifts=lifts))
        return self._made[-1]

    def close(self) -> None:
        for worker in self._made:
            worker.close()


Connect = Callable[..., Client]
numbers = itertools.count(1)


def call(worker: Worker, client: Client, source: int, target: int, *, lane: int = 0, kernel: str = "copy") -> Header:
    """One call from its begin to the worker's answer, which is not its end."""
    dispatch = next(numbers)
    worker.run(dispatch, client, client.begin(lane), client.refs(source, target), kernel)
    header, body = worker.answer()
    assert (header.kind, header.seq, header.attempt, body) == (Kind.RAN, dispatch, 1, b"")
    return header


@contextmanager
def clients(context: driver.Context, spawn: Spawn) -> Iterator[Connect]:
    """Makes clients. Their memory is freed once no worker has it mapped."""
    made: list[Client] = []

    def make(transport: str = "ipc") -> Client:
        made.append(Client(context, len(made) + 1, transport))
        return made[-1]

    yield make
    spawn.close()
    for client in made:
        client.close()
