"""What happened to a call, or what would: SelectionReport. Prints in a terminal and in a notebook."""

from __future__ import annotations

import html
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from layerzero.ipc.wording import counted, shared_causes

BROKER, EXPRESS, IN_PROCESS, LIFTED = "broker", "express", "in_process", "lifted"  # paths of a call
NODE = "node"  # likewise: another node of the cluster served it (docs/cluster.md)
NODE_LOST = "NODE_LOST"  # outcome of an attempt: that node does not answer any more
MIN_WIDTH = 80  # a report that is printed is made for a terminal at least so wide
MIN_COLUMN = 24  # so wide is the last column of a table at least
MAX_WHY = 160  # characters of why a kernel refuses
MAX_REFUSING = 5  # so many kernels say why they refuse; all of them in what is `verbose`
BEFORE = "before"  # where copies were made that serve again
ADAPTED = "the chosen kernel takes it only contiguous (policy: allow_adaptation)"


@dataclass(frozen=True)
class Copy:
    """Bytes that were copied, where ("client" or "worker") and why."""

    arg: str
    nbytes: int
    where: str
    reason: str


def not_kept(copy: Copy, told: str) -> Copy:
    """With what is to be said of why it was made for this call."""
    return replace(copy, reason=f"{copy.reason} ({told})")


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
    """`repair`: what removes a cause that lies not in the call; empty where there is nothing of that kind."""

    code: str
    detail: str
    repair: str = ""

    def __str__(self) -> str:
        return f"{self.code}: {self.detail}" + (f"; repair: {self.repair}" if self.repair else "")


