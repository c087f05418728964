"""A record's events through the core again: does it take the same actions, and what became of one call or worker? The
core is the broker's own; nothing is started, opened or sent. Pure but for what iterates over the lines."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.core.state import BrokerState
from layerzero.broker.recording.form import Names, decode
from layerzero.broker.recording.sketch import sketch
from layerzero.broker.recording.start import HEAD, SCHEMA, Start, TableForm
from layerzero.broker.recording.story import Story
from layerzero.broker.selection.dispatch_table import DispatchTable
from layerzero.broker.selection.policy_values import Known
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.ops import OPS

MAX_LINE = 32 << 20
MAX_EVENTS = 10_000_000
EVENTS: dict[str, type] = {one.__name__: one for one in ev.Event.__args__}
ACTIONS = frozenset(one.__name__ for one in act.Action.__args__)


@dataclass
class Difference:
    """Where the core first does something else: the event, what was recorded of it, and what it does now."""

    event: int
    line: int
    at_s: float
    name: str
    recorded: list[dict[str, Any]]
    now: list[dict[str, Any]]

    def texts(self) -> Iterator[str]:
        """The first action that differs, as it was and as it is."""
        yield f"event {self.event} (line {self.line}), {self.name}: the core does something else than was recorded"
        for n in range(max(len(self.recorded), len(self.now))):
            then, now = (side[n] if n < len(side) else None for side in (self.recorded, self.now))
            if then != now:
                yield f"  action {n + 1} recorded: {_shown(then)}"
                yield f"  action {n + 1} now:      {_shown(now)}"
                changed = [] if then is None or now is None else _changed(then.get("with"), now.get("with"))
                if changed:
                    yield f"  differs in: {', '.join(changed)}"
                return


@dataclass
class Result:
    """What a replay has shown. `end`: of the record's last line; empty where there is none, since the broker was
    killed. `failed`: calls that ended in an error, CLIENT:SEQ, and its code. `fell_back`: those that failed somewhere
    and were answered."""

    package: str
    unix_s: float
    begun_s: float
    events: int = 0
    actions: int = 0
    last_s: float = 0.0
    end: str = ""
    notes: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    difference: Difference | None = None
    failed: list[tuple[str, str]] = field(default_factory=list)
    fell_back: list[str] = field(default_factory=list)
    # Workers' ends before the broker's: number of the event, backend, exit code.
    exits: list[tuple[int, str, int]] = field(default_factory=list)


class _Group:
    """An event's line with those of its actions."""

    def __init__(self, line: int, told: dict[str, Any]) -> None:
        self.line = line
        self.told = told
        self.actions: list[dict[str, Any]] = []


def replay(lines: Iterable[bytes], story: Story | None = None) -> Result:
    """Replay the record whose lines these are, until its end or the first difference. `story`: is told what happens.
    Raises InvalidArgument for what is no record, with the line."""
    source = _Lines(lines)
    number, head = source.head()
    try:
        start = Start.of(head["start"])
    except InvalidArgument as exc:
        raise InvalidArgument(f"line {number}: {exc.message}") from exc
    state = start.state()
    known = Known.of(start.capabilities, OPS)
    result = Result(str(head["package"])[:80], float(head["unix_s"]), 0.0)
    if start.lifted:
        lifted = ", ".join(sorted(start.lifted))
        result.notes.append(f"callers launched kernels of {lifted} themselves, which is not in the record")
    names = Names()
    for group in source.groups():
        if "told" in group.told:
            _tell(state, group)
        elif "end" in group.told:
            result.end = str(group.told["end"])[:200]
        elif not _step(state, group, known, names, result, story, is_last=source.is_over):
            break
        elif group.told["event"] == "BackendLearned":
            known = Known.of(state.capabilities, OPS)
    if not result.end and result.difference is None:
        result.notes.append("the record has no end: its broker was killed, or runs")
    return result


def _step(
    state: BrokerState,
    group: _Group,
    known: Known,
    names: Names,
    result: Result,
    story: Story | None,
    *,
    is_last: bool,
) -> bool:
    """One event. False: the core did something else."""
    told, number = group.told, group.told["n"]
    event, at_s = _event(group, known), float(told["at_s"])
    raised = ""
    try:
        actions = state.handle(event, at_s)
    except Exception as exc:
        raised, actions = type(exc).__name__, state.effects.actions
    done = [{"action": type(one).__name__, "with": sketch(one, names)} for one in actions]
    now = json.loads(json.dumps(done))
    recorded = [{"action": one["action"], "with": one["with"]} for one in group.actions]
    result.begun_s = result.begun_s or at_s
    result.events, result.last_s = result.events + 1, at_s
    result.actions += len(actions)
    result.kinds[told["event"]] += 1
    _note(result, state, event, actions)
    if story is not None:
        story.take(state, number, at_s, event, actions)
    if raised != told.get("raised", ""):
        result.notes.append(f"event {number}: recorded {told.get('raised', 'no error')}, now {raised or 'no error'}")
    elif now == recorded:
        return True
    if is_last and recorded == now[: len(recorded)] and not result.end:
        result.notes.append("of its last event not all actions were written")
        return True
    result.difference = Difference(number, group.line, at_s, told["event"], recorded, now)
    return False


