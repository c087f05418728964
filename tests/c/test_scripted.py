"""liblayerzero against a broker that says what the test has it say: what real ones say rarely, and what none should."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from tests.c.conftest import Built, libzmq
from tests.process.harness import PATIENCE_S

from layerzero.ipc.shm.counter_page import CounterPage
from layerzero.ipc.shm.counter_words import Label
from layerzero.ipc.transport import control, messages, wire
from layerzero.ipc.transport.counter_messages import AddCounters, CountersAdded
from layerzero.ipc.transport.wire import Header, Kind

IDENTITY = b"L" + bytes(range(16))


class Script:
    """The broker's end of one connection."""

    def __init__(self, folder: Path, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.folder = folder
        self.listener = control.listen(folder / "broker.sock")
        self.router = context.socket(zmq.ROUTER)
        self.router.bind(f"ipc://{folder}/router")
        self.router.setsockopt(zmq.RCVTIMEO, int(1000 * PATIENCE_S))
        self.peers: list[socket.socket] = []

    def connection(self) -> socket.socket:
        """The next one, before its hello."""
        self.listener.settimeout(PATIENCE_S)
        peer, _ = self.listener.accept()
        peer.settimeout(PATIENCE_S)
        self.peers.append(peer)
        return peer

    def accept(
        self, answer: messages.Message | None = None, timeout_s: float = 60.0, *, counts: bool = False
    ) -> socket.socket:
        """Hear a hello and answer it, with a welcome if nothing else is given."""
        peer = self.connection()
        hello, _ = control.receive(peer, messages.Hello)
        assert (hello.role, hello.protocols) == ("client", [wire.PROTOCOL])
        welcome = messages.Welcome(
            protocol=wire.PROTOCOL,
            package="0",
            broker="0" * 16,
            broker_pid=7,
            endpoint=f"ipc://{self.folder}/router",
            identity=IDENTITY,
            number=1,
            max_in_flight=4,
            timeout_s=timeout_s,
            counts=counts,
        )
        control.send(peer, answer or welcome)
        return peer

    def add_arena(self, peer: socket.socket) -> None:
        """Take the program's first memory, as a worker would map it."""
        message, fds = control.receive(peer, messages.AddArena)
        assert message.arena == 1
        assert os.fstat(fds[0]).st_size == message.nbytes
        os.close(fds[0])
        control.send(peer, messages.ArenaAdded(arena=1))

    def hear(self, kind: Kind) -> Header:
        """The next frame, which has this kind."""
        identity, frame = self.router.recv_multipart()
        header = wire.unpack(frame)
        assert (identity, header.kind) == (IDENTITY, kind)
        return header

    def say(self, frame: bytes) -> None:
        self.router.send_multipart([IDENTITY, frame])

    def take_route(self) -> None:
        """The question about a new signature, and the route."""
        self.say(wire.pack(Kind.RESPONSE, seq=self.hear(Kind.REQUEST).seq, body=msgpack.packb({"pending": []})))
        self.hear(Kind.ROUTE)

    def close(self) -> None:
        for sock in (self.listener, *self.peers):
            sock.close()
        self.router.close(linger=0)


@pytest.fixture
def script() -> Iterator[Script]:
    with tempfile.TemporaryDirectory(prefix="lzc") as folder:
        context: zmq.Context[Any] = zmq.Context()
        script = Script(Path(folder), context)
        yield script
        script.close()
        context.term()


@contextmanager
def program(built: Built, script: Script, mode: str, **variables: str) -> Iterator[list[str]]:
    """Runs meanwhile, and must end well; what it said is there then."""
    command = [built["calls"], mode, str(script.folder), libzmq()]
    said: list[str] = []
    environ = os.environ | variables
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ) as running:
        try:
            yield said
            out, errors = running.communicate(timeout=PATIENCE_S)
        finally:
            running.kill()
    assert running.returncode == 0, errors
    said += out.splitlines()


def test_memory_of_a_worker_out_of_reach_is_kept_until_it_is_released(built: Built, script: Script) -> None:
    """Freed meanwhile, it is handed out again only behind RELEASED."""
    with program(built, script, "lent"):
        script.add_arena(script.accept())
        script.take_route()
        first = script.hear(Kind.EXECUTE).seq
        error = {"code": "UNREACHABLE", "message": "no answer", "facts": {}}
        body = messages.encode(messages.Outcome(error=error))
        script.say(wire.pack(Kind.FAILED, flags=wire.STILL_LENT, seq=first, body=body))
        second = script.hear(Kind.EXECUTE).seq
        script.say(wire.pack(Kind.RELEASED, seq=first))
        script.say(wire.pack(Kind.DONE, seq=second, attempt=1))


def test_a_call_whose_worker_is_out_of_reach_is_counted_by_its_client(built: Built, script: Script) -> None:
    """The broker leaves that to who might make the call again with other memory."""
    with program(built, script, "lent"):
        peer = script.accept(counts=True)
        script.add_arena(peer)
        script.take_route()
        first = script.hear(Kind.EXECUTE).seq
        failed = {"backend": "alpha", "kernel_id": "alpha.silu", "worker_pid": 7, "code": "UNREACHABLE", "detail": ""}
        error = {"code": "UNREACHABLE", "message": "no answer", "facts": {}}
        body = messages.encode(messages.Outcome(error=error, attempts=[failed]))
        script.say(wire.pack(Kind.FAILED, flags=wire.STILL_LENT, seq=first, body=body))
        _, fds = control.receive(peer, AddCounters)
        page = CounterPage(fds[0], writable=False)
        control.send(peer, CountersAdded())
        second = script.hear(Kind.EXECUTE).seq
        [grown] = page.grown()
        script.say(wire.pack(Kind.RELEASED, seq=first))
        script.say(wire.pack(Kind.DONE, seq=second, attempt=1))
    page.close()
    os.close(fds[0])
    assert (grown.label, grown.errors) == (Label("silu", "alpha.silu", "broker"), {"UNREACHABLE": 1})


