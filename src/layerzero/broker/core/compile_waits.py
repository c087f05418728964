"""Compilations as calls meet them: which ones they start, which calls wait for one, and what then becomes of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.core.call_fsm import CallState, move
from layerzero.broker.core.effects import Effects
from layerzero.broker.core.model import Call, Client
from layerzero.broker.core.worker_fsm import WorkerState
from layerzero.broker.core.worker_lifecycle import WorkerLifecycle
from layerzero.broker.selection.compile_queue import Job
from layerzero.broker.selection.ranking import Engine
from layerzero.broker.selection.signature import CallSpec, Verdict
from layerzero.capabilities.compile_unit import Unit
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.errors import DeadlineExceeded
from layerzero.ipc.transport.attempts import FailedAttempt, failed_attempt


@dataclass(slots=True, eq=False)
class Held:
    """A call that only this unit's kernel can serve."""

    call: Call
    unit: Unit
    since_s: float
    among: dict[Call, Held]  # all that are held, which call_fsm.py keeps

    @property
    def due_s(self) -> float:
        return self.since_s + self.call.timeout_s


@dataclass(eq=False, kw_only=True)
class CompileWaits:
    engine: Engine
    lifecycle: WorkerLifecycle
    effects: Effects
    _held: dict[Call, Held] = field(init=False, default_factory=dict)

    @property
    def held(self) -> list[Held]:
        """All that wait, the oldest first."""
        return list(self._held.values())

    def start(self, spec: CallSpec, verdicts: Iterable[Verdict], *, is_urgent: bool = False) -> None:
        """Have kernels compiled for calls of this signature, beside all calls; probe those that nobody has yet."""
        for verdict in verdicts:
            if verdict.uncompiled is None:
                self.lifecycle.need(self.lifecycle.workers[verdict.backend])
                continue
            self._do(self.engine.compilation.ask(_job(spec, verdict), is_urgent=is_urgent))

    def _do(self, job: Job | None) -> None:
        if job is not None and not self.effects.stopping:
            self.effects.emit(act.Compile(job.backend, job.unit, job.body))

    def on_compile_asked(self, event: ev.CompileAsked) -> None:
        """Somebody warms up."""
        wanted = [v for v in self.missing(event.spec, self.effects.now_s) if v.backend in event.backends]
        self.start(event.spec, wanted, is_urgent=True)

    def missing(self, spec: CallSpec, now_s: float) -> list[Verdict]:
        """Kernels that would serve such calls were they compiled, or probed before that. Changes nothing."""
        ranked = self.engine.rank(spec, self.engine.context(spec), self.lifecycle.unavailable, now_s)
        return [verdict for verdict in ranked if verdict.uncompiled is not None or self._is_unseen(verdict)]

    def _is_unseen(self, verdict: Verdict) -> bool:
        """Its probe is to come."""
        if verdict.kernel is None or not verdict.is_accepted or not verdict.kernel.needs_jit:
            return False
        is_known = self.engine.certification.is_known(verdict.kernel_id)
        state = self.lifecycle.workers[verdict.backend].state
        return not is_known and state in (WorkerState.ABSENT, WorkerState.PROBING)

    def end(self, event: ev.CompileEnded) -> list[Call]:
        """A compilation is over. Returns the calls that waited for it."""
        unit, effects = event.unit, self.effects
        self._do(self.engine.compilation.end(event.backend, unit, event.failure))
        self.engine.epoch += 1
        facts = {"backend": event.backend, "kernel_id": unit.kernel_id, "calls": unit.calls}
        effects.tally.compiles[event.backend, "failed" if event.failure else "ok"] += 1
        if event.failure:
            effects.emit(act.Note("kernel.compile_failed", {**facts, "cause": event.failure}))
        else:
            effects.tally.compile_s[event.backend] += event.seconds
            effects.emit(act.Note("kernel.compiled", {**facts, "seconds": round(event.seconds, 3)}))
        waiting = self._take([held for held in self.held if held.unit == unit])
        if not event.failure:
            for held in waiting:
                held.call.attempts.append(waited(held, event.backend, effects.now_s))
        return [held.call for held in waiting]

    # --- calls that wait -----------------------------------------------------------------------------------

    def hold(self, call: Call) -> bool:
        """Keep a call that nobody else can serve until a kernel is compiled for it. False: none will be."""
        signature = call.route.signature
        for verdict in signature.ranked:
            if verdict.uncompiled is not None and call.may_try(verdict.backend):
                self.start(signature.spec, (verdict,), is_urgent=True)
                if not self.engine.compilation.is_under_way(_job(signature.spec, verdict)):
                    continue  # there is no room for it
                call.held = Held(call, verdict.uncompiled, self.effects.now_s, self._held)
                move(call, CallState.COMPILING)
                self._wake()
                return True
        return False

    def calls(self) -> list[Call]:
        """Those that are held."""
        return list(self._held)

    def take(self, client: Client | None = None) -> list[Call]:
        """The held calls of a client, or all, which are held no more."""
        return [held.call for held in self._take([h for h in self.held if client in (None, h.call.client)])]

    def take_overdue(self) -> list[Held]:
        """Those that have waited for as long as they may run, which are held no more."""
        overdue = self._take([held for held in self.held if self.effects.now_s >= held.due_s])
        self._wake()
        return overdue

    @staticmethod
    def _take(wanted: list[Held]) -> list[Held]:
        for held in wanted:
            move(held.call, CallState.IN_HAND)
        return wanted

    def _wake(self) -> None:
        self.effects.wake_by(min((held.due_s for held in self.held), default=math.inf))


def _job(spec: CallSpec, verdict: Verdict) -> Job:
    assert verdict.uncompiled is not None
    return Job(verdict.backend, verdict.uncompiled, spec.prepare(verdict.kernel_id, is_graph_safe=False))


def to_compile(ranked: Sequence[Verdict]) -> tuple[Verdict, ...]:
    """The kernels that would be ahead of the best accepted one were they compiled; of those that no probe has seen, the
    probe comes first. None where nothing is accepted: then a call is held for one after the other."""
    best = next((verdict for verdict in ranked if verdict.is_accepted), None)
    if best is None:
        return ()
    return tuple(
        verdict
        for verdict in ranked
        if verdict is not best
        and (verdict.uncompiled is not None or (verdict.is_accepted and "jit" in verdict.terms))
        and _score(verdict) > _score(best)
    )


def _score(verdict: Verdict) -> float:
    """What it will be once the kernel is compiled."""
    return verdict.score - verdict.terms.get("jit", 0.0)


def waited(held: Held, backend: str, now_s: float) -> FailedAttempt:
    """For the report of a call that was held: its first attempt."""
    detail = f"it waited {now_s - held.since_s:.1f} s until the kernel was compiled for {held.unit.calls}"
    return failed_attempt(backend, held.unit.kernel_id, Reason.NOT_COMPILED.value, detail, phase="queued")


def overdue(held: Held) -> DeadlineExceeded:
    """The error of a call that waited for as long as it may run."""
    text = (
        f"{held.unit.kernel_id} is being compiled for {held.unit.calls}, no other kernel serves the call, and it "
        f"waited for {held.call.timeout_s:g} s. The compilation goes on: call again later, or warm up first (lz.warmup)"
    )
    return DeadlineExceeded(text, timeout_s=held.call.timeout_s, kernel_id=held.unit.kernel_id)
