"""Where a call's tensors lie for a worker on the same GPU: in place where their allocation allows that, else copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from layerzero.client.arrays.recognition import Array
from layerzero.client.connection.call import BACK, Request, Route
from layerzero.client.connection.report import Copy
from layerzero.client.gpu.arrays import new_like
from layerzero.client.gpu.device import Gpu
from layerzero.client.gpu.memory import Place
from layerzero.client.gpu.results import layout_of
from layerzero.client.planning.plans import Plan
from layerzero.ipc.cuda.handles import STAGED
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.transport.wire import NO_ARENA, REF
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec

DENSE = "no kernel takes it with these strides"
_NO_REF = REF.pack(NO_ARENA, 0, 0, 0)


class Memory(NamedTuple):
    """Where a call's tensors lie for a worker."""

    refs: bytes
    places: Sequence[Place | None]  # inputs, then the outputs' unless those are inputs
    copies: Sequence[Copy]
    holds: Sequence[Array]  # until the call is enqueued

    @property
    def is_in_place(self) -> bool:
        """Whether all of it is the caller's own. What was lent for the call comes and goes."""
        return not self.copies and all(place is None or place.block is None for place in self.places)


class Placing:
    """Of one call, in its stream's order. Blocks that it took are given back by `end`, whatever happened."""

    def __init__(self, gpu: Gpu, transport: str, stream: int) -> None:
        self._gpu, self._transport, self._stream = gpu, transport, stream
        self._places: list[Place | None] = []

    def place(
        self,
        route: Route,
        arrays: tuple[Array | None, ...],
        specs: tuple[TensorSpec | None, ...],
        output: int,
    ) -> Memory:
        """`output`: the address of the caller's own memory for the result, 0 when it must not be written directly.

        Raises InvalidArgument for what is written in place where no worker reaches it, with gaps between its elements.
        """
        op = OPS[route.plan.op]
        gpu, transport, places = self._gpu, self._transport, self._places
        copies: list[Copy] = []
        holds: list[Array] = []
        refs: list[bytes] = []
        for name, array, spec in zip(op.inputs, arrays, specs, strict=True):
            if array is None or spec is None:
                places.append(None)
                refs.append(_NO_REF)
                continue
            source, why = array, ""
            if array.spec != spec:
                source, why = _dense_copy(array, spec), DENSE
                holds.append(source)  # its allocator would take it for the next copy, before this one is read
            elif array.needs_copy:
                why = "its strides cannot be described to a worker"
            place = self._input(source)
            why = why or place.copied
            if why and array.nbytes:
                copies.append(Copy(name, array.nbytes, "client", why))
            places.append(place)
            if why and array.nbytes and name in op.in_place:
                if not array.spec.is_contiguous:  # a copy back would undo what others write between its elements
                    raise InvalidArgument(
                        f"{op.name}: {name} is written in place, and no worker reaches its memory: {why}; "
                        f"with strides {list(array.spec.strides)} it is not copied there and back; make it dense"
                    )
                copies.append(Copy(name, array.nbytes, "client", BACK))
            refs.append(REF.pack(gpu.number(place.arena, transport), 0, place.offset, spec.span_bytes))
        if op.in_place:
            refs += [refs[op.inputs.index(name)] for name in op.in_place]
            return Memory(b"".join(refs), places, copies, holds)
        layout = layout_of(tuple(route.plan.outputs))
        nbytes = layout.nbytes
        found = gpu.memory.find(output, nbytes, transport) if output else "it shares memory with an input"
        if isinstance(found, str):
            block = gpu.memory.pool(transport).take(nbytes, self._stream)
            place = Place(block.arena, block.offset, block, found)
            if nbytes:
                copies.append(Copy("out", nbytes, "client", found))
        else:
            place = Place(*found)
        places.append(place)
        number = gpu.number(place.arena, transport)
        for at, spec in zip(layout.offsets, route.plan.outputs, strict=True):
            refs.append(REF.pack(number, 0, place.offset + at, spec.span_bytes))
        return Memory(b"".join(refs), places, copies, holds)

    def _input(self, array: Array) -> Place:
        gpu, nbytes = self._gpu, array.spec.span_bytes
        found = gpu.memory.find(array.address, nbytes, self._transport)
        if not isinstance(found, str):
            return Place(*found)
        block = gpu.memory.pool(self._transport).take(nbytes, self._stream)
        if nbytes:
            gpu.memory.context.driver.copy_on_device(block.address, array.address, nbytes, self._stream)
        return Place(block.arena, block.offset, block, found)

    def publish(self, specs: Sequence[TensorSpec | None]) -> None:
        """Inputs to where a worker that does not map them looks; before the call is enqueued."""
        if self._transport in STAGED:
            for place, spec in zip(self._places, specs, strict=False):
                if place is not None and spec is not None and spec.span_bytes:
                    place.arena.publish(self._transport, place.offset, spec.span_bytes, self._stream)

    def take_outputs(self, plan: Plan, arrays: Sequence[Array | None], address: int) -> None:
        """What was written to where the caller wants it, if it is not there; after the call was enqueued. `address`: of
        the results, for ops that have new ones."""
        at = [OPS[plan.op].inputs.index(name) for name in OPS[plan.op].in_place]
        targets = [(self._places[i], a.address, a.spec.span_bytes) for i in at if (a := arrays[i]) is not None]
        whole = (self._places[-1], address, layout_of(tuple(plan.outputs)).nbytes)
        for output, target, nbytes in targets or [whole]:
            assert output is not None
            if self._transport in STAGED and nbytes:
                output.arena.collect(self._transport, output.offset, nbytes, self._stream)
            if output.block is not None and nbytes:
                self._gpu.memory.context.driver.copy_on_device(target, output.block.address, nbytes, self._stream)

    def end(self) -> None:
        pool = self._gpu.memory.pool(self._transport)
        for place in self._places:
            if place is not None and place.block is not None:
                pool.give(place.block)


def dense_key(request: Request, specs: tuple[TensorSpec | None, ...]) -> tuple[Any, ...]:
    """Equal for calls that need the same copies."""
    return (request.op, specs, tuple(request.params.items()))


def _dense_copy(array: Array, spec: TensorSpec) -> Array:
    made: Any
    if array.kind == "own":
        made = array.obj.dense()
        return Array(array.kind, spec, made.address, made, made, device=array.device)
    made, address = new_like(array, spec)
    if array.kind == "torch":
        made.copy_(array.owner.detach() if array.requires_grad else array.owner)
    else:
        made[...] = array.owner
    return Array(array.kind, spec, address, made, made, device=array.device)
