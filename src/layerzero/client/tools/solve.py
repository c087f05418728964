"""lz.solve: measure calls on every kernel that accepts them and write which kernel is best for which extents."""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerzero.client.connection.overlay import Overlay, Scope
from layerzero.client.facade import api, default_session
from layerzero.client.tools.calls import Call, calls_of
from layerzero.client.tools.tune import BUDGET_S, Progress, tune_calls
from layerzero.client.tools.tune_report import TuneReport
from layerzero.ipc import files
from layerzero.ipc.errors import ConfigError, InvalidArgument
from layerzero.ipc.wording import counted

FILE_NAME = "dispatch_table.json"


@dataclass(frozen=True)
class SolveReport:
    """path: the file that was written; None when there was nothing to write, or an interrupt. kinds: of calls, which
    differ in more than extents. buckets: leaves of all trees. in_force: the broker chooses by it from now on."""

    measured: TuneReport
    path: Path | None
    kinds: int = 0
    buckets: int = 0
    in_force: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        path = None if self.path is None else str(self.path)
        table = {"path": path, "kinds": self.kinds, "buckets": self.buckets, "in_force": self.in_force}
        return {**table, "measured": self.measured.to_dict()}

    def __str__(self) -> str:
        return f"{self.measured}\n\n{self._verdict()}{self._warning()}"

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        return Group(
            self.measured,
            Text(),
            Text(self._verdict(), style="bold"),
            Text(self._warning().strip(), style="bold yellow"),
        )

    def _repr_html_(self) -> str:
        return f"{self.measured._repr_html_()}<b>{html.escape(self._verdict())}</b>"

    def _verdict(self) -> str:
        if self.path is None:
            why = "interrupted" if self.measured.was_interrupted else "nothing was measured"
            return f"no dispatch table was written: {why}"
        text = f"{self.path}: {counted(self.kinds, 'kind')} of calls, {counted(self.buckets, 'bucket')}"
        return f"{text}, in force" if self.in_force else f"{text}; dispatch_table: {self.path} in the policy uses it"

    @property
    def unsettled(self) -> tuple[str, ...]:
        """Labels of the calls in the table whose fastest kernel was measured too few times, or too unevenly."""
        fastest = ((call.label, call.fastest) for call in self.measured.calls)
        return tuple(label for label, kernel in fastest if kernel is not None and not kernel.is_stable)

    def _warning(self) -> str:
        if self.path is None or not self.unsettled:
            return ""
        calls = (
            f"{len(self.unsettled)} of {len(self.measured.calls)} calls have not settled: {', '.join(self.unsettled)}"
        )
        return f"\n{calls}; solve again with a larger budget_s than {self.measured.budget_s:g}"


def solve(
    op: str | Callable[..., Any] | Sequence[str | Callable[..., Any] | Call] | None = None,
    *args: Any,
    path: str | os.PathLike[str] | None = None,
    budget_s: float = BUDGET_S,
    device: str | None = None,
    **kwargs: Any,
) -> SolveReport:
    """Measure calls and write a dispatch table: for each kind of call a decision tree over its extents (docs/solve.md).

    Arguments as of lz.tune; usually many calls: lz.solve([lz.Call.of("silu", x) for x in arrays_of_all_sizes]). Each is
    run on every kernel that accepts it, which compiles what has to be. The table chooses for the sorts of devices that
    the calls are on, and for no others; device: as of lz.tune. path: file to write, default
    dispatch_table.json in the store. The table is used where the policy's `dispatch_table` names it, on this machine
    and with these environments only. budget_s: seconds for all runs, on top of starts and compilations. Calls whose
    fastest kernel has not settled by then are in the table, and named last in the report.
    Raises InvalidArgument, ConfigError when the file cannot be written, NotConnected, BrokerLost.
    """
    return solve_calls(calls_of(op, args, kwargs, device), path=path, budget_s=budget_s)


def solve_calls(
    calls: Sequence[Call],
    *,
    path: str | os.PathLike[str] | None = None,
    budget_s: float = BUDGET_S,
    command: str = "lz.solve, with the same calls",
    on_progress: Callable[[Progress], None] | None = None,
) -> SolveReport:
    """As `solve`. `command` is written into the table: what makes it anew. `on_progress` as of tune_calls."""
    session = default_session.session()
    target = Path(api.status()["broker"]["store"]) / FILE_NAME if path is None else Path(path).absolute()
    if target.is_dir() or not os.access(target.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{target} cannot be written: it is a folder, or its own folder is missing or read-only")
    # A table that is in force would refuse calls which it does not have.
    with Scope(Overlay.of({"origin": "lz.solve", "values": {"plan_mode": False}})):
        report = tune_calls(calls, budget_s=budget_s, on_progress=on_progress)
    measured = [
        {
            "route": call.signature(),
            "us": {k.kernel_id: k.kernel.median_us for k in tuned.kernels if k.kernel is not None},
        }
        for call, tuned in zip(calls, report.calls, strict=True)
        if tuned.fastest is not None
    ]
    if report.was_interrupted or not measured:
        return SolveReport(report, None)
    answer = session.ask("solve", measured=measured, command=command)
    _write(target, answer["text"])
    loaded = session.ask("load_table")
    in_force = loaded["path"] == str(target) and not loaded["problem"]
    return SolveReport(report, target, answer["kinds"], answer["buckets"], in_force)


def _write(path: Path, text: str) -> None:
    """Whole or not at all: a broker may read it at any time. Raises ConfigError."""
    try:
        files.put(path, text)
    except OSError as exc:
        raise ConfigError(f"{path} cannot be written: {exc.strerror}; give another path") from exc


def with_extents(words: Sequence[str], extents: Sequence[str]) -> list[list[str]]:
    """The words of a call for each combination of named extents: `8xS:float32` with `S=1,128` is `8x1:float32` and
    `8x128:float32`. Raises InvalidArgument."""
    found = [list(words)]
    for text in extents:
        name, equals, values = text.partition("=")
        if not (equals and name.isalpha() and name.isupper() and all(v.isdecimal() for v in values.split(","))):
            raise InvalidArgument(
                f"--extent {text!r:.80} is not NAME=N,N,..., such as S=1,128,2048; names are capitals"
            )
        if not any(name in _extents(word) for word in words):
            raise InvalidArgument(f"--extent {name} is in no shape; write it there, such as 8x{name}:float32")
        found = [[_replaced(word, name, value) for word in one] for one in found for value in values.split(",")]
    return found


def _extents(word: str) -> list[str]:
    return word.partition(":")[0].split("x")


def _replaced(word: str, name: str, value: str) -> str:
    shape, colon, dtype = word.partition(":")
    return "x".join(value if extent == name else extent for extent in shape.split("x")) + colon + dtype
