"""What a worker had served last, for a capsule of the call that it died of (docs/capsules.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from layerzero.broker.queries.broker_view import BrokerView
from layerzero.ipc.errors import InvalidArgument

OF_OTHERS = "not told: users of several numbers share this broker's workers"


def last_calls(server: BrokerView, params: Mapping[str, Any]) -> dict[str, Any]:
    """Of the worker of `backend` that has, or had, one of `pids`, without those of the one that runs: a line of each of
    its newest calls, the oldest first, in `calls`; or `why` there are none. Shapes and dtypes alone."""
    backend, pids = params.get("backend"), params.get("pids", [])
    worker = server.state.workers.get(backend) if isinstance(backend, str) else None
    if worker is None or type(pids) is not list or not all(type(pid) is int for pid in pids):
        raise InvalidArgument(f"last_calls takes `backend`, and a list of `pids`; got {backend!r:.80}, {pids!r:.80}")
    if server.settings.allow_uids.strip() and server.settings.joined.strip():
        return {"calls": [], "why": OF_OTHERS}
    running = server.processes.get((worker.backend, worker.generation))
    calls = server.processes.last_calls.told(worker.backend, pids, running)
    return {"calls": calls or [], "why": "" if calls is not None else "not known: it ended too long ago"}
