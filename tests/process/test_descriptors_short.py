"""Crowds, honest or not, that would take all of the broker's file descriptors: newcomers are turned away with the
reason, those who are there go on, and there is room again when the crowd has gone."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import zmq
from tests.process.harness import Site, bare_client, is_running, wait_until
from tests.process.invariants import open_of

import layerzero as lz
from layerzero.ipc.shm import memory
from layerzero.ipc.transport import control, messages, wire

X = np.linspace(-3, 3, 64, dtype=np.float32)


@contextlib.contextmanager
def limited(pid: int, soft: int) -> Iterator[None]:
    """A broker with fewer descriptors for a while. No hard limit of its own: it has raised its soft one to that."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        if is_running(pid):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@pytest.fixture
def site(new_site: Callable[..., Site]) -> Site:
    """With a client, and two workers that are ready."""
    site = new_site(express=False).start()  # else calls would not pass through the broker
    site.connect()
    site.wait_ready("alpha", "beta")
    lz.silu(X)
    return site


def plain_connection(path: str) -> socket.socket | None:
    """One that says nothing; None when nobody listens there, or does not accept for now."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        sock.connect(path)
    except OSError:
        sock.close()
        return None
    return sock


@pytest.mark.parametrize("side", ["client", "worker"])
def test_connections_to_zeromq_without_end_leave_the_broker_and_its_clients(site: Site, side: str) -> None:
    """libzmq ends the process that has no descriptor for one more."""
    pid = site.broker_pid
    assert pid is not None
    path = next(str(path) for path in site.folder.glob(f"{side}-*") if path.is_socket())
    with contextlib.ExitStack() as held:
        with limited(pid, open_of(pid) + 150):

            def attack() -> bool:
                for _ in range(50):
                    if (sock := plain_connection(path)) is not None:
                        held.enter_context(sock)
                return not is_running(pid) or bool(site.events("listener.closed"))

            wait_until(attack)
            assert is_running(pid)
            for _ in range(10):
                attack()
                assert lz.silu(X).shape == X.shape
    assert site.broker_pid == pid
    wait_until(lambda: site.events("listener.opened"))
    other = site.python(
        "import sys, numpy\nlz.connect(runtime_dir=sys.argv[1])\nprint(lz.silu(numpy.ones(1, numpy.float32)).shape)"
    )
    assert other.communicate(timeout=60)[0] == "(1,)\n"
    assert site.broker_pid == pid


def test_more_clients_than_descriptors_are_refused_by_name(site: Site) -> None:
    """Each honest client takes two; the last of them must not end all."""
    pid = site.broker_pid
    assert pid is not None
    context = zmq.Context()
    refused: list[dict[str, object]] = []
    with contextlib.ExitStack() as held, limited(pid, open_of(pid) + 100):
        for _ in range(120):
            sock = held.enter_context(control.connect(site.endpoints.control, timeout_s=5))
            with contextlib.suppress(control.Closed):  # it may be refused before its hello
                control.send(sock, messages.Hello(protocols=[wire.PROTOCOL], role="client", package="0", pid=1))
            answer, _ = control.receive(sock, messages.Welcome, messages.Refused)
            if isinstance(answer, messages.Refused):
                refused.append(answer.error)
                continue
            dealer = context.socket(zmq.DEALER)
            held.callback(dealer.close, 0)
            dealer.setsockopt(zmq.ROUTING_ID, answer.identity)
            dealer.connect(answer.endpoint)
        assert is_running(pid)
        assert lz.silu(X).shape == X.shape
        assert 0 < len(refused) < 120
        assert {error["code"] for error in refused} == {"BUSY"}
        assert "file descriptors left" in str(refused[0]["message"])
        assert "ulimit -n" in str(refused[0]["message"])
    wait_until(lambda: not site.events("listener.closed") or site.events("listener.opened"))
    sock, dealer = bare_client(site, context)
    sock.close()
    dealer.close(0)
    context.term()


def test_a_client_takes_no_more_than_its_part_and_others_are_kept(site: Site) -> None:
    """A client that offers arenas without end is told so, and one that offers its first is served."""
    pid = site.broker_pid
    assert pid is not None
    context = zmq.Context()
    with limited(pid, open_of(pid) + 200):
        sock, dealer = bare_client(site, context)
        fd = memory.create_memfd("small", 4096)
        answers = []
        for arena in range(1, 300):
            control.send(sock, messages.AddArena(arena=arena, nbytes=4096), (fd,))
            answers.append(control.receive(sock, messages.ArenaAdded, messages.Refused)[0])
        refused = [answer for answer in answers if isinstance(answer, messages.Refused)]
        assert {answer.error["code"] for answer in refused} == {"NO_MEMORY"}
        assert 0 < len(refused) < 299
        assert lz.silu(np.ones(1 << 20, np.float32))[0] > 0.7  # an arena of another client's
        control.send(sock, messages.RetireArena(arena=1))
        control.send(sock, messages.AddArena(arena=300, nbytes=4096), (fd,))
        assert isinstance(control.receive(sock, messages.ArenaAdded, messages.Refused)[0], messages.ArenaAdded)
        sock.close()
        dealer.close(0)
        os.close(fd)
    context.term()


def test_an_arena_that_comes_while_there_is_no_descriptor_is_refused_and_its_client_kept(site: Site) -> None:
    """The kernel drops the descriptor and says so; the client has done nothing wrong."""
    pid = site.broker_pid
    assert pid is not None
    big = np.ones(32 << 20, np.float32)
    with limited(pid, open_of(pid)):
        with pytest.raises(lz.OutOfMemory, match="file descriptors"):
            lz.silu(big)
        assert lz.silu(X).shape == X.shape
    assert lz.silu(big).shape == big.shape
    assert not site.events("client.dropped")


def test_the_soft_limit_is_raised_and_not_handed_down(new_site: Callable[..., Site]) -> None:
    """1024 is what shells begin with; the hard limit is what the administrator meant. Libraries may use select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= 900:
        pytest.skip(f"the hard limit of descriptors is {hard}")
    site = new_site()
    resource.setrlimit(resource.RLIMIT_NOFILE, (800, hard))
    try:
        site.start()
        site.connect()
        (alpha,) = site.wait_ready("alpha")
        pid = site.broker_pid
        assert pid is not None
        assert resource.prlimit(pid, resource.RLIMIT_NOFILE)[0] == min(hard, 1 << 16)
        assert resource.prlimit(alpha, resource.RLIMIT_NOFILE)[0] == 800
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
