"""The newest calls of workers: of one that runs, and of those that have ended lately. Their control pages have plans'
numbers and times; what those plans are is what the workers were told."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Protocol

from layerzero.broker.core import actions as act
from layerzero.ipc.errors import LayerZeroError
from layerzero.ipc.shm import memory, recent_calls
from layerzero.ipc.shm.recent_calls import BOUND, DECLINED, ENQUEUED, OK, RAISED, RUNNING, RecentCall
from layerzero.ipc.transport import messages
from layerzero.ipc.transport.wire import REF_BYTES
from layerzero.ipc.vocabulary.neighbours import VALUE_BYTES, Neighbourhood, unpack_values
from layerzero.ipc.vocabulary.ops import FUNCTION
from layerzero.ipc.vocabulary.tensors import TensorSpec

MOST_PLANS, MOST_ENDED = 4096, 64
MOST_KINDS, MANY = 8, (b"",)  # of neighbours of a plan, and what stands for more
FrameOf = Callable[[Any], bytes]
_HOW = {
    RUNNING: "had not ended",
    OK: "ok",
    RAISED: "raised",
    DECLINED: "not run here",
    ENQUEUED: "enqueued on its GPU",
    BOUND: "put into a CUDA graph of its client, whose replays are not seen",
}
_GONE = "a call whose signature is not known any more"


class Worker(Protocol):
    backend: str
    page: memory.ControlPage

    @property
    def pid(self) -> int: ...


class _Plan(NamedTuple):
    body: bytes  # the encoded Prepare message
    neighbours: tuple[bytes, ...] = ()  # the encoded Neighbours messages of its leases, those that differ

    def lent(self, neighbours: bytes) -> _Plan:
        """With those of one more lease."""
        if neighbours in self.neighbours or self.neighbours == MANY:
            return self
        known = (*self.neighbours, neighbours)
        return self._replace(neighbours=known if len(known) <= MOST_KINDS else MANY)


class _Ended(NamedTuple):
    page: bytes
    plans: Mapping[int, _Plan]  # of the calls on that
    at_ns: int


class LastCalls:
    def __init__(self) -> None:
        self._plans: OrderedDict[int, _Plan] = OrderedDict()  # newest last
        self._ended: OrderedDict[tuple[str, int], _Ended] = OrderedDict()

    def noting(self, frames: Mapping[type, FrameOf]) -> Mapping[type, FrameOf]:
        """What makes frames for workers, which notes what they are told of plans. Nothing of it is on a call's way."""

        def prepare(action: act.SendPrepare) -> bytes:
            self._plans[action.plan] = _Plan(action.body)
            self._plans.move_to_end(action.plan)
            if len(self._plans) > MOST_PLANS:
                self._plans.popitem(last=False)
            return frames[act.SendPrepare](action)

        def allow(action: act.SendAllow) -> bytes:
            if action.neighbours and action.plan in self._plans:
                self._plans[action.plan] = self._plans[action.plan].lent(action.neighbours)
            return frames[act.SendAllow](action)

        return {**frames, act.SendPrepare: prepare, act.SendAllow: allow}

    def note_end(self, worker: Worker) -> None:
        """It has ended, and its page is there yet."""
        self._ended[worker.backend, worker.pid] = self._seen(worker)
        if len(self._ended) > MOST_ENDED:
            self._ended.popitem(last=False)

    def told(self, backend: str, pids: Collection[int], running: Worker | None) -> list[str] | None:
        """A line of each of the newest calls of a worker that has ended, with one of these numbers, or without any of
        the one that is `running`; None for one that is not known."""
        found = next((self._ended[backend, pid] for pid in pids if (backend, pid) in self._ended), None)
        if found is None and running is not None and (not pids or running.pid in pids):
            found = self._seen(running)
        return None if found is None else _lines(found)

    def _seen(self, worker: Worker) -> _Ended:
        page = worker.page.copy()
        plans = {call.plan for call in recent_calls.read(page)}
        return _Ended(page, {plan: self._plans[plan] for plan in plans if plan in self._plans}, time.monotonic_ns())


def _lines(found: _Ended) -> list[str]:
    """The oldest first. Workers write what is on their page: it is shown, and decides nothing."""
    calls, specs = recent_calls.read(found.page), dict[int, messages.Prepare | None]()
    lines, begun_ns = [], 0
    for call in calls:
        if call.plan not in specs:
            specs[call.plan] = _prepared(found.plans.get(call.plan))
        begun_ns = call.begun_ns or (begun_ns if call.is_in_chain else 0)
        before_ns = found.at_ns - begun_ns if begun_ns else -1
        when = f"{before_ns / 1e9:,.6f} s before: " if before_ns >= 0 else ""
        what = _said_of(call, specs[call.plan], found.plans.get(call.plan))
        how = _HOW.get(call.how, "not known how it ended")
        how = "not begun" if call.is_in_chain and call.how == DECLINED else how
        took = f" in {call.took_ns / 1e3:,.0f} us" if call.took_ns and not call.is_in_chain else ""
        lines.append(f"{when}{what}{', in a plan' if call.is_in_chain else ''}: {how}{took}")
    return lines


def _prepared(plan: _Plan | None) -> messages.Prepare | None:
    try:
        return None if plan is None else messages.decode(plan.body, messages.Prepare)
    except LayerZeroError:
        return None


def _said_of(call: RecentCall, told: messages.Prepare | None, plan: _Plan | None) -> str:
    if told is None or plan is None:
        return _GONE
    if told.op == FUNCTION:
        return f"a call of a function ({told.kernel_id}), whose name and arguments its worker alone has"
    specs = [None if one is None else TensorSpec.from_wire(one) for one in (*told.inputs, *told.outputs)]
    extents = call.body_bytes - REF_BYTES * len(specs)
    is_like = ""
    if call.body_bytes and extents:
        resized = _resized(specs, plan, call.tail[-extents:] if 0 < extents <= len(call.tail) else b"")
        specs, is_like = (specs, ", of other extents") if resized is None else (resized, "")
    count = len(told.inputs)
    given = ", ".join(_shown(spec) for spec in specs[:count] if spec is not None)
    made = ", ".join(_shown(spec) for spec in specs[count:] if spec is not None)
    return f"{told.op}({given}){' -> ' if made else ''}{made}{is_like}, {told.kernel_id}"


def _resized(specs: list[TensorSpec | None], plan: _Plan, tail: bytes) -> list[TensorSpec | None] | None:
    """None where that is not known: the same extents may mean this or that by two leases."""
    if not tail or len(tail) % VALUE_BYTES:
        return None
    found: list[list[TensorSpec | None]] = []
    try:
        for one in plan.neighbours:
            said = messages.decode(one, messages.Neighbours).neighbours
            resized = Neighbourhood.from_wire(said, specs).apply(specs, unpack_values(tail))
            if resized is not None and list(resized) not in found:
                found.append(list(resized))
    except LayerZeroError:
        return None
    return found[0] if len(found) == 1 else None


def _shown(spec: TensorSpec) -> str:
    return f"{'x'.join(map(str, spec.shape))}:{spec.dtype}"