def _note(result: Result, state: BrokerState, event: ev.Event, actions: list[act.Action]) -> None:
    if isinstance(event, ev.WorkerExited) and not state.stopping:
        result.exits.append((result.events, event.backend, event.exit_code))
    for one in actions:
        if isinstance(one, act.Refuse | act.Answer):
            client = state.clients.get(one.identity)
            call = f"{client.number if client is not None else 0}:{one.seq}"
            if isinstance(one, act.Refuse):
                result.failed.append((call, one.error.code))
            elif one.attempts:
                result.fell_back.append(call)


def _event(group: _Group, known: Known) -> ev.Event:
    told = group.told
    kind = EVENTS.get(told["event"])
    if kind is None:
        raise InvalidArgument(f"line {group.line}: {told['event']!r:.80} is no event that this version knows")
    try:
        event: ev.Event = decode(kind, told["with"], known)
    except InvalidArgument as exc:
        raise InvalidArgument(f"line {group.line}: {exc.message}") from exc
    return event


def _tell(state: BrokerState, group: _Group) -> None:
    """What the engine was told past the events."""
    what, values = group.told["told"], group.told.get("with")
    engine = state.engine
    try:
        match what, values:
            case "table", [None]:
                engine.set_table(None)
            case "table", [dict(form)]:
                table = decode(TableForm, form, place="table")
                engine.set_table(DispatchTable(table.header, table.groups))
            case "env", [str(backend), str(env)]:
                engine.note_env(backend, env)
            case "free_memory", [int() | None as nbytes, str(device)]:
                engine.note_free_memory(nbytes, device)
            case "epoch", [int(by)]:
                engine.epoch += by
            case _:
                raise InvalidArgument(f"{what!r:.80} with {values!r:.80} is nothing that an engine is told")
    except InvalidArgument as exc:
        raise InvalidArgument(f"line {group.line}: {exc.message}") from exc


class _Lines:
    """A record's lines, checked: a head, then events with their actions behind them. A line that was cut off at the
    end of the file is left out."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        self._lines = iter(lines)
        self._number = 0
        self.is_over = False  # what `groups` has given is the last one

    def _next(self) -> dict[str, Any] | None:
        for data in self._lines:
            self._number += 1
            if len(data) > MAX_LINE:
                raise InvalidArgument(f"line {self._number}: longer than {MAX_LINE:,} bytes")
            try:
                value = json.loads(data, parse_constant=_refuse)
            except (ValueError, RecursionError) as exc:
                if not data.endswith(b"\n"):
                    return None  # the broker was killed while it wrote
                raise InvalidArgument(f"line {self._number}: no JSON: {exc}") from exc
            if not isinstance(value, dict):
                raise InvalidArgument(f"line {self._number}: no JSON object")
            return value
        return None

    def head(self) -> tuple[int, dict[str, Any]]:
        value = self._next()
        wanted = {"record", "schema", "package", "unix_s", "start"}
        if value is None or value.keys() != wanted or value["record"] != HEAD:
            raise InvalidArgument("this is no record of lz up --record: its first line says something else")
        if value["schema"] != SCHEMA:
            raise InvalidArgument(f"its schema is {value['schema']!r:.40}; this version reads {SCHEMA}")
        if type(value["unix_s"]) not in (int, float) or type(value["package"]) is not str:
            raise InvalidArgument("line 1: package is a text and unix_s a number")
        return self._number, value

    def groups(self) -> Iterator[_Group]:
        group: _Group | None = None
        count = 0
        while (value := self._next()) is not None:
            if "action" in value:
                self._check(value, ("n", "cause", "action", "with"))
                if group is None or "event" not in group.told or value["cause"] != group.told["n"]:
                    raise InvalidArgument(f"line {self._number}: an action of event {value['cause']!r:.40} stands here")
                if value["action"] not in ACTIONS:
                    raise InvalidArgument(f"line {self._number}: {value['action']!r:.80} is no action")
                group.actions.append(value)
                continue
            if group is not None:
                yield group
            group = _Group(self._number, value)
            if "event" in value:
                self._check(value, ("n", "at_s", "event", "with", *(("raised",) if "raised" in value else ())))
                count += 1
                if value["n"] != count or count > MAX_EVENTS:
                    raise InvalidArgument(f"line {self._number}: event {value['n']!r:.40} stands where {count} would")
                if type(value["at_s"]) not in (int, float) or type(value["event"]) is not str:
                    raise InvalidArgument(f"line {self._number}: at_s is a number, and event a text")
            elif "told" not in value and "end" not in value:
                raise InvalidArgument(f"line {self._number}: neither an event, nor an action, nor what else is told")
        self.is_over = True
        if group is not None:
            yield group

    def _check(self, value: dict[str, Any], fields: tuple[str, ...]) -> None:
        if value.keys() != set(fields):
            raise InvalidArgument(f"line {self._number}: it has the fields {sorted(value)!r:.120}, not {fields}")


def _refuse(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def _shown(action: dict[str, Any] | None) -> str:
    return "nothing" if action is None else f"{action['action']} {json.dumps(action['with'])}"[:400]


def _changed(then: Any, now: Any) -> list[str]:
    if not isinstance(then, dict) or not isinstance(now, dict):
        return []
    return [name for name in sorted(then.keys() | now.keys()) if then.get(name) != now.get(name)]
