"""A call on its way to another node: its signature and its arrays, as bytes."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any

from layerzero.client.arrays.copies import copy_into
from layerzero.client.arrays.recognition import CPU, Array
from layerzero.client.connection import arena as arenas
from layerzero.client.connection import overlay
from layerzero.client.connection.call import Request, Route, Submitted, describe_all, microseconds, refuse_gradients
from layerzero.client.connection.link import Pending
from layerzero.client.connection.report import Copy
from layerzero.client.connection.routes import route_message
from layerzero.client.planning.plans import Plan
from layerzero.client.session.session import Session
from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.transport import messages
from layerzero.ipc.transport.plain import pack_body
from layerzero.ipc.vocabulary.ops import FUNCTION, OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec

BY_RAY = "another node served the call, and Ray carried it there"
BACK_BY_RAY = "another node served the call, and Ray carried it back"


def may_travel(request: Request) -> bool:
    """Whether another node can serve such a call: no function, nothing that is written in place, no output whose
    size depends on the data."""
    op = OPS[request.op]
    return request.op != FUNCTION and request.places is None and not op.in_place and not op.sized_output


class Forwarded:
    """A call of this process that other nodes may serve. `kind`: equal for calls that cost the same. `nbytes`: there
    and back."""

    def __init__(self, request: Request) -> None:
        """Raises InvalidArgument for what is no call."""
        self.request = request
        self.arrays, self.outs = describe_all(request)
        specs = tuple(None if a is None else TensorSpec.contiguous(a.spec.dtype, a.spec.shape) for a in self.arrays)
        self.plan: Plan = request.planner(*specs, **request.params)
        self.body = messages.encode(route_message(self.plan, request.backend, overlay.current()))
        outputs = sum(spec.span_bytes for spec in self.plan.outputs)
        self.nbytes = outputs + sum(a.nbytes for a in self.arrays if a is not None)
        self.start_ns = time.perf_counter_ns()

    @property
    def is_on_cpu(self) -> bool:
        return all(one.device == CPU for one in (*self.arrays, *self.outs) if one is not None)

    def head(self) -> bytes:
        """What the agent reads first."""
        refuse_gradients(self.request.op, self.arrays)
        timeout_s = self.request.timeout_s
        return pack_body([self.body, 0 if timeout_s is None else microseconds(timeout_s)])

    def memory(self) -> list[bytes]:
        """The elements of each array, in row-major order."""
        return [_bytes_of(array) for array in self.arrays if array is not None]

    def result(self, session: Session, results: Sequence[bytes]) -> tuple[Any, list[Copy]]:
        """What the caller gets of the bytes that came back, and what was copied for it. Raises ProtocolError."""
        outputs = []
        for spec, data in zip(self.plan.outputs, results, strict=True):
            if len(data) != spec.span_bytes:
                raise ProtocolError(f"{len(data)} bytes came back of a result of {spec.span_bytes}")
            block, _, _ = arenas.pool.allocate(spec.span_bytes)
            block[: len(data)] = data
            outputs.append(block)
        submitted = Submitted(
            session.link,
            Route(0, self.plan),
            self.request,
            Pending(),
            self.arrays,
            [],
            outputs,
            self.plan.results,
            self.outs,
            False,
            [],
            self.start_ns,
            b"",
            frozenset(),
            None,
        )
        value = submitted.result(b"")
        copies = [
            Copy(name, array.nbytes, "client", BY_RAY)
            for name, array in zip(OPS[self.request.op].inputs, self.arrays, strict=True)
            if array is not None and array.nbytes
        ]
        back = [Copy("out", len(data), "client", BACK_BY_RAY) for data in results if data]
        return value, [*copies, *back, *submitted.copies]


def nbytes_of(body: bytes) -> int | None:
    """As Forwarded.nbytes, of an encoded Route message; None where such a call stays here."""
    route = messages.decode(body, messages.Route)
    op = OPS[route.op]
    if route.op == FUNCTION or op.in_place or op.sized_output or route.device:
        return None
    specs = [TensorSpec.from_wire(spec) for spec in (*route.inputs, *route.outputs) if spec is not None]
    return sum(spec.numel * spec.itemsize for spec in specs)


def _bytes_of(array: Array) -> bytes:
    if array.spec.is_contiguous and not array.needs_copy:
        return ctypes.string_at(array.address, array.nbytes) if array.nbytes else b""
    scratch = bytearray(array.nbytes)
    copy_into(array, memoryview(scratch))
    return bytes(scratch)
