"""A worker's bookkeeping of calls on a GPU, above a driver that is a fake: who is served, in which order, what is kept
for how long, and when the process ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import pytest
from tests.unit.ipc.fake_cuda import UUID, FakeDriver, FakeGpu, error

from layerzero.ipc.cuda import driver
from layerzero.ipc.cuda.driver import Context
from layerzero.ipc.cuda.handles import TRANSPORTS
from layerzero.ipc.cuda.memory import Arena
from layerzero.ipc.cuda.offer_client import Trial
from layerzero.ipc.errors import CudaError, NoTransport, ProtocolError
from layerzero.ipc.shm.timeline_page import TimelinePage, create_page
from layerzero.ipc.shm.timeline_words import TIMELINES, TimelinePoint
from layerzero.ipc.transport.messages import MapGpu, MapGpuArena
from layerzero.ipc.transport.wire import NO_ARENA, Ref, pack_refs
from layerzero.ipc.vocabulary.ops import FUNCTION
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.ipc.vocabulary.worker_codes import RENEWAL_EXIT, STICKY_EXIT
from layerzero.workers.gpu import executor
from layerzero.workers.gpu.errors import is_out_of_memory
from layerzero.workers.gpu.executor import STALL_S, Gpus
from layerzero.workers.gpu.plan import MAX_TASKS, Plan
from layerzero.workers.provider import Block, Bound, Call

NBYTES = 64
SPEC = TensorSpec.contiguous("uint8", (NBYTES,))


class Ended(BaseException):
    """In place of the end of the process."""


class Rig:
    """A client's memory and timeline page, and the worker's side of them. The kernel copies its input to its output."""

    def __init__(self, transport: str = "ipc") -> None:
        device = FakeGpu()
        self.client, self.driver = FakeDriver(device), FakeDriver(device)
        self.context, self.transport = Context(self.client, UUID), transport
        self.stream = 0  # the one that the provider enqueues on
        self.queue: list[Callable[[], None]] = []  # control messages that were sent and not taken
        self.binds: list[int] = []
        self.kernel: Callable[[], None] = lambda: None
        self.replayed: list[bool] = []
        self.has_ended = False
        self.alarms: list[float] = []
        self.gpus = self.worker()
        kind = "vmm" if transport == "vmm" else "plain"
        self.arena = Arena(self.context, "c1", 1, 2 << 20, kind=kind)
        self.trial = Trial(self.context, "c1", 2, transport)
        self.page_fd = create_page()
        self.page = TimelinePage(self.page_fd)
        call = Call("silu", "test.silu", (SPEC,), (SPEC,))
        self.plan = Plan(call, self.bind, UUID, is_graph_safe=False)

    def worker(self, on_stream: Any = "ours", load: Any = None) -> Gpus:
        def end(reason: str, code: int = STICKY_EXIT) -> NoReturn:
            self.has_ended = True
            raise Ended(reason, code)

        return Gpus(
            self.on_stream if on_stream == "ours" else on_stream,
            self.hear,
            load=load or (lambda: self.driver),
            end=end,
            set_alarm=self.alarms.append,
        )

    def hear(self, *, waits: bool) -> bool:
        assert self.queue or not waits, "it waits for a message that does not come"
        if self.queue:
            self.queue.pop(0)()
            return True
        return False

    @contextlib.contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        self.stream = stream
        yield
        self.stream = 0

    def bind(self, call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        (x,), out = inputs, outputs[0]
        assert x is not None
        assert x.device.device == 0
        source, target = x.device.pointer, out.device.pointer
        self.binds.append(self.stream)

        def bound() -> None:
            self.kernel()
            self.driver.copy_on_device(target, source, NBYTES, self.stream)

        return bound

    def map_gpu(self, client: int = 1, *, has_memops: bool = True, pid: int | None = None) -> None:
        offer = replace(self.trial.offer, pid=pid or os.getpid() + 1)
        fds = [os.dup(self.page_fd), *([] if self.trial.fd is None else [os.dup(self.trial.fd)])]
        message = MapGpu(client=client, gpu=UUID, slot=3, has_memops=has_memops, offer=offer.to_wire())
        self.gpus.map_gpu(message, fds)

    def map_arena(self, client: int = 1) -> None:
        handle, fd = self.arena.offer(self.transport)
        message = MapGpuArena(client=client, arena=1, handle=handle.to_wire())
        self.gpus.map_arena(message, [] if fd is None else [os.dup(fd)])

    def put(self, offset: int, data: bytes) -> None:
        memory, start = self.client._bytes(self.arena.address, self.arena.nbytes)
        memory[start + offset : start + offset + len(data)] = data
        self.arena.publish(self.transport, offset, len(data), 0)

    def take(self, offset: int) -> bytes:
        self.arena.collect(self.transport, offset, NBYTES, 0)
        memory, start = self.client._bytes(self.arena.address, self.arena.nbytes)
        return bytes(memory[start + offset : start + offset + NBYTES])

    def run(self, number: int = 1, *, lane: int = 0, client: int = 1, source: int = 0, target: int = 4096) -> int:
        refs = pack_refs([Ref(1, 0, source, NBYTES), Ref(1, 0, target, NBYTES)])
        task = self.gpus.task(self.plan, client, refs)
        self.page.store_ready(TimelinePoint(lane, number))
        enqueued = self.gpus.run(self.plan, task, client, TimelinePoint(lane, number))
        assert enqueued.result is None
        self.replayed.append(enqueued.is_replayed)
        return enqueued.elapsed_ns

    def streams(self) -> list[int]:
        return sorted(self.gpus._busy)

    def close(self) -> None:
        self.driver.held.clear()
        self.driver.fails.clear()
        for client, arena in list(self.gpus._arenas):
            self.gpus.unmap_arena(client, arena, [self.plan])
        for client, uuid in list(self.gpus._links):
            self.gpus.unmap_gpu(client, uuid)
        self.gpus.drop(self.plan)
        self.gpus.watch()
        self.trial.close()
        self.arena.close()
        self.page.close()
        os.close(self.page_fd)


@pytest.fixture
def make() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def build(transport: str = "ipc") -> Rig:
        made.append(Rig(transport))
        return made[-1]

    yield build
    for rig in made:
        rig.close()
        left = (rig.driver.mapped, rig.driver.pinned, rig.driver.events)
        assert rig.has_ended or left == ({}, {}, {})


@pytest.fixture
def rig(make: Callable[..., Rig]) -> Rig:
    rig = make()
    rig.map_gpu()
    rig.map_arena()
    return rig


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_call_computes_from_and_to_the_clients_memory(make: Callable[..., Rig], transport: str) -> None:
    """On transports that copy, its input is fetched first and its output sent after it."""
    rig = make(transport)
    rig.map_gpu()
    rig.map_arena()
    data = os.urandom(NBYTES)
    rig.put(0, data)
    rig.run()
    assert rig.take(4096) == data
    assert rig.page.is_done(TimelinePoint(0, 1))
    assert rig.trial.is_signed(3)


def test_lane_has_a_stream_of_its_own_that_waits_for_the_input_first(rig: Rig) -> None:
    """Lanes of a client do not wait for each other, and one lane's calls are in order."""
    rig.run(1, lane=0)
    rig.run(1, lane=5)
    rig.run(2, lane=0)
    first, second = rig.streams()
    waits = [(stream, value) for stream, _, value in rig.driver.waits if stream in (first, second)]
    assert sorted(waits) == [(first, 1), (first, 2), (second, 1)]


