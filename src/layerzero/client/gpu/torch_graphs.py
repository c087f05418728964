"""Which torch.cuda.CUDAGraph is being captured, and when it is gone.

The driver can tell when a graph is gone (Driver.retain_in_graph), but a graph that is watched so ends each replay with
work of the application's on the GPU: where all else is remote, that makes the GPU change between processes twice, which
is 0.28 ms on an H200. Torch's graphs are Python objects, whose end Python tells.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

from layerzero.ipc.cuda.driver import Driver
from layerzero.ipc.errors import CudaError

_capturing: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by the capture's id
_ends: weakref.WeakKeyDictionary[Any, list[weakref.finalize[..., Any]]] = weakref.WeakKeyDictionary()


def follow(torch_cuda: Any, driver: Driver) -> None:
    """Know of captures from now on. `torch_cuda`: torch.cuda."""
    kind = torch_cuda.CUDAGraph
    if getattr(kind, "_layerzero_follows", False) or "capture_begin" not in vars(kind):
        return  # or of a torch whose graphs are made otherwise
    begin, reset, give = kind.capture_begin, kind.reset, getattr(kind, "raw_cuda_graph", None)

    @functools.wraps(begin)
    def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
        begin(graph, *args, **kwargs)
        with contextlib.suppress(CudaError):  # the capture is the application's: what fails here must not end it
            number = driver.capture_id(torch_cuda.current_stream().cuda_stream)
            if number is not None:
                _capturing[number] = graph

    @functools.wraps(reset)
    def reset_and_tell(graph: Any) -> None:
        reset(graph)
        for end in _ends.pop(graph, ()):
            end()

    kind.capture_begin, kind.reset, kind._layerzero_follows = capture_begin, reset_and_tell, True
    if give is not None:

        @functools.wraps(give)
        def raw_cuda_graph(graph: Any) -> Any:
            for end in _ends.pop(graph, ()):
                end.detach()  # what is made from it may outlive it
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
