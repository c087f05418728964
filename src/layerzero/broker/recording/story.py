"""What became of one call, or of one backend's workers: the lines of a replay that are about it."""

from __future__ import annotations

from typing import Any, NamedTuple

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.core.state import BrokerState
from layerzero.broker.selection.signature import CallSpec
from layerzero.ipc.errors import InvalidArgument, LayerZeroError

MAX_LINES = 10_000
MAX_TEXT = 160


class Line(NamedTuple):
    """`number`: of an event, or "17.2" of an action that the event 17 has led to."""

    number: str
    at_s: float
    what: str
    text: str


class Story:
    """Of the call `seq` of the client with this number, or of the workers of `backend`."""

    def __init__(self, *, call: str = "", backend: str = "") -> None:
        self.lines: list[Line] = []
        self.dropped = 0
        self._backend = backend
        self._client = self._seq = 0
        self._dispatches: set[int] = set()
        self._identity = b""  # of the call's client
        self._workers: set[bytes] = set()  # identities that workers of the backend have had
        self._now: tuple[int, float] = (0, 0.0)
        if call:
            client, _, seq = call.partition(":")
            if not (client.isascii() and client.isdigit() and seq.isascii() and seq.isdigit() and len(call) < 40):
                raise InvalidArgument(f"--call {call!r:.40}; allowed: CLIENT:SEQ, such as 2:17")
            self._client, self._seq = int(client), int(seq)

    def take(self, state: BrokerState, number: int, at_s: float, event: ev.Event, actions: list[act.Action]) -> None:
        """What happened: the core has done these actions on this event."""
        self._now = number, at_s
        if self._backend:
            self._of_backend(event, actions)
        else:
            self._of_call(state, event, actions)

    def _say(self, part: int, what: Any, text: str = "") -> None:
        if len(self.lines) >= MAX_LINES:
            self.dropped += 1
            return
        number, at_s = self._now
        shown = "".join(one if one.isprintable() else " " for one in text)[:MAX_TEXT]
        self.lines.append(Line(f"{number}.{part}" if part else str(number), at_s, type(what).__name__, shown))

    # --- a call

    def _of_call(self, state: BrokerState, event: ev.Event, actions: list[act.Action]) -> None:
        if isinstance(event, ev.ClientJoined) and event.number == self._client:
            self._identity = event.identity
        if not self._identity:
            return
        is_told = self._is_of_call(event)
        if is_told:
            self._say(0, event, self._event_text(state, event))
        for part, action in enumerate(actions, 1):
            if isinstance(action, act.Run) and action.client == self._client and self._has_run(state, action):
                self._dispatches.add(action.dispatch)
                where = _worker(state, action)
                self._say(part, action, f"attempt {action.attempt}, dispatch {action.dispatch}, {where}")
            elif isinstance(action, act.Answer | act.Refuse | act.ReleaseCall) and self._is_its(action):
                self._tell_event(is_told, event, state)
                self._say(part, action, _end_text(action))
            elif is_told and isinstance(action, act.Note | act.Kill | act.Spawn | act.Probe):
                self._say(part, action, _action_text(action))

    def _tell_event(self, is_told: bool, event: ev.Event, state: BrokerState) -> None:
        if not is_told and (not self.lines or self.lines[-1].number.partition(".")[0] != str(self._now[0])):
            self._say(0, event, self._event_text(state, event))

    def _is_its(self, action: Any) -> bool:
        return bool(action.identity == self._identity and action.seq == self._seq)

    def _is_of_call(self, event: ev.Event) -> bool:
        if isinstance(event, ev.CallArrived | ev.CallUnbound):
            return event.identity == self._identity and event.seq == self._seq
        if isinstance(event, ev.CallRan | ev.CallRaised):
            return event.dispatch in self._dispatches
        if isinstance(event, ev.WorkerExited):
            return event.executing in self._dispatches
        return False

    def _has_run(self, state: BrokerState, action: act.Run) -> bool:
        worker = state.lifecycle.by_identity.get(action.identity)
        if worker is None:
            return False
        return any(
            call.dispatch == action.dispatch and (call.client.number, call.seq) == (self._client, self._seq)
            for call in worker.running
        )

    def _event_text(self, state: BrokerState, event: ev.Event) -> str:
        if isinstance(event, ev.CallArrived):
            client = state.clients.get(event.identity)
            route = None if client is None else client.routes.get(event.route)
            spec = "" if route is None else _spec_text(route.signature.spec)
            return f"{spec} route {event.route}"
        return _event_text(event)

    # --- a backend

    def _of_backend(self, event: ev.Event, actions: list[act.Action]) -> None:
        backend = getattr(event, "backend", None)
        if isinstance(event, ev.WorkerReady) and backend == self._backend:
            self._workers.add(event.identity)
        is_its = backend == self._backend or getattr(event, "identity", None) in self._workers
        if is_its:
            self._say(0, event, _event_text(event))
        for part, action in enumerate(actions, 1):
            its = getattr(action, "backend", None) == self._backend
            its |= getattr(action, "identity", None) in self._workers
            its |= isinstance(action, act.Note) and action.facts.get("backend") == self._backend
            if its:
                if not is_its and (not self.lines or self.lines[-1].number.partition(".")[0] != str(self._now[0])):
                    self._say(0, event, _event_text(event))
                self._say(part, action, _action_text(action))