def test_worker_that_gets_a_new_kernel_behind_later_calls_begins_anew(rig: Rig) -> None:
    """CUDA may wait for all its streams to load the kernel; these wait for the call. In another lane they do not."""
    rig.run(5)
    rig.plan.has_run = False
    rig.run(3, lane=1)
    rig.plan.has_run = False
    with pytest.raises(Ended, match=r"the first test\.silu came behind later calls") as ended:
        rig.run(4)
    assert ended.value.args[1] == RENEWAL_EXIT
    rig.plan.has_run = True
    rig.run(3)
    rig.plan.has_run = False
    with pytest.raises(Ended, match="behind later calls"):  # though a stream could take it
        rig.run(4)


def test_late_call_that_blocks_the_process_ends_it(rig: Rig) -> None:
    """A library may wait for all streams in one that is new to it, which wait for that call, and hold the interpreter's
    lock. Calls in their order have no such end, however long they take."""
    rig.run(1)
    rig.run(3)
    assert rig.alarms == []
    rig.run(2)
    assert rig.alarms == [STALL_S, 0]
    code = "import time; from layerzero.workers.gpu.ending import set_alarm; set_alarm(0.01); time.sleep(60)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode == -signal.SIGALRM


def test_call_whose_kernel_raised_may_come_again_with_another_one(rig: Rig) -> None:
    """The broker tries the worker's next kernel: nothing of the lane is behind it."""
    rig.run(5)
    rig.plan.has_run = False
    rig.run(5)
    assert len(rig.streams()) == 1


