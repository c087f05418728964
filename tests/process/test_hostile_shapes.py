"""A client that names calls whose tensors do not belong together. A kernel would read and write past them, into memory
of others that the same worker has mapped."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import zmq
from tests.process.harness import Site, bare_client
from tests.signatures import planned

import layerzero as lz
from layerzero.client.planning.plans import Plan
from layerzero.ipc.errors import LayerZeroError, from_wire
from layerzero.ipc.shm import memory
from layerzero.ipc.transport import control, messages, wire
from layerzero.ipc.vocabulary.ops import PUBLIC_OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec


def with_rows(spec: TensorSpec, rows: int) -> TensorSpec:
    return replace(spec, shape=(rows, *spec.shape[1:]))


def inconsistent(op: str) -> list[Plan]:
    """Calls of an op, each with one tensor that is longer or shorter than the others say, or of another dtype."""
    call, found = planned(op, Random(3)), []
    for side in ("inputs", "outputs"):
        for at, spec in enumerate(getattr(call, side)):
            if spec is None or not spec.shape:
                continue
            others = [with_rows(spec, spec.shape[0] + 7), replace(spec, dtype="uint16")]
            if (op, side) == ("cast", "inputs"):  # of any dtype
                others.pop()
            for other in others:
                specs = list(getattr(call, side))
                specs[at] = other
                found.append(replace(call, **{side: tuple(specs)}))
    return found


def send_route(dealer: zmq.Socket[bytes], number: int, call: Plan) -> None:
    inputs = [None if spec is None else spec.to_wire() for spec in call.inputs]
    route = messages.Route(op=call.op, inputs=inputs, outputs=[s.to_wire() for s in call.outputs], attrs=call.attrs)
    dealer.send(wire.pack(wire.Kind.ROUTE, route=number, body=messages.encode(route)))


def error_of(dealer: zmq.Socket[bytes], route: int, refs: list[wire.Ref]) -> LayerZeroError:
    """What a call on the route ends in."""
    dealer.send(wire.pack(wire.Kind.EXECUTE, route=route, seq=route, body=wire.pack_refs(refs)))
    while True:
        frame = dealer.recv()
        header = wire.unpack(frame)
        if header.seq == route and header.kind == wire.Kind.FAILED:
            return from_wire(messages.decode(frame[wire.HEADER_BYTES :], messages.Outcome).error)


def pids() -> list[int]:
    return [one["pid"] for one in lz.status()["backends"]]


def offered(sock: socket.socket, nbytes: int = 1 << 20) -> None:
    fd = memory.create_memfd("arena", nbytes)
    control.send(sock, messages.AddArena(arena=1, nbytes=nbytes), (fd,))
    os.close(fd)
    control.receive(sock, messages.ArenaAdded)


@pytest.mark.parametrize("op", [op.name for op in PUBLIC_OPS.values() if op.inputs and op.name != "embedding"])
def test_tensors_that_do_not_belong_together_reach_no_worker(connected: Site, op: str) -> None:
    """Every such call is INVALID_ARGUMENT; workers are as they were, and the client's other calls are served."""
    np.testing.assert_allclose(lz.silu(np.zeros(4, np.float32)), 0)
    before = pids()
    with zmq.Context() as context:
        sock, dealer = bare_client(connected, context)
        sock.settimeout(30)
        offered(sock)
        for number, call in enumerate(inconsistent(op), start=1):
            refs = [wire.Ref(1, 0, 0, 1 << 16) for _ in (*call.inputs, *call.outputs)]
            send_route(dealer, number, call)
            error = error_of(dealer, number, refs)
            assert error.code == "INVALID_ARGUMENT", call
            assert error.message.startswith(f"{op}: ")
        sock.close()
        dealer.close(linger=0)
    assert pids() == before
    np.testing.assert_allclose(lz.silu(np.zeros(4, np.float32)), 0)
