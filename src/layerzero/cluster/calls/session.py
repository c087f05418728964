"""A session whose calls other nodes may serve, too: `lz.connect(cluster="ray")`.

A call goes to this node's broker first, as in any session. Others are asked where no kernel here takes it or all that
were tried failed, and where calls of its kind have taken so long here that the way to another node may pay.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from layerzero.client.connection import observing, start
from layerzero.client.connection.call import Request, seconds
from layerzero.client.connection.report import NODE, NODE_LOST, Attempt, Candidate, SelectionReport
from layerzero.client.session.session import Session
from layerzero.cluster import ray_link
from layerzero.cluster.calls.forwarded import Forwarded, may_travel, nbytes_of
from layerzero.cluster.calls.others import Other, Others
from layerzero.cluster.calls.placement import DEATHS, Choice, Decisions, Walk, by_price, is_poisonous
from layerzero.cluster.calls.price import is_cheaper, priced
from layerzero.ipc.errors import (
    BackendError,
    BrokerLost,
    LayerZeroError,
    NoBackend,
    NotConnected,
    Poison,
    from_wire,
)
from layerzero.ipc.transport.endpoints import Endpoints
from layerzero.ipc.transport.plain import unpack_body

COARSE_NS = 3_000_000  # calls that take less are never worth the way
ATTEMPTS, GRACE_S = 3, 30.0  # a node that says nothing for so many times a call's limit, and this, counts as lost


class ClusterSession(Session):
    """Calls on the CPU whose results are new arrays may be served elsewhere; all others as by Session."""

    def __init__(self, path: Path, package: str, key: bytes | None = None) -> None:
        """Raises EnvError without Ray, NotConnected where there is no cluster."""
        super().__init__(path, package, key)
        self.others = Others(ray_link.attach())
        self.decisions = Decisions()
        self._ops: frozenset[str] = frozenset()  # that have kinds which others serve
        self._kinds = threading.Lock()
        self._opened = 1  # how often

    def run(self, request: Request, *, is_recorded: bool = False) -> Any:
        """As Session.run; by another node where that is cheaper, or the only way."""
        if observing.recorder is not None and not is_recorded:
            return observing.recorder.run(self, request)
        tried: list[Attempt] = []
        if request.op in self._ops:
            found = self._run_afar(request, tried)
            if found is not None:
                return found[0]
        opened, start_ns = self._opened, time.perf_counter_ns()
        try:
            result = super().run(request, is_recorded=True)
        except (NoBackend, BackendError) as exc:
            return self._run_elsewhere(request, exc, tried)
        except BrokerLost as exc:
            if self._is_open_again(request):
                return self.run(request, is_recorded=True)
            return self._run_elsewhere(request, exc, tried)
        except NotConnected:  # another thread has left the broker that died for its successor
            with self._lock:
                if self._opened == opened:
                    raise
            return self.run(request, is_recorded=True)
        if tried:
            report = self.last_report()
            self.last.record = None if report is None else replace(report, attempts=(*tried, *report.attempts))
        elif time.perf_counter_ns() - start_ns > COARSE_NS:
            self._consider(request)
        return result

    def explain_route(self, op: str, body: bytes) -> SelectionReport:
        """As Session's, with the kernels of other nodes and what their use costs."""
        here = super().explain_route(op, body)
        nbytes = nbytes_of(body)
        choices = () if nbytes is None else self._choices(body, here.candidates, nbytes)
        ranked = sorted(
            (*here.candidates, *(one.candidate for one in choices)),
            key=lambda one: (not one.accepted, -(one.score or 0.0)),
        )
        found = replace(here, candidates=tuple(ranked))
        if choices and (here.kernel_id is None or _is_cheaper(choices[0], here.candidates)):
            best = choices[0].candidate
            return replace(found, kernel_id=best.kernel_id, backend=best.backend, path=NODE, notes=())
        return found

    # --- where calls go --------------------------------------------------------------------------------

    def _choices(self, body: bytes, here: tuple[Candidate, ...], nbytes: int) -> tuple[Choice, ...]:
        """Kernels of other nodes, cheapest first."""
        accepted = [one for one in here if one.accepted]
        best_us, score = _best_us(here), accepted[0].score if accepted else None
        return by_price(
            [
                Choice(other.id, priced(one, other.short, way, nbytes, best_us, score))
                for other, way, candidates in self.others.explain(body)
                for one in candidates
            ]
        )

    def _consider(self, request: Request) -> None:
        """After a call that took long here: are the next ones of its kind served elsewhere?"""
        call = _travelling(request)
        if call is None or self.decisions.stays(call.body, time.monotonic()):
            return
        here = super().explain_route(request.op, call.body).candidates
        choices = self._choices(call.body, here, call.nbytes)
        self._decide(call, [one for one in choices if _is_cheaper(one, here)], here)

    def _decide(self, call: Forwarded, choices: Sequence[Choice], here: tuple[Candidate, ...]) -> None:
        with self._kinds:
            self.decisions.decide(call.body, choices, here, time.monotonic())
            if choices:
                self._ops |= {call.request.op}

    def _run_afar(self, request: Request, tried: list[Attempt]) -> tuple[Any] | None:
        """The result, in a tuple, of a call whose kind is served elsewhere; None where it is to be served here."""
        call = _travelling(request)
        if call is None:
            return None
        with self._kinds:
            afar = self.decisions.elsewhere(call.body, time.monotonic())
        if afar is None:
            return None
        found = self._try(call, Walk(afar.choices, self.others.nodes, next(afar.turns)), afar.here, tried)
        if found is None:  # looked at anew, after a call here
            with self._kinds:
                self.decisions.forget(call.body)
        return found

    def _run_elsewhere(self, request: Request, error: LayerZeroError, tried: list[Attempt]) -> Any:
        """A call that nobody here serves. Raises `error` where nobody elsewhere does either."""
        call = _travelling(request)
        if call is None:
            raise error
        report: SelectionReport | None = getattr(error, "report", None)
        here = () if report is None else report.candidates
        if report is not None:
            tried += report.attempts
        if not isinstance(error, NoBackend) and report is None:
            tried.append(Attempt("", "", error.code, error.message))
        while True:
            lost = _losses(tried)
            choices = self._choices(call.body, (), call.nbytes)
            found = self._try(call, Walk(choices, self.others.nodes), here, tried)
            if found is not None or _losses(tried) == lost:
                break  # else others are asked, who were not while those that are lost now served it
        if found is None:
            if report is not None:
                self.last.record = error.report = replace(report, attempts=tuple(tried))  # type: ignore[attr-defined]
            raise error
        if isinstance(error, NoBackend):
            self._decide(call, choices, here)
        return found[0]

    def _is_open_again(self, request: Request) -> bool:
        """Whether there is a connection to a later broker of this node, and the call may be made again."""
        if _travelling(request) is None:
            return False
        with self._lock:
            if self.is_alive:  # another thread has seen to it
                return True
            if start.broker_pid(Endpoints(self.path.parent)) is None:
                return False
            self.close()
            try:
                self._open()
            except (OSError, LayerZeroError):
                return False
            self._opened += 1
            return True

    def _try(
        self,
        call: Forwarded,
        walk: Walk,
        here: tuple[Candidate, ...],
        tried: list[Attempt],
    ) -> tuple[Any] | None:
        """The result, in a tuple, of the first that serves it. Adds to the attempts that failed."""
        while (one := walk.next(time.monotonic())) is not None:
            other = self.others.get(one.node)
            found = None if other is None else self._forward(call, other, one.candidate, here, tried)
            if found is not None:
                return found
            if is_poisonous(sum(one.exit_signal is not None or one.exit_code is not None for one in tried)):
                raise self._poison(call, here, tried)
        return None

    def _poison(self, call: Forwarded, here: tuple[Candidate, ...], tried: Sequence[Attempt]) -> Poison:
        """The error of a call that no further node is to see."""
        error = Poison(f"change the inputs: this call of {call.request.op} has killed {DEATHS} workers of the cluster")
        elapsed_us = (time.perf_counter_ns() - call.start_ns) / 1e3
        self.last.record = error.report = SelectionReport(
            call.request.op, None, None, None, NODE, elapsed_us=elapsed_us, attempts=tuple(tried), candidates=here
        )
        return error

    def _forward(
        self, call: Forwarded, other: Other, one: Candidate, here: tuple[Candidate, ...], tried: list[Attempt]
    ) -> tuple[Any] | None:
        within_s = ATTEMPTS * seconds(call.request, self._link.welcome.timeout_s) + GRACE_S
        head = call.head()  # it refuses gradients, as everywhere
        try:
            answer, *results = self.others.call(other, head, call.memory(), len(call.plan.outputs), within_s)
            told = unpack_body(answer)
            if "error" in told:
                tried += [_on_node(other.short, attempt) for attempt in told["attempts"]]
                error = from_wire(told["error"])
                if isinstance(error, Poison):
                    raise self._poison(call, here, tried) from error
                if told["attempts"]:
                    return None
                raise error
            value, copies = call.result(self, results)
        except Poison:
            raise
        except LayerZeroError as exc:
            code = NODE_LOST if isinstance(exc, NotConnected) else exc.code
            tried.append(Attempt(one.backend, one.kernel_id, code, f"on node {other.short}: {exc.message}"))
            return None
        row = told["report"]
        before = [_on_node(other.short, attempt) for attempt in row["attempts"]]
        served = before[-1]
        self.last.record = SelectionReport(
            op=call.request.op,
            kernel_id=served.kernel_id,
            backend=served.backend,
            worker_pid=row["worker_pid"],
            path=NODE,
            copies=tuple(copies),
            elapsed_us=(time.perf_counter_ns() - call.start_ns) / 1e3,
            kernel_us=row["kernel_us"],
            attempts=(*tried, *before),
            candidates=(replace(one, kernel_id=served.kernel_id, backend=served.backend), *here),
            notes=one.notes[-1:],
        )
        return (value,)


def _on_node(node: str, attempt: dict[str, Any]) -> Attempt:
    """An attempt of another node's report, as this node's reports call it."""
    names = {name: f"{node}/{attempt[name]}" for name in ("backend", "kernel_id")}
    return Attempt(**{**attempt, **names})


def _losses(tried: Sequence[Attempt]) -> int:
    """How many nodes were lost by a call."""
    return sum(one.outcome == NODE_LOST for one in tried)


def _best_us(here: Sequence[Candidate]) -> float | None:
    """Of the fastest kernel here that was measured."""
    return min((one.measured_us for one in here if one.accepted and one.measured_us is not None), default=None)


def _is_cheaper(one: Choice, here: Sequence[Candidate]) -> bool:
    return is_cheaper(one.price_us, _best_us(here))


def _travelling(request: Request) -> Forwarded | None:
    """The call as other nodes may serve it; None where it stays here."""
    if not may_travel(request) or request.out is not None:
        return None
    call = Forwarded(request)
    return call if call.is_on_cpu else None
