"""What a broker says to clients whose calls on a GPU make no sense, or name one that is not here. Needs no GPU."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zmq
from tests.process.harness import Site, bare_client

import layerzero as lz
from layerzero.ipc.cuda.handles import ARENA_STEP_BYTES, ArenaHandle
from layerzero.ipc.cuda.offer import PATTERN_BYTES, Offer
from layerzero.ipc.errors import LayerZeroError, from_wire
from layerzero.ipc.shm import memory, timeline_page
from layerzero.ipc.shm.timeline_words import TimelinePoint
from layerzero.ipc.transport import control, messages, wire

NOWHERE = "GPU-of-another-machine"
HANDLE = ArenaHandle(NOWHERE, "c", 1, 1, "staged", ARENA_STEP_BYTES)
OFFER = Offer(HANDLE, bytes(PATTERN_BYTES), 1)
SPEC = ["float32", [4], [1]]
ROUTE = messages.Route(op="silu", inputs=[SPEC], outputs=[SPEC], attrs={})
REFS = wire.pack_refs([wire.Ref(1, 0, 0, 64), wire.Ref(1, 0, 64, 64)])
POINT = wire.pack_call(b"", TimelinePoint(0, 1))[1]

Bare = tuple[socket.socket, zmq.Socket[bytes]]


@pytest.fixture
def bare(connected: Site) -> Iterator[Bare]:
    with zmq.Context() as context:
        sock, dealer = bare_client(connected, context)
        sock.settimeout(30)
        yield sock, dealer
        sock.close()
        dealer.close(linger=0)


def page() -> int:
    return timeline_page.create_page()


def staging(nbytes: int = ARENA_STEP_BYTES) -> int:
    return memory.create_memfd("staging", nbytes)


def send(sock: socket.socket, message: messages.Message, *fds: int) -> None:
    control.send(sock, message, fds)
    for fd in fds:
        os.close(fd)


def refusal(sock: socket.socket) -> LayerZeroError:
    answer, _ = control.receive(sock, messages.Refused)
    return from_wire(answer.error)


def is_dropped(sock: socket.socket) -> bool:
    return not sock.recv(1)


def add_gpu(**changes: Any) -> messages.AddGpu:
    return replace(messages.AddGpu(gpu=NOWHERE, has_memops=True, offer=OFFER.to_wire()), **changes)


def test_a_gpu_that_is_not_here_is_refused_by_name_and_the_client_goes_on(bare: Bare) -> None:
    """Its calls on the CPU are none the worse; the error says what there is."""
    sock, _ = bare
    for _ in range(2):
        send(sock, add_gpu(), page(), staging())
        error = refusal(sock)
        assert error.code == "INVALID_ARGUMENT"
        assert error.message.startswith(f"this broker has no GPU {NOWHERE!r}; it has ")
    send(sock, messages.AddArena(arena=1, nbytes=4096), memory.create_memfd("arena", 4096))
    added, _ = control.receive(sock, messages.ArenaAdded)
    assert added.arena == 1


@pytest.mark.parametrize(
    ("message", "fds", "text"),
    [
        (add_gpu(), (), "carries a timeline page"),
        (add_gpu(), (page,), "comes with 1 descriptors, got 0"),
        (add_gpu(), (page, staging, staging), "comes with 1 descriptors, got 2"),
        (add_gpu(), (lambda: memory.create_memfd("page", 4096), staging), "memfd has 4096 bytes"),
        (add_gpu(), (lambda: os.open(os.devnull, os.O_RDWR), staging), "not a memfd"),
        (add_gpu(), (page, lambda: staging(4096)), "memfd has 4096 bytes"),
        (add_gpu(offer={"pattern": b"short"}), (page, staging), "not an offer of GPU memory"),
        (add_gpu(offer={**OFFER.to_wire(), "handle": {}}), (page, staging), "not an arena handle"),
        (add_gpu(gpu="GPU-0"), (page, staging), f"offers memory of {NOWHERE!r}"),
        (add_gpu(gpu=""), (page, staging), f"offers memory of {NOWHERE!r}"),
        (
            messages.AddGpuArena(arena=2, handle=HANDLE.to_wire()),
            (staging,),
            "the handle of arena 1",
        ),
        (messages.AddGpuArena(arena=1, handle=HANDLE.to_wire()), (), "comes with 1 descriptors, got 0"),
        (messages.AddGpuArena(arena=1, handle={"transport": "best"}), (staging,), "not an arena handle"),
        (messages.AddGpuArena(arena=1, handle=HANDLE.to_wire()), (staging,), "which the client has not added"),
    ],
)
def test_what_comes_with_gpu_memory_is_checked(
    bare: Bare, message: messages.Message, fds: tuple[Any, ...], text: str
) -> None:
    """Workers map what the broker passes on, and the broker itself maps the page."""
    sock, _ = bare
    send(sock, message, *(make() for make in fds))
    assert text in refusal(sock).message
    assert is_dropped(sock)


def test_calls_on_a_gpu_that_is_not_here_are_refused(bare: Bare) -> None:
    """The route is known to be wrong, its calls say so, and other routes are served."""
    _, dealer = bare
    dealer.send(wire.pack(wire.Kind.ROUTE, route=1, body=messages.encode(replace(ROUTE, device=NOWHERE))))
    dealer.send(wire.pack(wire.Kind.EXECUTE, flags=wire.HAS_POINT, route=1, seq=7, body=REFS + POINT))
    frame = dealer.recv()
    header = wire.unpack(frame)
    assert (header.kind, header.seq) == (wire.Kind.FAILED, 7)
    error = from_wire(messages.decode(frame[wire.HEADER_BYTES :], messages.Outcome).error)
    assert error.code == "INVALID_ARGUMENT"
    assert NOWHERE in error.message
    np.testing.assert_allclose(lz.silu(np.zeros(4, np.float32)), 0)


@pytest.mark.parametrize(
    ("route", "body", "text"),
    [
        (ROUTE, REFS + POINT, "a call on the CPU comes with a point or a graph slot"),
        (ROUTE, POINT[:4], "too short for a point"),
        (messages.Route(op="null", inputs=[], outputs=[], attrs={}, device=NOWHERE), POINT, "null runs on the CPU"),
    ],
)
def test_points_and_devices_that_make_no_sense_end_the_connection(
    bare: Bare, route: messages.Route, body: bytes, text: str
) -> None:
    """Nothing of such a call can be served, and a stream of the client may wait for it."""
    sock, dealer = bare
    dealer.send(wire.pack(wire.Kind.ROUTE, route=1, body=messages.encode(route)))
    dealer.send(wire.pack(wire.Kind.EXECUTE, flags=wire.HAS_POINT, route=1, seq=7, body=body))
    assert text in refusal(sock).message
    assert is_dropped(sock)
