"""Calls on a GPU that are made again: what needs no planning, no message and nearly no time.

A call is known by its arguments as they are: addresses, shapes, strides and dtypes of its arrays, the values of the
others. Memory at the same address may be another allocation by now, so the driver's ids of the allocations are compared
each time; those are never used twice.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from layerzero.client.arrays.recognition import Array, describe
from layerzero.client.connection import overlay
from layerzero.client.connection.call import Request, Route
from layerzero.client.connection.express import Lease
from layerzero.client.gpu.arrays import current_stream, new_like
from layerzero.client.gpu.device import Gpu
from layerzero.client.gpu.fastpath import call_site_of
from layerzero.client.gpu.outcomes import OnRing
from layerzero.client.gpu.placement import Memory
from layerzero.client.gpu.results import result_like, torch_results
from layerzero.client.gpu.ring import GpuLane
from layerzero.ipc.cuda.driver import Driver
from layerzero.ipc.errors import CudaError
from layerzero.ipc.vocabulary.tensors import TensorSpec

if TYPE_CHECKING:
    from layerzero.client.gpu._fastpath import CallSite, Repeats

MAX_KNOWN, MAX_PLACES = 4096, 64

Owners = tuple[tuple[int, int], ...]  # allocations: an address in each, and the driver's id


@dataclass(slots=True)
class Known:
    """A call whose route has a lease, and whose inputs lie where workers reach them. `places`: references, and whose
    memory that is, by the address of the result."""

    gpu: Gpu
    lane: GpuLane
    lease: Lease
    route: Route
    transport: str
    stream: Callable[[], int]
    is_capturing: Callable[[int], bool]
    make: Callable[[Any], tuple[Any, int]]  # a new array for the result, like an input
    is_here: Callable[[], bool]  # the GPU's context is current in this thread
    places: dict[int, tuple[bytes, Owners]] = field(default_factory=dict)
    site: CallSite | None = None  # for the C

    @classmethod
    def of(cls, enqueued: OnRing, like: Array, repeats: Repeats | None) -> Known:
        gpu, route = enqueued.gpu, enqueued.route
        make = maker(like, route.plan.results)
        watch, is_here = capture_watcher(like, gpu), context_watcher(like, gpu)
        known = cls(gpu, enqueued.lane, enqueued.lease, route, gpu.transport, streamer(like), watch, make, is_here)
        if repeats is not None:
            known.site = call_site_of(known, like)
        return known

    def is_current(self) -> bool:
        """As far as this process knows; what the lane says of the lease is to be asked under the GPU's lock."""
        route, lease = self.route, self.lease
        return route.lease is lease and route.is_armed and self.gpu.transport == self.transport

    def refs(self, address: int, driver: Driver) -> bytes | None:
        """The references, with the result at this address; None when something of it may be other memory by now."""
        found = self.places.get(address)
        if found is None:
            return None
        refs, owners = found
        try:
            for inside, buffer_id in owners:
                if driver.buffer_id(inside) != buffer_id:
                    break
            else:
                return refs
        except CudaError as exc:
            if exc.is_sticky:
                raise
        self.places.pop(address, None)
        return None

    def remember(self, address: int, memory: Memory, driver: Driver) -> None:
        """Where the tensors lay this time."""
        arenas = {place.arena.address for place in memory.places if place is not None}
        if len(self.places) >= MAX_PLACES:
            del self.places[next(iter(self.places))]
        self.places[address] = (memory.refs, tuple((inside, driver.buffer_id(inside)) for inside in arenas))


def key_of(request: Request, repeats: Repeats | None) -> Hashable:
    """What makes two calls the same but for where a new result lies; None for what must be looked at each time."""
    key = None if repeats is None else repeats.key(request)
    return _key_of(request) if key is None else key


