"""A trace as rows of slices, for pictures: the program's threads, its workers, its GPUs. What is on one row lies in
each other or behind each other, so that every viewer can show it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from layerzero.client.traces.calls import FUNCTION, STEP, RecordedCall
from layerzero.client.traces.contents import TraceContents

CALLS, SCOPES, KERNELS = "layerzero", "layerzero.scope", "layerzero.kernel"
"""Categories of slices."""


@dataclass
class Slice:
    """`sends`, `takes`: numbers of arrows that begin and end here."""

    name: str
    category: str
    start_ns: int
    elapsed_ns: int
    facts: dict[str, Any] = field(default_factory=dict)
    sends: list[int] = field(default_factory=list)
    takes: list[int] = field(default_factory=list)

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.elapsed_ns


@dataclass(frozen=True)
class Row:
    """`pid`, `process`: whose row it is; `tid`: a thread's of the system, 0 for what is none."""

    pid: int
    process: str
    name: str
    tid: int
    slices: tuple[Slice, ...]


def rows_of(contents: TraceContents) -> list[Row]:
    """All rows of a trace."""
    told = contents.facts.get("pid")
    pid = told if type(told) is int and told > 0 else 0  # a file may say anything
    process = f"{contents.facts.get('program') or 'program'} (layerzero)"
    drawn = {call.number: _slice_of(call) for call in contents.calls}
    arrows = iter(range(1, 1 << 62))
    _draw_flow(contents, drawn, arrows)
    by_thread: dict[int, list[Slice]] = {number: [] for number in sorted(contents.threads)}
    for call in contents.calls:
        by_thread.setdefault(call.thread, []).append(drawn[call.number])
    for scope in contents.scopes:
        if scope.elapsed_ns is not None:
            by_thread.setdefault(scope.thread, []).append(
                Slice(scope.name, SCOPES, scope.start_ns, scope.elapsed_ns, {"scope": scope.number})
            )
    rows: list[Row] = []
    for number, slices in by_thread.items():
        named = contents.threads.get(number)
        name, tid = (f"thread {number}", 0) if named is None else named
        rows += _rows(pid, process, name, tid, nested(slices))
    gpus, workers = _gpu_slices(contents, drawn, arrows), _worker_slices(contents, drawn, arrows, pid)
    for device, slices in sorted(gpus.items()):
        rows += _rows(pid, process, f"{device}, by the caller's streams", 0, nested(slices))
    for (worker, backend), slices in sorted(workers.items()):
        rows += _rows(worker, f"worker {backend}", "kernels", worker, nested(slices))
    return rows


def _rows(pid: int, process: str, name: str, tid: int, rows: list[list[Slice]]) -> Iterator[Row]:
    for number, slices in enumerate(rows):
        yield Row(pid, process, f"{name} ({number + 1})" if number else name, 0 if number else tid, tuple(slices))


def nested(slices: Iterable[Slice]) -> list[list[Slice]]:
    """In rows on which each lies in another or behind it, as few as come of putting each on the first that has room;
    those of a row begin in order, an outer one before what lies in it."""
    rows: list[tuple[list[Slice], list[Slice]]] = []  # and those that are open at that time
    for one in sorted(slices, key=lambda s: (s.start_ns, -s.end_ns)):
        for row, still_open in rows:
            while still_open and still_open[-1].end_ns <= one.start_ns:
                still_open.pop()
            if not still_open or one.end_ns <= still_open[-1].end_ns:
                row.append(one)
                still_open.append(one)
                break
        else:
            rows.append(([one], [one]))
    return [row for row, _ in rows]


def _slice_of(call: RecordedCall) -> Slice:
    facts = {
        "call": call.number,
        "what": call.label,
        "kernel": call.kernel_id,
        "backend": call.backend,
        "path": call.path,
        "device": call.device,
        "kernel_us": call.kernel_ns / 1e3,
        "worker_pid": call.worker_pid,
        "copied_bytes": call.copied_bytes,
        "scopes": "/".join(call.scopes),
        "asked_backend": call.asked_backend or "",
        "error": call.error,
        "attempts": "; ".join(f"{one.kernel_id}: {one.outcome}: {one.detail}" for one in call.attempts),
        "notes": "; ".join(call.notes),
    }
    known = {name: value for name, value in facts.items() if value not in ("", 0, 0.0) or name == "call"}
    name = call.name if call.kind == FUNCTION or not call.backend else f"{call.name} ({call.backend})"
    return Slice(name, CALLS, call.start_ns, call.elapsed_ns, known)


def _draw_flow(contents: TraceContents, drawn: dict[int, Slice], arrows: Iterator[int]) -> None:
    for call in contents.calls:
        for source in call.sources:
            arrow = next(arrows)
            drawn[source.call].sends.append(arrow)
            drawn[call.number].takes.append(arrow)


def _gpu_slices(contents: TraceContents, drawn: dict[int, Slice], arrows: Iterator[int]) -> dict[str, list[Slice]]:
    found: dict[str, list[Slice]] = {}
    for call in contents.calls:
        if call.gpu_ns is not None:
            facts = {"call": call.number, "kernel": call.kernel_id, "backend": call.backend}
            found.setdefault(call.device, []).append(_led_to(drawn[call.number], *call.gpu_ns, facts, arrows))
    return found


def _worker_slices(
    contents: TraceContents, drawn: dict[int, Slice], arrows: Iterator[int], pid: int
) -> dict[tuple[int, str], list[Slice]]:
    """Kernels that ran in workers. How long each took is known, and in which call: it is drawn in the middle of that,
    or behind the one before it on that worker, as far as it may be."""
    given: dict[tuple[int, str], list[RecordedCall]] = {}
    for call in contents.calls:
        if call.kernel_ns and call.worker_pid not in (0, pid) and call.gpu_ns is None and call.device == "cpu":
            given.setdefault((call.worker_pid, call.backend), []).append(call)
    found: dict[tuple[int, str], list[Slice]] = {}
    for worker, calls in given.items():
        free_ns = 0
        for call in sorted(calls, key=_middle_ns):
            last_ns = max(call.end_ns - call.kernel_ns, call.start_ns)
            start_ns = min(max(_middle_ns(call), free_ns), last_ns)
            free_ns = start_ns + call.kernel_ns
            facts: dict[str, Any] = {"call": call.number, "kernel": call.kernel_id}
            if call.kind != STEP:
                facts["start"] = "within its call; the worker tells how long it took, not when it began"
            slices = found.setdefault(worker, [])
            slices.append(_led_to(drawn[call.number], start_ns, call.kernel_ns, facts, arrows))
    return found


def _middle_ns(call: RecordedCall) -> int:
    return call.start_ns + max(call.elapsed_ns - call.kernel_ns, 0) // 2


def _led_to(caller: Slice, start_ns: int, elapsed_ns: int, facts: dict[str, Any], arrows: Iterator[int]) -> Slice:
    arrow = next(arrows)
    caller.sends.append(arrow)
    return Slice(str(facts["kernel"]), KERNELS, start_ns, elapsed_ns, facts, takes=[arrow])
