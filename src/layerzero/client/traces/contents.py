"""What a trace has: calls and scopes, whether they were recorded here or come from a file; how it is printed."""

from __future__ import annotations

import html
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerzero.client.connection.report import html_of, time_text
from layerzero.client.traces.calls import FUNCTION, RecordedCall, ScopeRecord
from layerzero.client.traces.scopes import ThreadName
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.wording import counted

if TYPE_CHECKING:
    from layerzero.client.traces.rerun import TraceRun

GROUPS = ("op", "backend", "scope")
MAX_ROWS = 15  # of a table that is printed unasked
WIDTH = 80
_HEAD = ("call", "backend", "count", "total", "each", "kernel", "fell back")


@dataclass
class Group:
    """Calls that are one row."""

    key: tuple[str, str]
    count: int = 0
    total_ns: int = 0
    kernel_ns: int = 0
    timed_ns: int = 0  # what those took of which the kernel's time is known
    fallbacks: int = 0
    errors: int = 0

    def add(self, call: RecordedCall) -> None:
        self.count += 1
        self.total_ns += call.elapsed_ns
        self.kernel_ns += call.kernel_ns
        self.timed_ns += call.elapsed_ns if call.kernel_ns else 0
        self.fallbacks += bool(call.attempts) and not call.error
        self.errors += bool(call.error)

    @property
    def kernel_share(self) -> float | None:
        """Of the time of calls whose kernel's time is known; None where none is."""
        return self.kernel_ns / self.timed_ns if self.timed_ns else None

    def cells(self) -> tuple[str, ...]:
        share = self.kernel_share
        failed = [f"{self.fallbacks:,}"] if self.fallbacks else []
        failed += [counted(self.errors, "error")] if self.errors else []
        kernel = "" if share is None else f"{100 * share:.0f} %"
        each = time_text(self.total_ns / 1e3 / self.count)
        return (*self.key, f"{self.count:,}", time_text(self.total_ns / 1e3), each, kernel, ", ".join(failed))