def test_call_that_comes_late_is_not_behind_a_later_one_of_its_lane(rig: Rig) -> None:
    """Another worker died with call 2. Behind call 3, which waits for the client's stream, which waits for call 2, it
    would never run."""
    rig.run(1)
    rig.run(3)
    rig.run(2)
    rig.run(4)
    first, second = rig.streams()
    waits = [(stream, value) for stream, _, value in rig.driver.waits if stream in (first, second)]
    assert waits == [(first, 1), (first, 3), (second, 2), (first, 4)]


def test_call_is_bound_once_and_not_on_its_lane(rig: Rig) -> None:
    """What a provider refuses leaves nothing on the stream, and repeated calls pay nothing for binding."""
    rig.run(1)
    rig.run(2, lane=1)
    assert len(rig.binds) == 1
    assert rig.binds[0] not in (0, *rig.streams())


def test_what_was_told_before_the_call_is_waited_for(make: Callable[..., Rig]) -> None:
    """The control socket and the calls are two ways; their messages pass each other."""
    rig = make()
    rig.queue = [rig.map_gpu, rig.map_arena]
    rig.run()
    assert rig.page.is_done(TimelinePoint(0, 1))


def test_client_that_cannot_be_reached_gets_the_reason_for_each_call(
    make: Callable[..., Rig], capsys: pytest.CaptureFixture[str]
) -> None:
    """The client goes on to the next transport then; with its next offer it is served."""
    rig = make()
    rig.map_gpu(pid=os.getpid())
    rig.map_arena()
    for _ in range(2):
        with pytest.raises(NoTransport, match="have the same pid") as caught:
            rig.run()
        assert caught.value.facts["transport"] == "ipc"
    assert "cannot be served" in capsys.readouterr().err
    rig.queue = [lambda: rig.gpus.unmap_gpu(1, UUID), rig.map_gpu]
    rig.run()
    assert rig.page.is_done(TimelinePoint(0, 1))


def test_call_that_comes_after_its_client_was_unmapped_is_refused(rig: Rig) -> None:
    """It was sent before: waiting for another offer would hold up everybody else."""
    rig.run()
    rig.gpus.unmap_gpu(1, UUID)
    with pytest.raises(NoTransport, match="taken its offer"):
        rig.run(2)


@pytest.mark.parametrize("broken", ["create_stream", "host_register"])
def test_page_that_cannot_be_used_is_a_reason_too(make: Callable[..., Rig], broken: str) -> None:
    """And its offer is unmapped again."""
    rig = make()
    rig.driver.fails[broken] = error(broken, 1)
    rig.driver.times[broken] = -1
    rig.map_gpu()
    rig.driver.fails.clear()
    rig.map_arena()
    with pytest.raises(NoTransport, match=broken):
        rig.run()


