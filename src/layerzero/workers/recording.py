"""A kernel's work as a graph instead of a run: the capture of a stream, undisturbed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager

from layerzero.ipc.cuda.driver import Driver
from layerzero.ipc.errors import CudaError
from layerzero.workers.provider import Bound

OnStream = Callable[[int], AbstractContextManager[None]]


def record(
    bound: Bound,
    driver: Driver,
    on_stream: OnStream,
    stream: int,
    *,
    end: Callable[[int], int],
    discard: Callable[[int], None],
) -> int:
    """The graph that `end` makes of the stream's capture; `discard` destroys such a one. Raises ValueError where it
    would not do what the kernel does, and what the kernel raises."""
    driver.begin_capture(stream)
    was_collecting = gc.isenabled()
    gc.disable()  # what it finds may be freed on the GPU, which breaks a capture
    try:
        with on_stream(stream):
            result = bound()
    except BaseException:
        _abandon(stream, end, discard)
        raise
    finally:
        if was_collecting:
            gc.enable()
    graph = end(stream)
    if not graph:
        raise ValueError("it enqueues nothing on its stream")
    if result is not None:
        discard(graph)
        raise ValueError(f"it returns a {type(result).__name__}, which a graph cannot")
    return graph


def _abandon(stream: int, end: Callable[[int], int], discard: Callable[[int], None]) -> None:
    try:
        graph = end(stream)
    except CudaError as exc:
        if exc.is_sticky:
            raise
        return  # broken by what the kernel did; the stream is usable again
    if graph:
        discard(graph)
