"""What plans on a GPU ask of an array library (client/plans/graph_library.py), of the CuPy of soft_cupy.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from tests.soft_gpu import soft_cupy
from tests.soft_gpu.soft_gpu import driver

from layerzero.ipc.vocabulary.tensors import TensorSpec


class SoftGraph:
    def __init__(self, graph: soft_cupy.Graph, nodes: int) -> None:
        self._graph, self.nodes, self.nbytes, self.replays = graph, nodes, 4096 * nodes, 0

    def replay(self) -> None:
        self.replays += 1
        self._graph.launch()

    def time_us(self) -> float | None:
        return None

    def destroy(self) -> None:
        raise NotImplementedError("for plans that are split, which are of torch")


class SoftFence:
    def __init__(self) -> None:
        self._event, self._stream = driver.create_event(), None

    def enter(self, arrays: Sequence[Any]) -> None:
        stream = soft_cupy.current().ptr
        if self._stream not in (None, stream):
            driver.wait_event(stream, self._event)
        self._stream = stream

    def leave(self) -> None:
        driver.record_event(self._event, self._stream)


class SoftGraphs:
    """`is_waiting`: what own code does waits for the GPU."""

    def __init__(self) -> None:
        self.made: list[SoftGraph] = []

    def stream(self, device: int) -> int:
        return soft_cupy.current().ptr

    def on(self, device: int) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    def static(self, array: Any) -> Any:
        return soft_cupy.empty(array.shape, array.dtype)

    def filler(self, targets: Sequence[Any]) -> Callable[[Sequence[Any]], None]:
        def fill(sources: Sequence[Any]) -> None:
            for target, source in zip(targets, sources, strict=True):
                into, values = target._view(), source._view()
                driver.put(soft_cupy.current().ptr, lambda into=into, values=values: into.__setitem__(..., values))

        return fill

    def copier(self, arrays: Sequence[Any]) -> Callable[[], list[Any]]:
        return lambda: [array.copy() for array in arrays]

    def view(self, base: Any, like: Any, of: Any) -> Any:
        offset = like.data.ptr - of.data.ptr
        return soft_cupy.ndarray(like.shape, like.dtype, base.data + offset, like.strides)

    def upload(self, data: bytearray, device: int) -> Any:
        return soft_cupy.asarray(np.frombuffer(data, np.uint8))

    def part(self, base: Any, spec: TensorSpec, at: int) -> Any:
        strides = [stride * spec.itemsize for stride in spec.strides]
        return soft_cupy.ndarray(spec.shape, spec.dtype, base.data + at, strides)

    @contextlib.contextmanager
    def strict(self) -> Iterator[None]:
        yield

    def capture(
        self, work: Callable[[], Any], device: int, its_driver: Any, beside: Any, *, is_timed: bool
    ) -> tuple[SoftGraph, Any]:
        with soft_cupy.stream():
            stream = soft_cupy.current()
            stream.begin_capture()
            try:
                result = work()
                nodes = its_driver.capture_size(stream.ptr)
            finally:
                graph = stream.end_capture()
        self.made.append(SoftGraph(graph, nodes))
        return self.made[-1], result

    def fence(self, device: int) -> SoftFence:
        return SoftFence()
