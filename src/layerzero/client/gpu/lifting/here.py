"""Calls on a GPU that this process runs by their backend's own provider, where policy wants that and its library fits.

Leave for them is asked for, and ends, as for lifted calls (lifts.py). No worker and no message has a part in a call.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from layerzero.client.connection import retained
from layerzero.client.connection.call import Refusal
from layerzero.client.connection.report import IN_PROCESS, Attempt, Candidate, SelectionReport
from layerzero.client.gpu import torch_graphs
from layerzero.client.gpu.device import Gpu
from layerzero.client.gpu.lifting.faults import Faults
from layerzero.client.gpu.lifting.loaded import relaxed
from layerzero.client.gpu.lifting.sites import Asked, Tensors, told_of
from layerzero.client.gpu.session_view import GpuRunner, SessionView
from layerzero.ipc.cuda.driver import Driver
from layerzero.ipc.errors import BackendError, CudaError, InvalidArgument, OutputTooSmall
from layerzero.ipc.transport import messages

RETRY_S = 5.0  # so long a call goes to a worker after it failed here
LOOK_S = 0.1  # whether the probe has ended by now


@dataclass(eq=False, slots=True)
class HereSite:
    """Calls with one key, as long as the page has `epoch`. `number`: by which the broker knows them."""

    asked: Asked
    runner: GpuRunner
    number: int
    epoch: int
    is_graph_safe: bool
    decision: messages.Decision
    note: str
    tensors: Tensors
    row: int  # of counters
    compiled: None = None  # the C leaves them to the Python

    @property
    def gpu(self) -> Gpu:
        return self.asked.gpu

    @property
    def driver(self) -> Driver:
        return self.asked.gpu.memory.context.driver

    def may_lie(self, memory: Sequence[int]) -> bool:
        """As of `Site`; whatever the alignment is."""
        return self.tensors.may_lie(memory)


class Here:
    """Of one connection. Threads may share it."""

    def __init__(self, session: SessionView, faults: Faults, stop: Callable[[Asked], None]) -> None:
        """`stop`: no more of these calls here, until RETRY_S have passed."""
        self._session, self._faults, self._stop = session, faults, stop

    def site(self, asked: Asked, answer: Mapping[str, Any]) -> HereSite | Refusal:
        """What runs the calls, under the broker's leave. Raises KeyError, TypeError, ValueError for what is none."""
        number, epoch = int(answer["number"]), int(answer["epoch"])
        backend, kernel_id = str(answer["backend"]), str(answer["kernel_id"])
        copies = bool(answer["copies_inputs"]), bool(answer["copies_outputs"])
        plan = asked.route.plan
        runner = self._session.local.on_gpu(backend, kernel_id, plan, asked.gpu.memory.context)
        if isinstance(runner, Refusal):
            return replace(runner, why=f"{backend} does not run in this process: {runner.why}")
        decision = told_of(asked.route, kernel_id, backend, os.getpid(), IN_PROCESS, copies)
        what = ", ".join(f"{name} {version}" for name, version in runner.versions.items()) or "an unknown version"
        note = f"{kernel_id} of {what} ran in this process, on its own stream; GPU {asked.gpu.uuid}"
        is_safe, tensors = bool(answer["is_graph_safe"]), Tensors.of(plan, has_out=asked.has_out)
        row = asked.gpu.counters.row(plan.op, kernel_id, IN_PROCESS)
        return HereSite(asked, runner, number, epoch, is_safe, decision, note, tensors, row)

    def run(self, site: HereSite, memory: Sequence[int], stream: int, start_ns: int, *, is_captured: bool) -> bool:
        """Enqueue a call. False: it goes the ordinary way. Raises what is wrong with the call itself, and BackendError
        when the GPU is lost to this process, or a capture cannot go on."""
        asked, runner, decision = site.asked, site.runner, site.decision
        try:
            kernel_ns = 0
            if is_captured:
                self._keep(site, stream, runner.capture(memory, stream))
            else:
                kernel_ns = runner.run(memory, stream)
        except (InvalidArgument, OutputTooSmall) as exc:
            self._note_failure(site, exc, exc.code, exc.message)
            raise
        except Exception as exc:  # whatever a library raises
            why = self._session.local.note_failed(
                asked.route, decision.backend, decision.kernel_id, exc, asked.gpu.uuid
            )
            if self._is_lost(asked.gpu) or is_captured:
                raise self._failure(site, exc) from exc
            asked.route.stays_out = why
            asked.gpu.counters.note_fallback(site.row, BackendError.code)
            self._stop(asked)
            return False
        if kernel_ns:
            self._session.local.note_ran(asked.route, decision.kernel_id, kernel_ns)
        end_ns = time.perf_counter_ns()
        asked.gpu.counters.count(site.row, end_ns - start_ns)
        self._session.last.record = (
            asked.route.plan,
            (),
            start_ns,
            end_ns,
            kernel_ns,
            (),
            decision,
            (),
            site.note,
        )
        return True

    def _keep(self, site: HereSite, stream: int, bound: Callable[[], Any]) -> None:
        """What the graph needs, for as long as it is replayed; for ever, where nobody says when it is gone."""
        graph = torch_graphs.graph_of(site.driver.capture_id(stream))
        if graph is None:
            retained.keep(bound)
        else:
            torch_graphs.tell_end(graph, partial(_release, bound))

    def _is_lost(self, gpu: Gpu) -> bool:
        """Whether the kernel has cost this process its GPU. The broker is told then."""
        try:
            with relaxed(gpu.memory) as driver:
                driver.is_stream_idle(gpu.memory.own_stream())
        except CudaError as exc:
            if exc.is_sticky:
                self._faults.tell(gpu)
                return True
        return False

    def _failure(self, site: HereSite, exc: Exception) -> BackendError:
        decision, op = site.decision, site.asked.route.plan.op
        text = f"{op}: {decision.kernel_id} failed in this process: {type(exc).__name__}: {exc}"[:2000]
        error = BackendError(text, backend=decision.backend, kernel_id=decision.kernel_id)
        self._note_failure(site, error, error.code, error.message)
        return error

    def _note_failure(self, site: HereSite, error: Exception, code: str, detail: str) -> None:
        decision = site.decision
        site.gpu.counters.note_error(site.row, code)
        report = SelectionReport(
            op=site.asked.route.plan.op,
            kernel_id=None,
            backend=None,
            worker_pid=None,
            path=IN_PROCESS,
            attempts=(Attempt(decision.backend, decision.kernel_id, code, detail, worker_pid=os.getpid()),),
            candidates=tuple(Candidate.from_wire(one) for one in decision.candidates),
        )
        error.report = report  # type: ignore[attr-defined]
        self._session.note(report)


def _release(bound: Callable[[], Any]) -> None:
    release = getattr(bound, "release", None)
    if release is not None:
        with contextlib.suppress(Exception):  # the graph is gone either way
            release()
