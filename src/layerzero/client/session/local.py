"""Calls that run in this process, where policy wants it: the broker's grants, and the runs under them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from layerzero.client.connection.call import Here, Refusal, Route, Submitted, microseconds
from layerzero.client.connection.link import Link
from layerzero.client.connection.report import IN_PROCESS, Attempt
from layerzero.client.connection.routes import Routes
from layerzero.client.planning.plans import Plan
from layerzero.client.session.in_process import Grant, Lane, Place, is_abi_failure
from layerzero.client.session.on_gpu import GpuRunner
from layerzero.ipc.cuda.driver import Context
from layerzero.ipc.errors import BackendError, Busy, InvalidArgument, OutputTooSmall, ProtocolError, RunInProcess
from layerzero.ipc.transport import messages, wire
from layerzero.ipc.transport.wire import Header, Kind
from layerzero.workers.provider import Call

MAX_LEASE_S = 60.0
RETRY_HERE_S = 5.0  # so long a route's calls go to workers after one failed in this process


class Local:
    """Of one connection: a forked child has neither the probe's thread nor those of the libraries. Threads may share
    it."""

    def __init__(self, link: Link, routes: Routes, ask: Callable[..., Any]) -> None:
        self._link = link
        self._routes = routes
        self._ask = ask  # the broker
        self._lane = Lane()
        self._providers: dict[str, dict[str, Any]] = {}  # backend -> provider, descriptor, versions

    def refusals(self) -> dict[str, str]:
        """Backends (and single kernels) that policy wants in this process and that cannot run here, with the reason."""
        return self._lane.refusals()

    def take_grant(self, route: Route, error: RunInProcess, outcome: messages.Outcome) -> None:
        """Policy wants a backend in this process: take the grant, or note that calls go to its worker for now."""
        try:
            backend, kernel_id = str(error.facts["backend"]), str(error.facts["kernel_id"])
            lease_s = min(float(error.facts["lease_s"]), MAX_LEASE_S)
            if not lease_s > 0:  # nor NaN
                raise ValueError
            copies = bool(error.facts["copies_inputs"]), bool(error.facts["copies_outputs"])
        except (KeyError, TypeError, ValueError) as exc:
            raise ProtocolError(f"not a grant: {error.facts!r:.200}") from exc
        given = self._provider(backend)
        runner = self._lane.runner(Grant(backend, given["provider"], given["descriptor"]), _call(route.plan, kernel_id))
        if isinstance(runner, Refusal):
            route.worker_until_s = time.monotonic() + (RETRY_HERE_S if runner.is_final else lease_s)
            route.stays_out = f"{backend} does not run in this process: {runner.why}"
            if self._lane.stays_out(backend):
                self._routes.stay_out(backend, runner.why)
                failed = BackendError(runner.why).to_wire()
                self._tell(route, messages.RanHere(kernel_id=kernel_id, error=failed, stays_out=True))
            return
        decision = messages.Decision(
            kernel_id=kernel_id,
            backend=backend,
            worker_pid=os.getpid(),
            copies_inputs=copies[0],
            copies_outputs=copies[1],
            candidates=outcome.candidates,
            lane=IN_PROCESS,
        )
        route.here = Here(runner, decision, time.monotonic() + lease_s)

    # --- on a GPU: client/gpu/lifting/here.py

    def on_gpu(self, backend: str, kernel_id: str, plan: Plan, context: Context) -> GpuRunner | Refusal:
        """What runs a signature's calls here, in the GPU's context. Starts the backend's probe on that GPU the first
        time; never waits for it."""
        given = self._provider(backend)
        if not given.get("versions"):
            self._providers.pop(backend, None)  # another thread may have
            return Refusal("the probe of its own environment has not ended yet", False)
        versions = tuple(sorted(given["versions"].items()))
        call = _call(plan, kernel_id)
        found = self._lane.find(Grant(backend, given["provider"], given["descriptor"], context.gpu, versions), call)
        return found if isinstance(found, Refusal) else GpuRunner(call, *found, context)

    def is_settled(self, backend: str, gpu: str) -> bool:
        """Whether it is known if the backend runs here."""
        return self._lane.is_settled(backend, gpu)

    def note_ran(self, route: Route, kernel_id: str, kernel_ns: int) -> None:
        """The GPU's time of a run."""
        self._tell(route, messages.RanHere(kernel_id=kernel_id, kernel_ns=kernel_ns))

    def note_failed(self, route: Route, backend: str, kernel_id: str, exc: Exception, gpu: str) -> str:
        """A kernel failed here: the broker is told, and this says what is to be said of it. What other calls would
        share keeps the backend out for good."""
        error = _error(exc)
        self._tell(route, messages.RanHere(kernel_id=kernel_id, error=error.to_wire()))
        if not is_abi_failure(exc):
            return f"{backend} does not run in this process for {RETRY_HERE_S:g} s: {kernel_id} failed: {error.message}"
        self._lane.refuse(backend, f"a call of {kernel_id} failed here: {error.message}", gpu)
        return f"{backend} does not run in this process: a call of {kernel_id} failed here: {error.message}"

    def _provider(self, backend: str) -> dict[str, Any]:
        if backend not in self._providers:
            self._providers[backend] = self._ask("provider", backend=backend)
        return self._providers[backend]

    # --- on the CPU

    def run(
        self, submitted: Submitted, here: Here, inputs: Sequence[Place | None], outputs: Sequence[Place]
    ) -> Attempt | None:
        """Run a call; `submitted` has its answer then. When the kernel fails, returns how: the call goes to the broker
        like any other. Its `timeout_s` is checked, but nobody can end a kernel here."""
        if submitted.request.timeout_s is not None:
            microseconds(submitted.request.timeout_s)
        route, decision = submitted.route, here.decision
        kind, body = Kind.DONE, b""
        try:
            kernel_ns, body = here.runner.run(inputs, outputs)
        except (InvalidArgument, OutputTooSmall) as exc:  # the call itself is wrong, and so it is for every kernel
            outcome = messages.Outcome(error=exc.to_wire(), candidates=decision.candidates)
            kind, kernel_ns, body = Kind.FAILED, 0, messages.encode(outcome)
        except Exception as exc:  # whatever a library raises is this attempt's outcome
            return self._fail(route, decision, exc)
        else:
            self._tell(route, messages.RanHere(kernel_id=decision.kernel_id, kernel_ns=kernel_ns))
        pending = submitted.pending
        pending.header = Header(wire.PROTOCOL, kind, 0, route.number, 0, 1, 0, kernel_ns)
        pending.body = body
        pending.finish()
        submitted.decision = decision
        return None

    def _fail(self, route: Route, decision: messages.Decision, exc: Exception) -> Attempt:
        """The kernel failed in this process: the broker is told."""
        backend, kernel_id = decision.backend, decision.kernel_id
        error = _error(exc)
        route.here, route.worker_until_s = None, time.monotonic() + RETRY_HERE_S
        route.stays_out = f"{backend} does not run in this process for {RETRY_HERE_S:g} s: a call failed here"
        if is_abi_failure(exc):
            why = f"a call of {kernel_id} failed here: {error.message}"
            self._lane.refuse(backend, why)
            self._routes.stay_out(backend, why)
        told = messages.RanHere(kernel_id=kernel_id, error=error.to_wire(), stays_out=self._lane.stays_out(backend))
        self._tell(route, told)
        counters = self._link.counters
        counters.note_fallback(counters.row(route.plan.op, kernel_id, IN_PROCESS), error.code)
        return Attempt(backend, kernel_id, error.code, error.message, phase=IN_PROCESS, worker_pid=os.getpid())

    def _tell(self, route: Route, ran: messages.RanHere) -> None:
        """For the broker's log and times. The call does not depend on it."""
        try:
            self._link.send(wire.pack(Kind.RAN_HERE, route=route.number, body=messages.encode(ran)))
        except Busy:  # thousands of messages are on their way: one time more or less
            return


def _call(plan: Plan, kernel_id: str) -> Call:
    return Call(plan.op, kernel_id, plan.inputs, plan.outputs, plan.attrs)


def _error(exc: Exception) -> BackendError:
    return BackendError(f"{type(exc).__name__}: {exc}"[:2000])
