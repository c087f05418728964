"""The GPU's part of a call of a function: memory that it was lent there, its results, and the order of streams.

The function's work goes to the stream of its call, which begins when the caller's stream has come to it. Functions have
state, which calls of other streams may have made: so what a worker's calls enqueue runs in the order of the calls.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from layerzero.ipc.errors import CudaError, InvalidArgument, ProtocolError
from layerzero.ipc.functions import frames
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.workers.provider import Block, DeviceMemory

if TYPE_CHECKING:
    from layerzero.ipc.cuda.driver import Driver

LEGACY = 0  # the stream of those who name none
_BLOCKING = ("cupy", "numba", "pycuda", "cuda")  # whose own streams wait for that one; torch's do not


class Span:
    """Bytes of a GPU, cut as a memoryview is."""

    __slots__ = ("device", "nbytes", "pointer")

    def __init__(self, pointer: int, nbytes: int, device: int) -> None:
        self.pointer, self.nbytes, self.device = pointer, nbytes, device

    @classmethod
    def of(cls, memory: DeviceMemory) -> Span:
        return cls(memory.pointer, memory.nbytes, memory.device)

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, part: slice) -> Span:
        start, stop, _ = part.indices(self.nbytes)
        return Span(self.pointer + start, max(stop - start, 0), self.device)


class Found(NamedTuple):
    """A dense result, by its address. `owner` keeps it. `stream`: that it is made on, where its library says so."""

    spec: TensorSpec
    pointer: int
    owner: Any
    stream: int = LEGACY


class Results:
    """The results of a call that are on the GPU, and the memory that its caller has for them: `outs`, of these specs;
    `is_given`: the function had it as its argument `out`."""

    def __init__(self, outs: Sequence[tuple[TensorSpec, Span]] = (), *, is_given: bool = False) -> None:
        self._outs, self._is_given = outs, is_given
        self.found: list[Found] = []
        self._places: list[int] = []  # of `outs`, that they are or will be in; -1 for none

    def add(self, found: Found) -> list[Any]:
        """What stands for it in a tree."""
        place = self._place_of(found)
        self.found.append(found)
        self._places.append(place)
        return frames.array_node(frames.OF_GPU, found.spec, frames.ON_GPU, max(place, 0))

    def takes(self, found: Found) -> bool:
        """Whether there is memory for a result that is the only one: then it is added."""
        if len(self._outs) != 1 or self._place_of(found):
            return False
        self.found.append(found)
        self._places.append(0)
        return True

    def _place_of(self, found: Found) -> int:
        if not self._is_given:
            at = len(self.found)
            return at if at < len(self._outs) and self._outs[at][0] == found.spec else -1
        for at, (spec, span) in enumerate(self._outs):
            if spec == found.spec and span.pointer == found.pointer:
                return at
        return -1

    @property
    def have_room(self) -> bool:
        """Whether each has memory of its caller's, which has none for others."""
        return -1 not in self._places and (self._is_given or len(self.found) == len(self._outs))

    @property
    def nbytes(self) -> int:
        return sum(found.spec.span_bytes for found in self.found)

    @property
    def specs(self) -> list[list[Any]]:
        return [found.spec.to_wire() for found in self.found]

    def put(self, driver: Driver, stream: int) -> list[int]:
        """Copy them there. Returns the places of those that were made there."""
        made = []
        for found, place in zip(self.found, self._places, strict=True):
            span = self._outs[place][1]
            if span.pointer == found.pointer:
                made.append(place)
            elif found.spec.numel:
                driver.copy_on_device(span.pointer, found.pointer, found.spec.span_bytes, stream)
        return made


class Libraries(Protocol):
    """The GPU libraries of an environment."""

    def on_stream(self, stream: int, device: int) -> AbstractContextManager[None]:
        """Inside, those that are loaded, and those that are loaded meanwhile by `open`, enqueue on this stream."""

    def open(self, library: str, spec: TensorSpec, span: Span, stream: int) -> Any:
        """An array on a GPU's memory, of `library` where that can be had. Raises InvalidArgument."""

    def found(self, value: Any, device: int) -> Found | None:
        """An array on that GPU; None for what is none. Raises InvalidArgument for what cannot cross."""

    def enter(self) -> None:
        """The present call opens no array, and may return some: the library that it has, as torch's caller would have
        it, is entered. Raises InvalidArgument where there are some and none can use a GPU."""

    def writes_of(self, array: Any) -> int:
        """How many writes to it, or to what it is a view of, its library has counted."""


