"""What accelerate() has done, as a table: by layer and op, how many calls were taken over and by which kernel, how many
were left to torch, and why."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from layerzero.client.connection.report import html_of_text
from layerzero.ipc.wording import counted
from layerzero.torch.acceleration.tally import Tally
from layerzero.torch.acceleration.whole_calls import WholeComparison
from layerzero.torch.evidence import Comparison

WIDTH = 80
MAX_ROWS = 60  # of a table that is not verbose
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


@dataclass(frozen=True)
class Line:
    """Calls of one layer and op that fared alike. `kernel` served them, on `paths` (docs/design.md); or they were left
    to torch, because of `why`. `moved`: so many of them began on another kernel, which failed. `notes`: of the last one
    that a GPU's worker made, why it is not lifted, for one.

    `layer`: the module's name in the model, its class where there is no model, "(compiled)" for calls in a compiled
    graph, which are counted once for each graph; `kernel` is empty there, since each run of the graph chooses anew."""

    layer: str
    op: str
    calls: int
    kernel: str = ""
    paths: tuple[str, ...] = ()
    why: str = ""
    moved: int = 0
    notes: tuple[str, ...] = ()

    @property
    def is_taken(self) -> bool:
        return not self.why

    @property
    def is_backward(self) -> bool:
        """Of a backward pass, which the program did not call itself."""
        return self.op.endswith("_backward")

    def _outcome(self) -> str:
        if self.why:
            return f"in this process: {self.why}" if self.is_backward else f"torch's: {self.why}"
        text = self.kernel or "in the graph"
        text = f"{text}, {self.moved} after another had failed" if self.moved else text
        return "; ".join((text, *self.notes))


@dataclass(frozen=True)
class AccelerationReport:
    """`lines` in the order of first calls. `taken`, `left`: calls in all, without backward passes, which have lines
    only. `why_off`: why nothing is taken over. `comparisons`: kinds of calls, or of
    calls of the model, that were timed beside torch's. `resting`:
    ops whose calls stay with torch just now, uncounted. Prints as a table in which layers that differ by a number only
    are one row; `text(verbose=True)` has each."""

    lines: tuple[Line, ...]
    ops: tuple[str, ...]
    why_off: str = ""
    comparisons: tuple[Comparison | WholeComparison, ...] = ()
    resting: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        tally: Tally,
        ops: Sequence[str],
        why_off: str,
        comparisons: tuple[Comparison | WholeComparison, ...] = (),
        resting: tuple[str, ...] = (),
    ) -> AccelerationReport:
        found: dict[tuple[str, str, str, str], Line] = {}
        notes = tally.notes()
        for key, calls in tally.counts().items():
            kind = (key.layer, key.op, key.why, key.kernel)
            known = found.get(kind, Line(key.layer, key.op, 0, key.kernel, (), key.why))
            paths = known.paths if not key.path or key.path in known.paths else (*known.paths, key.path)
            moved = known.moved + tally.moved.get(key, 0)
            said = notes.get((key.layer, key.op, key.kernel), ())
            found[kind] = Line(key.layer, key.op, known.calls + calls, key.kernel, paths, key.why, moved, said)
        return cls(tuple(found.values()), tuple(ops), why_off, comparisons, resting)

    @property
    def taken(self) -> int:
        return sum(line.calls for line in self.lines if line.is_taken and not line.is_backward)

    @property
    def left(self) -> int:
        return sum(line.calls for line in self.lines if not line.is_taken and not line.is_backward)

    @property
    def reasons(self) -> dict[str, int]:
        """Why calls were left, and how many each."""
        found: dict[str, int] = {}
        for line in self.lines:
            if line.why and not line.is_backward:
                found[line.why] = found.get(line.why, 0) + line.calls
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "taken": self.taken,
            "left": self.left,
            "why_off": self.why_off,
            "ops": list(self.ops),
            "lines": [asdict(line) for line in self.lines],
            "comparisons": [asdict(one) for one in self.comparisons],
            "resting": list(self.resting),
        }

    def text(self, *, verbose: bool = False) -> str:
        """What `print` shows, in lines that fit the terminal, at least 80 columns."""
        if self.why_off:
            return f"accelerate: off, {self.why_off}"
        headline = f"accelerate: {counted(self.taken, 'call')} taken over, {self.left:,} left to torch"
        rows = self.lines if verbose else _alike(self.lines)
        columns = None if verbose else max(shutil.get_terminal_size((WIDTH, 0)).columns, WIDTH)
        text = [
            headline,
            *table(
                [(one.layer, one.op, f"{one.calls:,}", one._outcome()) for one in rows[:MAX_ROWS]],
                ("layer", "op", "calls", "kernel"),
                columns,
            ),
        ]
        if len(rows) > MAX_ROWS:
            text.append(f"  {len(rows) - MAX_ROWS:,} more rows; report.lines has all")
        told = [str(one) for one in self.comparisons]
        if self.resting:
            which = "all ops" if len(self.resting) == len(self.ops) else ", ".join(self.resting)
            told.append(f"torch's for now, uncounted, since no call was ours for a while: {which}")
        for line in told:
            text += [line] if columns is None else textwrap.wrap(f"  {line}", columns, subsequent_indent="    ")
        return "\n".join(text)

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return html_of_text(str(self))


def table(rows: Sequence[tuple[str, ...]], names: tuple[str, ...], columns: int | None) -> list[str]:
    """Lines of `columns` characters at most; numbers to the right; the last column goes on below itself."""
    if not rows:
        return []
    widths = [max(len(row[n]) for row in (names, *rows)) for n in range(len(names) - 1)]
    if columns is not None:
        widths[0] = min(widths[0], max(columns // 3, columns - 30 - sum(widths[1:]) - 2 * len(names)))
    lines = []
    for row in (names, *rows):
        cells = [_shortened(cell, width) for cell, width in zip(row, widths, strict=False)]
        padded = [
            f"{cell:>{width}}" if n and rows[0][n][:1].isdigit() else f"{cell:<{width}}"
            for n, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        left = "  " + "  ".join(padded) + "  "
        lines += [left + row[-1]] if columns is None else _wrapped(left, row[-1], columns)
    return lines


def _wrapped(left: str, text: str, columns: int) -> list[str]:
    parts = textwrap.wrap(text, max(columns - len(left), 20)) or [""]
    return [f"{left}{parts[0]}".rstrip(), *(" " * len(left) + part for part in parts[1:])]


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else f"..{text[len(text) - width + 2 :]}"


def _alike(lines: Sequence[Line]) -> list[Line]:
    """One line for layers whose names differ in numbers."""
    found: dict[tuple[str, ...], Line] = {}
    for one in lines:
        layer = _NUMBER.sub("*", one.layer)
        kind = (layer, one.op, one.kernel, one.why)
        known = found.get(kind)
        if known is None:
            found[kind] = replace(one, layer=layer)
        else:
            found[kind] = replace(known, calls=known.calls + one.calls, moved=known.moved + one.moved)
    return list(found.values())
