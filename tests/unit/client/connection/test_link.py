"""What a client asks of its broker by the control socket and waits for: bytes of lifted calls."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from layerzero.client.connection.link import Link
from layerzero.ipc.errors import BrokerLost, InvalidArgument, ProtocolError
from layerzero.ipc.transport import control, messages

Answer = Callable[[socket.socket, str], None]


class Broker:
    """The other end, which answers what is asked for."""

    def __init__(self) -> None:
        ours, self.sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.link = Link.__new__(Link)
        self.link._control, self.link._control_lock = ours, threading.Lock()
        self.link._refused, self.link.lost, self.link.welcome = "", None, SimpleNamespace(broker_pid=7)  # type: ignore[assignment]
        ours.settimeout(10)
        self.thread = threading.Thread()

    def serve(self, answer: Answer) -> None:
        def run() -> None:
            asked, _ = control.receive(self.sock, messages.GetLifted)
            answer(self.sock, asked.digest)

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def count(self) -> int:
        """Open descriptors of what was handed over, once it has answered."""
        self.thread.join(10)
        return handed_over()

    def close(self) -> None:
        if self.thread.ident is not None:
            self.thread.join(10)
        self.link._control.close()
        self.sock.close()


@pytest.fixture
def broker() -> Iterator[Broker]:
    made = Broker()
    yield made
    made.close()


def handed_over() -> int:
    """Other descriptors come and go: those of earlier tests, with the garbage."""
    paths = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return sum("memfd:lifted" in os.readlink(path) for path in paths if os.path.islink(path))


def give(sock: socket.socket, digest: str, *, count: int = 1) -> None:
    fd = os.memfd_create("lifted")
    os.write(fd, b"code")
    control.send(sock, messages.LiftedGiven(digest=digest, nbytes=4), (fd,) * count)
    os.close(fd)


def test_bytes_come_with_a_descriptor(broker: Broker) -> None:
    broker.serve(give)
    given = broker.link.get_lifted("ab")
    assert given is not None
    fd, nbytes = given
    assert (os.pread(fd, 10, 0), nbytes) == (b"code", 4)
    os.close(fd)


def test_late_answers_to_others_are_not_taken_for_it(broker: Broker) -> None:
    def answer(sock: socket.socket, digest: str) -> None:
        give(sock, "another")
        control.send(sock, messages.ArenaAdded(arena=1))
        give(sock, digest)

    before = handed_over()
    broker.serve(answer)
    given = broker.link.get_lifted("ab")
    assert given is not None
    os.close(given[0])
    assert broker.count() == before


@pytest.mark.parametrize("count", [0, 2])
def test_another_number_of_descriptors_is_refused(broker: Broker, count: int) -> None:
    before = handed_over()
    broker.serve(lambda sock, digest: give(sock, digest, count=count))
    with pytest.raises(ProtocolError, match="descriptors"):
        broker.link.get_lifted("ab")
    assert broker.count() == before


def test_what_the_broker_refuses_with_is_raised(broker: Broker) -> None:
    def refuse(sock: socket.socket, digest: str) -> None:
        control.send(sock, messages.Refused(error=InvalidArgument(f"{digest} is not here").to_wire()))

    broker.serve(refuse)
    with pytest.raises(InvalidArgument, match="ab is not here"):
        broker.link.get_lifted("ab")


def test_a_broker_that_is_gone_is_named(broker: Broker) -> None:
    broker.serve(lambda sock, _: sock.shutdown(socket.SHUT_RDWR))
    with pytest.raises(BrokerLost, match="pid 7"):
        broker.link.get_lifted("ab")


def test_why_the_broker_hung_up_is_told_to_all_threads(broker: Broker) -> None:
    """The one that reads it is not the one that finds the broker gone, and another answer may lie before it."""

    def refuse(sock: socket.socket, digest: str) -> None:
        give(sock, "another")
        control.send(sock, messages.Refused(error=InvalidArgument(f"{digest} is not here").to_wire()))
        sock.shutdown(socket.SHUT_RDWR)

    before = handed_over()
    broker.serve(refuse)
    control.send(broker.link._control, messages.GetLifted(digest="ab"))
    broker.thread.join(10)
    assert str(broker.link._last_word()) == "ab is not here"
    assert handed_over() == before


def test_what_was_refused_last_is_named_once_the_broker_is_gone(broker: Broker) -> None:
    def refuse(sock: socket.socket, digest: str) -> None:
        control.send(sock, messages.Refused(error=InvalidArgument(f"{digest} is not here").to_wire()))
        sock.shutdown(socket.SHUT_RDWR)

    broker.serve(refuse)
    with pytest.raises(InvalidArgument):
        broker.link.get_lifted("ab")
    with pytest.raises(BrokerLost, match=r"pid 7\) is gone \(it last refused: ab is not here\); lz.connect\(\)"):
        broker.link.get_lifted("cd")