class Device:
    """For the worker's one thread."""

    def __init__(self) -> None:
        self.libraries: Libraries | None = None
        self.results: Results | None = None  # of the present call, which is on a GPU
        self._stream: int | None = None  # of the present call
        self._ordinal = 0
        self._last: tuple[int, int] | None = None  # context and stream of the latest work; None before the first
        self._lent: list[tuple[Any, int]] = []  # with the writes to it until then
        self._events: dict[int, int] = {}  # by context: what one stream waits for of another
        self._contexts: dict[int, int] = {}  # by ordinal
        self.driver: Driver | None = None
        self._known: set[str] = set()  # functions that have run on a GPU
        self._is_captured = False  # the present call
        self._is_entered = False  # by an array of the present call: its library enqueues on the call's stream
        self._is_settled = False  # the stream of the present call waits for all that the function has told others

    @contextlib.contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        """As Loaded.on_stream."""
        before, self._stream = self._stream, stream
        try:
            yield
        finally:
            self._stream = before

    @property
    def is_used(self) -> bool:
        """Whether there was a call on a GPU."""
        return self._last is not None

    def around(self, ordinal: int | None) -> AbstractContextManager[None]:
        """A call: `ordinal` of its GPU; None for one without, in a worker that has had others."""
        return self._after_others() if ordinal is None else self._on_gpu(ordinal)

    def _on_gpu(self, ordinal: int) -> AbstractContextManager[None]:
        assert self._stream is not None
        assert self.libraries is not None
        return _OnGpu(self, ordinal, self._stream, self.libraries)

    @contextlib.contextmanager
    def alone(self, ordinal: int) -> Iterator[None]:
        """As `around`, of a call that nobody has made (lifted.py). While its stream is captured no other has a part in
        it: what a graph waits for must be in it."""
        assert self._stream is not None
        assert self.libraries is not None
        driver = self.driver = self.driver or _driver()
        self._is_captured = driver.is_capturing(self._stream)
        try:
            with self.libraries.on_stream(self._stream, ordinal) if self._is_captured else self._on_gpu(ordinal):
                self._ordinal = ordinal
                yield
        finally:
            self._is_captured = False
            self.end()

    def enter(self, ordinal: int, stream: int) -> Driver:
        """A call on this GPU begins, in this stream. The driver."""
        driver = self.driver = self.driver or _driver()
        context = self._contexts.get(ordinal)
        if context is None:
            context = self._contexts[ordinal] = driver.current_context()
        self._ordinal, self._is_settled = ordinal, False
        self._follow(driver, context, stream)
        return driver

    def leave(self, driver: Driver, stream: int) -> None:
        """The function has returned. Raises where it has cost this process its GPU, as what follows does."""
        if not self._is_settled:
            self._follow_legacy(driver, stream)

    def end(self) -> None:
        self.results = None
        self._is_entered = False
        self._lent.clear()

    @contextlib.contextmanager
    def _after_others(self) -> Iterator[None]:
        """A call without a GPU in a worker that has one: what it does there comes after what calls before did."""
        assert self._last is not None
        driver, context = _driver(), self._last[0]
        driver.push_context(context)
        try:
            self._follow(driver, context, LEGACY)
            yield
        finally:
            driver.pop_context()

    def _follow(self, driver: Driver, context: int, stream: int) -> None:
        before = self._last or (context, LEGACY)
        self._last = (context, stream)
        if before != self._last:
            self._order(driver, before[1], stream, of=before[0])

    def _order(self, driver: Driver, first: int, then: int, of: int | None = None) -> None:
        """What one stream has to do comes before what the other is told from now on. `of`: the first one's context,
        where that is not the current one."""
        context = self._contexts[self._ordinal] if of is None else of
        if of is not None:
            driver.push_context(of)
        try:
            event = self._events.get(context)
            if event is None:
                event = self._events[context] = driver.create_event()
            driver.record_event(event, first)
        finally:
            if of is not None:
                driver.pop_context()
        driver.wait_event(then, event)

    def _follow_legacy(self, driver: Driver, stream: int) -> None:
        """What libraries that know no streams have told comes before what this one is told from now on, and what others
        have told streams that wait for the default one: whether that is idle need not tell of these."""
        if any(library in sys.modules for library in _BLOCKING) or not driver.is_stream_idle(LEGACY):
            self._order(driver, LEGACY, stream)

    def begin(self, label: str) -> None:
        """A function is about to run. Its first time it may import what then asks for the current stream too late: its
        inputs are waited for. Raises InvalidArgument for a call without any, where no library can use a GPU."""
        if self._stream is None or self.results is None:
            return
        if not self._is_entered:
            assert self.libraries is not None
            self.libraries.enter()
        if label not in self._known:
            _driver().synchronize_stream(self._stream)
            self._known.add(label)

    def expect(self, results: Results) -> None:
        """The present call is on a GPU. Raises ProtocolError where it came without a stream."""
        if self._stream is None:
            raise ProtocolError("a call on a GPU came without its place in a stream")
        self.results = results

    # Arrays

    def open(self, library: str, spec: TensorSpec, span: Span) -> Any:
        """An array of the caller's, lent. Raises InvalidArgument."""
        assert self.libraries is not None
        assert self._stream is not None
        libraries = self.libraries
        array = libraries.open(library, spec, span, self._stream)
        self._is_entered = True
        self._lent.append((array, libraries.writes_of(array)))
        return array

    def out(self, library: str, spec: TensorSpec, span: Span) -> Any:
        """As `open`, of memory for a result."""
        array = self.open(library, spec, span)
        self.disown()
        return array

    def disown(self) -> None:
        """What was opened last may be written: it is memory for a result, or the function has a copy."""
        self._lent.pop()

    def demand_unwritten(self, label: str) -> None:
        """Raises InvalidArgument where the function wrote to what it was lent."""
        assert self.libraries is not None
        for place, (array, before) in enumerate(self._lent):
            if self.libraries.writes_of(array) != before:
                text = f"{label} has to write to a copy, such as x.clone(): it has run, and has written to the memory"
                raise InvalidArgument(f"{text} of its caller's, array {place} of its arguments on a GPU")

    def put(self, value: Any) -> list[Any] | None:
        """What stands for a result on a GPU; None for what is none. Raises InvalidArgument for one that cannot go."""
        if self.libraries is None:
            return None
        found = self.libraries.found(value, self._ordinal if self.results is not None else -1)
        if found is None:
            return None
        if self.results is None:
            raise InvalidArgument("an array on a GPU, and the call names no stream for it", repair=NO_STREAM)
        return self.results.add(found)

    def found(self, value: Any) -> Found | None:
        """A result on the GPU of the present call. None for what is none, or cannot go, which `put` says of it."""
        assert self.libraries is not None
        try:
            return self.libraries.found(value, self._ordinal)
        except CudaError:
            raise
        except Exception:  # such as a library that has no memory for a dense copy
            return None

    def place(self, result: Any, label: str) -> None:
        """Copy a result, the only one, to its memory. Raises InvalidArgument for what does not belong there."""
        assert self.libraries is not None
        assert self.results is not None
        assert self._stream is not None
        found = self.libraries.found(result, self._ordinal)
        if found is None or not self.results.takes(found):
            told = f"{type(result).__name__}" if found is None else str(found.spec)
            raise InvalidArgument(f"{label} gives {told}; allowed: one array on the GPU, which is what shapes= tells")
        if not self._is_captured:
            self.settle()
            return
        if found.stream != LEGACY:
            raise InvalidArgument(f"{label} gives an array of a stream of its own")
        self.results.put(self.driver or _driver(), self._stream)

    def settle(self) -> list[int] | None:
        """Copy the results to their caller's memory: the places of those that were made there. None where there is not
        the memory for them."""
        assert self.results is not None
        assert self._stream is not None
        if not self.results.have_room:
            return None
        driver = self.driver or _driver()
        self._follow_legacy(driver, self._stream)
        for stream in {found.stream for found in self.results.found} - {LEGACY}:
            self._order(driver, stream, self._stream)
        self._is_settled = True
        return self.results.put(driver, self._stream)


