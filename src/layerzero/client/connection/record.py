"""From what is noted of a call to its report. Making one costs more than most calls: it waits until someone asks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from layerzero.client.connection.call import Submitted
from layerzero.client.connection.report import (
    BEFORE,
    BROKER,
    IN_PROCESS,
    Attempt,
    Candidate,
    Copy,
    SelectionReport,
    not_kept,
)
from layerzero.client.planning.plans import Plan
from layerzero.ipc.records import named_record
from layerzero.ipc.transport import messages
from layerzero.ipc.transport.attempts import as_failed_attempt


@named_record
class Told(messages.Decision):
    """A decision as this process heard of it: its verdicts on kernels are of then. `told_ns`: on the clock of calls."""

    told_ns: int

    @classmethod
    def of(cls, decision: messages.Decision) -> Told:
        return cls(**vars(decision), told_ns=time.perf_counter_ns())


ROLLOUT = "rollout: "  # what the broker's note on a version begins with that stands in for another

# Of a call that ended well: plan, copies, start and end in ns, the kernel's ns, failed attempts as the broker tells
# them, what served, attempts that failed before the broker was asked, a note or "". A tuple: every call makes one.
# Copies of a call that was made again (client/session/_repeats.c) may be those of the first one, and of each by turns
# what is to be said of it, or None, whether it was made before, and None.
Copies: TypeAlias = Sequence[Copy] | tuple[tuple[Copy, ...], list[Any]]
Record: TypeAlias = tuple[Plan, Copies, int, int, int, Sequence[Any], messages.Decision, Sequence[Attempt], str]


def report_of(record: Record | SelectionReport | None) -> SelectionReport | None:
    """The report of a call; None stays None."""
    if record is None or isinstance(record, SelectionReport):
        return record
    plan, copies, start_ns, end_ns, kernel_ns, attempts, decision, prior, note = record
    copies, kept = told_apart(copies)
    where = "client" if decision.lane == IN_PROCESS else "worker"
    for is_copied, name, specs in (
        (decision.copies_inputs, "inputs", plan.inputs),
        (decision.copies_outputs, "out", plan.outputs),
    ):
        nbytes = sum(spec.numel * spec.itemsize for spec in specs if spec is not None)
        if is_copied and nbytes:
            copies.append(Copy(name, nbytes, where, f"{decision.backend} owns its arrays' memory"))
    age_s = max(start_ns - decision.told_ns, 0) / 1e9 if isinstance(decision, Told) else 0.0
    good = Attempt(decision.backend, decision.kernel_id, None, worker_pid=decision.worker_pid)
    return SelectionReport(
        op=plan.op,
        kernel_id=decision.kernel_id,
        backend=decision.backend,
        worker_pid=decision.worker_pid,
        path=decision.lane,
        copies=tuple(copies),
        kept=tuple(kept),
        elapsed_us=(end_ns - start_ns) / 1e3,
        kernel_us=kernel_ns / 1e3,
        attempts=(*prior, *(attempt_of(a) for a in attempts), good),
        candidates=tuple(Candidate.from_wire(c) for c in decision.candidates),
        notes=(*rolled_out(decision.kernel_id, decision.candidates), *((note,) if note else ())),
        verdicts_age_s=age_s,
    )


def told_apart(copies: Copies) -> tuple[list[Copy], list[Copy]]:
    """Those that were made for this call, and those that were made before it."""
    told: list[Copy] = []
    if copies and isinstance(copies[0], tuple):
        first, said = copies
        for copy, what, was_before in zip(first, said[::3], said[1::3], strict=True):  # type: ignore[arg-type, index]
            plain = copy if what is None else not_kept(copy, what)
            told.append(replace(copy, where=BEFORE, reason=what) if was_before else plain)
    else:
        told.extend(copies)  # type: ignore[arg-type]
    return [copy for copy in told if copy.where != BEFORE], [copy for copy in told if copy.where == BEFORE]


def failure(submitted: Submitted, outcome: messages.Outcome) -> SelectionReport:
    """The report of a call that no kernel could serve."""
    return failure_of(submitted.request.op, submitted.copies, submitted.start_ns, outcome, submitted.prior)


def failure_of(
    op: str, copies: Sequence[Copy], start_ns: int, outcome: messages.Outcome, prior: Sequence[Attempt] = ()
) -> SelectionReport:
    """As `failure`, from its parts."""
    copies, kept = told_apart(copies)
    return SelectionReport(
        op=op,
        kernel_id=None,
        backend=None,
        worker_pid=None,
        path=BROKER,
        copies=tuple(copies),
        kept=tuple(kept),
        elapsed_us=(time.perf_counter_ns() - start_ns) / 1e3,
        attempts=(*prior, *(attempt_of(a) for a in outcome.attempts)),
        candidates=tuple(Candidate.from_wire(c) for c in outcome.candidates),
    )


def waited(outcome: messages.Outcome) -> str:
    """A note: how much of a call's time was the start of its worker; empty for one that was running."""
    return f"{outcome.waited_s:.1f} s: its worker was started" if outcome.waited_s else ""


def attempts_of(outcome: messages.Outcome) -> tuple[Attempt, ...]:
    """Those that failed, as the broker tells them."""
    return tuple(attempt_of(a) for a in outcome.attempts)


def explanation(op: str, answer: Mapping[str, Any]) -> SelectionReport:
    """The report of a call that was not made, from the broker's answer."""
    candidates = tuple(Candidate.from_wire(c) for c in answer["candidates"])
    best = next((c for c in candidates if c.accepted), None)
    return SelectionReport(
        op=op,
        kernel_id=best.kernel_id if best else None,
        backend=best.backend if best else None,
        worker_pid=None,
        path=BROKER if best else None,
        candidates=candidates,
        notes=rolled_out(best.kernel_id, answer["candidates"]) if best else (),
    )


def rolled_out(kernel_id: str, candidates: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The rollout by which a kernel serves the call, if any: one of its notes among the verdicts."""
    notes = (note for one in candidates if one["kernel_id"] == kernel_id for note in one["notes"])
    return tuple(note for note in notes if note.startswith(ROLLOUT))


def with_refusal(candidate: Candidate, refusals: Mapping[str, str]) -> Candidate:
    """With a note of why it stays out of this process, if it does. `refusals`: by backend or kernel."""
    why = refusals.get(candidate.kernel_id, refusals.get(candidate.backend))
    if why is None:
        return candidate
    return replace(candidate, notes=(*candidate.notes, f"does not run in this process: {why}"))


def attempt_of(value: Any) -> Attempt:
    """A failed one, as the broker tells it."""
    failed = as_failed_attempt(value)
    return Attempt(
        failed["backend"],
        failed["kernel_id"],
        failed["code"],
        failed["detail"],
        failed["exit_signal"],
        failed["exit_code"],
        failed["phase"],
        failed["worker_pid"],
    )


def kernel_of(record: object) -> tuple[str, str, bool]:
    """Kernel and path of a call, and whether it was tried elsewhere before; "" where that is known later only."""
    if isinstance(record, tuple):
        decision = record[6]
        return decision.kernel_id, decision.lane, bool(record[5] or record[7])
    if isinstance(record, SelectionReport):
        return record.kernel_id or "", record.path or "", len(record.attempts) > 1
    return "", "", False
