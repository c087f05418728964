"""The broker's loop, turned by hand: what becomes of peers whose messages bring out a fault of ours."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import zmq
from tests.fuzz.requests import make_server
from tests.simulation import route_body

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.io import peers
from layerzero.broker.queries import methods
from layerzero.broker.server import Server
from layerzero.ipc.transport import control, messages, wire
from layerzero.ipc.transport.wire import Kind

Logged = list[dict[str, Any]]


class Peer:
    """A client without any of our client code."""

    def __init__(self, server: Server, context: zmq.Context[Any]) -> None:
        self.sock = control.connect(server.endpoints.control, timeout_s=5)
        control.send(self.sock, messages.Hello(protocols=[wire.PROTOCOL], role="client", package="0", pid=1))
        turn(server)
        self.welcome, _ = control.receive(self.sock, messages.Welcome)
        self.dealer = context.socket(zmq.DEALER)
        self.dealer.setsockopt(zmq.ROUTING_ID, self.welcome.identity)
        self.dealer.connect(self.welcome.endpoint)
        self._server = server

    def send(self, kind: Kind, **fields: Any) -> None:
        self.dealer.send(wire.pack(kind, **fields))
        turn(self._server)

    def ask(self, method: str, **params: Any) -> bytes:
        """The answer's frame; empty when there is none."""
        self.send(Kind.REQUEST, seq=7, body=messages.encode(messages.Request(method=method, params=params)))
        return self.dealer.recv() if self.dealer.poll(2000) else b""

    def is_cut_off(self) -> bool:
        self.sock.setblocking(False)
        try:
            while self.sock.recv(1 << 16, socket.MSG_DONTWAIT):
                pass
        except BlockingIOError:
            return False
        except ConnectionResetError:
            pass
        return True


def turn(server: Server, times: int = 40) -> None:
    """Some turns of the broker's loop, without its clock."""
    for _ in range(times):
        server._routers.take()
        server._poller.wait(0.005)
        server._incremental_answers.go_on()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = make_server(tmp_path)
    yield server
    with suppress(Exception):
        server._close()


@pytest.fixture
def join(server: Server) -> Iterator[Callable[[], Peer]]:
    context, joined = zmq.Context(), []

    def join() -> Peer:
        joined.append(Peer(server, context))
        return joined[-1]

    yield join
    for peer in joined:
        peer.sock.close()
        peer.dealer.close(linger=0)
    context.term()


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Logged:
    """Failures as they are logged."""
    found: Logged = []
    monkeypatch.setattr(peers, "log", lambda event, **facts: found.append({"event": event, **facts}))
    return found


def fail(*_: object) -> None:
    raise OverflowError("cannot convert float infinity to integer")


def break_event(server: Server, *kinds: type, times: int = 1 << 30) -> None:
    """From now on the core fails on these, half way, with something said already."""
    left = [times]
    for kind in kinds:
        real = server.state._handlers[kind]

        def broken(event: Any, real: Callable[[Any], None] = real) -> None:
            server.state.effects.emit(act.Note("half.way", {}))
            left[0] -= 1
            if left[0] >= 0:
                fail()
            real(event)

        server.state._handlers[kind] = broken


def test_a_failure_on_a_frame_costs_the_client_that_sent_it(
    server: Server, join: Callable[[], Peer], logged: Logged
) -> None:
    """A broker serves all; one message that nobody had thought of ended it for all."""
    attacker, victim = join(), join()
    break_event(server, ev.RouteDefined, times=1)
    attacker.send(Kind.ROUTE, route=1, body=route_body())
    assert attacker.is_cut_off()
    assert victim.ask("ping")
    victim.send(Kind.ROUTE, route=1, body=route_body())
    assert not victim.is_cut_off()
    assert len(server.state.clients) == 1
    (record,) = logged
    assert (record["event"], record["role"]) == ("message.failed", "client")
    assert "OverflowError: cannot convert" in record["error"]
    assert "in fail" in record["traceback"]


def test_a_failure_on_a_control_message_costs_the_client_that_sent_it(
    server: Server, join: Callable[[], Peer], logged: Logged
) -> None:
    """Hellos, arenas, GPUs and lanes come there."""
    attacker, victim = join(), join()
    break_event(server, ev.ArenaGivenUp)
    control.send(attacker.sock, messages.RetireArena(arena=1))
    turn(server)
    assert attacker.is_cut_off()
    assert victim.ask("ping")
    break_event(server, ev.ClientJoined, times=1)
    with control.connect(server.endpoints.control, timeout_s=5) as sock:
        control.send(sock, messages.Hello(protocols=[wire.PROTOCOL], role="client", package="0", pid=1))
        turn(server)
        refused, _ = control.receive(sock, messages.Refused)
        assert "OverflowError" in refused.error["message"]
    assert victim.ask("ping")
    assert [record["event"] for record in logged] == ["message.failed"] * 2


