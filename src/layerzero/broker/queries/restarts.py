"""Restarts that people ask for: which backends a name means, another worker in the place of one, how that goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from layerzero.broker.core import events as ev
from layerzero.broker.core.model import Worker
from layerzero.broker.core.worker_fsm import WorkerState
from layerzero.broker.queries.broker_view import BrokerView
from layerzero.broker.selection.signature import unknown_backend
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary import pools

MAX_TIMEOUT_S = 3600.0
S = WorkerState
_RUNNING = (S.STARTING, S.READY, S.KILLING, S.DRAINING, S.STOPPING)


def backends_of(server: BrokerView, params: Mapping[str, Any]) -> dict[str, Any]:
    """The backends that `name` means: one, the workers of an environment of functions, also by its name without the
    digits behind it where that is one's alone, or of one alone that has a worker."""
    name = params.get("name")
    workers = server.state.workers
    if isinstance(name, str) and name in workers and pools.environment_of(name) != name:
        return {"backends": [name]}
    found = [one for one in workers if pools.environment_of(one) == name]
    if not found and isinstance(name, str):
        alike = sorted({env for env in map(pools.environment_of, workers) if env.startswith(f"{name}.")})
        if len(alike) > 1:  # of what a program asked for before, whose workers have ended, nobody speaks
            running = {pools.environment_of(one) for one, worker in workers.items() if worker.state in _RUNNING}
            alike = [env for env in alike if env in running] or alike
        if len(alike) > 1:
            raise InvalidArgument(f"name one of {', '.join(alike)}: {name} is short for each of them")
        found = [one for one in workers if alike and pools.environment_of(one) == alike[0]]
    if not found:
        engine = server.state.engine
        raise InvalidArgument(unknown_backend(name, engine.capabilities, engine.refused.get(str(name), "")))
    return {"backends": found}


def restart(server: BrokerView, params: Mapping[str, Any]) -> dict[str, Any]:
    """Forget a backend's failures, and start another worker in the place of the one that runs: it takes over when it is
    ready, within `timeout_s`, and the one before ends with the calls that it has. `force`: that one ends at once.
    Answered as `restarting`, with what is there then."""
    name, is_forced = params.get("backend"), params.get("force", False)
    timeout_s: object = params.get("timeout_s")
    if not isinstance(name, str) or name not in server.state.workers:
        raise InvalidArgument(unknown_backend(name, server.state.engine.capabilities, ""))
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise InvalidArgument(f"timeout_s is {timeout_s!r:.80}; allowed: seconds above 0, up to {MAX_TIMEOUT_S:g}")
    if type(is_forced) is not bool:
        raise InvalidArgument(f"force is {is_forced!r:.80}; allowed: true or false")
    until_s, missing = time.monotonic() + timeout_s, None
    if name not in server.joined.names:
        if server.launcher.is_renewed(name):
            server.state.engine.note_env(name, server.launcher.env_ids().get(name, ""))
        missing = server.launcher.missing(name)
    before = restarting(server, {"backend": name})
    server.lifts.note_restart(name)
    server.handle(ev.RestartAsked(name, missing, until_s, is_forced))
    if name in server.joined.names:
        server.joined.offer(name)
    return before


def restarting(server: BrokerView, params: Mapping[str, Any]) -> dict[str, Any]:
    """The workers of `backend`, first the one that gets its calls: `state`, `pid` (0 where there is no process),
    `calls` that they have, and `kept`: objects, streams and answers for clients. `failure`: why the last one that was
    to take over did not. `is_joined`: somebody else starts them. `unavailable`: as in `status`."""
    name = params.get("backend")
    if not isinstance(name, str) or name not in server.state.workers:
        raise InvalidArgument(unknown_backend(name, server.state.engine.capabilities, ""))
    succession = server.state.lifecycle.succession
    workers = [_worker(server, worker) for worker in succession.of(name)]
    reason = server.state.unavailable_at(time.monotonic()).get(name)
    return {
        "backend": name,
        "workers": workers,
        "failure": succession.failures.get(name),
        "is_joined": server.state.workers[name].is_joined,
        "unavailable": reason and {"code": reason.code.value, "detail": reason.detail, "repair": reason.repair},
    }


def _worker(server: BrokerView, worker: Worker) -> dict[str, Any]:
    process = server.processes.get((worker.backend, worker.generation))
    of_lanes = process is not None and process.page.read()[0] != 0  # which the broker has not
    return {
        "state": worker.state.value,
        "pid": worker.pid if worker.state in _RUNNING else 0,
        "calls": len(worker.running) + len(worker.enqueued) or int(of_lanes),
        "kept": 0 if process is None else process.page.read_kept(),
    }


METHODS: dict[str, Callable[[BrokerView, Mapping[str, Any]], Any]] = {
    "backends_of": backends_of,
    "restart": restart,
    "restarting": restarting,
}