def _key_of(request: Request) -> tuple[Any, ...] | None:
    if (
        request.is_rigid
        or request.timeout_s is not None
        or request.output_bytes is not None
        or overlay.baked.get() is not None
    ):
        return None
    policy = overlay.current()
    values = request.params.values()
    key = [request.op, request.backend, None if policy is None else policy.text, *values, *map(type, values)]
    for arg in (*request.args, request.out):
        kind = type(arg)
        if arg is None:
            key.append(None)
        elif kind is _torch.tensor:  # most are: this is each call's path
            has_grad = arg.requires_grad
            if (has_grad and _torch.is_grad_enabled()) or arg.is_neg():
                return None  # what checks it refuses it, or computes its values first
            key.append((arg.data_ptr(), arg.shape, arg.stride(), arg.dtype, has_grad))
        else:
            part = _part(arg, kind)
            if part is None:
                return None
            key.append(part)
    return tuple(key)


def maker(like: Array, specs: Sequence[TensorSpec]) -> Callable[[Any], tuple[Any, int]]:
    """Makes new arrays for results as `result_like` does, given an array that is like `like`."""
    if not specs:
        return lambda _: (None, 0)
    if len(specs) > 1:
        return torch_results(like.device, specs) if like.kind == "torch" else _results_like(specs)
    spec = specs[0]
    if like.kind == "torch" and spec.is_contiguous and spec.dtype == like.spec.dtype:
        shape = spec.shape

        def make(obj: Any) -> tuple[Any, int]:
            made = obj.new_empty(shape)
            return made, made.data_ptr()

        return make
    return lambda obj: new_like(describe(obj), spec)


def _results_like(specs: Sequence[TensorSpec]) -> Callable[[Any], tuple[Any, int]]:
    return lambda obj: result_like(describe(obj), None, specs)


def streamer(like: Array) -> Callable[[], int]:
    """As `current_stream`, for later calls with arrays like this one."""
    if like.kind == "torch":
        raw, device = getattr(sys.modules["torch"]._C, "_cuda_getCurrentRawStream", None), like.device
        if raw is not None:
            return lambda: raw(device)
    like = Array(like.kind, like.spec, like.address, None, None, device=like.device)  # keeps nobody's memory
    return lambda: current_stream(like)


def capture_watcher(like: Array, gpu: Gpu) -> Callable[[int], bool]:
    """Whether a stream is being captured."""
    if like.kind == "torch":
        ask = getattr(sys.modules["torch"]._C, "_cuda_isCurrentStreamCapturing", None)
        if ask is not None:  # a tenth of the time
            return lambda _: bool(ask())
    return gpu.memory.context.driver.is_capturing


def context_watcher(like: Array, gpu: Gpu) -> Callable[[], bool]:
    """Whether the GPU's context is current in the calling thread."""
    context = gpu.memory.context
    device_of = getattr(sys.modules["torch"]._C, "_cuda_getDevice", None) if like.kind == "torch" else None
    if device_of is None:
        return context.is_current
    device, seen = like.device, threading.local()

    def is_here() -> bool:
        if device_of() == device and hasattr(seen, "is_here"):  # torch has made it current, and it stays
            return True
        if context.is_current():
            seen.is_here = True
            return True
        return False

    return is_here


class _Torch:
    """What of torch each call needs, once it is imported."""

    tensor: type = type(None)
    is_grad_enabled: Callable[[], bool]


_torch = _Torch()


def _part(arg: Any, kind: type) -> tuple[Any, ...] | None:
    """Of a key, for an argument that is not a plain tensor of torch, or the first one."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if cupy is not None and kind is getattr(cupy, "ndarray", None):
        return arg.data.ptr, arg.shape, arg.strides, arg.dtype
    if torch is not None and kind in (torch.Tensor, torch.nn.Parameter):
        _torch.tensor, _torch.is_grad_enabled = torch.Tensor, torch.is_grad_enabled
        if (arg.requires_grad and torch.is_grad_enabled()) or arg.is_neg():
            return None
        return arg.data_ptr(), arg.shape, arg.stride(), arg.dtype, arg.requires_grad
    return None