@dataclass(frozen=True)
class Candidate:
    """A kernel that was looked at: accepted with a score (higher is better), or rejected with every reason. One that
    only has to be compiled is rejected, and has the score that it will have.

    `terms`: the parts of the score by name; their sum is the score. `transforms`: copies of inputs that it needs.
    `notes`: what policy and health had to say. `fix`: the smallest change of the call that would make a rejected kernel
    eligible (only lz.explain looks for it), and `fix_saves_us` what it would save, where that was measured. `group`:
    what this kernel and others need that are refused for the same cause, one which says nothing about this very call,
    such as "need an NVIDIA GPU"; empty for a kernel with reasons of its own. `lifted_only`: no worker has it here, and
    the caller's process launches it (docs/lifting.md).
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
    group: str = ""
    lifted_only: bool = False

    @classmethod
    def from_wire(cls, value: Mapping[str, Any]) -> Candidate:
        return cls(
            value["kernel_id"],
            value["backend"],
            value["accepted"],
            tuple(ReasonDetail(r["code"], r["detail"], r.get("repair", "")) for r in value["reasons"]),
            value["score"],
            value["measured_us"],
            value["terms"],
            tuple(value["transforms"]),
            tuple(value["notes"]),
            value.get("fix"),
            value.get("fix_saves_us"),
            tuple(value.get("fused_ops", ())),
            value.get("group", ""),
            value.get("lifted_only", False),
        )

    @property
    def repair(self) -> str:
        """What makes the kernel eligible without a change of the call; empty where nothing of that kind does."""
        return self.reasons[0].repair if self.reasons and all(reason.repair for reason in self.reasons) else ""


@dataclass(frozen=True)
class ExecutionPlan:
    """What was selected, without why: spec 5.6. `transform_cost` is in points of the score."""

    kernel_id: str
    backend: str
    path: str
    transforms: tuple[str, ...] = ()
    fused_ops: tuple[str, ...] = ()
    transform_cost: float = 0.0
    uses_fallback: bool = False


@dataclass(frozen=True)
class SelectionReport:
    """Which kernel served a call (or would), what it cost, why not the others.

    `elapsed_us` is the caller's wall time, `kernel_us` the kernel's own; both are None for an explanation.
    `path` is "broker", "express", "in_process", "lifted" (docs/design.md) or "node" (docs/cluster.md). `attempts` has
    every try, the successful one last with outcome None. `notes`: what else there is to say, such as why a backend that
    policy wants in the caller's process did not run there. `verdicts_age_s`: so long before this call `candidates` were
    looked at, where it runs as earlier ones of its kind did; lz.explain has the present ones. `kept`: inputs that were
    not copied for this call, since a copy of an earlier one is as they are, each with the rule that says so
    (docs/dispatch.md).

    Prints in a few lines: what was chosen, what else was accepted, then why others refuse, those first that a repair
    makes eligible. `text(verbose=True)` prints all of it, as does a report whose `is_verbose` is set.
    """

    op: str
    kernel_id: str | None
    backend: str | None
    worker_pid: int | None
    path: str | None
    copies: tuple[Copy, ...] = ()
    elapsed_us: float | None = None
    kernel_us: float | None = None
    attempts: tuple[Attempt, ...] = ()
    candidates: tuple[Candidate, ...] = field(default=())
    notes: tuple[str, ...] = ()
    verdicts_age_s: float = 0.0
    kept: tuple[Copy, ...] = ()
    is_verbose: bool = field(default=False, repr=False, compare=False)

    @property
    def lane(self) -> str | None:
        """The path, by its name of version 0.1; for callers from then."""
        return self.path

    @property
    def copied_bytes(self) -> int:
        """All bytes copied for this call, on either side."""
        return sum(copy.nbytes for copy in self.copies)

    @property
    def plan(self) -> ExecutionPlan | None:
        """What was selected; None when nobody serves the call."""
        if self.kernel_id is None or self.backend is None or self.path is None:
            return None
        chosen = next((c for c in self.candidates if c.kernel_id == self.kernel_id), None)
        terms = chosen.terms if chosen else {}
        copied = tuple(f"contiguous {copy.arg}" for copy in self.copies if copy.reason == ADAPTED)
        return ExecutionPlan(
            self.kernel_id,
            self.backend,
            self.path,
            copied or (chosen.transforms if chosen else ()),
            chosen.fused_ops if chosen else (),
            abs(terms.get("transform", 0.0)),
            any(attempt.outcome is not None for attempt in self.attempts),
        )

    def to_dict(self) -> dict[str, Any]:
        """All that is known, as plain values, for JSON."""
        value = asdict(self)
        del value["is_verbose"]
        return value

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

    def _table(self, *, verbose: bool) -> tuple[list[_Row], list[str]]:
        """One row for each kernel that is shown, and what is said of the others."""
        shown = sorted(
            (c for c in self.candidates if verbose or not c.group),
            key=lambda c: (c.kernel_id != self.kernel_id, not c.accepted, not c.repair),
        )
        more = shared_causes(c.group for c in self.candidates if c.group and not verbose)
        refusing = [c for c in shown if not c.accepted]
        if not verbose and len(refusing) > MAX_REFUSING:
            shown = [c for c in shown if c not in refusing[MAX_REFUSING:]]
            more.insert(0, f"{counted(len(refusing) - MAX_REFUSING, 'more kernel')} refused")
        if more:
            more[-1] += "; full list: --all, or report.text(verbose=True)"
        is_old = self.verdicts_age_s > 0
        return [_Row.of(c, self.kernel_id, verbose=verbose, is_old=is_old) for c in shown], more

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
        for copy in self.kept:
            notes.append(f"{copy.arg}: {copy.nbytes:,} bytes {copy.reason}")
        if self.elapsed_us is not None and not self.copies:
            notes.append("copied nothing")
        if self.verdicts_age_s:
            ago = f"{self.verdicts_age_s:,.1f} s" if self.verdicts_age_s >= 0.1 else "a moment"
            notes.append(f"verdicts of {ago} before this call; lz.explain has the present ones")
        return notes

    def text(self, *, verbose: bool = False) -> str:
        """What `print` shows, in lines that fit the terminal; with `verbose` of all kernels, with all reasons and the
        parts of their scores, however long that is."""
        columns = max(shutil.get_terminal_size((MIN_WIDTH, 0)).columns, MIN_WIDTH)
        rows, more = self._table(verbose=verbose)
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
        lines = [f"  {note}" for note in self._notes()]
        if not verbose:
            lines = [part for note in self._notes() for part in _beside("  ", note, columns)]
        lines = [*([self._headline()] if verbose else _beside("", self._headline(), columns)), *lines]
        for row in rows:
            left = f"  {row.kernel:<{widths[0]}}  {row.verdict:<{widths[1]}}  {row.score:>{widths[2]}}  "
            lines += [f"{left}{row.why}".rstrip()] if verbose else _beside(left, row.why, columns)
        return "\n".join((*lines, *(f"  {text}" for text in more)))

    def __str__(self) -> str:
        return self.text(verbose=self.is_verbose)

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        rows, more = self._table(verbose=self.is_verbose)
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for name in ("kernel", "verdict", "score", "why"):
            table.add_column(
                name, justify="right" if name == "score" else "left", no_wrap=name != "why", overflow="fold"
            )
        style = {"chosen": "bold green", "accepted": "green", "rejected": "dim"}
        for row in rows:
            table.add_row(*(Text(cell) for cell in row), style=style[row.verdict])
        styles = [(note, "yellow" if note.startswith("attempt") else "") for note in self._notes()]
        notes = [Padding(Text(note, style=style), (0, 0, 0, 2)) for note, style in styles]
        return Group(Text(self._headline(), style="bold"), *notes, table, *(Text(text, style="dim") for text in more))

    def _repr_html_(self) -> str:
        rows, more = self._table(verbose=self.is_verbose)
        return html_of(self._headline(), ("kernel", "verdict", "score", "why"), rows, notes=self._notes(), more=more)


class _Row(NamedTuple):
    """A kernel in a report."""

    kernel: str
    verdict: str
    score: str
    why: str

    @classmethod
    def of(cls, c: Candidate, chosen: str | None, *, verbose: bool, is_old: bool) -> _Row:
        why = "; ".join(map(str, c.reasons))
        if c.accepted:
            measured = "not measured then" if is_old else "not measured yet"
            if c.measured_us is not None:
                measured = f"measured {time_text(c.measured_us)}"
            terms = " ".join(f"{name} {value:+.4g}" for name, value in c.terms.items())
            parts = [terms] if len(c.terms) > 1 and verbose else []
            why = "; ".join((measured, *parts, *c.transforms, *c.notes))
        else:
            saves = f", which would save {time_text(c.fix_saves_us)}" if c.fix_saves_us is not None else ""
            fix = f" -> {c.fix}{saves}" if c.fix else ""
            why = why + fix if verbose else _in_short(c, fix)
        verdict = "chosen" if c.kernel_id == chosen else "accepted" if c.accepted else "rejected"
        return cls(c.kernel_id, verdict, f"{c.score:.1f}" if c.score is not None else "", why)


def _in_short(c: Candidate, fix: str) -> str:
    """What to look at first of a kernel that refuses: the first reason, and what to do, where that is known. A repair
    has a line of its own: it is to be copied."""
    if not c.reasons:
        return fix
    first = c.reasons[0]
    head, tail = f"{first.code}: {first.detail}", f"\nrepair: {c.repair}" if c.repair else ""
    if fix and not c.repair:
        head = f"{first.code}{fix}"
    if len(head) > MAX_WHY:
        head = f"{head[: MAX_WHY - 3]}..."
    more = "" if len(c.reasons) == 1 or c.repair or fix else f" (and {len(c.reasons) - 1} more)"
    return head + tail + more


def _beside(left: str, text: str, columns: int) -> list[str]:
    """`text` in lines to the right of `left`. No word is broken: it may be something to copy."""
    indent = " " * min(len(left), columns - MIN_COLUMN)
    lines: list[str] = []
    for part in text.split("\n"):
        lines += textwrap.wrap(
            (indent if lines else left) + part,
            columns,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


def html_of(
    headline: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    notes: Sequence[str] = (),
    more: Sequence[str] = (),
) -> str:
    """A report in a notebook: a line, notes, a table, and what is said below it. Texts are escaped."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(f"<{tag} style='text-align:left'>{html.escape(cell)}</{tag}>" for cell in row)

    listed = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    table = f"<table><thead><tr>{cells('th', head)}</tr></thead><tbody>{body}</tbody></table>" if rows else ""
    below = "".join(f"<div>{html.escape(text)}</div>" for text in more)
    return f"<b>{html.escape(headline)}</b>" + (f"<ul>{listed}</ul>" if notes else "") + table + below


def html_of_text(text: str) -> str:
    """A report in a notebook whose lines are all there is to it: the first one is its headline."""
    headline, _, more = text.partition("\n")
    return f"<b>{html.escape(headline)}</b>" + (f"<pre>{html.escape(more)}</pre>" if more else "")


def time_text(us: float) -> str:
    """With three digits or so, in the unit that suits."""
    return f"{us:,.0f} us" if us < 1e4 else f"{us / 1e3:,.1f} ms" if us < 1e6 else f"{us / 1e6:,.2f} s"