def test_arena_that_cannot_be_mapped_fails_its_calls_and_no_others(rig: Rig) -> None:
    """The worker serves the rest."""
    rig.driver.fails["ipc_open"] = error("cuIpcOpenMemHandle", 201)
    rig.driver.times["ipc_open"] = 1
    rig.map_gpu(client=2)
    rig.driver.times["ipc_open"] = 1
    rig.map_arena(client=3)
    rig.driver.fails.clear()
    rig.map_gpu(client=3)
    with pytest.raises(NoTransport, match="returned 201"):
        rig.run(client=3)
    rig.run(client=1)


def test_worker_of_cpu_kernels_never_loads_the_driver(make: Callable[..., Rig]) -> None:
    """A GPU context costs half a gigabyte, and kernels on the CPU have no use for it."""
    rig = make()

    def load() -> driver.Driver:
        raise AssertionError("loaded")

    rig.gpus = rig.worker(None, load)
    rig.map_gpu()
    rig.map_arena()
    with pytest.raises(NoTransport, match="compute on the CPU"):
        rig.run()


def test_machine_without_a_driver_is_a_reason(make: Callable[..., Rig]) -> None:
    """A backend with GPU kernels may be started anywhere."""
    rig = make()

    def load() -> driver.Driver:
        raise OSError("libcuda.so.1: no such file")

    rig.gpus = rig.worker(load=load)
    rig.map_gpu()
    with pytest.raises(NoTransport, match="no such file"):
        rig.run()


@pytest.mark.parametrize(
    ("refs", "message"),
    [
        ([Ref(1, 0, 0, NBYTES), Ref(1, 0, (2 << 20) - 32, NBYTES)], "not within"),
        ([Ref(1, 0, 0, NBYTES), Ref(1, 0, 4096, NBYTES - 1)], "spans 64 bytes"),
        ([Ref(NO_ARENA, 0, 0, 0), Ref(1, 0, 4096, NBYTES)], "has no arena"),
        ([Ref(1, 0, 0, NBYTES)], "too short"),
    ],
)
def test_references_are_held_to_their_arenas(rig: Rig, refs: list[Ref], message: str) -> None:
    """An address outside would be a fault that ends the worker, or somebody else's data."""
    with pytest.raises(ProtocolError, match=message):
        rig.gpus.task(rig.plan, 1, pack_refs(refs))


def test_point_that_is_none_leaves_nothing_on_a_stream(rig: Rig) -> None:
    """A stream that waits for a word outside the page waits for ever."""
    with pytest.raises(ProtocolError, match="point 1 of timeline 64"):
        rig.run(lane=TIMELINES)
    assert rig.streams() == []


def test_kernel_that_raises_is_not_done_and_the_lane_goes_on(rig: Rig) -> None:
    """Another worker will run that call, and write DONE."""

    def refuse() -> None:
        raise ValueError("odd shape")

    rig.kernel = refuse
    with pytest.raises(ValueError, match="odd shape"):
        rig.run(1)
    assert not rig.page.is_done(TimelinePoint(0, 1))
    rig.kernel = lambda: None
    rig.run(2)
    assert rig.page.is_done(TimelinePoint(0, 2))