def test_late_answers_to_what_was_given_up_are_passed_over(built: Built, script: Script) -> None:
    """Also those of other kinds."""
    with program(built, script, "cut") as said:
        peer = script.accept()
        control.send(peer, messages.LaneAdded(lane=9, is_open=False))
        control.send(peer, CountersAdded())
        control.send(peer, messages.ArenaAdded(arena=9))
        script.add_arena(peer)
        script.take_route()
        script.say(wire.pack(Kind.DONE, seq=script.hear(Kind.EXECUTE).seq, attempt=1))
    assert said == ["OK", ""]


def test_memory_that_could_not_be_shown_is_retired(built: Built, script: Script) -> None:
    """A broker that answers late would keep it."""
    with program(built, script, "refused") as said:
        peer = script.accept()
        _, fds = control.receive(peer, messages.AddArena)
        os.close(fds[0])
        control.send(peer, messages.Ping(number=1))  # no answer to it, as none at all
        message, _ = control.receive(peer, messages.RetireArena)
        assert message.arena == 1
    assert said == ["BAD_MESSAGE"]


def test_a_broker_that_is_silent_is_asked_for_a_sign_of_life(built: Built, script: Script) -> None:
    """And one that gives it has all the time that the call takes."""
    with program(built, script, "cut") as said:
        script.add_arena(script.accept(timeout_s=0.02))
        question = script.hear(Kind.REQUEST).seq
        ping = script.hear(Kind.REQUEST).seq
        assert ping != question
        script.say(wire.pack(Kind.RESPONSE, seq=ping, body=msgpack.packb(None)))
        script.say(wire.pack(Kind.RESPONSE, seq=question, body=msgpack.packb({"pending": []})))
        script.hear(Kind.ROUTE)
        script.say(wire.pack(Kind.DONE, seq=script.hear(Kind.EXECUTE).seq, attempt=1))
    assert said == ["OK", ""]


def test_a_broker_that_gives_no_sign_of_life_is_lost(built: Built, script: Script) -> None:
    """As one that was stopped: nobody waits for ever."""
    with program(built, script, "cut", LZ_TEST_GRACE_S="0.05") as said:
        script.add_arena(script.accept(timeout_s=0.02))
        script.hear(Kind.REQUEST)
        script.hear(Kind.REQUEST)
    assert said[0] == "BROKER_LOST"
    assert said[2].startswith("The broker says nothing, although it was asked.")


@pytest.mark.parametrize(
    "frame",
    [b"", b"\1" * 31, b"\1\0" + bytes(30), wire.pack(99), b"\2" * 2000],
    ids=["empty", "short", "protocol", "kind", "noise"],
)
def test_frames_that_are_none_end_the_connection(built: Built, script: Script, frame: bytes) -> None:
    """Nothing is guessed: the client says that the broker broke the protocol, in this call and the next."""
    with program(built, script, "cut") as said:
        script.add_arena(script.accept())
        script.hear(Kind.REQUEST)
        script.say(frame)
    assert said[:2] == ["BAD_MESSAGE", "Close this client and connect again."]


def test_what_the_broker_says_last_is_the_reason(built: Built, script: Script) -> None:
    """A client that is dropped is told why."""
    with program(built, script, "cut") as said:
        peer = script.accept()
        script.add_arena(peer)
        script.hear(Kind.REQUEST)
        error = {"code": "VERSION_MISMATCH", "message": "too old", "facts": {}}
        control.send(peer, messages.Refused(error=error))
        peer.close()
    assert said == ["VERSION_MISMATCH", "Close this client and connect again.", "too old"]


def test_what_the_broker_says_last_is_heard_where_it_leaves_something_unread(built: Built, script: Script) -> None:
    """The kernel says first that the connection was reset."""
    with program(built, script, "refused") as said:
        peer = script.accept()
        assert control.is_readable(peer.fileno(), PATIENCE_S)
        control.send(peer, messages.Refused(error={"code": "VERSION_MISMATCH", "message": "too old", "facts": {}}))
        peer.close()
    assert said == ["VERSION_MISMATCH"]


def test_a_client_goes_where_the_broker_sends_it(built: Built, script: Script, tmp_path: Path) -> None:
    """To the broker that its user has; from one to the next it is not sent."""
    there = control.listen(script.folder / "there.sock")
    here, script.listener = script.listener, there
    with program(built, script, "cut") as said:
        script.listener = here
        script.accept(messages.Redirect(path=str(script.folder / "there.sock"))).close()
        script.listener = there
        script.add_arena(script.accept())
        script.take_route()
        script.say(wire.pack(Kind.DONE, seq=script.hear(Kind.EXECUTE).seq, attempt=1))
    here.close()
    assert said == ["OK", ""]


def test_what_is_no_welcome_is_refused(built: Built, script: Script) -> None:
    """A refusal has its own code; a hang-up before the welcome is a broker that is gone."""
    with program(built, script, "unconnected") as said:
        script.accept(messages.Refused(error={"code": "BUSY", "message": "full", "facts": {}}))
    assert said[0] == "BUSY"
    with program(built, script, "unconnected") as said:
        script.accept(messages.Ping(number=1))
    assert said[0] == "BAD_MESSAGE"
    for timeout_s in (float("inf"), 1e12, 86_401.0, 0.0):
        with program(built, script, "unconnected") as said:
            script.accept(timeout_s=timeout_s)
        assert said[0] == "BAD_MESSAGE"
    with program(built, script, "unconnected") as said:
        script.connection().close()
    assert said[0] == "BROKER_LOST"
