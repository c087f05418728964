"""Which torch.cuda.CUDAGraph is being captured, whether any is, and when it is gone.

The driver can tell when a graph is gone (Driver.retain_in_graph), but a graph that is watched so ends each replay with
work of the application's on the GPU: where all else is remote, that makes the GPU change between processes twice, which
is 0.28 ms on an H200. Torch's graphs are Python objects, whose end Python tells.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from layerzero.ipc.cuda.driver import Driver
from layerzero.ipc.errors import CudaError

_capturing: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by the capture's id
_ends: weakref.WeakKeyDictionary[Any, list[weakref.finalize[..., Any]]] = weakref.WeakKeyDictionary()
_open: weakref.WeakSet[Any] = weakref.WeakSet()  # whose capture is under way, or about to begin
_marked: weakref.WeakSet[Marked] = weakref.WeakSet()
_lock = threading.Lock()  # held for the time of a driver's call, and while `_open` changes


class Marked(Protocol):
    """What enqueues in a context that which would break a capture."""

    def mark(self) -> None:
        """Do so now, if there is anything to do: a capture begins behind it."""


def before_captures(marked: Marked) -> None:
    """Have it marked before each capture."""
    _marked.add(marked)


@contextlib.contextmanager
def between_captures() -> Iterator[bool]:
    """Whether no capture of torch's is under way; none begins meanwhile. Those of others are not known: who is within
    one must not come here."""
    with _lock:
        yield not _open


def follow(torch_cuda: Any, driver: Driver) -> None:
    """Know of captures from now on. `torch_cuda`: torch.cuda."""
    kind = torch_cuda.CUDAGraph
    if getattr(kind, "_layerzero_follows", False) or not {"capture_begin", "capture_end"} <= vars(kind).keys():
        return  # or of a torch whose graphs are made otherwise
    begin, end, reset, give = kind.capture_begin, kind.capture_end, kind.reset, getattr(kind, "raw_cuda_graph", None)

    def close(graph: Any) -> None:
        with _lock:
            _open.discard(graph)

    @functools.wraps(begin)
    def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
        for marked in tuple(_marked):
            marked.mark()
        with _lock:
            _open.add(graph)
        try:
            begin(graph, *args, **kwargs)
        except BaseException:
            close(graph)
            raise
        with contextlib.suppress(CudaError):  # the capture is the application's: what fails here must not end it
            number = driver.capture_id(torch_cuda.current_stream().cuda_stream)
            if number is not None:
                _capturing[number] = graph

    @functools.wraps(end)
    def capture_end(graph: Any, *args: Any, **kwargs: Any) -> None:
        try:
            end(graph, *args, **kwargs)
        finally:
            close(graph)

    @functools.wraps(reset)
    def reset_and_tell(graph: Any) -> None:
        reset(graph)
        for tell in _ends.pop(graph, ()):
            tell()

    kind.capture_begin, kind.capture_end, kind.reset = capture_begin, capture_end, reset_and_tell
    kind._layerzero_follows = True
    if give is not None:

        @functools.wraps(give)
        def raw_cuda_graph(graph: Any) -> Any:
            for tell in _ends.pop(graph, ()):
                tell.detach()  # what is made from it may outlive it
            return give(graph)

        kind.raw_cuda_graph = raw_cuda_graph


def graph_of(capture: int | None) -> Any:
    """The torch.cuda.CUDAGraph that this capture goes into; None for one that is not known."""
    return None if capture is None else _capturing.get(capture)


def tell_end(graph: Any, told: Callable[[], object]) -> None:
    """Call `told`, in any thread, when the graph is not replayed anew. Replays may be under way then."""
    end = weakref.finalize(graph, told)
    end.atexit = False
    _ends.setdefault(graph, []).append(end)
