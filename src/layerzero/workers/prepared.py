"""Call signatures as the broker tells workers of them."""

from __future__ import annotations

from collections.abc import Sequence

from layerzero.ipc.errors import InvalidArgument, ProtocolError
from layerzero.ipc.transport import messages
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


def _check(message: messages.Prepare, inputs: Sequence[TensorSpec | None], outputs: Sequence[TensorSpec]) -> None:
    """The broker has checked it: one that names what does not belong together cannot be trusted with anything else."""
    op = OPS.get(message.op)
    if (
        op is None
        or (len(inputs), len(outputs)) != (len(op.inputs), len(op.outputs))
        or set(message.attrs) != set(op.attrs)
    ):
        raise ProtocolError(f"a plan of {message.op!r:.80} has other tensors or attributes than that op")
    if any(spec is None and name not in op.optional for name, spec in zip(op.inputs, inputs, strict=True)):
        raise ProtocolError(f"a plan of {op.name} lacks a tensor")
    try:
        check_call(op.name, inputs, outputs, message.attrs)
    except InvalidArgument as exc:
        raise ProtocolError(f"a plan that the broker should have refused: {exc.message}") from exc
