"""From what the recorder noted to calls with their data flow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from layerzero.client.connection.record import attempt_of, told_apart
from layerzero.client.connection.report import Attempt, SelectionReport
from layerzero.client.gpu.arrays import device_name
from layerzero.client.gpu.outcomes import Enqueued
from layerzero.client.planning.plans import Plan
from layerzero.client.traces.calls import (
    FUNCTION,
    OP,
    STEP,
    KeptTensors,
    RecordedCall,
    ScopeRecord,
    Source,
    Tensor,
)
from layerzero.client.traces.flow import MemoryMap
from layerzero.client.traces.gpu_times import Span
from layerzero.client.traces.keeping import Kept
from layerzero.client.traces.recorder import Buffer, CallEntry, ChainEntry, Failed, Fresh, FunctionEntry
from layerzero.client.traces.scopes import Scope
from layerzero.ipc.errors import LayerZeroError
from layerzero.ipc.vocabulary.ops import OPS

_PLAIN = (str, int, float, bool, type(None))
NOT_KEPT = "a plan's calls that cross as one are not looked at"


class Snapshot:
    """Calls and scopes of a buffer as it is now. `memory`: the bytes that calls refer to, by SHA-256."""

    def __init__(self, buffer: Buffer) -> None:
        counted, fresh = list(buffer.calls), list(buffer.fresh)
        self.dropped = buffer.dropped(counted)
        self._calls: list[RecordedCall] = []
        self._reads: list[tuple[int, int, Sequence[tuple[str, int]]]] = []
        self._writes: list[tuple[int, int, Sequence[tuple[str, int, int]]]] = []
        self._scopes: dict[int, Scope] = {scope.number: scope for scope in list(buffer.scopes)}
        self._keeps = buffer.keeper is not None
        self.memory: dict[str, bytes] = {} if buffer.keeper is None else dict(buffer.keeper.memory)
        for _, entry in counted:
            if type(entry) is tuple:
                self._add_call(CallEntry(*entry))
            elif isinstance(entry, CallEntry):
                self._add_call(entry)
            elif isinstance(entry, ChainEntry):
                self._add_chain(entry)
            else:
                self._add_function(entry)
        self.calls = tuple(self._linked(fresh))
        self.scopes = tuple(_scope_records(self._scopes.values()))
        self.threads = sorted({call.thread for call in self.calls} | {scope.thread for scope in self.scopes})

    # --- each kind

    def _place(self, scope: Scope | None) -> dict[str, Any]:
        if scope is None:
            return {}
        chain = list(scope.chain())
        for one in chain:
            self._scopes.setdefault(one.number, one)
        return {"scope": scope.number, "scopes": tuple(one.name for one in reversed(chain))}

    def _add_call(self, entry: CallEntry) -> None:
        op = OPS[entry.op]
        facts = facts_of(entry.record)
        plan: Plan | None = facts.pop("plan", None)
        start_ns = facts.pop("start_ns", entry.start_ns)
        inputs = tuple(
            Tensor(name, spec) for name, spec in zip(op.inputs, entry.specs, strict=False) if spec is not None
        )
        outputs = _outputs(entry.op, plan)
        call = RecordedCall(
            entry.number,
            OP,
            entry.op,
            start_ns,
            max(facts.pop("end_ns", entry.end_ns) - start_ns, 0),
            entry.thread,
            device=device_name(entry.device),
            gpu_ns=_gpu_ns(entry.span),
            inputs=inputs,
            outputs=outputs,
            params={name: _plain(value) for name, value in entry.params.items()},
            asked_backend=entry.backend,
            **_kept_of(entry.kept, self.memory),
            **facts,
            **self._place(entry.scope),
        )
        memory = tuple(entry.memory) if not isinstance(entry.memory, bytes) else _addresses(entry.memory)
        args, made = memory[: len(op.inputs)], memory[len(op.inputs) :]
        if not any(made) and op.in_place and len(args) == len(op.inputs):
            made = tuple(args[op.inputs.index(name)] for name in op.outputs)
        self._note(call, entry.read_at, zip(op.inputs, args, strict=False), made)

    def _add_chain(self, entry: ChainEntry) -> None:
        """The steps have run one after the other; when, within the message, only their times tell."""
        total, at_ns = sum(step.kernel_ns for step in entry.steps), entry.start_ns
        slack_ns = max(entry.end_ns - entry.start_ns - total, 0)
        at_ns += slack_ns // 2
        for step in entry.steps:
            op, decision = OPS[step.op], step.decision
            given = [(name, spec) for name, spec in zip(op.inputs, step.specs, strict=False) if spec is not None]
            call = RecordedCall(
                entry.number,
                STEP,
                step.op,
                at_ns,
                step.kernel_ns,
                entry.thread,
                kernel_id=decision.kernel_id,
                backend=decision.backend,
                path=decision.lane,
                worker_pid=decision.worker_pid,
                kernel_ns=step.kernel_ns,
                inputs=tuple(Tensor(*one) for one in given),
                outputs=_outputs(step.op, step.plan),
                params={name: _plain(value) for name, value in step.params.items()},
                notes=(f"one of {len(entry.steps)} calls that crossed as one",),
                why_not_kept=NOT_KEPT if self._keeps else "",
                **self._place(entry.scope),
            )
            at_ns += step.kernel_ns
            self._note(call, entry.number, zip(op.inputs, step.args, strict=False), tuple(step.made))

    def _add_function(self, entry: FunctionEntry) -> None:
        report = entry.call.report
        selection: SelectionReport | None = report.selection
        failed = () if selection is None else tuple(a for a in selection.attempts if a.outcome is not None)
        is_in_worker = report.placement == "worker" and bool(report.served_by)
        call = RecordedCall(
            entry.number,
            FUNCTION,
            report.function,
            entry.start_ns,
            max(entry.end_ns - entry.start_ns, 0),
            entry.thread,
            kernel_id=report.function,
            backend=report.served_by,
            path="in_process" if report.placement != "worker" else "" if selection is None else selection.path or "",
            worker_pid=0 if selection is None else selection.worker_pid or 0,
            kernel_ns=int(1e3 * (selection.kernel_us or 0)) if selection is not None and is_in_worker else 0,
            inputs=tuple(Tensor(name, spec) for name, spec, _ in entry.inputs),
            outputs=tuple(Tensor(name, spec) for name, spec, _ in entry.outputs),
            params={"env": report.env},
            attempts=failed,
            error="" if report.served_by else (report.failures or ("it failed",))[-1],
            copied_bytes=sum(copy.nbytes for copy in report.copies),
            notes=(*report.failures, *filter(None, (report.placement_reason, report.shadow))),
            **self._place(entry.scope),
        )
        reads = ((name, address) for name, _, address in entry.inputs)
        self._note(call, entry.number, reads, tuple(address for _, _, address in entry.outputs))

    # --- data flow

    def _note(self, call: RecordedCall, read_at: int, reads: Iterable[tuple[str, int]], made: Sequence[int]) -> None:
        place = len(self._calls)
        self._calls.append(call)
        self._reads.append((read_at, place, [one for one in reads if one[1]]))
        named = zip(call.outputs, made, strict=False)
        writes = [(one.name, address, one.spec.span_bytes) for one, address in named if address]
        self._writes.append((call.number, place, writes))

    def _linked(self, fresh: Sequence[Fresh]) -> Iterator[RecordedCall]:
        """The calls in their order, numbered from the first, each with where its arguments come from."""
        events: list[tuple[int, int, int, Any]] = []
        for place in range(len(self._calls)):
            # What one call of a chain makes, the next one reads: same number, so by place; it reads before it writes.
            events.append((self._reads[place][0], 2 * place, place, None))
            events.append((self._writes[place][0], 2 * place + 1, place, self._writes[place][2]))
        events += [(one.number, -1, -1, one) for one in fresh]
        memory, sources = MemoryMap(), list[tuple[Source, ...]]([()] * len(self._calls))
        for _, _, place, what in sorted(events, key=lambda event: event[:2]):
            if isinstance(what, Fresh):
                memory.forget(what.address, what.nbytes)
            elif what is None:
                found = [(name, address, memory.find(address)) for name, address in self._reads[place][2]]
                sources[place] = tuple(
                    Source(name, one.call, one.name, address - one.origin)
                    for name, address, one in found
                    if one is not None
                )
            else:
                for name, address, nbytes in what:
                    memory.write(address, nbytes, place, name)
        for place, call in enumerate(self._calls):
            yield replace(call, number=place, sources=sources[place])


def facts_of(record: Any) -> dict[str, Any]:
    """What a record tells of a call (client/connection/record.py), as fields of RecordedCall, with its plan, start
    and end where it has them. One on a GPU that was not taken by a worker yet is waited for, as its report is."""
    if isinstance(record, Enqueued):
        plan, end_ns = record.route.plan, record.end_ns
        try:
            report = record.outcomes.report_of(record)
        except LayerZeroError as exc:
            return {"plan": plan, "end_ns": end_ns, "notes": (f"how it ended is not known: {exc.message}",)}
        failed = {} if report.kernel_id else {"error": _error_of(report)}
        return {**_facts_of_report(report), **failed, "plan": plan, "end_ns": end_ns}
    if isinstance(record, SelectionReport):
        return _facts_of_report(record)
    if isinstance(record, Failed):
        found = _facts_of_report(record.report) if isinstance(record.report, SelectionReport) else {}
        return {**found, "error": record.error}
    if record is None:
        return {}
    plan, copies, start_ns, end_ns, kernel_ns, attempts, decision, prior, note = record
    made, _ = told_apart(copies)
    return {
        "plan": plan,
        "start_ns": start_ns,
        "end_ns": end_ns,
        "kernel_id": decision.kernel_id,
        "backend": decision.backend,
        "path": decision.lane,
        "worker_pid": decision.worker_pid,
        "kernel_ns": kernel_ns,
        "attempts": (*prior, *map(attempt_of, attempts)),
        "copied_bytes": sum(copy.nbytes for copy in made),
        "notes": (note,) if note else (),
    }


def _facts_of_report(report: SelectionReport) -> dict[str, Any]:
    attempts: tuple[Attempt, ...] = tuple(one for one in report.attempts if one.outcome is not None)
    return {
        "kernel_id": report.kernel_id or "",
        "backend": report.backend or "",
        "path": report.path or "",
        "worker_pid": report.worker_pid or 0,
        "kernel_ns": int(1e3 * (report.kernel_us or 0)),
        "attempts": attempts,
        "copied_bytes": report.copied_bytes,
        "notes": report.notes,
    }


def _error_of(report: SelectionReport) -> str:
    last = (report.attempts or (None,))[-1]
    return "it failed" if last is None else f"{last.outcome}: {last.detail}"


def _outputs(op: str, plan: Plan | None) -> tuple[Tensor, ...]:
    if plan is None:
        return ()
    specs = plan.results or plan.outputs
    return tuple(Tensor(name, spec) for name, spec in zip(OPS[op].outputs, specs, strict=False))


def _gpu_ns(span: Span | None) -> tuple[int, int] | None:
    """None for one that the GPU will not tell of any more."""
    with suppress(LayerZeroError):
        if span is not None and span.read():
            return span.found
    return None


def _plain(value: Any) -> Any:
    """Scalars and lists of them as they are; of the rest what it is called."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (tuple, list)) and all(isinstance(one, _PLAIN) for one in value):
        return list(value)
    return repr(value)[:200]


def _addresses(packed: bytes) -> tuple[int, ...]:
    return tuple(memoryview(packed).cast("Q"))


def _kept_of(kept: Kept | None, memory: dict[str, bytes]) -> dict[str, Any]:
    if kept is None:
        return {}
    if kept.why:
        return {"why_not_kept": kept.why}
    found = KeptTensors(kept.arguments, kept.segments, tuple(kept.results))
    if not found.digests <= memory.keys():
        return {"why_not_kept": "newer calls have taken its room"}
    return {"kept": found}


def _scope_records(scopes: Iterable[Scope]) -> Iterator[ScopeRecord]:
    for one in sorted(scopes, key=lambda scope: scope.number):
        parent = None if one.parent is None else one.parent.number
        elapsed_ns = one.end_ns - one.start_ns if one.end_ns else None
        yield ScopeRecord(one.number, one.name, parent, one.thread, one.start_ns, elapsed_ns)