@dataclass(frozen=True, eq=False)
class TraceContents:
    """A trace at one moment, or from a file. Printed it is a table by op and backend.

    `clock`: nanoseconds of time.time_ns and of time.perf_counter_ns, the clock of all calls, at the same moment.
    `threads`: by the calls' numbers of them. `memory`: bytes that calls have kept, by SHA-256. `facts`: of the process
    and the machine, for people."""

    calls: tuple[RecordedCall, ...]
    scopes: tuple[ScopeRecord, ...] = ()
    dropped: int = 0
    clock: tuple[int, int] = (0, 0)
    threads: Mapping[int, ThreadName] = field(default_factory=dict)
    memory: Mapping[str, bytes] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.calls)

    def __repr__(self) -> str:
        return f"<lz trace of {counted(len(self.calls), 'call')}>"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file for lz.load_trace, in the place of one that is there; readable by its owner alone. Raises
        OSError."""
        from layerzero.client.traces.form import save  # which needs this module

        save(self, Path(path))

    def run(
        self,
        backend: str | Sequence[str] | None = None,
        *,
        env: str | None = None,
        times: int = 1,
        timeout_s: float | None = None,
        seed: int = 0,
    ) -> TraceRun:
        """Make the calls again, in their order, by this process's connection; printed the result is a table of
        differences and times.

        backend: one, or several; without, each call goes to the backend that served it. env: "all" for every backend
        that has the op. times: so often each. Arguments are the bytes that were kept; else what earlier calls of the
        run gave, where those of the trace came from earlier calls; else random numbers of `seed`, of the same shapes.
        Results are compared with the recorded ones, where they and their arguments were kept, else with those of
        another backend on the same arguments, torch's if it is there. Functions and texts are left out, and said to be.
        Calls that were on a GPU are made on the CPU. Raises InvalidArgument, EnvError without NumPy.
        """
        from layerzero.client.facade.default_session import ensure_connected
        from layerzero.client.traces.rerun import run_again  # which needs this module

        if env not in (None, "all"):
            raise InvalidArgument(f"env is {env!r:.40}; allowed: all, or backend= for one")
        if env == "all" and backend:
            raise InvalidArgument('name env="all" or backend=, not both')
        named = [backend] if isinstance(backend, str) else backend
        options: dict[str, Any] = {"times": times, "timeout_s": timeout_s, "seed": seed}
        return run_again(ensure_connected(), self, backends=named, everywhere=env == "all", **options)

    # --- as a graph

    def users(self, number: int) -> tuple[RecordedCall, ...]:
        """The calls that have a result of this one as an argument."""
        return tuple(call for call in self.calls if any(source.call == number for source in call.sources))

    def mermaid(self) -> str:
        """The calls and which feeds which, as a Mermaid flow chart."""
        lines = ["flowchart TD"]
        for call in self.calls:
            of = f"{call.backend} " if call.backend else ""
            text = f"{call.number} {call.name}<br/>{of}{time_text(call.elapsed_ns / 1e3)}"
            lines.append(f'  c{call.number}["{html.escape(text).replace("&lt;br/&gt;", "<br/>")}"]')
        for call in self.calls:
            lines += [f"  c{source.call} -->|{source.input}| c{call.number}" for source in call.sources]
        return "\n".join(lines)

    # --- as a table

    def groups(self, by: str = "backend") -> list[Group]:
        """Calls of one op together ("op"), of one op and backend ("backend"), or of one scope and op ("scope"), what
        took longest first. Raises InvalidArgument for another word."""
        if by not in GROUPS:
            raise InvalidArgument(f"by is {by!r:.40}; allowed: {', '.join(GROUPS)}")
        found: dict[tuple[str, str], Group] = {}
        for call in self.calls:
            second = "" if by == "op" else call.backend or "none"
            key = (call.name, second) if by != "scope" else ("/".join(call.scopes[-1:]) or "no scope", call.name)
            found.setdefault(key, Group(key)).add(call)
        return sorted(found.values(), key=lambda one: -one.total_ns)

    def headline(self) -> str:
        """What there is, in a line or two."""
        if not self.calls:
            dropped = f"; {self.dropped:,} were dropped" if self.dropped else ""
            return f"no calls were recorded{dropped}"
        threads = len({call.thread for call in self.calls})
        start, end = min(c.start_ns for c in self.calls), max(c.end_ns for c in self.calls)
        parts = [f"{counted(len(self.calls), 'call')} in {time_text((end - start) / 1e3)}"]
        parts += [f"{threads} threads"] if threads > 1 else []
        kinds = Counter(call.kind for call in self.calls)
        parts += [counted(kinds[FUNCTION], "function call")] if kinds[FUNCTION] else []
        fallbacks = sum(bool(call.attempts) and not call.error for call in self.calls)
        errors = sum(bool(call.error) for call in self.calls)
        parts += [f"{fallbacks:,} fell back"] if fallbacks else []
        parts += [counted(errors, "error")] if errors else []
        parts += [f"{self.dropped:,} older ones were dropped"] if self.dropped else []
        return "; ".join((", ".join(parts[:2]), *parts[2:]))

    def text(self, by: str = "backend", most: int | None = MAX_ROWS) -> str:
        """The table in 80 columns: of the `most` rows that took longest, None for all. "kernel" is the kernels' share
        of the time of calls that tell it."""
        groups = self.groups(by)
        shown = groups if most is None else groups[:most]
        head = ("scope", "call", *_HEAD[2:]) if by == "scope" else _HEAD
        rows = [head, *(one.cells() for one in shown)]
        right = (2, 3, 4, 5)
        widths = [max(len(row[n]) for row in rows) for n in range(len(head))]
        room = WIDTH - sum(widths[2:]) - 2 * (len(head) - 1)
        widths[0] = min(widths[0], max(room - widths[1], 12))
        widths[1] = min(widths[1], max(room - widths[0], 12))
        lines = [self.headline()]
        for row in rows if groups else ():
            cells = [cut(cell, widths[n]) for n, cell in enumerate(row)]
            cells = [c.rjust(widths[n]) if n in right else c.ljust(widths[n]) for n, c in enumerate(cells)]
            lines.append(("  ".join(cells)).rstrip())
        if len(shown) < len(groups):
            lines.append(f"and {len(groups) - len(shown):,} more rows: trace.text(most=None)")
        lines += _wrapped(self._errors())
        return "\n".join(lines)

    def _errors(self) -> Iterator[str]:
        seen = Counter(f"{call.name}: {call.error.partition(chr(10))[0]}" for call in self.calls if call.error)
        for what, count in seen.most_common(3):
            yield f"failed {counted(count, 'time')}: {what}"

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return html_of(self.headline(), _HEAD, [one.cells() for one in self.groups()[:MAX_ROWS]])


def cut(text: str, width: int) -> str:
    """On one line, and without what a terminal would obey: it may be from a file of others."""
    text = "".join(one if one.isprintable() else "?" for one in text)
    return text if len(text) <= width else f"{text[: width - 2]}.."


def _wrapped(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        yield cut(line, WIDTH)