def _spec_text(spec: CallSpec) -> str:
    inputs = ", ".join("-" if one is None else str(one) for one in spec.inputs)
    return f"{spec.op}({inputs}){f', pinned to {spec.pinned}' if spec.pinned else ''}"


def _worker(state: BrokerState, action: act.Run) -> str:
    worker = state.lifecycle.by_identity[action.identity]
    call = next(one for one in worker.running if one.dispatch == action.dispatch)
    return f"{call.kernel_id} in pid {worker.pid}"


def _event_text(event: ev.Event) -> str:
    match event:
        case ev.CallRan():
            return f"dispatch {event.dispatch}, kernel {event.kernel_ns / 1e3:.0f} us"
        case ev.CallRaised():
            return f"dispatch {event.dispatch}, {_error_text(event.error)}"
        case ev.WorkerExited():
            how = f"signal {-event.exit_code}" if event.exit_code < 0 else f"code {event.exit_code}"
            busy = f", in dispatch {event.executing} ({event.phase})" if event.executing else ""
            return f"{event.backend} {event.generation}, {how}{busy}"
        case ev.ProbeEnded() | ev.SpawnFailed():
            return f"{event.backend}, {_error_text(event.error)}"
        case ev.WorkerSpawned():
            return f"{event.backend} {event.generation}, pid {event.pid}"
        case ev.WorkerReady():
            return f"{event.backend} {event.generation}"
        case ev.WorkerMisbehaved():
            return f"{event.backend} {event.generation}: {event.detail}"
    return str(getattr(event, "backend", ""))


def _action_text(action: act.Action) -> str:
    match action:
        case act.Note():
            return action.event
        case act.Run():
            return f"client {action.client}, dispatch {action.dispatch}, attempt {action.attempt}"
        case act.Spawn() | act.Kill() | act.StopWorker() | act.RetireWorker():
            return f"{action.backend} {action.generation}"
        case act.Probe():
            return action.backend
        case act.SendPrepare() | act.SendDrop():
            return f"plan {action.plan}"
        case act.GrantArena() | act.TakeBackArena():
            return f"arena {action.arena} of client {action.client}"
        case act.GrantLane() | act.TakeBackLane() | act.SendAllow():
            return f"lane {action.lane}"
    return ""


def _end_text(action: act.Action) -> str:
    match action:
        case act.Answer():
            failed = ", ".join(f"{one['kernel_id']} {one['code']}" for one in action.attempts)
            return f"attempt {action.attempt}, kernel {action.kernel_ns / 1e3:.0f} us" + (
                f"; failed before: {failed}" if failed else ""
            )
        case act.Refuse():
            return _error_text(action.error)
    return ""


def _error_text(error: LayerZeroError | None) -> str:
    return "ok" if error is None else f"{error.code}: {error.message.partition(chr(10))[0]}"
