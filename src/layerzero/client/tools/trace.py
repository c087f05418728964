"""The calls that a function makes, and which of them feed each other: for lz.dry_run and lz.compile."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layerzero.client.arrays.recognition import CPU, Array, describe
from layerzero.client.arrays.wrapping import wrap
from layerzero.client.connection import arena as arenas
from layerzero.client.connection.call import Request, describe_args, describe_outs
from layerzero.client.facade import running
from layerzero.client.gpu.arrays import device_name, device_of, gpu_name, zeros_like
from layerzero.client.planning.plans import Plan, plan_out
from layerzero.client.session.session import Session
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec

MAX_CALLS = 1024  # a broker plans so many at once
Key = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class TracedCall:
    """One call. `body` is what the broker is told of it, `key` equal for calls that a baked plan does not tell apart.
    `sources` has (argument, number of the call that returned it)."""

    op: str
    key: Key
    plan: Plan
    body: bytes
    sources: tuple[tuple[str, int], ...]
    is_pinned: bool
    device: int  # the ordinal of a GPU, or CPU

    @property
    def label(self) -> str:
        shapes = ", ".join(str(spec) for spec in self.plan.inputs if spec is not None)
        return f"{self.op}({shapes})" + ("" if self.device == CPU else f" on {device_name(self.device)}")


class Tracer:
    """Takes each request of a function, lets `execute` answer it and notes the call."""

    def __init__(self, session: Session, execute: Callable[[Request, Plan, Sequence[Array | None]], Any]) -> None:
        self.calls: list[TracedCall] = []
        self._session = session
        self._execute = execute
        self._results: list[tuple[int, int, int, object]] = []  # address, end, call, what keeps the memory

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        tokens = running.handler.set(self._handle), running.tracer.set(self._handle)
        try:
            return function(*args, **kwargs)
        finally:
            running.handler.reset(tokens[0])
            running.tracer.reset(tokens[1])

    def _handle(self, request: Request) -> Any:
        number = len(self.calls)
        if number >= MAX_CALLS:
            raise InvalidArgument(f"the function makes more than {MAX_CALLS} calls; plan its parts one by one")
        arrays = describe_args(request)
        outs = describe_outs(request)
        device = device_of(request.op, arrays, outs)
        specs = request.shape_specs(tuple(None if array is None else self._spec(array) for array in arrays))
        plan = request.planner(*specs, **request.params)
        if outs:
            plan = plan_out(plan, *(out.spec for out in outs))
        body = self._session.route_body(plan, request.backend, gpu_name(device))
        found = [(name, self._source(array)) for name, array in zip(OPS[request.op].inputs, arrays, strict=True)]
        sources = tuple((name, source) for name, source in found if source is not None)
        key = call_key(request.op, specs, request.params, gpu_name(device))
        call = TracedCall(request.op, key, plan, body, sources, request.backend is not None, device)
        value = self._execute(request, plan, arrays)
        self.calls.append(call)
        for result in value if isinstance(value, (list, tuple)) else [value]:
            if result is not None and not isinstance(result, memoryview):
                array = describe(result)
                self._results.append((array.address, array.address + array.spec.span_bytes, number, array.owner))
        return value

    def _spec(self, array: Array) -> TensorSpec:
        """As a session sees it: strides count where workers can reach the memory, as they do on a GPU."""
        is_shared = not array.needs_copy and (
            array.device != CPU
            or self._source(array) is not None
            or arenas.pool.find(array.address, array.spec.span_bytes) is not None
        )
        spec = array.spec
        return spec if is_shared or spec.is_contiguous else TensorSpec.contiguous(spec.dtype, spec.shape)

    def _source(self, array: Array | None) -> int | None:
        """The last call that wrote the memory of this array."""
        if array is None or not array.nbytes:
            return None
        at = int(array.address)
        return next((number for begin, end, number, _ in reversed(self._results) if begin <= at < end), None)


def watch(
    session: Session, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, list[TracedCall]]:
    """Run a function as it is. Its value, and the calls it made; their results are kept until it ends."""
    tracer = Tracer(session, lambda request, *_: session.run(request))
    return tracer.run(function, args, kwargs), tracer.calls


def imagine(
    session: Session, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[TracedCall]:
    """The calls that a function makes, none of them executed: each returns zeros of the right shape, dtype and kind,
    on the CPU in memory that is not there before something touches it."""
    tracer = Tracer(session, _zeros)
    tracer.run(function, args, kwargs)
    return tracer.calls


def _zeros(request: Request, plan: Plan, arrays: Sequence[Array | None]) -> Any:
    if request.out is not None:
        return request.out
    if request.finish is not None:
        return request.finish([_memory(nbytes) for nbytes in request.output_bytes or ()], b"")
    if not plan.results:
        return None
    like = next(array for array in arrays if array is not None)
    made = [
        zeros_like(like, spec) if like.device != CPU else wrap(_memory(spec.span_bytes), spec, like)[0]
        for spec in plan.results
    ]
    return made[0] if len(made) == 1 else tuple(made)


def _memory(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, max(nbytes, 1)))[:nbytes]


def call_key(op: str, specs: Sequence[TensorSpec | None], params: Mapping[str, Any], gpu: str) -> Key:
    """Equal for calls of one bucket: extents rounded up to powers of two, as measured times are kept by the broker.
    `gpu`: the UUID of the one that it runs on; "" for the CPU."""
    shapes = tuple(None if spec is None else bucket_key(spec) for spec in specs)
    return (op, gpu, shapes, tuple((name, type(value), value) for name, value in params.items()))


def bucket_key(spec: TensorSpec) -> Key:
    return (spec.dtype, *(1 << (n - 1).bit_length() if n > 0 else 0 for n in spec.shape))
