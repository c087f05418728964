"""Calls on a GPU that are made again: what needs no planning, no message and nearly no time.

A call is known by its arguments as they are: addresses, shapes, strides and dtypes of its arrays, the values of the
others. Memory at the same address may be another allocation by now, so the driver's ids of the allocations are compared
each time; those are never used twice.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from layerzero.client import overlay
from layerzero.client.arrays import Array, describe
from layerzero.client.call import Request, Route
from layerzero.client.express import Lease
from layerzero.client.gpu import Gpu
from layerzero.client.gpu_arrays import current_stream, new_like
from layerzero.client.gpu_lane import GpuLane
from layerzero.client.gpu_outcomes import OnRing
from layerzero.client.gpu_places import Memory
from layerzero.ipc.cuda import Driver
from layerzero.ipc.errors import CudaError
from layerzero.ipc.tensors import TensorSpec

MISS = object()
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
    rung: str
    stream: Callable[[], int]
    is_capturing: Callable[[int], bool]
    make: Callable[[Any], tuple[Any, int]]  # a new array for the result, like an input
    places: dict[int, tuple[bytes, Owners]] = field(default_factory=dict)

    @classmethod
    def of(cls, enqueued: OnRing, like: Array) -> Known:
        gpu, route = enqueued.gpu, enqueued.route
        make = _maker(like, route.plan.results)
        return cls(
            gpu, enqueued.lane, enqueued.lease, route, gpu.rung, _streamer(like), _capture_watcher(like, gpu), make
        )

    def is_current(self) -> bool:
        route, lease = self.route, self.lease
        return route.lease is lease and route.is_armed and self.gpu.rung == self.rung and self.lane.holds(lease)

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
        del self.places[address]
        return None

    def remember(self, address: int, memory: Memory, driver: Driver) -> None:
        """Where the tensors lay this time. Memory that was lent for the call is not worth it: it comes and goes."""
        if memory.copies or any(place is not None and place.block is not None for place in memory.places):
            return
        arenas = {place.arena.address for place in memory.places if place is not None}
        if len(self.places) >= MAX_PLACES:
            del self.places[next(iter(self.places))]
        self.places[address] = (memory.refs, tuple((inside, driver.buffer_id(inside)) for inside in arenas))


def key_of(request: Request) -> tuple[Any, ...] | None:
    """What makes two calls the same but for where a new result lies; None for what must be looked at each time."""
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
        if arg is None:
            key.append(None)
            continue
        part = (_READERS.get(type(arg)) or _find_reader(type(arg)))(arg)
        if part is None:
            return None
        key.append(part)
    return tuple(key)


def _maker(like: Array, specs: Sequence[TensorSpec]) -> Callable[[Any], tuple[Any, int]]:
    """Makes new arrays for results as `result_like` does, given an array that is like `like`."""
    if not specs:
        return lambda _: (None, 0)
    spec = specs[0]
    if like.kind == "torch" and spec.is_contiguous and spec.dtype == like.spec.dtype:
        shape = spec.shape

        def make(obj: Any) -> tuple[Any, int]:
            made = obj.new_empty(shape)
            return made, made.data_ptr()

        return make
    return lambda obj: new_like(describe(obj), spec)


def _streamer(like: Array) -> Callable[[], int]:
    """As `current_stream`, for later calls with arrays like this one."""
    if like.kind == "torch":
        raw, device = getattr(sys.modules["torch"]._C, "_cuda_getCurrentRawStream", None), like.device
        if raw is not None:
            return lambda: raw(device)
    like = Array(like.kind, like.spec, like.address, None, None, device=like.device)  # keeps nobody's memory
    return lambda: current_stream(like)


def _capture_watcher(like: Array, gpu: Gpu) -> Callable[[int], bool]:
    """Whether a stream is being captured."""
    if like.kind == "torch":
        ask = getattr(sys.modules["torch"]._C, "_cuda_isCurrentStreamCapturing", None)
        if ask is not None:  # a tenth of the time
            return lambda _: bool(ask())
    return gpu.memory.context.driver.is_capturing


def _torch_part(tensor: Any) -> tuple[Any, ...] | None:
    if tensor.requires_grad and sys.modules["torch"].is_grad_enabled():
        return None  # what checks it refuses it
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_neg()


def _cupy_part(array: Any) -> tuple[Any, ...]:
    return array.data.ptr, array.shape, array.strides, array.dtype


def _no_part(_: Any) -> None:
    return None


_READERS: dict[type, Callable[[Any], tuple[Any, ...] | None]] = {}


def _find_reader(kind: type) -> Callable[[Any], tuple[Any, ...] | None]:
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and kind in (torch.Tensor, torch.nn.Parameter):
        _READERS[kind] = _torch_part
    elif cupy is not None and kind is getattr(cupy, "ndarray", None):
        _READERS[kind] = _cupy_part
    return _READERS.get(kind, _no_part)