@pytest.mark.parametrize("method", ["policy", "steps"])
def test_a_failure_on_a_request_costs_the_client_that_asked(
    server: Server, join: Callable[[], Peer], monkeypatch: pytest.MonkeyPatch, logged: Logged, method: str
) -> None:
    """Whether the answer is made at once or in steps."""

    def steps(*_: object) -> Any:
        yield
        fail()

    attacker, victim = join(), join()
    monkeypatch.setitem(methods.METHODS, "policy", fail)
    monkeypatch.setitem(methods.METHODS, "steps", steps)
    assert attacker.ask(method) == b""
    assert attacker.is_cut_off()
    assert victim.ask("ping")
    assert len(logged) == 1


def test_what_others_wait_for_is_done_in_spite_of_a_failure(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Actions that the core has asked for hold: those before its failure, and those around one that fails."""
    done: list[str] = []
    monkeypatch.setitem(server._perform, act.Note, lambda action: done.append(action.event))
    break_event(server, ev.RouteForgotten, times=1)
    with pytest.raises(OverflowError):
        server.handle(ev.RouteForgotten(b"C1", 1))
    assert done == ["half.way"]
    monkeypatch.setattr(server.state, "handle", lambda *_: [act.Note("a", {}), act.Exit(), act.Note("b", {})])
    monkeypatch.setitem(server._perform, act.Exit, fail)
    with pytest.raises(OverflowError):
        server.handle(ev.RouteForgotten(b"C1", 1))
    assert done == ["half.way", "a", "b"]


def test_a_second_failure_while_the_client_is_dropped_ends_the_broker(
    server: Server, join: Callable[[], Peer], logged: Logged
) -> None:
    """Then nobody knows what its state is worth: `run` closes what it has and tells all."""
    attacker = join()
    break_event(server, ev.RouteDefined, ev.ClientLeft)
    with pytest.raises(OverflowError):
        attacker.send(Kind.ROUTE, route=1, body=route_body())
    server.state._handlers[ev.ClientLeft] = lambda _: None


def test_a_failure_on_a_workers_frame_has_it_killed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it had sent nonsense; its calls go on elsewhere."""
    heard: list[ev.Event] = []
    peer = peers.Peer(socket.socket(), role="worker", identity=b"W1", backend="alpha", generation=3)
    server._links.add(peer)
    monkeypatch.setattr(server._worker_frames, "event_of", fail)
    monkeypatch.setattr(server._connections, "_handle", heard.append)
    server._from_worker(b"W1", b"")
    (event,) = heard
    assert isinstance(event, ev.WorkerMisbehaved)
    assert (event.backend, event.generation) == ("alpha", 3)
    peer.close()


def test_a_plan_is_measured_before_it_is_made(server: Server, join: Callable[[], Peer]) -> None:
    """200,000 calls with 80,000 links were 40 s of comparisons before anybody looked how many they are."""
    client = join()
    few = {"routes": [route_body()], "calls": [0, 0], "links": [[0, 1, "x"]], "rewrites": []}
    assert b"cost_us" in client.ask("plan", **few)
    for more in (
        {"calls": [0] * 5000},
        {"links": [[0, 1, "x"]] * 5000},
        {"rewrites": [[[0, 1], 0]] * 5000},
        {"rewrites": [[[0, 1] * 600, 0]]},
        {"routes": [route_body()] * 1500},
        {"links": [[10**9, 1, "x"]]},
        {"links": [5]},
        {"calls": [[]]},
    ):
        assert b"INVALID_ARGUMENT" in client.ask("plan", **{**few, **more})


def test_an_answer_that_no_frame_can_hold_is_an_error(
    server: Server, join: Callable[[], Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's socket would be cut for it."""
    client = join()
    monkeypatch.setitem(methods.METHODS, "policy", lambda *_: {"text": "x" * (1 << 20)})
    answer = client.ask("policy")
    assert b"INVALID_ARGUMENT" in answer
    assert b"Ask for less" in answer
    assert not client.is_cut_off()
