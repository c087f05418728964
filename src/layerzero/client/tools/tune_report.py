"""What tuning measured: TuneReport. Prints in a terminal and in a notebook."""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from layerzero.client.connection.report import html_of, time_text


@dataclass(frozen=True)
class Times:
    """Of clean runs, in microseconds."""

    count: int
    median_us: float
    p95_us: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Times:
        ordered = sorted(samples)
        return cls(len(ordered), statistics.median(ordered), ordered[math.ceil(0.95 * len(ordered)) - 1])


@dataclass(frozen=True)
class TunedKernel:
    """One candidate. `kernel` is its own time, on a GPU by the GPU's clock, `call` what the caller waited until the
    result was there; None: see `note`.

    first_ms: the first call, a start of the worker included. is_stable: its median had settled.
    """

    kernel_id: str
    backend: str
    kernel: Times | None = None
    call: Times | None = None
    first_ms: float = 0.0
    is_stable: bool = False
    note: str = ""


@dataclass(frozen=True)
class TunedCall:
    """One call, tried on every kernel that accepts it. Kernel ids: `previous` was chosen before, `now` is after.

    kernels: the fastest first, then those without times. note: why there are none.
    """

    op: str
    label: str
    previous: str | None
    now: str | None
    kernels: tuple[TunedKernel, ...]
    note: str = ""

    @property
    def fastest(self) -> TunedKernel | None:
        return next((k for k in self.kernels if k.kernel is not None), None)

    @property
    def speedup(self) -> float | None:
        """How much faster the fastest kernel is than the one chosen before; None when either was not measured."""
        before = next((k for k in self.kernels if k.kernel_id == self.previous), None)
        if self.fastest is None or before is None or before.kernel is None or self.fastest.kernel is None:
            return None
        return before.kernel.median_us / self.fastest.kernel.median_us


@dataclass(frozen=True)
class TuneReport:
    calls: tuple[TunedCall, ...]
    elapsed_s: float
    budget_s: float
    was_interrupted: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        value = asdict(self)
        for call, plain in zip(self.calls, value["calls"], strict=True):
            plain["fastest"] = call.fastest.kernel_id if call.fastest else None
            plain["speedup"] = call.speedup
        return value

    def _headline(self) -> str:
        end = ", interrupted" if self.was_interrupted else ""
        measured = sum(call.fastest is not None for call in self.calls)
        return f"{measured} of {len(self.calls)} calls measured in {self.elapsed_s:.1f} s{end}"

    def _rows(self, call: TunedCall) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        for k in call.kernels:
            marks = [
                "fastest" if k is call.fastest else "",
                "chosen before" if k.kernel_id == call.previous else "",
                "chosen now" if k.kernel_id == call.now else "",
                "" if k.is_stable or k.kernel is None else "not settled",
                k.note,
            ]
            text = ", ".join(mark for mark in marks if mark)
            if k.kernel is None or k.call is None:
                rows.append((k.kernel_id, "", "", "", "", text))
                continue
            times = (k.kernel.median_us, k.kernel.p95_us, k.call.median_us)
            rows.append((k.kernel_id, str(k.kernel.count), *map(time_text, times), text))
        return rows

    def _verdict(self, call: TunedCall) -> str:
        if call.fastest is None:
            return call.note or "nothing was measured"
        if call.speedup is None:
            return f"{call.fastest.kernel_id} is the fastest measured"
        if call.fastest.kernel_id == call.previous:
            return f"{call.fastest.kernel_id} was chosen before and is the fastest"
        return f"{call.fastest.kernel_id} is {call.speedup:.2f} times as fast as {call.previous}"

    def __str__(self) -> str:
        lines = [self._headline()]
        for call in self.calls:
            rows = [_HEAD, *self._rows(call)] if call.kernels else []
            widths = [max((len(row[i]) for row in rows), default=0) for i in range(len(_HEAD))]
            lines += ["", f"{call.label}: {self._verdict(call)}"]
            for name, *figures, text in rows:
                columns = [f"{figure:>{width}}" for figure, width in zip(figures, widths[1:], strict=False)]
                lines.append("  ".join((f"  {name:<{widths[0]}}", *columns, text)).rstrip())
        return "\n".join(lines)

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        parts: list[Any] = []
        for call in self.calls:
            parts.append(Text.assemble((call.label, "bold"), f": {self._verdict(call)}"))
            if call.kernels:
                table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
                for i, name in enumerate(_HEAD):
                    table.add_column(name, justify="right" if 0 < i < len(_HEAD) - 1 else "left", overflow="fold")
                for k, row in zip(call.kernels, self._rows(call), strict=True):
                    style = "bold green" if k is call.fastest else "dim" if k.kernel is None else ""
                    table.add_row(*(Text(cell) for cell in row), style=style)
                parts.append(table)
            parts.append(Text())
        return Group(*parts, Text(self._headline()))

    def _repr_html_(self) -> str:
        tables = [html_of(f"{call.label}: {self._verdict(call)}", _HEAD, self._rows(call)) for call in self.calls]
        return "".join((*tables, f"<div>{html.escape(self._headline())}</div>"))


_HEAD = ("kernel", "runs", "kernel median", "p95", "call median", "")
