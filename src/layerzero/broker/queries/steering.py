"""What people ask of a broker that runs, on top of its policy and as long as it lives: calls to be recorded, ops locked
to a backend, backends that get no more calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from layerzero.broker.core import events as ev
from layerzero.broker.queries.broker_view import BrokerView
from layerzero.broker.selection.signature import unknown_backend
from layerzero.ipc.errors import ConfigError, InvalidArgument

TRACES, STEERED = "lz trace on", "lz top"  # origins of these layers of policy


def tracing(server: BrokerView, params: Mapping[str, Any]) -> dict[str, Any]:
    """Have programs record calls from now on, on top of what policy says: `traces` as policy has it, empty for no more.
    Answers with what holds now."""
    traces = params.get("traces")
    if not isinstance(traces, dict):
        raise InvalidArgument(f"traces is {traces!r:.80}; allowed: a map of kernels, or process:PID, to shares")
    _ask(server, TRACES, {"traces": traces} if traces else {})
    return {"traces": dict(server.policy.policy.traces)}


def steer(server: BrokerView, params: Mapping[str, Any]) -> dict[str, Any]:
    """`lock`: an op, to the backend `to`, or to none any more if that is empty. `drain`: a backend, which gets no new
    calls, or again if `off`; what it has it finishes. Answers with all that holds; without any of them that alone."""
    locks, drained = _steered(server)
    if (op := params.get("lock")) is not None:
        to = params.get("to")
        if not isinstance(op, str) or not isinstance(to, str):
            raise InvalidArgument(f"lock is {op!r:.80}, to {to!r:.80}; allowed: an op and a backend, or no backend")
        locks.pop(op, None)
        if to:
            locks[op] = f"{to}.*"
    if (name := params.get("drain")) is not None:
        if not isinstance(name, str) or name not in server.state.workers:
            raise InvalidArgument(unknown_backend(name, server.state.engine.capabilities, ""))
        drained = [one for one in drained if one != name] + ([] if params.get("off") else [name])
    if params:
        values: dict[str, Any] = {"locks": locks} if locks else {}
        if drained:  # a rule: it is beside what policy avoids, where a list would be in its place
            values["rules"] = [{"avoid_sources": drained}]
        _ask(server, STEERED, values)
    return {"locks": {op: kernel.removesuffix(".*") for op, kernel in locks.items()}, "drained": drained}


def _steered(server: BrokerView) -> tuple[dict[str, str], list[str]]:
    values = server.policy.asked(STEERED)
    rules = values.get("rules", ())
    return dict(values.get("locks", {})), [name for rule in rules for name in rule["avoid_sources"]]


def _ask(server: BrokerView, origin: str, values: Mapping[str, Any]) -> None:
    try:
        policy = server.policy.ask(origin, values)
    except ConfigError as exc:
        raise InvalidArgument(exc.message) from exc
    server.handle(ev.PolicyChanged(policy))


METHODS: dict[str, Callable[[BrokerView, Mapping[str, Any]], Any]] = {"tracing": tracing, "steer": steer}
