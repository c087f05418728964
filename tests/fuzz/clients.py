"""A client's frames to the broker's core, with calls under way: parts that are valid, and nasty values among them.
Whatever it says, the core takes it or drops that client; another client's calls end once each."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.fuzz import values
from tests.fuzz.source import Source, chunk
from tests.simulation import route_body
from tests.unit.broker.driver import BODY, CLIENT, Driver

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.io import frame_codec
from layerzero.ipc.errors import BackendError, ProtocolError
from layerzero.ipc.transport import wire
from layerzero.ipc.transport.messages import RanHere, Route, decode, encode
from layerzero.ipc.transport.wire import HEADER_BYTES, Kind

TYPED = ()
_MAX_FRAMES = 16
_VICTIM = b"C2"


def run(data: bytes) -> None:
    source, driver = Source(data), Driver("alpha", "beta", express=True)
    driver.join(_VICTIM, 2)
    for number in range(_MAX_FRAMES):
        if not source:
            break
        step, frame = source.number(1), source.chunk()
        _hear(driver, frame)
        if step % 4 == 3:
            _take(driver, driver.tick(step / 32))
        if step % 8 == 7:
            _take(driver, driver.call(100 + number, identity=_VICTIM))
    _take(driver, driver(ev.ClientLeft(CLIENT)))
    ended = _take(driver, driver.call(99, identity=_VICTIM))
    for _ in range(8):
        ended += _take(driver, driver.tick(1.0))
    assert ended.count((_VICTIM, 99)) == 1, ended
    assert driver.state.clients[_VICTIM].open_calls == 0


def _hear(driver: Driver, frame: bytes) -> None:
    if CLIENT not in driver.state.clients:
        return
    try:
        event = frame_codec.of_client(CLIENT, frame)
    except ProtocolError:
        return
    if not isinstance(event, frame_codec.Asked):
        _take(driver, driver(event))


def _take(driver: Driver, actions: list[act.Action]) -> list[tuple[bytes, int]]:
    """As the server would, with honest workers; returns the calls that have ended."""
    ended = []
    for action in actions:
        if isinstance(action, (act.Answer, act.Refuse)):
            ended.append((action.identity, action.seq))
        if type(action) in frame_codec.TO_CLIENT:
            frame_codec.TO_CLIENT[type(action)](action)
        elif type(action) in frame_codec.TO_WORKER:
            frame_codec.TO_WORKER[type(action)](action)
        if isinstance(action, act.Probe) or (
            isinstance(action, act.Spawn) and driver.state.workers[action.backend].generation > 1
        ):
            ended += _take(driver, driver.ready(action.backend))
        elif isinstance(action, act.Kill):
            ended += _take(driver, driver.dies(action.backend))
        elif isinstance(action, act.Run):
            ended += _take(driver, driver.ran(action))
    return ended


def mutate(data: bytes, rng: random.Random) -> bytes | None:
    """The body of one of the frames, as a value."""
    source, steps = Source(data), []
    while source and len(steps) < _MAX_FRAMES:
        steps.append((source.number(1), source.chunk()))
    if not steps:
        return None
    at = rng.randrange(len(steps))
    step, frame = steps[at]
    body = values.mutated(frame[HEADER_BYTES:], rng)
    if body is None:
        return None
    steps[at] = (step, frame[:HEADER_BYTES] + body)
    return b"".join(bytes([step]) + chunk(frame) for step, frame in steps)


def seeds() -> dict[str, bytes]:
    def script(*said: bytes) -> bytes:
        return b"".join(bytes([7 * number % 256]) + chunk(frame) for number, frame in enumerate(said, 1))

    route = wire.pack(Kind.ROUTE, route=2, body=route_body("gelu"))
    call = wire.pack(Kind.EXECUTE, route=1, seq=5, body=BODY)
    hasty = wire.pack(Kind.EXECUTE, route=1, seq=6, time=1, body=BODY)
    layer = {"origin": "x", "values": {"memory_headroom_bytes": "9" * 400}}
    asked = replace(decode(route_body(), Route), policy={"layers": [layer]})
    ran = RanHere(kernel_id="alpha.silu", kernel_ns=5, error=BackendError("no").to_wire())
    return {
        "calls": script(route, call, hasty, wire.pack(Kind.EXECUTE, route=2, seq=7, body=BODY), call, call),
        "claims": script(
            wire.pack(Kind.POISONED, route=1, body=b"d" * 16),
            wire.pack(Kind.RAN_HERE, route=1, body=encode(ran)),
            wire.pack(Kind.OVERDUE, route=1, seq=1, aux=1, time=1),
            wire.pack(Kind.UNBIND, seq=5),
            wire.pack(Kind.FORGET, route=1),
        ),
        "policy": script(wire.pack(Kind.ROUTE, route=2, body=encode(asked)), call),
    }
