"""What the broker does when the machine gives it no more."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import zmq
from tests.process.harness import PATIENCE_S, Site, bare_client, is_running, wait_ended, wait_until

import layerzero as lz
from layerzero.broker.core.clients import MAX_ARENAS
from layerzero.client.connection import routes
from layerzero.client.connection.call import Submitted
from layerzero.ipc.shm import memory
from layerzero.ipc.transport import control, messages, wire

X = np.array([1, 2, 3], np.float32)
SILU = messages.Route(
    op="silu", inputs=[["float32", [4], [1]]], outputs=[["float32", [4], [1]]], attrs={}, backend="alpha"
)


def test_a_broker_without_descriptors_turns_callers_away_and_recovers(new_site: Callable[..., Site]) -> None:
    """accept() fails with EMFILE while the caller stays in the queue: that must neither end the broker nor spin it."""
    site = new_site().start()
    session = site.connect()
    site.wait_ready("alpha", "beta")  # nothing opens or closes descriptors any more
    pid = session.broker_pid
    x = np.ones(4, np.float32)
    expected = lz.silu(x)
    used = len(os.listdir(f"/proc/{pid}/fd"))
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (used, limits[1]))
    turned_away = 0
    with contextlib.ExitStack() as callers:
        for _ in range(5):
            sock = callers.enter_context(control.connect(site.endpoints.control, timeout_s=5))
            answer, _ = control.receive(sock, messages.Refused)
            assert answer.error["code"] == "BUSY"
            turned_away += 1
    assert turned_away == 5
    np.testing.assert_array_equal(lz.silu(x), expected)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    with control.connect(site.endpoints.control, timeout_s=5) as sock:
        sock.setblocking(False)
        wait_until(lambda: len(os.listdir(f"/proc/{pid}/fd")) > used)
        with contextlib.suppress(BlockingIOError):
            assert sock.recv(1, socket.MSG_PEEK) != b""
    assert session.is_alive
    assert Path(f"/proc/{pid}").exists()


def test_a_full_disk_under_the_log_ends_no_broker(new_site: Callable[..., Site]) -> None:
    """A log is the least of what a broker is for."""
    site = new_site()
    site.endpoints.log.symlink_to("/dev/full")
    session = site.connect()
    (pid,) = site.wait_ready("alpha")
    os.kill(pid, signal.SIGKILL)  # which is worth a line
    wait_ended(pid)
    np.testing.assert_allclose(lz.silu(X), X / (1 + np.exp(-X)), rtol=1e-6)
    assert session.is_alive
    site.endpoints.log.unlink()


def test_a_busy_worker_may_be_behind_with_hundreds_of_arenas(connected: Site) -> None:
    """What its control socket cannot take waits: the worker is busy with a call, not broken. What waited must reach it
    when it has room, also while it says nothing itself: a call on an arena among them waits for it."""
    (alpha,) = connected.wait_ready("alpha")
    context = zmq.Context()
    sock, dealer = bare_client(connected, context)
    dealer.send(wire.pack(wire.Kind.ROUTE, route=1, body=messages.encode(SILU)))
    fd = memory.create_memfd("small", 4096)

    def execute(arena: int) -> None:
        control.send(sock, messages.AddArena(arena=arena, nbytes=4096), (fd,))
        control.receive(sock, messages.ArenaAdded)
        refs = wire.pack_refs([wire.Ref(arena, 0, 0, 16), wire.Ref(arena, 0, 64, 16)])
        dealer.send(wire.pack(wire.Kind.EXECUTE, route=1, seq=arena, body=refs))

    def finish() -> None:
        while (header := wire.unpack(dealer.recv())).kind in (wire.Kind.DECISION, wire.Kind.LEASE):
            pass
        assert header.kind == wire.Kind.DONE

    for arena in range(1, 801):
        execute(arena)
        finish()
    os.kill(alpha, signal.SIGSTOP)
    try:
        execute(801)
        for arena in range(1, 801):
            control.send(sock, messages.RetireArena(arena=arena))
        execute(802)
    finally:
        os.kill(alpha, signal.SIGCONT)
    finish()
    finish()
    maps = Path(f"/proc/{alpha}/maps")
    wait_until(lambda: maps.read_text().count("memfd:small") <= 4)
    assert is_running(alpha)
    assert connected.backend("alpha")["pid"] == alpha
    dealer.close(linger=0)
    sock.close()
    context.term()
    os.close(fd)


def test_a_client_with_too_many_arenas_is_dropped_and_leaves_nothing(new_site: Callable[..., Site]) -> None:
    """Each is a descriptor of the broker, which has only so many for all clients."""
    site = new_site().start()
    pid = site.connect().broker_pid
    site.wait_ready("alpha", "beta")
    soft, _ = resource.prlimit(pid, resource.RLIMIT_NOFILE)  # the broker has raised it; a client gets a part of that
    if soft < 4 * MAX_ARENAS:
        pytest.skip(f"the limit of descriptors is {soft}")
    held = len(os.listdir(f"/proc/{pid}/fd"))
    context = zmq.Context()
    sock, dealer = bare_client(site, context)
    fd = memory.create_memfd("small", 4096)
    for arena in range(1, MAX_ARENAS + 1):
        control.send(sock, messages.AddArena(arena=arena, nbytes=4096), (fd,))
        control.receive(sock, messages.ArenaAdded)
    control.send(sock, messages.AddArena(arena=MAX_ARENAS + 1, nbytes=4096), (fd,))
    answer, _ = control.receive(sock, messages.Refused)
    assert f"more than {MAX_ARENAS} arenas" in answer.error["message"]
    assert sock.recv(1) == b""
    dealer.close(linger=0)
    sock.close()
    context.term()
    os.close(fd)
    wait_until(lambda: len(os.listdir(f"/proc/{pid}/fd")) <= held)
    assert lz.silu(X).shape == (3,)


@pytest.mark.usefixtures("connected")
def test_a_client_that_does_not_read_its_answers_is_dropped(new_site: Callable[..., Site]) -> None:
    """What the broker keeps for one that reads nothing would grow for ever, and nobody else may wait for it."""
    site = new_site(max_in_flight=1).start()
    site.connect()
    context = zmq.Context()
    sock = control.connect(site.endpoints.control, timeout_s=PATIENCE_S)
    control.send(sock, messages.Hello(protocols=[wire.PROTOCOL], role="client", package="0", pid=1))
    welcome, _ = control.receive(sock, messages.Welcome)
    dealer = context.socket(zmq.DEALER)
    for option, value in ((zmq.RCVHWM, 1), (zmq.LINGER, 0), (zmq.SNDTIMEO, int(PATIENCE_S * 1000))):
        dealer.setsockopt(option, value)
    dealer.setsockopt(zmq.ROUTING_ID, welcome.identity)
    dealer.connect(welcome.endpoint)
    body = messages.encode(messages.Request(method="status"))
    for seq in range(5000):
        dealer.send(wire.pack(wire.Kind.REQUEST, seq=seq, body=body))
        if control.is_readable(sock.fileno()):
            break
    refused, _ = control.receive(sock, messages.Refused)
    assert refused.error["message"] == "it does not read its answers"
    assert len(lz.status()["clients"]) == 1
    sock.close()
    dealer.close()
    context.term()


@pytest.mark.usefixtures("connected")
def test_a_route_is_forgotten_only_when_no_thread_can_call_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program with many shapes forgets old ones; a thread may have looked one up and not sent its call yet."""
    monkeypatch.setattr(routes, "MAX_ROUTES", 4)
    session = lz.session()
    send, send_frame = session._send, session.link.send
    kinds: Counter[int] = Counter()

    def count(frame: bytes) -> None:
        kinds[wire.unpack(frame).kind] += 1
        send_frame(frame)

    monkeypatch.setattr(session.link, "send", count)
    main = threading.get_ident()
    shapes = iter(range(1, 1000))

    def others_call_first(submitted: Submitted) -> int:
        if threading.get_ident() == main:
            for _ in range(2 * routes.MAX_ROUTES):
                assert others.submit(lz.silu, np.ones(next(shapes), np.float32)).result(timeout=PATIENCE_S) is not None
        return send(submitted)

    with ThreadPoolExecutor(1) as others:
        monkeypatch.setattr(session, "_send", others_call_first)
        for rows in range(1, 6):
            x = np.full((rows, 2), rows, np.float32)
            np.testing.assert_allclose(lz.silu(x), x / (1 + np.exp(-x)), rtol=1e-6)
    assert session.is_alive
    assert kinds[wire.Kind.ROUTE] > 2 * routes.MAX_ROUTES  # neighbours need no word of it
    assert kinds[wire.Kind.ROUTE] - kinds[wire.Kind.FORGET] <= 2 * routes.MAX_ROUTES


@pytest.mark.usefixtures("connected")
def test_threads_with_more_shapes_than_are_kept_get_their_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same without a hand on the order."""
    monkeypatch.setattr(routes, "MAX_ROUTES", 8)

    def work(thread: int) -> None:
        for i in range(100):
            x = np.full(1 + (7 * i + thread) % 60, thread, np.float32)
            np.testing.assert_allclose(lz.silu(x), x / (1 + np.exp(-x)), rtol=1e-6)

    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(work, n) for n in range(8)]:
            done.result(timeout=PATIENCE_S)
