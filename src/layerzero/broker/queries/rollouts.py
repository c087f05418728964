"""What people ask for of rollouts: to begin one, to end it, to see how it goes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from layerzero.broker.core import events as ev
from layerzero.broker.queries.broker_view import BrokerView
from layerzero.broker.selection.rollout import PROMOTED, Rollout
from layerzero.broker.selection.signature import unknown_backend
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.errors import InvalidArgument

PASSING = (Reason.BACKEND_RESTARTING, Reason.BACKEND_ERROR)  # it serves again by itself


def rollout(server: BrokerView, params: Mapping[str, Any]) -> dict[str, Any]:
    """Begin a rollout: `rollout` as Rollout.to_wire makes it, of which the broker sets state, step and start."""
    given = params.get("rollout")
    if not isinstance(given, dict):
        raise InvalidArgument(f"rollout takes `rollout`: a map, not a {type(given).__name__}")
    asked = Rollout.of({**given, "started_s": time.time(), "step": 0, "state": "running", "why": ""})
    _check(server, asked)
    server.handle(ev.RolloutAsked(asked))
    return rollouts(server, {})


def rollback(server: BrokerView, params: Mapping[str, Any]) -> dict[str, Any]:
    """End the rollout of `backend`, be it running or promoted: calls go to the backend's own version again."""
    name = params.get("backend")
    known = server.state.engine.rollouts.known
    found = known.get(name) if isinstance(name, str) else None
    if found is None:
        there_are = ", ".join(sorted(known)) or "none"
        raise InvalidArgument(f"name a backend that has a rollout: {there_are}; {name!r:.60} has none")
    if not found.is_standing:
        raise InvalidArgument(f"nothing to do: {found.to} was rolled back: {found.why}")
    server.handle(ev.RollbackAsked(found.backend, "lz rollback"))
    return rollouts(server, {})


def rollouts(server: BrokerView, _: Mapping[str, Any]) -> dict[str, Any]:
    """All rollouts with the evidence on those that run, counted by now; and why they are not kept, if so."""
    server.poll_lanes()
    facts = server.state.engine.rollouts.facts(time.monotonic())
    for row in facts:
        reason = server.state.unavailable_at(time.monotonic()).get(row["to"])
        is_there = row["to"] in server.state.workers
        row["unavailable"] = (str(reason) if reason else "") if is_there else f"there is no backend {row['to']}"
        row["uncertified"] = _uncertified(server, row["to"]) if is_there else []
    return {"rollouts": facts, "problem": server.rollout_file.problem}


def problems(server: BrokerView) -> list[str]:
    """What somebody has to know who does not ask for rollouts."""
    found = [server.rollout_file.problem]
    for one in server.state.engine.rollouts.known.values():
        if one.is_standing and one.to not in server.state.workers:
            found.append(
                f"{one}: there is no {one.to} any more, {one.backend} serves its calls; lz rollback {one.backend}"
            )
    return [text for text in found if text]


def _uncertified(server: BrokerView, backend: str) -> list[str]:
    """Its kernels that its probe has certified for no call, by their names within it."""
    record = server.launcher.record(backend)
    ids = server.state.engine.capabilities[backend].kernel_ids if record is not None else ()
    return sorted(one[len(backend) + 1 :] for one in ids if record is not None and not record.certified.get(one))


def _check(server: BrokerView, asked: Rollout) -> None:
    """Raises InvalidArgument for one that cannot begin."""
    engine = server.state.engine
    for name in (asked.backend, asked.to):
        if name not in server.state.workers:
            raise InvalidArgument(unknown_backend(name, engine.capabilities, engine.refused.get(name, "")))
    before = engine.rollouts.known.get(asked.backend)
    if before is not None and before.is_standing:
        how = "was promoted" if before.state == PROMOTED else "is running"
        raise InvalidArgument(f"end the other one first: lz rollback {asked.backend}; {before.to} {how}")
    reason = server.state.unavailable_at(time.monotonic()).get(asked.to)
    if reason is not None and reason.code not in PASSING:
        first = f"{reason.repair}; " if reason.repair else ""
        raise InvalidArgument(f"{first}{asked.to} cannot serve: {reason.code.value}: {reason.detail}")
    if len(_uncertified(server, asked.to)) == len(engine.capabilities[asked.to].kernel_ids):
        raise InvalidArgument(
            f"choose another version, or lz env probe {asked.to}: its probe has certified none of its kernels"
        )


METHODS = {"rollout": rollout, "rollback": rollback, "rollouts": rollouts}
