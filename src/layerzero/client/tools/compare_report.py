"""What a comparison of backends found: CompareReport. Prints in a terminal and in a notebook."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from layerzero.client.connection.report import html_of, time_text

_HEAD = ("call", "backend", "calls", "largest error", "allowed", "time", "beside", "speed-up")


@dataclass(frozen=True)
class Compared:
    """What one backend did with calls of one kind, beside what `baseline` did, another backend.

    calls: how many were compared. error: the largest, as a share of max(1, largest magnitude); None: there is none.
    allowed: what both backends together may be off. us, baseline_us: medians of the kernels' own times, in
    microseconds; None where none is known. failures: why a call was not compared, and how often.
    """

    op: str
    dtype: str
    shape_class: str
    baseline: str
    backend: str
    kernel_id: str = ""
    calls: int = 0
    error: float | None = None
    allowed: float = 0.0
    us: float | None = None
    baseline_us: float | None = None
    failures: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_beyond(self) -> bool:
        """Whether a result was off by more than is allowed, or is NaN where it must not be."""
        return self.error is not None and not self.error <= self.allowed

    @property
    def speedup(self) -> float | None:
        """How many times as fast as the baseline; None where a time is not known."""
        return self.baseline_us / self.us if self.us and self.baseline_us else None

    @property
    def note(self) -> str:
        marks = ["beyond what is allowed"] if self.is_beyond else []
        marks += [f"{count} x {why}" if count > 1 else why for why, count in self.failures.items()]
        return "; ".join(marks)


@dataclass(frozen=True)
class CompareReport:
    """Rows by op, dtype and shape class, and by backend. missed: calls of a watched program that were not looked at, by
    reason. is_complete: nothing was left to look at when it was made."""

    rows: tuple[Compared, ...]
    missed: Mapping[str, int] = field(default_factory=dict)
    is_complete: bool = True

    @property
    def is_equal(self) -> bool:
        """Whether something was compared, all of it within what is allowed, and nothing failed."""
        return any(row.calls for row in self.rows) and not any(row.is_beyond or row.failures for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; an error that is no number is text."""
        rows = []
        for row in self.rows:
            plain = asdict(row) | {"is_beyond": row.is_beyond, "speedup": row.speedup}
            if row.error is not None and not math.isfinite(row.error):
                plain["error"] = str(row.error)
            rows.append(plain)
        return {
            "rows": rows,
            "missed": dict(self.missed),
            "is_complete": self.is_complete,
            "is_equal": self.is_equal,
        }

    @property
    def headline(self) -> str:
        calls, beyond = sum(row.calls for row in self.rows), sum(row.is_beyond for row in self.rows)
        failed = sum(sum(row.failures.values()) for row in self.rows)
        parts = [f"{calls:,} comparison{'' if calls == 1 else 's'}"]
        parts += [
            f"{beyond} of {len(self.rows)} rows beyond what is allowed" if beyond else "all within what is allowed"
        ]
        parts += [f"{failed:,} not compared"] if failed else []
        parts += [f"{count:,} calls not looked at: {why}" for why, count in self.missed.items()]
        parts += [] if self.is_complete else ["some calls are still to be looked at"]
        return "; ".join(parts if calls else ["nothing was compared", *parts[2:]])

    @property
    def _notes(self) -> list[str]:
        return [f"{row.op} {row.shape_class}, {row.backend}: {row.note}" for row in self.rows if row.note]

    def _cells(self, row: Compared) -> tuple[str, ...]:
        call = " ".join(filter(None, (row.op, row.dtype, row.shape_class)))
        error = "" if row.error is None else f"{row.error:.2g}"
        us, base = ("" if one is None else time_text(one) for one in (row.us, row.baseline_us))
        speedup = "" if row.speedup is None else f"{row.speedup:.2f}"
        name = f"{row.backend} beside {row.baseline}"
        return (call, name, f"{row.calls:,}", error, f"{row.allowed:g}" if row.calls else "", us, base, speedup)

    def __str__(self) -> str:
        cells = [_HEAD, *map(self._cells, self.rows)] if self.rows else []
        widths = [max(len(row[i]) for row in cells) for i in range(len(_HEAD))] if cells else []
        lines = [self.headline]
        for row in cells:
            texts = [f"{text:<{width}}" for text, width in zip(row[:2], widths, strict=False)]
            texts += [f"{text:>{width}}" for text, width in zip(row[2:], widths[2:], strict=True)]
            lines.append("  ".join(texts).rstrip())
        return "\n".join((*lines, *self._notes))

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for i, name in enumerate(_HEAD):
            table.add_column(name, justify="right" if i > 1 else "left", overflow="fold", no_wrap=i > 1)
        for row in self.rows:
            style = "red" if row.is_beyond else "yellow" if row.failures else ""
            table.add_row(*map(Text, self._cells(row)), style=style)
        return Group(Text(self.headline), *([table] if self.rows else []), *map(Text, self._notes))

    def _repr_html_(self) -> str:
        return html_of(self.headline, _HEAD, [self._cells(row) for row in self.rows], notes=self._notes)
