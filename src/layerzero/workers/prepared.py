"""Call signatures as the broker tells workers of them."""

from __future__ import annotations

from collections.abc import Sequence

from layerzero.ipc.errors import InvalidArgument, ProtocolError
from layerzero.ipc.transport import messages
from layerzero.ipc.vocabulary.neighbours import VALUE_BYTES, Neighbourhood, check_sizes, unpack_values
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.shapes import check_call
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.workers.provider import Call


def read_call(body: bytes) -> tuple[messages.Prepare, Call]:
    """An encoded Prepare message, and the call that it is of. Raises ProtocolError."""
    message = messages.decode(body, messages.Prepare)
    inputs = tuple(None if i is None else TensorSpec.from_wire(i) for i in message.inputs)
    outputs = tuple(TensorSpec.from_wire(o) for o in message.outputs)
    _check(message, inputs, outputs)
    return message, Call(message.op, message.kernel_id, inputs, outputs, message.attrs)


def read_neighbours(body: bytes, call: Call) -> Neighbourhood | None:
    """Calls with other extents that the broker lets a plan be run for. Raises ProtocolError."""
    if not body:
        return None
    said = messages.decode(body, messages.Neighbours).neighbours
    return Neighbourhood.from_wire(said, (*call.inputs, *call.outputs))


def neighbour(call: Call, neighbours: Neighbourhood | None, tail: bytes) -> Call | None:
    """The call with the extents that a client wrote behind its references; None for one that is not allowed."""
    if neighbours is None or len(tail) != VALUE_BYTES * len(neighbours.ranges):
        return None
    found = neighbours.apply((*call.inputs, *call.outputs), unpack_values(tail))
    if found is None:
        return None
    count = len(call.inputs)
    outputs = tuple(one for one in found[count:] if one is not None)
    try:
        check_sizes(found)
        check_call(call.op, found[:count], outputs, call.attrs)
    except InvalidArgument:
        return None
    return Call(call.op, call.kernel_id, found[:count], outputs, call.attrs)


def _check(message: messages.Prepare, inputs: Sequence[TensorSpec | None], outputs: Sequence[TensorSpec]) -> None:
    """The broker has checked it: one that names what does not belong together cannot be trusted with anything else."""
    op = OPS.get(message.op)
    if (
        op is None
        or (len(inputs), len(outputs)) != (len(op.inputs), len(op.outputs))
        or not op.has_attrs(message.attrs)
    ):
        raise ProtocolError(f"a plan of {message.op!r:.80} has other tensors or attributes than that op")
    if any(spec is None and name not in op.optional for name, spec in zip(op.inputs, inputs, strict=True)):
        raise ProtocolError(f"a plan of {op.name} lacks a tensor")
    try:
        check_call(op.name, inputs, outputs, message.attrs)
    except InvalidArgument as exc:
        raise ProtocolError(f"a plan that the broker should have refused: {exc.message}") from exc