class _OnGpu(AbstractContextManager[None]):
    """A call on a GPU."""

    def __init__(self, device: Device, ordinal: int, stream: int, libraries: Libraries) -> None:
        self._device, self._ordinal, self._stream = device, ordinal, stream
        self._inside = libraries.on_stream(stream, ordinal)

    def __enter__(self) -> None:
        try:
            self._driver = self._device.enter(self._ordinal, self._stream)
            self._inside.__enter__()
        except BaseException:
            self._device.end()
            raise

    def __exit__(self, kind: object, *_: object) -> None:
        device = self._device
        try:
            self._inside.__exit__(None, None, None)
            if kind is None:
                device.leave(self._driver, self._stream)
        finally:
            device.end()


NO_STREAM = (
    "call with an array on that GPU among the arguments, whose library and stream the result is for, or by "
    '.options(device="cuda"), for a tensor of torch there, or return it with .cpu() or .get()'
)
device = Device()
"""Of this worker, which runs one call at a time."""


def span_or_view(block: Block) -> memoryview | Span:
    """Memory of a call, wherever it is."""
    if isinstance(block.memory, DeviceMemory):
        return Span.of(block.memory)
    return block.host[: block.spec.span_bytes]


def copy_of(array: Any) -> Any:
    """One that an object may keep. Raises InvalidArgument."""
    for name in ("clone", "copy"):
        if hasattr(array, name):
            return getattr(array, name)()
    text = "what stays there may keep the array, and this environment has no library to copy it on the GPU with"
    raise InvalidArgument(f"{text}; add torch or cupy to its requires")


