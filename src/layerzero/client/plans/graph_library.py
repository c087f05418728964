"""What a plan on a GPU asks of the caller's array library: CUDA graphs, and memory that they may keep.

LIBRARIES has one for each kind of arrays; today that is torch.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from layerzero.client.gpu import torch_graphs
from layerzero.ipc.cuda.driver import Driver
from layerzero.ipc.vocabulary.tensors import TensorSpec


class Graph(Protocol):
    """A CUDA graph. `nodes`: how many, 0 where the driver does not tell; `nbytes`: of the memory that was taken for it
    when it was captured."""

    nodes: int
    nbytes: int

    def replay(self) -> None:
        """Launch it in the current stream."""

    def time_us(self) -> float | None:
        """The GPU's time of the last replay that was timed and is over; None for none."""

    def destroy(self) -> None:
        """Now, whoever still has it. Its last replay is over."""


class GraphLibrary(Protocol):
    """Works on arrays of one kind, on the GPU `device`, in the current stream."""

    def stream(self, device: int) -> int:
        """The current stream."""

    def on(self, device: int) -> contextlib.AbstractContextManager[Any]:
        """Make that GPU the current one."""

    def address(self, array: Any) -> int:
        """Of its first element."""

    def static(self, array: Any) -> Any:
        """New memory of the same shape, strides and dtype, contents undefined."""

    def filler(self, targets: Sequence[Any]) -> Callable[[Sequence[Any]], None]:
        """What copies arrays, each to its target, which is like it."""

    def copier(self, arrays: Sequence[Any]) -> Callable[[], list[Any]]:
        """What copies these into new memory; those that shared memory share it again."""

    def are_apart(self, arrays: Sequence[Any], others: Sequence[Any]) -> bool:
        """None of these shares memory with one of the others."""

    def view(self, base: Any, like: Any, of: Any) -> Any:
        """The view of `base` that `like` is of `of`."""

    def upload(self, data: bytearray, device: int) -> Any:
        """These bytes on the GPU, as one row."""

    def part(self, base: Any, spec: TensorSpec, at: int) -> Any:
        """The array `at` bytes behind the first element of `base`, which is of its dtype, or a row of bytes."""

    def strict(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, what waits for the GPU raises RuntimeError."""

    def capture(
        self, work: Callable[[], Any], device: int, driver: Driver, beside: Graph | None, *, is_timed: bool
    ) -> tuple[Graph, Any]:
        """The graph of some work, and what the work returned. `beside`: one that is never replayed at the same time,
        whose memory may serve both. Raises what the work raises."""

    def fence(self, device: int) -> Fence:
        """What keeps runs of one plan from overtaking each other on two streams."""


class Fence(Protocol):
    """Of one plan. Its runs share memory, and a stream knows nothing of the other's."""

    def enter(self, arrays: Sequence[Any]) -> None:
        """The current stream waits for the run before, if that went to another one. `arrays`: what the run works on,
        which is not used for anything else before the stream is through."""

    def leave(self) -> None:
        """The run is enqueued."""


class TorchGraph:
    """A torch.cuda.CUDAGraph."""

    def __init__(self, graph: Any, nodes: int, nbytes: int, *, is_timed: bool) -> None:
        cuda = sys.modules["torch"].cuda
        self._graph, self.nodes, self.nbytes = graph, nodes, nbytes
        self._events = [cuda.Event(enable_timing=True) for _ in range(2)] if is_timed else []

    def replay(self) -> None:
        if not self._events:
            self._graph.replay()
            return
        self._events[0].record()
        self._graph.replay()
        self._events[1].record()

    def time_us(self) -> float | None:
        if not self._events or not self._events[1].query():
            return None
        try:
            return float(self._events[0].elapsed_time(self._events[1])) * 1e3
        except (RuntimeError, ValueError):  # never recorded
            return None

    def destroy(self) -> None:
        self._graph.reset()

    def pool(self) -> Any:
        return self._graph.pool()


class TorchFence:
    """An event of torch."""

    def __init__(self, device: int) -> None:
        self._cuda, self._device, self._stream, self._handle = sys.modules["torch"].cuda, device, None, -1
        self._event = self._cuda.Event()

    def enter(self, arrays: Sequence[Any]) -> None:
        handle = _stream(self._device)
        if handle == self._handle:
            return
        stream = self._cuda.current_stream(self._device)
        if self._stream is not None:
            stream.wait_event(self._event)
        for array in arrays:
            array.record_stream(stream)
        self._stream, self._handle = stream, handle

    def leave(self) -> None:
        self._event.record(self._stream)


class TorchGraphs:
    """CUDA graphs of torch tensors."""

    def __init__(self) -> None:
        self._streams: dict[int, Any] = {}  # that captures are made on

    def stream(self, device: int) -> int:
        return _stream(device)

    def on(self, device: int) -> contextlib.AbstractContextManager[Any]:
        cuda = sys.modules["torch"].cuda
        return contextlib.nullcontext() if cuda.current_device() == device else cuda.device(device)

    def address(self, array: Any) -> int:
        return int(array.data_ptr())

    def static(self, array: Any) -> Any:
        torch = sys.modules["torch"]
        if array.is_contiguous():
            return torch.empty(array.shape, dtype=array.dtype, device=array.device)
        flat = torch.empty(_span(array), dtype=array.dtype, device=array.device)
        return flat.as_strided(array.shape, array.stride(), 0)

    def filler(self, targets: Sequence[Any]) -> Callable[[Sequence[Any]], None]:
        torch, flat = sys.modules["torch"], [_flat(one) for one in targets]

        def fill(sources: Sequence[Any]) -> None:
            if not flat:
                return
            given = [_flat(one.detach() if one.requires_grad else one) for one in sources]
            if len(flat) == 1:
                flat[0].copy_(given[0])
            else:
                torch._foreach_copy_(flat, given)

        return fill

    def copier(self, arrays: Sequence[Any]) -> Callable[[], list[Any]]:
        storages = [array.untyped_storage().data_ptr() for array in arrays]
        if all(array.is_contiguous() for array in arrays) and len(set(storages)) == len(storages):
            return lambda: [array.clone() for array in arrays]
        alone = [storages.count(storage) == 1 for storage in storages]

        def copy() -> list[Any]:
            whole: dict[tuple[int, Any], Any] = {}
            made = []
            for array, storage, is_alone in zip(arrays, storages, alone, strict=True):
                if is_alone:
                    made.append(_flat(array).clone().as_strided(array.shape, array.stride(), 0))
                    continue
                key = (storage, array.dtype)
                if key not in whole:
                    count = array.untyped_storage().nbytes() // array.itemsize
                    whole[key] = array.as_strided((count,), (1,), 0).clone()
                made.append(whole[key].as_strided(array.shape, array.stride(), array.storage_offset()))
            return made

        return copy

    def are_apart(self, arrays: Sequence[Any], others: Sequence[Any]) -> bool:
        storages = {one.untyped_storage().data_ptr() for one in others if one.numel()}
        return storages.isdisjoint(one.untyped_storage().data_ptr() for one in arrays if one.numel())

    def view(self, base: Any, like: Any, of: Any) -> Any:
        offset = base.storage_offset() + like.storage_offset() - of.storage_offset()
        return base.as_strided(like.shape, like.stride(), offset)

    def upload(self, data: bytearray, device: int) -> Any:
        torch = sys.modules["torch"]
        return torch.frombuffer(data, dtype=torch.uint8).to(torch.device("cuda", device))

    def part(self, base: Any, spec: TensorSpec, at: int) -> Any:
        dtype = getattr(sys.modules["torch"], spec.dtype)
        if base.dtype != dtype:
            base, at = base[at : at + spec.span_bytes].view(dtype), 0
        return base.as_strided(spec.shape, spec.strides, base.storage_offset() + at // spec.itemsize)

    @contextlib.contextmanager
    def strict(self) -> Iterator[None]:
        cuda = sys.modules["torch"].cuda
        before = cuda.get_sync_debug_mode()
        _set_sync_mode(cuda, "error")
        try:
            yield
        finally:
            _set_sync_mode(cuda, before)

    def capture(
        self, work: Callable[[], Any], device: int, driver: Driver, beside: Graph | None, *, is_timed: bool
    ) -> tuple[Graph, Any]:
        cuda = sys.modules["torch"].cuda
        torch_graphs.follow(cuda, driver)  # so that what it needs is kept as long as it
        graph = cuda.CUDAGraph()
        if device not in self._streams:
            self._streams[device] = cuda.Stream(device)
        pool = beside.pool() if isinstance(beside, TorchGraph) else None
        # Of other threads nothing is asked: they may allocate meanwhile, and wait for their streams.
        with cuda.graph(graph, pool=pool, stream=self._streams[device], capture_error_mode="thread_local"):
            before = cuda.memory_reserved(device)
            result = work()
            nodes = driver.capture_size(self.stream(device))
            nbytes = max(cuda.memory_reserved(device) - before, 0)
        return TorchGraph(graph, nodes, nbytes, is_timed=is_timed), result

    def fence(self, device: int) -> Fence:
        return TorchFence(device)


def _set_sync_mode(cuda: Any, mode: Any) -> None:
    with warnings.catch_warnings():  # that it does not see all that waits: the capture does
        warnings.simplefilter("ignore")
        cuda.set_sync_debug_mode(mode)


def _stream(device: int) -> int:
    """The current one, as a CUDA handle."""
    torch = sys.modules["torch"]
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # a tenth of the time
    return int(raw(device) if raw is not None else torch.cuda.current_stream(device).cuda_stream)


def _span(array: Any) -> int:
    """Elements from the first to the last, all that lies between them included."""
    if not array.numel():
        return 0
    ends = ((extent - 1) * stride for extent, stride in zip(array.shape, array.stride(), strict=True))
    return 1 + int(sum(ends))


def _flat(array: Any) -> Any:
    """All of that as one row, where the array is not one row already."""
    return array if array.is_contiguous() else array.as_strided((_span(array),), (1,), array.storage_offset())


LIBRARIES: dict[str, GraphLibrary] = {"torch": TorchGraphs()}
"""By kind of array (client/arrays/recognition.py)."""
