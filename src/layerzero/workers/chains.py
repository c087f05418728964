"""Chains on an express lane (ipc/transport/chains.py): all calls are bound before the first one runs, in order."""

from __future__ import annotations

import time
from collections.abc import Callable

from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.shm import lane
from layerzero.ipc.shm.memory import ControlPage
from layerzero.ipc.shm.recent_calls import ChainRecord
from layerzero.ipc.transport.chains import digest_of, pack_times, resolve, unpack_chain_call, unpack_table
from layerzero.ipc.transport.wire import Ref
from layerzero.ipc.vocabulary.worker_codes import EXECUTING, IDLE, MAPPED, WRITTEN, mark
from layerzero.workers.lanes import Lane, Ready
from layerzero.workers.outcomes import short_error
from layerzero.workers.provider import Bound

Bind = Callable[[Lane, int, bytes], "Bound | None"]
ReadTable = Callable[[int, Ref], "bytes | None"]


def run_chain(one: Lane, call: int, body: bytes, page: ControlPage, bind: Bind, read: ReadTable) -> None:
    """Run the chain of a lane's call and tell the client how it ended: each step's time, or the error of the step that
    the lane's page names. `bind` makes a step's call ready, None for one that may not run here; `read` copies the
    table. A chain that cannot be made ready is declined, none of its steps has run then."""
    dispatch, elapsed_ns, said = mark(one.number, call), 0, b""
    page.write(dispatch, MAPPED)
    ready = one.chains.get(body) or _bind(one, call, body, bind, read)
    if ready is None:
        status = lane.DECLINED
    else:
        bounds, record = ready
        page.recent.begin_chain(record)
        put_step, times, end_ns = one.page.put_step, [], time.perf_counter_ns()
        try:
            for number, bound in enumerate(bounds):
                put_step(call, number)
                page.write(dispatch, EXECUTING)
                if bound() is not None:  # there is no place for it: no client puts such an op into a chain
                    raise ProtocolError("an op that says more than its outputs is no step of a chain")
                before_ns, end_ns = end_ns, time.perf_counter_ns()
                times.append(end_ns - before_ns)
            page.write(dispatch, WRITTEN)
            status, elapsed_ns, said = lane.OK, sum(times), pack_times(times)
            page.recent.end_chain(record, elapsed_ns)
        except Exception as exc:  # the broker hears of it when the client brings the step there
            status, said = lane.RAISED, short_error(exc)
            page.recent.end_chain(record, sum(times), failed_at=len(times))
    one.end(call, status, 0, elapsed_ns, said)
    page.write(0, IDLE)


def _bind(one: Lane, call: int, body: bytes, bind: Bind, read: ReadTable) -> Ready | None:
    """None where that fails, and of a chain without steps: a step that raises does so again when it comes as a call of
    its own."""
    bounds, calls = [], []
    try:
        chain = unpack_chain_call(body)
        table = read(one.client, chain.table)
        if table is None or digest_of(table) != chain.digest:
            return None
        for number, step in enumerate(unpack_table(table)):
            one.page.put_step(call, number, is_running=False)
            refs = resolve(step, chain.variables)
            bound = bind(one, step.plan, refs)
            if bound is None:
                return None
            bounds.append(bound)
            calls.append((step.plan, refs))
    except Exception:
        return None
    if not bounds:
        return None
    ready = tuple(bounds), ChainRecord(calls)
    one.remember_chain(body, ready)
    return ready
