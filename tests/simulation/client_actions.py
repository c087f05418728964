"""What the server does for clients; a promise that an answer breaks is a Violation."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.simulation.backends import GPU, NEWER
from tests.simulation.clients import Client
from tests.simulation.model import Call

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.core.quarantine import MAX_DEATHS_PER_CALL
from layerzero.broker.core.worker_fsm import WorkerState
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.errors import from_wire
from layerzero.ipc.transport.messages import Decision, decode
from layerzero.ipc.vocabulary.worker_codes import mark


class ClientActions:
    """World as the server that clients know."""

    def _to_client(self, identity: bytes) -> Client | None:
        """The client, unless it was dropped while this very list of actions was performed."""
        client = self.clients[identity]
        if client.has_left:
            self.require(client.left_during == self._events, "an answer to a client that has left")
            return None
        if self.rng.random() < self._p_full:
            self._leave(client)
            self._handle(ev.ClientLeft(identity))
            return None
        return client

    def _decide(self, action: act.SendDecision) -> None:
        client = self._to_client(action.identity)
        if client is not None:
            client.decisions[action.decision] = decode(action.body, Decision)

    def _answer(self, action: act.Answer) -> None:
        client = self._to_client(action.identity)
        if client is None:
            return
        call = client.open.pop(action.seq, None)
        self.require(call is not None, f"call {action.seq} is answered twice")
        assert call is not None
        dispatch = call.dispatches[-1]
        self.coverage.fates["point_rerun"] += call.has_word and call.point is not None
        ended = action.attempt == dispatch.attempt and dispatch.result is not None
        is_lost = call.is_done and not action.body  # its worker ended after the GPU had, and before it could say so
        is_true = ended and (action.body == dispatch.result or is_lost)
        self.require(is_true, "an answer without an attempt that ran to its end")
        before = call.dispatches[:-1] if self.device else call.dispatches
        self.require(all(d.is_over for d in before), "a call is answered while a worker has it")
        self._check_blame(call, action.attempts)
        decision = client.decisions.get(action.decision)
        self.require(decision is not None, "an answer before its decision")
        assert decision is not None
        process = next(p for p in self.processes.values() if p.pid == decision.worker_pid)
        able = self.able(call)
        self.require(decision.backend == process.backend in able, "a decision names another backend")
        self._note_reasons(decision.candidates)
        client.inbound.send(client.answered, call)

    def _refuse(self, action: act.Refuse) -> None:
        client = self._to_client(action.identity)
        if client is None:
            return
        call = client.open.pop(action.seq, None)
        if call is None and client.has_offended:
            return  # its offence was not even looked at
        self.require(call is not None, f"call {action.seq} is refused after its end")
        assert call is not None
        if call.point is not None:
            is_over = call.has_failed or (call.has_passed and self.exits > 0)
            self.require(is_over, "a call is refused before its turn fails")
            client.pending.pop(call.point, None)
        self.require(all(d.is_over for d in call.dispatches), "a call is refused while a worker has it")
        self._check_blame(call, action.attempts)
        error = from_wire(action.error.to_wire())
        failed = [attempt for attempt in action.attempts if attempt["code"] != "NOT_COMPILED"]
        tried = Counter(attempt["backend"] for attempt in failed)
        queued = {attempt["backend"] for attempt in failed if attempt["phase"] == "queued"}
        unfinished = {backend for backend in call.died_on | queued if tried[backend] == 1}
        left = {b for b in call.signature.backends - tried.keys() | unfinished if self._could_serve(b, call)}
        no_transport = self._no_transport_to(call)
        left -= {*no_transport, NEWER}  # the old version is the fallback, and a rollout may end meanwhile
        if call.point is not None and self._held_since.get((client.number, GPU, call.point)) != self._events:
            left = set()  # it was held back: much may have changed since it was refused
        match error.code:
            case "POISON":
                is_true = call.deaths == MAX_DEATHS_PER_CALL or call.is_quarantined
                self.coverage.fates["lane_poison"] += bool(call.after[0]) and not call.is_quarantined
            case "DIGEST_REQUIRED":
                is_true = not call.digest and any(key[0] == call.signature.body for key in self._quarantine)
            case "BUSY":
                is_true = call.is_crowded or (
                    "short timeouts" in error.message and call.timeout_s < self.limits.timeout_s
                )
            case "BROKER_LOST":
                is_true = self._is_stopping
            case "NO_BACKEND":
                waited = all(attempt["code"] == "NOT_COMPILED" for attempt in action.attempts)
                is_true = waited and not left and not any(c["accepted"] for c in action.candidates)
            case "DEADLINE" if "kernel_id" in error.facts:
                self.coverage.fates["compile_awaited"] += 1
                is_long = self.now_s - call.since_s >= call.timeout_s - 1e-9
                is_true = is_long and not any(self._is_compiled(b, call) for b in left)
            case "CUDA_GRAPH_UNSAFE":
                codes = {attempt["code"] for attempt in action.attempts}
                is_true = call.graph_slot is not None and (not left or bool(call.signature.pinned))
                is_true &= "CUDA_GRAPH_UNSAFE" in codes
            case "BACKEND_ERROR" | "DEADLINE":
                is_true = bool(action.attempts) and (not left or bool(call.signature.pinned))
                is_true &= error.code != "DEADLINE" or "deadline" in call.faults
            case "NO_TRANSPORT":
                failed = {attempt["code"] for attempt in action.attempts}
                is_true = ("NO_TRANSPORT" in failed or bool(no_transport)) and (not left or bool(call.signature.pinned))
            case "BAD_MESSAGE":
                is_true = bool(call.signature.pinned) and "fault" in call.faults
            case "UNREACHABLE":
                has_newer = NEWER in (self.able(call) - tried.keys() | unfinished) and self._could_serve(NEWER, call)
                is_true = bool(left or has_newer) and call.is_lent and not call.signature.pinned
            case _:
                is_true = error.code in ("INVALID_ARGUMENT", "OUTPUT_TOO_SMALL")
        self.require(is_true, f"a call ends in {error.code}, which is not true: {error}")
        self.coverage.codes[error.code] += 1
        self._note_reasons(action.candidates)
        client.inbound.send(client.refused, call, error)

    def _check_blame(self, call: Call, attempts: list[dict[str, Any]]) -> None:
        """A call that its lane's worker was not killed for, and did not die in, only lost its place. So did all calls
        of a worker that began anew."""
        renewed = {process.pid for process in self.processes.values() if process.has_renewed}
        is_right = all(
            one["exit_code"] is None or one["phase"] == "queued" for one in attempts if one["worker_pid"] in renewed
        )
        self.require(is_right, "a call is blamed for the end of a worker that only began anew")
        if call.is_innocent_of and attempts:
            is_it = attempts[0]["worker_pid"] == call.is_innocent_of
            self.require(not is_it or attempts[0]["phase"] in ("queued", ""), "a call of a ring is blamed for another")
        if call.after[0] and attempts:
            lane = self.lanes[call.after[0]]
            is_innocent = lane.blamed != mark(*call.after) and attempts[0]["worker_pid"] == lane.process.pid
            is_blamed = attempts[0]["phase"] not in ("queued", "")  # the latter: its backend was disabled meanwhile
            self.require(not (is_innocent and is_blamed), "a call is blamed for another one's end")

    def _no_transport_to(self, call: Call) -> set[str]:
        """Backends that its memory is known not to reach."""
        key = (call.client.number, GPU)
        return call.no_transport | {b for b in self.able(call) if key in self.state.workers[b].no_transport}

    def able(self, call: Call) -> frozenset[str]:
        """Backends that may serve it; a newer one only while a rollout wants it."""
        able = call.signature.backends
        return able | {NEWER} if self.rolls and "beta" in able and not call.signature.pinned else able

    def _could_serve(self, backend: str, call: Call) -> bool:
        """It is available, or restarts within the call's timeout."""
        reason, worker = self.state.unavailable.get(backend), self.state.workers[backend]
        is_soon = worker.state is not WorkerState.BACKOFF or worker.retry_at_s <= self.now_s + call.timeout_s
        if self._is_compiled(backend, call) is False:
            return False
        return reason is None or (reason.code is Reason.BACKEND_RESTARTING and is_soon)

    def _note_reasons(self, candidates: list[dict[str, Any]]) -> None:
        for candidate in candidates:
            self.require(candidate["accepted"] == (not candidate["reasons"]), "a rejection without a reason")
            for reason in candidate["reasons"]:
                self.coverage.reasons[reason["code"]] += 1

    def _drop_client(self, action: act.DropClient) -> None:
        client = self.clients[action.identity]
        self.require(client.has_offended, f"an innocent client is dropped: {action.detail}")
        self._leave(client)
        self._handle(ev.ClientLeft(action.identity))

    def _note(self, action: act.Note) -> None:
        pass

    def _release_call(self, action: act.ReleaseCall) -> None:
        self.require(False, f"memory is released that nobody had lost: {action}")

    def _exit(self, _: act.Exit) -> None:
        self.exits += 1
        left = [p.backend for p in self.processes.values() if not p.is_over]
        self.require(self._is_stopping and not left, f"the broker ends with workers {left}")
