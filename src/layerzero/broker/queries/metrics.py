"""What the exporter asks (client/metrics): all counts at once, made in steps, and whether the broker can serve."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from itertools import islice
from typing import Any

from layerzero.broker.core.tally import Tally
from layerzero.broker.queries.broker_view import BrokerView
from layerzero.ipc.version import __version__

Steps = Generator[None, None, dict[str, Any]]
ROWS_A_STEP = 64
LIVING = ("starting", "ready", "killing", "stopping")  # states of workers that have a process


def metrics(server: BrokerView, _: Mapping[str, Any]) -> Steps:
    """Counts, durations and states, as plain lists: labels first, then numbers."""
    state, now_s = server.state, time.monotonic()
    server.poll_lanes()
    yield
    yield from server.counters.poll()
    tally: Tally = state.effects.tally
    found: dict[str, Any] = {
        "version": __version__,
        "up_s": now_s - server.started_s,
        "epoch": state.engine.epoch,
        "clients": len(state.clients) - 1,  # who asks is one
        "open_calls": sum(client.open_calls for client in state.clients.values()),
        "lanes": len(state.leases.lanes),
        "stale": state.lifecycle.stale,
        "refused_pages": server.counters.refusals,
        "problems": len(server.launcher.problems) + bool(server.policy.problem) + bool(server.table_problem),
    }
    yield
    arenas = [arena for client in state.clients.values() for arena in client.arenas.values()]
    found["arena_bytes"] = {
        "host": sum(arena.nbytes for arena in arenas if not arena.gpu),
        "gpu": sum(arena.nbytes for arena in arenas if arena.gpu),
    }
    for name, durations in (("durations", tally.durations), ("queued", tally.queued)):
        rows, left = [], iter(durations.items())
        while some := list(islice(left, ROWS_A_STEP)):
            rows += [[*key, list(its.buckets), its.sum_ns] for key, its in some]
            yield
        found[name] = rows
    counts = {
        "errors": tally.errors,
        "fallbacks": tally.fallbacks,
        "late": tally.late,
        "rejections": tally.rejections,
        "copied": tally.copied,
        "restarts": tally.restarts,
        "compiles": tally.compiles,
        "mismatches": tally.mismatches,
    }
    for name, counter in counts.items():
        found[name] = [[*key, count] for key, count in counter.items() if count]  # type: ignore[attr-defined]
        yield
    found["compile_s"] = [[backend, seconds] for backend, seconds in tally.compile_s.items()]
    workers, rows, pids = iter(list(state.workers.values())), [], {}
    while some_workers := list(islice(workers, ROWS_A_STEP)):
        for worker in some_workers:
            sizes = len(worker.running), len(worker.waiting), len(worker.enqueued)
            rows.append([worker.backend, worker.state.value, *sizes])
            if worker.pid and worker.state.value in LIVING:
                pids[worker.backend] = worker.pid
        yield
    found["workers"], found["pids"] = rows, pids
    return found


def serving(server: BrokerView, _: Mapping[str, Any]) -> dict[str, Any]:
    """Whether calls would be served now: `is_ready`, and why not."""
    state, why = server.state, []
    if state.stopping:
        why.append("the broker is being stopped")
    if server.policy.problem:
        why.append(f"the policy file is not in force: {server.policy.problem}")
    unavailable = state.unavailable_at(time.monotonic())
    if all(name in unavailable for name in state.workers):
        why.append("no backend can serve")
    return {"is_ready": not why, "why": why}
