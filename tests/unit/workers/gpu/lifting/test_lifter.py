"""A kernel of a worker, lifted above a driver that is a fake: what is asked of it, what is refused and with which word,
and that nothing stays."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.ipc.fake_cuda import UUID, FakeDriver, FakeGpu, error
from tests.unit.workers.gpu.lifting.captures import kernel, touched, word
from tests.unit.workers.gpu.lifting.test_modules import image

from layerzero.ipc.cuda.nodes import Allocation, CopyNode, FillNode, KernelNode, Node, OtherNode
from layerzero.ipc.errors import OutOfMemory
from layerzero.ipc.lifting.form import Address, Kernel, digest
from layerzero.ipc.lifting.specimen import Specimen
from layerzero.ipc.shm import memory
from layerzero.ipc.transport import messages
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.workers.gpu import serving as serving_module
from layerzero.workers.gpu.lifting.lifter import Lifter
from layerzero.workers.gpu.lifting.modules import Modules
from layerzero.workers.gpu.serving import GpuServing
from layerzero.workers.provider import Bind, Block, Bound, Call

NBYTES = 100
SPEC = TensorSpec.contiguous("bfloat16", (NBYTES // 2,))
ROWS = TensorSpec("bfloat16", (4, 5), (13, 1))  # with gaps


class Ended(BaseException):
    """In place of the end of the process."""


class Driver(FakeDriver):
    """Notes what a captured stream is told."""

    def __init__(self) -> None:
        super().__init__(FakeGpu())
        self.noted: dict[int, list[Node]] = {}
        self.recordings: dict[int, list[Node]] = {}
        self.times.update({"allocate": -1, "nodes": -1, "synchronize_stream": -1})  # as often as they are called
        self.changes: Callable[[list[Node]], list[Node]] = lambda nodes: nodes

    def version(self) -> int:
        return 13000

    def name(self, ordinal: int) -> str:
        return f"Fake GPU {ordinal}"

    def begin_capture(self, stream: int) -> None:
        super().begin_capture(stream)
        self.noted[stream] = []

    def copy_on_device(self, target: int, source: int, nbytes: int, stream: int) -> None:
        if stream in self.captures:
            self.noted[stream].append(CopyNode(source, target, nbytes))
        super().copy_on_device(target, source, nbytes, stream)

    def launch(self, node: KernelNode, stream: int, work: Callable[[], None]) -> None:
        if stream in self.captures:
            self.noted[stream].append(node)
            self.captures[stream].append(work)
        else:
            work()

    def end_recording(self, stream: int) -> int:
        graph = super().end_capture(stream)
        if graph:
            self.recordings[graph] = self.noted.pop(stream)
        return graph

    def discard_recording(self, graph: int) -> None:
        super().destroy_graph(graph)

    def nodes(self, graph: int) -> tuple[Node, ...]:
        return tuple(self.changes(self.recordings[graph]))

    def allocation(self, address: int) -> Allocation | None:
        found = (Allocation(base, size) for base, (_, size) in self.mapped.items() if base <= address < base + size)
        return next(found, None)


class Rig:
    """A worker's GPU, and a kernel that copies its input through memory of its own."""

    def __init__(self, spec: TensorSpec = SPEC) -> None:
        self.driver, self.modules = Driver(), Modules()
        self.modules.add(image("copy_kernel"))
        self.stream = 0
        self.released: list[int] = []
        self.kernel: Callable[[], object] = lambda: None
        self.after: Callable[[int], None] = lambda target: None
        self.is_repeatable = True
        self.fd = memory.create_memfd("page", memory.PAGE_BYTES)
        self.page = memory.ControlPage(self.fd, writable=True)
        lifter = Lifter(self.on_stream, self.modules, {"toy": "1"})
        self.serving = GpuServing(
            select.poll(), self.page, self.on_stream, self.hear, lambda *_: None, graph_bytes=0, faults=None,
            lifter=lifter,
        )  # fmt: skip
        self.gpus = self.serving.gpus
        self.gpus._load = lambda: self.driver  # type: ignore[assignment, return-value]
        self.gpus._end = self.end  # type: ignore[assignment]
        wire = [spec.to_wire()]
        self.prepare = messages.Prepare(
            op="silu", kernel_id="toy.silu", inputs=wire, outputs=wire, attrs={}, device=UUID, is_graph_safe=True
        )
        self.kernels: dict[str, Bind] = {"toy.silu": self.bind}
        self.before: dict[int, tuple[int, int]] = {}
        with self.gpus.context(UUID):
            self.kept = self.driver.allocate(4096)
        self.before.update(self.driver.mapped)

    def end(self, reason: str, code: int = 0) -> Any:
        raise Ended(reason)

    def hear(self, *, waits: bool) -> bool:
        return False

    @contextlib.contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        self.stream = stream
        yield
        self.stream = 0

    def bind(self, call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        x, out = inputs[0], outputs[0]
        assert x is not None
        source, target, nbytes = x.device.pointer, out.device.pointer, x.spec.span_bytes
        driver, rig = self.driver, self

        def work() -> None:
            driver.copy_on_device(target, rig.kept + 600, nbytes, -1)
            rig.after(target)

        class Capturable:
            def __call__(self) -> object:
                driver.copy_on_device(rig.kept + 600, source, nbytes, rig.stream)
                node = kernel(word(rig.kept + 600), word(target), name="copy_kernel")
                driver.launch(node, rig.stream, work)
                return rig.kernel()

            def release(self) -> None:
                assert source in range(*rig.extent(source)), "its memory is gone"
                rig.released.append(source)

        return Capturable()

    def extent(self, address: int) -> tuple[int, int]:
        found = self.driver.allocation(address)
        assert found is not None
        return found.base, found.base + found.nbytes

    def lift(self, alignments: Sequence[object] = (256, 16), seeds: Sequence[object] = (1, 2)) -> Specimen:
        message, fds = self.serving.answer(self.message(alignments, seeds), self.kernels)
        assert (message.number, message.reason) == (9, ""), message
        with os.fdopen(fds[0], "rb") as file:
            return Specimen.unpack(file.read())

    def refused(self, alignments: Sequence[object] = (256, 16), seeds: Sequence[object] = (1, 2)) -> tuple[str, str]:
        message, fds = self.serving.answer(self.message(alignments, seeds), self.kernels)
        assert (message.number, fds) == (9, ())
        assert self.driver.mapped == self.before, "something was not freed"
        assert not self.driver.graphs
        return message.reason, message.detail

    def message(self, alignments: Sequence[object], seeds: Sequence[object]) -> messages.Lift:
        call = messages.encode(self.prepare)
        its = {"alignments": list(alignments), "seeds": list(seeds), "is_repeatable": self.is_repeatable}
        return messages.Lift(number=9, call=call, **its)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.page.close()
    os.close(rig.fd)


def test_specimen_has_steps_code_and_what_came_of_the_inputs(rig: Rig) -> None:
    specimen = rig.lift()
    lifted = specimen.lifted
    assert touched(lifted.steps) == [
        ("copy", Address("input", 0, 0), Address("scratch", 0, 88)),
        ("kernel", (0, Address("scratch", 0, 88)), (8, Address("output", 0, 0))),
    ]
    assert (lifted.scratch, lifted.alignments, lifted.codes) == (
        (4096 - 512,),
        (256, 16),
        (digest(image("copy_kernel")),),
    )
    assert (lifted.op, lifted.kernel_id, lifted.inputs, lifted.outputs) == ("silu", "toy.silu", (SPEC,), (SPEC,))
    assert (lifted.gpu, lifted.driver, dict(lifted.versions)) == ("Fake GPU 0", "13000", {"toy": "1"})
    assert specimen.codes == {digest(image("copy_kernel")): image("copy_kernel")}
    assert set(specimen.trials) == {1, 2}
    assert specimen.trials[1] != specimen.trials[2]
    assert isinstance(lifted.steps[1], Kernel)


def test_what_is_compared_with_a_neighbour_is_captured_and_not_run(rig: Rig) -> None:
    """A run waits for the GPU, which other processes have; and their machine code is known."""
    whole, calls = rig.lift(), list[bool]()
    rig.kernel = lambda: calls.append(rig.stream in rig.driver.captures)
    specimen = rig.lift(seeds=())
    assert (specimen.lifted, specimen.codes, specimen.trials) == (whole.lifted, {}, {})
    assert calls == [True, True]
    assert rig.driver.mapped == rig.before


def test_library_that_prepares_something_at_a_shapes_first_call_is_run_before(rig: Rig) -> None:
    whole, has_run = rig.lift(), list[bool]()

    def prepare() -> None:
        if rig.stream not in rig.driver.captures:
            has_run.append(True)
        elif not has_run:
            raise RuntimeError("operation not permitted when stream is capturing")

    rig.kernel = prepare
    assert rig.lift(seeds=()).lifted == whole.lifted
    assert has_run == [True, True]
    assert rig.driver.mapped == rig.before


def test_nothing_stays_of_it(rig: Rig) -> None:
    """A Bound lets go of what its captures took before its memory goes."""
    rig.lift()
    assert rig.driver.mapped == rig.before
    assert not rig.driver.graphs
    assert len(rig.released) == 2
    assert rig.driver.depth == 0


def test_two_lifts_of_a_kernel_are_the_same(rig: Rig) -> None:
    """What is stored is known by its hash."""
    assert rig.lift().pack() == rig.lift().pack()


def test_nothing_is_freed_while_a_stream_waits(rig: Rig) -> None:
    """The driver would wait for it, and this thread serves everybody."""
    rig.gpus._busy[77] = rig.gpus.context(UUID)
    rig.driver.held.add(77)
    rig.lift()
    assert len(rig.driver.mapped) == len(rig.before) + 2
    assert rig.released == []
    rig.driver.held.clear()
    rig.gpus.watch()
    assert rig.driver.mapped == rig.before


def test_bytes_between_elements_are_no_result() -> None:
    """They hold what a caller had there."""
    rig = Rig(ROWS)
    runs: list[None] = []

    def bind(call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        x, out = inputs[0], outputs[0]
        assert x is not None

        def bound() -> None:
            runs.append(None)
            for row in range(4):
                at = 26 * row
                rig.driver.copy_on_device(out.device.pointer + at, x.device.pointer + at, 10, rig.stream)

        return bound

    rig.kernels["toy.silu"] = bind
    assert len(rig.lift().lifted.steps) == 4
    assert len(runs) == 8


def test_worker_without_the_kernel_or_its_code_says_so(rig: Rig) -> None:
    bind = rig.kernels.pop("toy.silu")
    assert rig.refused()[0] == "WORKER_FAILED"
    rig.kernels["toy.silu"] = bind
    rig.modules._images.clear()
    reason, detail = rig.refused()
    assert (reason, "copy_kernel" in detail) == ("CODE_UNKNOWN", True)


def test_worker_that_sees_no_code_says_why(rig: Rig) -> None:
    rig.modules.problem = "a profiler has it"
    assert rig.refused() == ("NO_CUPTI", "a profiler has it")
    rig.serving._lifter = None
    assert rig.refused()[0] == "NO_CUPTI"


def test_kernel_that_may_not_be_captured_is_not(rig: Rig) -> None:
    rig.prepare = replace(rig.prepare, is_graph_safe=False)
    assert rig.refused() == ("NOT_CAPTURABLE", "its descriptor does not say that it may be captured")


@pytest.mark.parametrize(
    ("alignments", "seeds"),
    [((256,), (1,)), ((256, 3), (1,)), ((256, 0), (1,)), ((256, "x"), (1,)), ((256, 16), ("1",))],
)
def test_what_fits_no_call_is_an_answer_too(
    rig: Rig, alignments: tuple[object, ...], seeds: tuple[object, ...]
) -> None:
    assert rig.refused(alignments, seeds)[0] == "WORKER_FAILED"


def raises(exc: Exception) -> Callable[[], object]:
    def strike() -> object:
        raise exc

    return strike


def test_kernel_that_fails_is_refused_with_its_words(rig: Rig) -> None:
    rig.kernel = raises(ValueError("odd \udcff shape"))
    reason, detail = rig.refused()
    assert (reason, detail) == ("NOT_CAPTURABLE", "its first run failed: ValueError: odd ? shape")
    rig.kernel = raises(RuntimeError("CUDA error: not permitted\nSearch for it in the manual.\n"))
    assert rig.refused()[1] == "its first run failed: RuntimeError: CUDA error: not permitted"


def test_kernel_that_waits_or_returns_cannot_be_captured(rig: Rig) -> None:
    rig.kernel = lambda: rig.driver.synchronize_stream(rig.stream)
    assert rig.refused()[0] == "NOT_CAPTURABLE"
    rig.kernel = lambda: {"sizes": []}
    assert rig.refused() == ("NOT_CAPTURABLE", "ValueError: it returns a dict, which a graph cannot")


def test_memory_that_is_not_there_is_no_fault(rig: Rig) -> None:
    rig.driver.free_bytes = 4096
    assert rig.refused()[0] == "TOO_LARGE"
    rig.driver.free_bytes = 1 << 30
    rig.driver.fails["allocate"] = error("cuMemAlloc_v2", 2)
    assert rig.refused()[0] == "TOO_LARGE"
    rig.driver.fails.clear()
    rig.kernel = raises(type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory"))
    assert rig.refused()[0] == "TOO_LARGE"


def test_a_specimen_that_nobody_takes_is_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_module, "MAX_BYTES", 100)
    assert rig.refused()[0] == "TOO_LARGE"
    monkeypatch.undo()

    def refuse(name: str, nbytes: int) -> int:
        raise OutOfMemory("no shared memory")

    monkeypatch.setattr(serving_module, "create_memfd", refuse)
    assert rig.refused() == ("TOO_LARGE", "no shared memory")


def test_parameters_that_the_driver_does_not_tell_are_a_reason(rig: Rig) -> None:
    rig.driver.fails["nodes"] = error("cuFuncGetParamInfo", 36)
    assert rig.refused()[0] == "PARAMETERS_HIDDEN"


def test_what_captures_show_is_a_reason(rig: Rig) -> None:
    rig.driver.changes = lambda nodes: [*nodes, OtherNode("an allocation")]
    assert rig.refused() == ("NODE_UNSUPPORTED", "step 2 is an allocation")
    rig.driver.changes = lambda nodes: [*nodes, FillNode(4096, 0, 1, 1)]
    assert rig.refused()[0] == "ADDRESS_UNKNOWN"
    counts = iter(range(9))
    rig.driver.changes = lambda nodes: nodes * next(counts)
    assert rig.refused()[0] == "CAPTURES_DIFFER"


def test_kernel_that_gives_something_else_each_time_is_refused(rig: Rig) -> None:
    """Or leaves out a part of its output, which is what lay there."""
    rig.kernels["toy.silu"] = lambda call, inputs, outputs: lambda: None
    reason, _ = rig.refused()
    assert reason == "NOT_CAPTURABLE"  # it does nothing at all

    def bind(call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        x, out = inputs[0], outputs[0]
        assert x is not None
        return lambda: rig.driver.copy_on_device(out.device.pointer, x.device.pointer, NBYTES - 1, rig.stream)

    rig.kernels["toy.silu"] = bind
    assert rig.refused() == ("NOT_DETERMINISTIC", "two runs on the same inputs (seed 1): out")
    rig.is_repeatable = False
    assert rig.refused() == ("NOT_DETERMINISTIC", "two runs on the same inputs (seed 1): out")


def test_numbers_are_compared_of_a_kernel_that_adds_in_an_order_of_chance(rig: Rig) -> None:
    """Which its descriptor says. What it gives is a sample, also where two runs happen to be the same bytes."""
    same = rig.lift()
    rig.is_repeatable = False
    assert all(type(trial[0]) is bytes and len(trial[0]) == NBYTES for trial in rig.lift().trials.values())
    bits = itertools.cycle((0, 1))

    def rounds(target: int) -> None:
        memory, at = rig.driver._bytes(target, 2)
        memory[at] ^= next(bits)  # the last bit of the first number

    rig.after = rounds
    assert rig.lift().trials.keys() == same.trials.keys()
    rig.is_repeatable = True
    assert rig.refused()[0] == "NOT_DETERMINISTIC"


@pytest.mark.parametrize("where", ["bound", "driver"])
def test_gpu_that_is_lost_ends_the_worker(rig: Rig, where: str) -> None:
    """As everywhere: the broker starts another."""
    lost = error("cuStreamSynchronize", 700, sticky=True)
    if where == "bound":
        rig.kernel = raises(lost)
    else:
        rig.driver.fails["synchronize_stream"] = lost
    with pytest.raises(Ended):
        rig.serving.answer(rig.message((256, 16), (1,)), rig.kernels)
