"""The way of a call from one candidate to the next: placed, sent, failed, placed again, until there is nobody left."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from layerzero.broker.core import actions as act
from layerzero.broker.core.call_fsm import CallState, move, take
from layerzero.broker.core.compile_waits import CompileWaits, overdue
from layerzero.broker.core.effects import Effects
from layerzero.broker.core.grants import Grants
from layerzero.broker.core.limits import Limits
from layerzero.broker.core.model import Call, Client, RunGrant, Worker
from layerzero.broker.core.prepared import PreparedCalls
from layerzero.broker.core.quarantine import MAX_DEATHS_PER_CALL, Quarantine
from layerzero.broker.core.release import Release
from layerzero.broker.core.worker_fsm import WorkerState
from layerzero.broker.core.worker_lifecycle import WorkerLifecycle, disabled, exit_text
from layerzero.broker.selection.ranking import Engine
from layerzero.broker.selection.signature import Verdict, no_backend
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.errors import (
    NEVER,
    SAME,
    AdaptationRequired,
    BackendError,
    CudaGraphUnsafe,
    DeadlineExceeded,
    LayerZeroError,
    NoTransport,
    RunInProcess,
)
from layerzero.ipc.transport.attempts import failed_attempt
from layerzero.ipc.vocabulary.pools import environment_of

IN_PROCESS_LEASE_S = 1.0  # a client that runs a backend itself asks again after so long: policy may have changed
SHARED_S = 0.1  # so long after calls of two clients a worker counts as theirs
LONE_S = 0.01  # so long after a call of a client that had no other open, a worker is kept free for its next one
S = WorkerState
_IN_HAND, _RUNNING, _WAITING = CallState.IN_HAND, CallState.RUNNING, CallState.WAITING


@dataclass(eq=False, kw_only=True)
class Dispatch:
    engine: Engine
    lifecycle: WorkerLifecycle
    signatures: PreparedCalls
    grants: Grants
    compiling: CompileWaits
    closing: Release
    quarantine: Quarantine
    limits: Limits
    effects: Effects
    _numbers: Iterator[int] = field(init=False, default_factory=lambda: itertools.count(1))
    health_at_s: float = field(init=False, default=math.inf)  # when a kernel that failed may be tried again
    observer: Callable[[Call], None] | None = None  # hears of each call that goes back to where it was lost

    # --- where it goes -------------------------------------------------------------------------------

    def place(self, call: Call) -> None:
        """Give the call to the best candidate it has not tried, or to one that is restarting, or end it."""
        signature, workers = call.route.signature, self.lifecycle.workers
        order = self.signatures.order(signature)
        if signature.to_compile:
            self.compiling.start(signature.spec, signature.to_compile)
        if call.attempts:  # a fallback is in a hurry: those that are warm first
            order = tuple(sorted(order, key=lambda v: workers[v.backend].state is not S.READY))
        verdict = self._pick(call, order)
        if verdict is not None:
            if self._sends_back(verdict, call):
                return
            if signature.spec.is_pooled:
                verdict = self._freest(verdict, call, order)
            call.kernel_id = verdict.kernel_id
            worker, number = workers[verdict.backend], call.client.number
            self._note_use(worker, call.client)
            if worker.state is S.READY and not worker.waiting.holds(number) and self._has_room(worker, call):
                self.send(worker, call)
            else:
                self._let_wait(call, worker)
                self.lifecycle.need(worker)
            if call.attempt <= 1 and not signature.spec.pinned:
                after = order.index(verdict) + 1
                for spare in order[after : after + self.limits.standby]:
                    self.lifecycle.need(workers[spare.backend])
            return
        awaited = self.awaited(call)
        if awaited is None:
            if self._goes_back(call):
                self.place(call)
            elif not self.compiling.hold(call):
                self.closing.refuse(call, self.unserved(call))
        elif not self._sends_back(awaited, call):
            call.kernel_id = awaited.kernel_id
            self._let_wait(call, workers[awaited.backend])

    def _pick(self, call: Call, order: tuple[Verdict, ...]) -> Verdict | None:
        """The best one not tried yet. One whose breaker is half open takes a single call; for others it comes last."""
        last: Verdict | None = None
        for verdict in order:
            if not call.may_try(verdict.backend) or (verdict.transforms and call.was_answered):
                continue  # the latter: its client has gone on, and makes no copies any more
            if verdict.transforms or not verdict.is_on_trial:  # a call that is sent back for copies tries nothing
                return verdict
            spec = call.route.signature.spec
            if self.engine.reserve_trial(verdict.backend, spec.op, self.effects.now_s, spec.device):
                return verdict
            last = last or verdict
        return last

    def _freest(self, verdict: Verdict, call: Call, order: tuple[Verdict, ...]) -> Verdict:
        """Of the workers of the environment that a verdict is on, the one that has the least to do; one that does not
        run yet is started rather than that another has two."""
        workers, environment = self.lifecycle.workers, environment_of(verdict.backend)

        def load(one: Verdict) -> tuple[bool, int, bool]:
            worker = workers[one.backend]
            count, is_up = len(worker.running) + len(worker.waiting), worker.state is S.READY
            return count > 0 or not is_up, count, not is_up

        able = [one for one in order if environment_of(one.backend) == environment and call.may_try(one.backend)]
        well = [one for one in able if not one.is_in_doubt]
        return min(well, key=load) if well else verdict

    def _sends_back(self, verdict: Verdict, call: Call) -> bool:
        """Ends the call when its client must do the next step: change the inputs, or run the kernel itself."""
        kernel = verdict.kernel
        if verdict.transforms:
            error: LayerZeroError = AdaptationRequired(
                f"{verdict.kernel_id} needs {', '.join(verdict.transforms)}", transforms=list(verdict.transforms)
            )
        elif (
            call.may_run_here
            and call.client.may_run(verdict)
            and not call.attempts
            and kernel is not None
            and not verdict.is_in_doubt  # not near the caller
        ):
            now_s = self.effects.now_s
            call.route.grant = RunGrant(verdict.kernel_id, now_s, now_s + IN_PROCESS_LEASE_S)
            error = RunInProcess(
                f"policy wants {verdict.backend} in the caller's process",
                backend=verdict.backend,
                kernel_id=verdict.kernel_id,
                copies_inputs=kernel.copies_inputs,
                copies_outputs=kernel.copies_outputs,
                lease_s=IN_PROCESS_LEASE_S,
            )
        else:
            return False
        self.closing.end_in_error(call, error)
        return True

    def awaited(self, call: Call) -> Verdict | None:
        """The best candidate that nothing but a restart keeps from the call, and that will be back in time for it."""
        for verdict in call.route.signature.ranked:
            is_down = [reason.code for reason in verdict.reasons] == [Reason.BACKEND_RESTARTING]
            if verdict.transforms and call.was_answered:
                continue
            if is_down and call.may_try(verdict.backend) and self._is_back_in_time(verdict.backend, call):
                return verdict
        return None

    def _goes_back(self, call: Call) -> bool:
        """Nobody is left who has not tried. A backend whose worker has ended with the call may have it once more: one
        death is no proof against a call, and two make it poison."""
        if not call.lost_at or call.route.signature.spec.pinned:
            return False
        call.once_more |= call.lost_at
        call.excused -= call.lost_at  # there its worker may begin anew once more
        call.lost_at.clear()
        if self.observer is not None:
            self.observer(call)
        return True

    def _has_other(self, call: Call) -> bool:
        return any(call.may_try(verdict.backend) for verdict in self.signatures.order(call.route.signature))

    def can_place(self, call: Call) -> bool:
        """Somebody can take it, now or after a restart."""
        if self._has_other(call) or self.awaited(call) is not None:
            return True
        return self._goes_back(call) and self.can_place(call)

    def _is_back_in_time(self, backend: str, call: Call) -> bool:
        return self.lifecycle.is_back_by(backend, self.effects.now_s + call.timeout_s)

    def end_waits(self) -> None:
        """Calls that have waited for a compilation for as long as they may run end, unless somebody can take them by
        now, be it after a restart."""
        for held in self.compiling.take_overdue():
            if self.can_place(held.call):
                self.place(held.call)
            else:
                self.closing.refuse(held.call, overdue(held))

    # --- at a worker ---------------------------------------------------------------------------------

    def _note_use(self, worker: Worker, client: Client) -> None:
        last, now_s = worker.last_client, self.effects.now_s
        if last is not client:
            if last is not None and not last.has_left and now_s - worker.last_use_s < SHARED_S:
                worker.shared_until_s = now_s + SHARED_S
            worker.last_client = client
        if client.open_calls == 1:
            worker.lone_until_s = now_s + LONE_S
        worker.last_use_s = now_s

    def _has_room(self, worker: Worker, call: Call) -> bool:
        """What was sent ahead runs first. So while others call a worker, too, a client has few calls there, and one
        while some of them wait for each of theirs. A call that other workers could have waits here for the first that
        is free."""
        if worker.is_held or (call.route.signature.spec.is_pooled and worker.running):
            return False
        client = call.client.number
        count, now_s = len(worker.running), self.effects.now_s
        if count >= self.limits.depth:
            return False
        share = 1 if now_s < worker.lone_until_s else self.limits.share
        if count < share or now_s >= worker.shared_until_s:
            return True
        return sum(one.client.number == client for one in worker.running) < share

    def send(self, worker: Worker, call: Call) -> None:
        plan = self.signatures.prepare(worker, call)
        self.grants.lend(worker, call)
        if call.waits_since_s != math.inf:
            call.start_wait_s += self.effects.now_s - call.waits_since_s
            call.waits_since_s = math.inf
        call.attempt += 1
        self.effects.tally.send(call, self.effects.now_s)
        call.dispatch = next(self._numbers)
        move(call, _RUNNING, worker)
        if len(worker.running) == 1:
            self.start_clock(worker)
        point = call.point.point if call.point is not None else None
        number = call.client.number
        self.effects.emit(
            act.Run(
                worker.identity,
                plan,
                call.dispatch,
                call.attempt,
                number,
                call.body,
                point,
                call.graph_slot,
                call.binding,
            )
        )

    def send_waiting(self, worker: Worker) -> None:
        """It has become ready, or got room."""
        while worker.waiting and len(worker.running) < self.limits.depth:
            call = worker.waiting.first(lambda oldest: self._has_room(worker, oldest))
            if call is None:
                break
            self.send(worker, call)
        if not worker.running and len(self.lifecycle.siblings(worker)) > 1:
            self._take_from_siblings(worker)

    def _take_from_siblings(self, worker: Worker) -> None:
        """A worker that is free has a call that waits for another one of its environment, and that it may have."""
        for sibling in sorted(self.lifecycle.siblings(worker), key=lambda one: -len(one.waiting)):
            for call in sibling.waiting:
                if not call.may_try(worker.backend):
                    continue
                order = self.signatures.order(call.route.signature)
                verdict = next((one for one in order if one.backend == worker.backend), None)
                if verdict is not None:
                    call.kernel_id = verdict.kernel_id
                    self.send(worker, call)
                    return

    def take_head(self, worker: Worker) -> Call:
        """The oldest running call is over; the next one starts, and a waiting one is sent."""
        call = worker.running[0]
        move(call, _IN_HAND)
        if worker.state is S.READY and (worker.waiting or len(self.lifecycle.siblings(worker)) > 1):
            self.send_waiting(worker)
        if worker.running:
            self.start_clock(worker)
        return call

    def start_clock(self, worker: Worker) -> None:
        worker.head_since_s = self.effects.now_s
        self.effects.wake_by(worker.head_deadline_s)

    # --- on to the next ------------------------------------------------------------------------------

    def attempt_failed(
        self,
        call: Call,
        worker: Worker,
        error: LayerZeroError,
        *,
        exit_code: int | None = None,
        phase: str = "",
        pid: int | None = None,
    ) -> None:
        """An attempt is over for good (the worker has answered, or is dead): try the next kernel, or end the call."""
        if call.is_unwanted:
            self.closing.close(call)
            return
        if call.is_spent:
            self.closing.refuse(call, error)
            return
        cannot_bind = error.code == CudaGraphUnsafe.code  # by this kernel; it is well, and another may
        if error.retry in (NEVER, SAME) and exit_code is None and not cannot_bind:
            self.closing.refuse(call, error)
            return
        self.note_attempt(call, worker, error, exit_code=exit_code, phase=phase, pid=pid)
        spec = call.route.signature.spec
        if spec.device and error.code == NoTransport.code:  # its kernels are well
            worker.no_transport[call.client.number, spec.device] = error
        elif (
            phase != "queued" and not cannot_bind and error.code != DeadlineExceeded.code
        ):  # a short timeout_s is the caller's doing
            self.engine.note_failure(worker.backend, spec.op, error, self.effects.now_s, spec.device)
            self.health_at_s = self.engine.health.next_change_s(self.effects.now_s)
            self.effects.wake_by(self.health_at_s)
        if call.deaths >= MAX_DEATHS_PER_CALL:
            call.client.poisons[call.route.number] += 1
            self.closing.refuse(call, self.quarantine.verdict(call.deaths))
        elif spec.pinned and not (len(spec.candidates) > 1 and self.can_place(call)):
            self.closing.refuse(call, error)
        elif self.effects.stopping:
            self.closing.end_for_shutdown(call)
        else:
            self.place(call)

    def note_attempt(
        self,
        call: Call,
        worker: Worker,
        error: LayerZeroError,
        *,
        exit_code: int | None = None,
        phase: str = "",
        pid: int | None = None,
    ) -> None:
        pid = worker.pid if pid is None else pid
        words = (worker.backend, call.kernel_id, error.code, error.message)
        call.attempts.append(failed_attempt(*words, pid=pid, exit_code=exit_code, phase=phase))
        call.route.failed_by.add(call.kernel_id)
        worker.failed += 1
        self.effects.tally.fallbacks[call.route.signature.spec.op, worker.backend, error.code] += 1
        call.last_error = error
        has_ended = exit_code is not None and error.code == BackendError.code  # and was not killed for the call
        if worker.backend not in call.tried and (has_ended or phase == "queued"):
            call.lost_at.add(worker.backend)
        call.tried.add(worker.backend)
        may_have_run = phase == "unreachable" or (exit_code is not None and phase != "queued")
        if may_have_run and call.route.signature.spec.is_pooled:  # nobody repeats it unasked
            environment = environment_of(worker.backend)
            call.tried |= {one for one in call.route.signature.spec.candidates if environment_of(one) == environment}
        call.once_more.discard(worker.backend)

    def watch_health(self) -> None:
        """A kernel that failed may be tried again from now on."""
        if self.effects.now_s >= self.health_at_s:
            self.engine.epoch += 1
            self.health_at_s = self.engine.health.next_change_s(self.effects.now_s)

    def requeue(self, call: Call, worker: Worker, exit_code: int, pid: int) -> None:
        """On to another candidate, or, if there is none, the call stays for the restart, should it be soon enough."""
        if not call.is_spent and self._awaits_restart(call, worker):
            return
        is_replaced = worker.state is S.RETIRED  # by one that may have the call; S.ABSENT: it had nothing to do
        is_replaced = (is_replaced or worker.state is S.ABSENT) and not call.is_spent
        if is_replaced and not call.is_unwanted and not self.effects.stopping:
            self.place(call)
            return
        if worker.state is S.DISABLED:
            lost = disabled(worker)
        else:
            how = exit_text(exit_code)
            where = "with what the call had enqueued on the GPU" if call.is_spent else "while the call was queued"
            where = "while the call ran, and not for it" if call.is_spent and call.has_begun else where
            text = f"the {worker.backend} worker died ({how}) {where}"
            lost = BackendError(text, backend=worker.backend, exit_code=exit_code)
        self.attempt_failed(call, worker, lost, exit_code=exit_code, phase="queued", pid=pid)

    def leave(self, call: Call, worker: Worker, error: LayerZeroError) -> None:
        """As `requeue`, from a worker that has not got the call and is not known to have ended."""
        if not self._awaits_restart(call, worker):
            self.attempt_failed(call, worker, error, phase="queued")

    def _awaits_restart(self, call: Call, worker: Worker) -> bool:
        may_wait = worker.state is S.BACKOFF and not call.is_unwanted
        if may_wait and self._is_back_in_time(worker.backend, call) and not self._has_other(call):
            self._let_wait(call, worker)
            return True
        return False

    def _let_wait(self, call: Call, worker: Worker) -> None:
        """Until the worker has room for it; how long for want of a worker that runs is kept for the report."""
        if worker.state is not S.READY:
            call.waits_since_s = min(call.waits_since_s, self.effects.now_s)
        move(call, _WAITING, worker)

    def leave_disabled(self, worker: Worker) -> None:
        """If the worker will not come, those that wait for it go on."""
        if worker.state is S.DISABLED:
            for call in take(worker.waiting):
                self.attempt_failed(call, worker, disabled(worker))

    def leave_uncertified(self, worker: Worker) -> None:
        """Calls that wait for a kernel which the probe did not certify for them go to another."""
        for call in take(worker.waiting):
            order = self.signatures.order(call.route.signature)
            if any(verdict.kernel_id == call.kernel_id for verdict in order):
                move(call, _WAITING, worker)
            else:
                self.place(call)

    def unserved(self, call: Call) -> LayerZeroError:
        """Why it ends when nobody is left to take it."""
        spec = call.route.signature.spec
        if call.last_error is not None:
            tried = ", ".join(f"{a['kernel_id']} ({a['code']})" for a in call.attempts)
            codes = {a["code"] for a in call.attempts} | {call.last_error.code}
            cls: type[LayerZeroError] = BackendError
            if NoTransport.code in codes:  # its client can offer its memory in another way
                cls = NoTransport
            elif CudaGraphUnsafe.code in codes:
                cls = CudaGraphUnsafe
            elif call.last_error.code == DeadlineExceeded.code:
                cls = DeadlineExceeded
            what = f"no kernel is left; tried {tried}" if tried else "no kernel is within reach"
            error: LayerZeroError = cls(f"{spec.op}: {what}: {call.last_error.message}")
            error.facts = dict(call.last_error.facts)
        else:
            ranked = self.lifecycle.as_of_now(call.route.signature.ranked)
            error = no_backend(spec, ranked, self.engine.capabilities, self.engine.refused)
        return error