def apart(value: Any) -> Any:
    """A result that waits for memory, with copies of its arrays on a GPU: the next call may write to what the function
    kept of them. Arrays of libraries that cannot copy, and those within other objects, are as they are."""
    if type(value) in (list, tuple):
        return type(value)(map(apart, value))
    if type(value) is dict:
        return {key: apart(one) for key, one in value.items()}
    if hasattr(value, "__cuda_array_interface__") or getattr(value, "is_cuda", False) is True:
        with contextlib.suppress(InvalidArgument):
            return copy_of(value)
    return value


def host_array(node: list[Any], memories: Sequence[Any], libraries: tuple[str, ...]) -> tuple[str, TensorSpec, Any]:
    """As frames.read_array, of one that is not on a GPU."""
    library, spec, part = frames.read_array(node, memories, libraries)
    if isinstance(part, Span):
        raise ProtocolError(f"{spec} of the CPU is said to lie on a GPU")
    return library, spec, part


def span_of(node: list[Any], memories: Sequence[Any]) -> tuple[str, TensorSpec, Span]:
    """Library, spec and memory of an array on a GPU. Raises as frames.read_array does."""
    library, spec, span = frames.read_array(node, memories, frames.GPU_LIBRARIES)
    if not isinstance(span, Span):
        if spec.numel:
            raise ProtocolError(f"{spec} of a GPU is said to lie in memory that is not a GPU's")
        span = Span(0, 0, 0)
    return library.removeprefix(frames.OF_GPU), spec, span


def outs_of(nodes: Sequence[Any], memories: Sequence[Any]) -> list[tuple[TensorSpec, Span]]:
    """The memory for results that a frame names. Raises ProtocolError, InvalidArgument."""
    found = []
    for node in nodes:
        if type(node) is not list:
            raise ProtocolError("no description of a result")
        _, spec, span = span_of(node, memories)
        if not spec.is_contiguous:
            raise ProtocolError(f"{spec} has gaps")
        found.append((spec, span))
    return found


def _driver() -> Driver:
    from layerzero.ipc.cuda import driver  # a worker of the CPU loads nothing of CUDA

    return driver.load()
