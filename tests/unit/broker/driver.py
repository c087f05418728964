"""A core with toy backends, a clock, and short words for what happens to it."""

from __future__ import annotations

import random
from typing import Any

from tests.simulation import CAPABILITIES, route_body

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.core.limits import Limits
from layerzero.broker.core.state import BrokerState
from layerzero.broker.selection.ranking import Engine
from layerzero.capabilities.descriptor import Capability
from layerzero.capabilities.device import DeviceSpec
from layerzero.capabilities.match import Rejection
from layerzero.ipc.errors import BackendError, LayerZeroError
from layerzero.ipc.transport import wire

LIMITS: dict[str, Any] = {
    "timeout_s": 10.0,
    "start_timeout_s": 60.0,
    "max_in_flight": 8,
    "depth": 2,
    "share": 2,
    "standby": 0,
    "restart_budget": 3,
    "restart_window_s": 30.0,
    "backoff_s": 0.5,
    "backoff_max_s": 30.0,
    "retry_disabled_s": 30.0,
    "retry_disabled_max_s": 600.0,
    "poison_quarantine_s": 600.0,
    "express": False,
}
CLIENT = b"C1"
SPEC = ["float32", [4], [1]]
GENTLE = BackendError("RuntimeError: kernel raised")
BODY = wire.pack_refs([wire.Ref(1, 0, 0, 64), wire.Ref(1, 0, 64, 64)])


def kinds(actions: list[act.Action]) -> list[str]:
    return [type(action).__name__ for action in actions]


def refusal(actions: list[act.Action]) -> act.Refuse:
    (refuse,) = (action for action in actions if isinstance(action, act.Refuse))
    return refuse


class Driver:
    """`client` 1 with arena 1 of 128 bytes and route 1 (silu on float32) is there. Notes are kept apart in `notes`."""

    def __init__(
        self,
        *backends: str,
        unusable: dict[str, Rejection] | None = None,
        changed: dict[str, Capability] | None = None,
        gpus: tuple[DeviceSpec, ...] = (),
        **limits: Any,
    ) -> None:
        self.now_s = 100.0
        self.notes: list[act.Note] = []
        known = {name: CAPABILITIES[name] for name in backends or ("alpha", "beta", "gamma")}
        known |= changed or {}
        self.state = BrokerState(
            Engine(known, DeviceSpec(), gpus=gpus), unusable or {}, Limits(**{**LIMITS, **limits}), random.Random(1)
        )
        self.pids = 0
        self.join(CLIENT, 1)

    def __call__(self, event: ev.Event) -> list[act.Action]:
        actions = self.state.handle(event, self.now_s)
        self.notes += [action for action in actions if isinstance(action, act.Note)]
        return [action for action in actions if not isinstance(action, act.Note)]

    def join(self, identity: bytes, number: int) -> None:
        self(ev.ClientJoined(identity, number))
        self(ev.ArenaOffered(identity, 1, 128))
        self.route(1, identity=identity)

    def route(self, number: int, *, identity: bytes = CLIENT, **signature: str) -> list[act.Action]:
        return self(ev.RouteDefined(identity, number, route_body(**signature)))

    def call(self, seq: int, route: int = 1, *, identity: bytes = CLIENT, **more: Any) -> list[act.Action]:
        fields = {"timeout_s": 0.0, "body": BODY, **more}
        return self(ev.CallArrived(identity, route, seq, **fields))

    def tick(self, after_s: float) -> list[act.Action]:
        self.now_s += after_s
        return self(ev.Tick())

    def ready(self, backend: str) -> list[act.Action]:
        """Its probe passes if one is due, its worker starts and loads; returns what that leads to."""
        worker = self.state.workers[backend]
        if worker.state.value == "probing":
            self(ev.ProbeEnded(backend, None))
        self.pids += 1
        self(ev.WorkerSpawned(backend, worker.generation, self.pids))
        return self(ev.WorkerReady(b"W%d" % self.pids, backend, worker.generation, {"lib": "1"}))

    def serve(self, seq: int, route: int = 1, **more: Any) -> act.Run:
        """A call that its best backend, started if need be, is now running."""
        actions = self.call(seq, route, **more)
        for action in actions:
            if isinstance(action, act.Probe):
                actions = self.ready(action.backend)
        return self.run_of(actions)

    @staticmethod
    def run_of(actions: list[act.Action]) -> act.Run:
        (run,) = (action for action in actions if isinstance(action, act.Run))
        return run

    def ran(self, run: act.Run, body: bytes = b"", kernel_ns: int = 5000) -> list[act.Action]:
        return self(ev.CallRan(run.identity, run.dispatch, run.attempt, kernel_ns, body))

    def raised(self, run: act.Run, error: LayerZeroError) -> list[act.Action]:
        return self(ev.CallRaised(run.identity, run.dispatch, run.attempt, error))

    def dies(
        self, backend: str, executing: int = 0, *, exit_code: int = -11, phase: str = "executing", stderr: str = ""
    ) -> list[act.Action]:
        generation = self.state.workers[backend].generation
        return self(ev.WorkerExited(backend, generation, exit_code, executing, phase, stderr))


def poisoned() -> Driver:
    driver = Driver()
    run = driver.serve(1)
    driver.dies("alpha", run.dispatch)
    run = driver.run_of(driver.ready("beta"))
    refuse = refusal(driver.dies("beta", run.dispatch))
    assert (refuse.error.code, refuse.error.facts) == ("POISON", {"quarantine_s": 600.0})
    assert [attempt["backend"] for attempt in refuse.attempts] == ["alpha", "beta"]
    return driver
