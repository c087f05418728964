"""The worker's reply path: frames of a worker that says anything, into the core with calls under way. The core
takes them all, faults that worker at most, and ends every call exactly once when it is gone."""

from __future__ import annotations

import random
from collections import Counter

from tests.fuzz import values
from tests.fuzz.source import Source, chunk
from tests.unit.broker.driver import BODY, CLIENT, Driver

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.io import frame_codec
from layerzero.ipc.errors import BackendError, ProtocolError
from layerzero.ipc.shm.ring_words import RingCall
from layerzero.ipc.shm.timeline_words import TimelinePoint
from layerzero.ipc.transport import wire
from layerzero.ipc.transport.messages import Ready, encode
from layerzero.ipc.transport.plain import pack_body
from layerzero.ipc.transport.wire import HEADER_BYTES, Kind

TYPED = ()
_CALLS = 6
_MAX_FRAMES = 24


def run(data: bytes) -> None:
    source, world = Source(data), _World()
    for _ in range(_MAX_FRAMES):
        if not source:
            break
        step, frame = source.number(1), source.chunk()
        world.hear(step, frame)
    world.finish()


class _World:
    """Two backends; the better one, alpha, is the liar."""

    def __init__(self) -> None:
        self.ended: Counter[int] = Counter()
        self.killed: set[str] = set()
        self.driver = Driver("alpha", "beta", depth=4, express=True)
        self.take(self.driver.call(1))
        for seq in range(2, _CALLS + 1):
            self.take(self.driver.call(seq))

    def take(self, actions: list[act.Action]) -> None:
        """As the server would: probes pass, workers start, and so on."""
        for action in actions:
            if isinstance(action, (act.Answer, act.Refuse)):
                self.ended[action.seq] += 1
                frame_codec.TO_CLIENT[type(action)](action)
            elif isinstance(action, act.Probe):
                self.take(self.driver.ready(action.backend))
            elif isinstance(action, act.Kill):
                self.killed.add(action.backend)
            elif type(action) in frame_codec.TO_CLIENT:
                frame_codec.TO_CLIENT[type(action)](action)
            elif type(action) in frame_codec.TO_WORKER:
                frame_codec.TO_WORKER[type(action)](action)

    def hear(self, step: int, frame: bytes) -> None:
        """A frame of alpha, into which the true numbers are put by most steps, so that it gets past the first check."""
        worker = self.driver.state.workers["alpha"]
        identity, head = worker.identity, worker.running[0] if worker.running else None
        if head is not None and step % 4 and len(frame) >= HEADER_BYTES:
            _, kind, flags, route, _, _, aux, time = wire.HEADER.unpack_from(frame)
            frame = wire.pack(kind, flags, route, head.dispatch, head.attempt, aux, time, frame[HEADER_BYTES:])
        if step % 8 == 7:
            self._end_killed()
            self.serve("beta")
            self.take(self.driver.tick(step / 16))
        if not identity:
            return
        try:
            said = frame_codec.of_worker(identity, frame)
        except ProtocolError as exc:
            event: ev.Event = ev.WorkerMisbehaved("alpha", worker.generation, str(exc))
        else:
            if isinstance(said, Ready):
                event = ev.WorkerReady(identity, "alpha", worker.generation, said.versions)
            elif isinstance(said, frame_codec.Left):
                event = ev.CallHandedBack(
                    identity, said.lane, RingCall(said.call, 1, 1, 1, TimelinePoint(0, 1), BODY), said.error
                )
            else:
                event = said
        self.take(self.driver(event))

    def serve(self, backend: str) -> None:
        """Honestly."""
        worker = self.driver.state.workers[backend]
        while worker.running:
            call = worker.running[0]
            self.take(self.driver(ev.CallRan(worker.identity, call.dispatch, call.attempt, 5, b"")))

    def _end_killed(self) -> None:
        if "alpha" in self.killed:
            self.killed.remove("alpha")
            head = self.driver.state.workers["alpha"].running
            self.take(self.driver.dies("alpha", head[0].dispatch if head else 0))

    def finish(self) -> None:
        """alpha is killed, if it is not dead, and what comes after it is honest: every call has ended once, and nobody
        else was killed."""
        if self.driver.state.workers["alpha"].identity:
            self.killed.add("alpha")
        for _ in range(4 * _CALLS):
            self._end_killed()
            self.serve("alpha")
            self.serve("beta")
            self.take(self.driver.tick(0.5))
            if self.driver.state.workers["alpha"].state.value == "starting":
                self.take(self.driver.ready("alpha"))
        assert self.ended == dict.fromkeys(range(1, _CALLS + 1), 1), f"ends of calls: {self.ended}"
        assert not self.killed, f"killed: {self.killed}"
        assert self.driver.state.clients[CLIENT].open_calls == 0


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
    def script(*said: tuple[int, bytes]) -> bytes:
        return b"".join(bytes([step]) + chunk(frame) for step, frame in said)

    ran = wire.pack(Kind.RAN, time=500, body=pack_body([[1, 2], 3.5]))
    error = pack_body(BackendError("no", backend="alpha", exit_code=1).to_wire())
    raised, left = wire.pack(Kind.RAISED, body=error), wire.pack(Kind.LEFT, seq=1, aux=1, body=error)
    ready = wire.pack(Kind.READY, body=encode(Ready(versions={"lib": "1"}, kernels=["alpha.silu"])))
    return {
        "honest": script((1, ran), (1, ran), (1, ran), (1, ran)),
        "raises": script((1, raised), (1, ran), (1, raised), (15, ran)),
        "stale": script((0, ran), (1, ran)),
        "ready_again": script((1, ready), (1, ran)),
        "left": script((1, left), (1, ran)),
        "nonsense": script((1, ran), (1, b"\xff" * 40), (1, ran)),
    }
