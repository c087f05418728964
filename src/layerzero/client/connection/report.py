"""What happened to a call, or what would: SelectionReport. Prints in a terminal and in a notebook."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

BROKER, EXPRESS, IN_PROCESS = "broker", "express", "in_process"  # lanes
ADAPTED = "the chosen kernel takes it only contiguous (policy: allow_adaptation)"


@dataclass(frozen=True)
class Copy:
    """Bytes that were copied, where ("client" or "worker") and why."""

    arg: str
    nbytes: int
    where: str
    reason: str


@dataclass(frozen=True)
class Attempt:
    """One try that failed. `outcome` is an error code; `exit_signal` is set when the worker was killed by one."""

    backend: str
    kernel_id: str
    outcome: str | None
    detail: str = ""
    exit_signal: int | None = None
    exit_code: int | None = None
    phase: str = ""
    worker_pid: int = 0


@dataclass(frozen=True)
class ReasonDetail:
    code: str
    detail: str


@dataclass(frozen=True)
class Candidate:
    """A kernel that was looked at: accepted with a score (higher is better), or rejected with every reason. One that
    only has to be compiled is rejected, and has the score that it will have.

    `terms`: the parts of the score by name; their sum is the score. `transforms`: copies of inputs that it needs.
    `notes`: what policy and health had to say. `fix`: the smallest change of the call that would make a rejected kernel
    eligible (only lz.explain looks for it), and `fix_saves_us` what it would save, where that was measured.
    """

    kernel_id: str
    backend: str
    accepted: bool
    reasons: tuple[ReasonDetail, ...] = ()
    score: float | None = None
    measured_us: float | None = None
    terms: Mapping[str, float] = field(default_factory=dict)
    transforms: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    fix: str | None = None
    fix_saves_us: float | None = None
    fused_ops: tuple[str, ...] = ()

    @classmethod
    def from_wire(cls, value: Mapping[str, Any]) -> Candidate:
        return cls(
            value["kernel_id"],
            value["backend"],
            value["accepted"],
            tuple(ReasonDetail(r["code"], r["detail"]) for r in value["reasons"]),
            value["score"],
            value["measured_us"],
            value["terms"],
            tuple(value["transforms"]),
            tuple(value["notes"]),
            value.get("fix"),
            value.get("fix_saves_us"),
            tuple(value.get("fused_ops", ())),
        )


@dataclass(frozen=True)
class ExecutionPlan:
    """What was selected, without why: spec 5.6. `transform_cost` is in points of the score."""

    kernel_id: str
    backend: str
    lane: str
    transforms: tuple[str, ...] = ()
    fused_ops: tuple[str, ...] = ()
    transform_cost: float = 0.0
    uses_fallback: bool = False


@dataclass(frozen=True)
class SelectionReport:
    """Which kernel served a call (or would), what it cost, why not the others.

    `elapsed_us` is the caller's wall time, `kernel_us` the kernel's own; both are None for an explanation.
    `lane` is "broker", "express" or "in_process" (docs/design.md). `attempts` has every try, the successful one last
    with outcome None. `notes`: what else there is to say, such as why a backend that policy wants in the caller's
    process did not run there.
    """

    op: str
    kernel_id: str | None
    backend: str | None
    worker_pid: int | None
    lane: str | None
    copies: tuple[Copy, ...] = ()
    elapsed_us: float | None = None
    kernel_us: float | None = None
    attempts: tuple[Attempt, ...] = ()
    candidates: tuple[Candidate, ...] = field(default=())
    notes: tuple[str, ...] = ()

    @property
    def copied_bytes(self) -> int:
        """All bytes copied for this call, on either side."""
        return sum(copy.nbytes for copy in self.copies)

    @property
    def plan(self) -> ExecutionPlan | None:
        """What was selected; None when nobody serves the call."""
        if self.kernel_id is None or self.backend is None or self.lane is None:
            return None
        chosen = next((c for c in self.candidates if c.kernel_id == self.kernel_id), None)
        terms = chosen.terms if chosen else {}
        copied = tuple(f"contiguous {copy.arg}" for copy in self.copies if copy.reason == ADAPTED)
        return ExecutionPlan(
            self.kernel_id,
            self.backend,
            self.lane,
            copied or (chosen.transforms if chosen else ()),
            chosen.fused_ops if chosen else (),
            abs(terms.get("transform", 0.0)),
            any(attempt.outcome is not None for attempt in self.attempts),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def _headline(self) -> str:
        served = f"{self.kernel_id} ({self.backend}" + (f", pid {self.worker_pid})" if self.worker_pid else ")")
        if self.kernel_id is None:
            served = "no kernel"
        times = ""
        if self.elapsed_us is not None:
            times = f", {self.elapsed_us:,.0f} us" + (
                f" of which kernel {self.kernel_us:,.0f} us" if self.kernel_us else ""
            )
        return f"{self.op}: {served}{times}"

    def _rows(self) -> list[tuple[str, str, str, str]]:
        rows = []
        for c in self.candidates:
            why = "; ".join(f"{r.code}: {r.detail}" for r in c.reasons)
            if c.accepted:
                measured = "measured " + time_text(c.measured_us) if c.measured_us is not None else "not measured yet"
                terms = " ".join(f"{name} {value:+.4g}" for name, value in c.terms.items())
                why = "; ".join((measured, *([terms] if len(c.terms) > 1 else []), *c.transforms, *c.notes))
            elif c.fix:
                saves = f", which would save {time_text(c.fix_saves_us)}" if c.fix_saves_us is not None else ""
                why += f" -> {c.fix}{saves}"
            verdict = "chosen" if c.kernel_id == self.kernel_id else "accepted" if c.accepted else "rejected"
            rows.append((c.kernel_id, verdict, f"{c.score:.1f}" if c.score is not None else "", why))
        return rows

    def _notes(self) -> list[str]:
        notes = list(self.notes)
        for a in self.attempts:
            if a.outcome is not None:
                notes.append(f"attempt on {a.kernel_id} failed: {a.outcome}: {a.detail}")
        alike: dict[tuple[str, str], list[Copy]] = {}
        for copy in self.copies:
            alike.setdefault((copy.where, copy.reason), []).append(copy)
        for (where, reason), copies in alike.items():
            names, nbytes = ", ".join(copy.arg for copy in copies), sum(copy.nbytes for copy in copies)
            notes.append(f"copied {names}: {nbytes:,} bytes in the {where}, {reason}")
        if self.elapsed_us is not None and not self.copies:
            notes.append("copied nothing")
        return notes

    def __str__(self) -> str:
        lines = [self._headline(), *(f"  {note}" for note in self._notes())]
        rows = self._rows()
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
        for kernel, verdict, score, why in rows:
            lines.append(f"  {kernel:<{widths[0]}}  {verdict:<{widths[1]}}  {score:>{widths[2]}}  {why}".rstrip())
        return "\n".join(lines)

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for name in ("kernel", "verdict", "score", "why"):
            table.add_column(name, justify="right" if name == "score" else "left", overflow="fold")
        style = {"chosen": "bold green", "accepted": "green", "rejected": "dim"}
        for row in self._rows():
            table.add_row(*(Text(cell) for cell in row), style=style[row[1]])
        styles = [(note, "yellow" if note.startswith("attempt") else "") for note in self._notes()]
        notes = [Padding(Text(note, style=style), (0, 0, 0, 2)) for note, style in styles]
        return Group(Text(self._headline(), style="bold"), *notes, table)

    def _repr_html_(self) -> str:
        rows = "".join(
            "<tr>" + "".join(f"<td style='text-align:left'>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in self._rows()
        )
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in self._notes())
        return (
            f"<b>{html.escape(self._headline())}</b><ul>{notes}</ul><table><thead><tr><th>kernel</th><th>verdict</th>"
            f"<th>score</th><th>why</th></tr></thead><tbody>{rows}</tbody></table>"
        )


def time_text(us: float) -> str:
    """With three digits or so, in the unit that suits."""
    return f"{us:,.0f} us" if us < 1e4 else f"{us / 1e3:,.1f} ms" if us < 1e6 else f"{us / 1e6:,.2f} s"