def test_process_ends_when_a_failed_kernel_does_not_finish(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could write to outputs that another worker fills by then."""
    monkeypatch.setattr(executor, "SETTLE_S", 0.0)

    def refuse() -> None:
        rig.driver.held.add(rig.stream)
        raise ValueError("odd shape")

    rig.kernel = refuse
    with pytest.raises(Ended, match="not through 0 s after its kernel raised ValueError\\('odd shape'\\)"):
        rig.run(1)


@pytest.mark.parametrize("where", ["create_event", "copy_on_device"])
def test_lost_gpu_ends_the_process_at_a_call(rig: Rig, where: str) -> None:
    """Also when the kernel's library says it in words of its own: the driver knows."""
    rig.run(1)

    def strike() -> None:
        rig.driver.fails[where] = error(where, 700, sticky=True)
        rig.driver.times[where] = -1
        if where == "create_event":
            raise RuntimeError("an illegal memory access was encountered")

    rig.kernel = strike
    with pytest.raises(Ended, match="returned 700"):
        rig.run(2)


def test_lost_gpu_ends_the_process_when_nobody_calls(rig: Rig) -> None:
    """Kernels fail after their call was answered; without this nobody would hear of it before the deadline."""
    assert rig.gpus.timeout_ms is None
    rig.run(1)
    assert rig.gpus.timeout_ms == 20
    rig.driver.fails["is_stream_idle"] = error("cuStreamQuery", 700, sticky=True)
    rig.driver.times["is_stream_idle"] = -1
    with pytest.raises(Ended, match="cuStreamQuery returned 700"):
        rig.gpus.watch()


def test_full_gpu_gets_a_second_chance_and_then_an_error(rig: Rig) -> None:
    """What others used may be free once the stream is through; another backend may need less."""
    tries = []

    def run_out() -> None:
        tries.append(rig.stream)
        if len(tries) < 2:
            raise error("cuMemAlloc", 2)

    rig.kernel = run_out
    rig.run(1)
    assert (len(tries), rig.page.is_done(TimelinePoint(0, 1))) == (2, True)
    tries.clear()

    def stay_full() -> None:
        tries.append(rig.stream)
        raise error("cuMemAlloc", 2)

    rig.kernel = stay_full
    with pytest.raises(CudaError) as caught:
        rig.run(2)
    assert (len(tries), caught.value.is_out_of_memory) == (2, True)


def test_function_is_not_run_again_where_a_gpu_is_full(rig: Rig) -> None:
    """It may have run, and has state."""
    tries = []

    def stay_full() -> None:
        tries.append(rig.stream)
        raise error("cuMemAlloc", 2)

    rig.run(1)
    rig.plan.call = replace(rig.plan.call, op=FUNCTION)
    rig.kernel = stay_full
    with pytest.raises(CudaError):
        rig.run(2)
    assert len(tries) == 1


def test_full_gpu_gets_the_memory_of_graphs_back(rig: Rig) -> None:
    """They are convenience; a call is not. The run that needed it is the kernel's own."""
    rig.plan.is_graph_safe = True
    for number in range(1, 7):
        rig.run(number)
    tries = []

    def run_out() -> None:
        tries.append(len(rig.driver.graphs))
        if len(tries) == 1:
            raise error("cuMemAlloc", 2)

    rig.kernel = run_out
    rig.run(7, target=8192)
    assert tries == [1, 0]
    rig.run(8)
    assert rig.replayed == [False] * 4 + [True] * 2 + [False] * 2


def test_repeated_call_is_replayed_on_its_lane_only(rig: Rig) -> None:
    """Libraries keep workspaces for each stream; a graph that ran beside itself would share one."""
    rig.plan.is_graph_safe = True
    for number in range(1, 7):
        data = os.urandom(NBYTES)
        rig.put(0, data)
        rig.run(number)
        assert rig.take(4096) == data
    rig.run(1, lane=1)
    rig.run(7)
    assert rig.replayed == [False] * 4 + [True, True, False, True]


def test_kernel_whose_descriptor_does_not_promise_it_is_never_captured(rig: Rig) -> None:
    """What is captured wrongly fails in ways that nobody sees."""
    for number in range(1, 20):
        rig.run(number)
    assert (rig.driver.calls["begin_capture"], any(rig.replayed)) == (0, False)


def test_kernel_that_breaks_its_capture_stays_eager_on_all_blocks(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    """Its library would do the same on others."""
    rig.plan.is_graph_safe = True
    rig.kernel = lambda: rig.driver.synchronize_stream(rig.stream)
    for number in range(1, 10):
        rig.run(number)
        rig.run(number, lane=1, target=8192)
    assert (rig.driver.calls["begin_capture"], any(rig.replayed)) == (1, False)
    assert "test.silu cannot be captured and stays eager: CudaError: cuStreamSynchronize" in capsys.readouterr().err


def test_graph_goes_with_its_blocks_but_not_while_a_stream_waits(rig: Rig) -> None:
    """The driver frees memory when a graph is destroyed, and blocks for that."""
    rig.plan.is_graph_safe = True
    for number in range(1, 6):
        rig.run(number)
    rig.driver.held.update(rig.streams())
    rig.gpus.unmap_arena(1, 1, [rig.plan])
    assert (len(rig.driver.graphs), rig.gpus.timeout_ms) == (1, 1)
    rig.driver.held.clear()
    rig.gpus.watch()
    assert rig.driver.graphs == {}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [("OutOfMemoryError", "CUDA out of memory", True), ("XlaRuntimeError", "RESOURCE_EXHAUSTED: 8 GiB", True),
     ("RuntimeError", "CUDA error: invalid argument", False)],
)  # fmt: skip
def test_libraries_say_out_of_memory_in_their_ways(name: str, text: str, expected: bool) -> None:
    """torch, CuPy and JAX have no error in common."""
    assert is_out_of_memory(type(name, (RuntimeError,), {})(text)) is expected


def test_unmapping_waits_until_no_stream_works(rig: Rig) -> None:
    """The driver would block this thread, which serves everybody, and a kernel that runs would fault."""
    rig.run(1)
    (stream,) = rig.streams()
    rig.driver.held.add(stream)
    before = dict(rig.driver.mapped)
    rig.gpus.unmap_arena(1, 1, [rig.plan])
    rig.gpus.unmap_gpu(1, UUID)
    assert (rig.driver.mapped, rig.gpus.timeout_ms) == (before, 1)
    rig.driver.held.clear()
    rig.gpus.watch()
    assert (rig.driver.mapped, rig.driver.pinned, rig.gpus.timeout_ms) == ({}, {}, None)


def test_streams_of_a_client_that_left_serve_the_next(rig: Rig) -> None:
    """They are never destroyed, because libraries keep what they know of them by handle."""
    rig.run(1)
    (stream,) = rig.streams()
    rig.gpus.watch()
    rig.gpus.unmap_gpu(1, UUID)
    rig.map_gpu(client=2)
    rig.map_arena(client=2)
    rig.run(1, client=2)
    assert rig.streams() == [stream]


def test_unmapped_arena_takes_its_tasks_along_and_no_others(rig: Rig) -> None:
    """Its addresses mean something else by and by."""
    rig.map_arena(client=2)
    rig.map_gpu(client=2)
    rig.run(1)
    rig.run(1, client=2, lane=1)
    rig.gpus.unmap_arena(1, 1, [rig.plan])
    assert [client for client, _ in rig.plan.tasks] == [2]


def test_tasks_are_bounded_and_the_oldest_is_kept_while_it_runs(rig: Rig) -> None:
    """Its workspace would go to another kernel, which then writes to it."""
    rig.run(1)
    rig.driver.held.update(rig.streams())
    (oldest,) = rig.plan.tasks.values()
    for number in range(2, MAX_TASKS + 2):
        rig.run(number, target=number * 4096)
    assert len(rig.plan.tasks) == MAX_TASKS
    assert [task for _, _, task in rig.gpus._dropped] == [oldest]
    rig.driver.held.clear()
    rig.gpus.watch()
    assert rig.gpus._dropped == []


def test_time_of_a_run_comes_with_a_later_one(rig: Rig) -> None:
    """Measured by the GPU, and not known before it is over: the first eight, then each 32nd."""
    told = [number for number in range(1, 100) if rig.run(number)]
    assert told == [*range(2, 10), 33, 65, 97]
