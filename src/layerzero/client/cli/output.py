"""How `lz` speaks: data on stdout, notes and errors on stderr, JSON with a schema number, exit codes."""

from __future__ import annotations

import functools
import json
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from layerzero.client.connection.report import SelectionReport
from layerzero.ipc.errors import (
    BackendError,
    BrokerLost,
    Busy,
    DeadlineExceeded,
    InvalidArgument,
    LayerZeroError,
    NoBackend,
    NotConnected,
    Poison,
    VersionMismatch,
)
from layerzero.ipc.vocabulary import variables
from layerzero.ipc.vocabulary.variables import SettingWarning

SCHEMA = 1  # of everything that --json prints; grows when a field is renamed, removed or changes its meaning
FAILED, USAGE, NO_BROKER = 1, 2, 3
MAX_TAIL_LINES = 8


MAX_PIECE = 4096  # characters of one line: a library's name or last words may have any length
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code not in (9, 10)}
_CONTROLS |= {code: f"\\u{code:04x}" for code in (0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))}


def printable(text: str) -> str:
    """Text of libraries, files and other processes, for a terminal: what would command it is shown instead, as \\x1b,
    and lines that are too long are cut."""
    return "\n".join(map(_printable_line, text.split("\n")))


def _printable_line(line: str) -> str:
    cut = "" if len(line) <= MAX_PIECE else f"... ({len(line) - MAX_PIECE} more characters)"
    return line[:MAX_PIECE].translate(_CONTROLS) + cut


class _Plain(Console):
    """Prints nothing but `printable` text, whatever part of it came from where; colours are the console's own."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


@functools.cache
def out() -> Console:
    return _Plain()


@functools.cache
def err() -> Console:
    return _Plain(stderr=True)


def print_json(value: Mapping[str, Any], *, indent: int | None = 1) -> None:
    """One JSON object on stdout."""
    print(json.dumps({"schema": SCHEMA, **value}, indent=indent, default=str), flush=True)


def note(text: str) -> None:
    """What a person wants to know and a script does not."""
    err().print(Text(text, style="dim"), soft_wrap=True)


def show_setting_warnings() -> None:
    """As notes, each once; those of misspelt variables now."""
    shown = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *more: Any) -> None:
        if issubclass(category, SettingWarning):
            err().print(Text(f"warning: {message}", style="yellow"), soft_wrap=True)
        else:
            shown(message, category, filename, lineno, *more)

    warnings.showwarning = show  # type: ignore[assignment]
    warnings.simplefilter("once", SettingWarning)
    for text in variables.mistakes(os.environ):
        warnings.warn(text, SettingWarning, stacklevel=2)


def show_error(error: LayerZeroError, *, as_json: bool) -> int:
    """Print what went wrong, why, and the next command. Returns the exit code."""
    if as_json:
        print_json({"error": error.to_wire()})
    what, _, more = error.message.partition("\n")
    block = Text.assemble(("error", "bold red"), ": ", (what, "bold"), (f" [{error.code}]", "dim"))
    for line in (*more.splitlines(), *_why(error)):
        block.append(f"\n  {line.strip()}")
    step = next_step(error)
    if step:
        block.append("\n  next: ", style="cyan").append(step)
    err().print(block, soft_wrap=True)
    return exit_code(error)


def exit_code(error: LayerZeroError) -> int:
    match error:
        case InvalidArgument():
            return USAGE
        case BrokerLost() | NotConnected():
            return NO_BROKER
    return FAILED


def _why(error: LayerZeroError) -> list[str]:
    """The failed attempts, when the message cannot hold them all, and the last words of the worker that died."""
    report: SelectionReport | None = getattr(error, "report", None)
    failed = [a for a in report.attempts if a.outcome is not None] if report is not None else []
    lines = [f"{a.kernel_id}: {a.outcome}: {a.detail}" for a in failed] if len(failed) > 1 else []
    tail = str(error.facts.get("stderr_tail") or "").strip().splitlines()
    return [*lines, *(f"| {line}" for line in tail[-MAX_TAIL_LINES:])]


def next_step(error: LayerZeroError) -> str:
    """The command or change that most likely helps; empty when the message already says it."""
    repair = error.facts.get("repair")
    if isinstance(repair, str) and repair:
        return repair
    match error:
        case DeadlineExceeded():
            return "a larger --timeout, or lz logs " + str(error.facts.get("backend", "BACKEND"))
        case BackendError():
            return "lz logs " + str(error.facts.get("backend", "BACKEND"))
        case NoBackend():
            return "lz status shows the backends; change what the reasons name"
        case BrokerLost():
            return "lz up, then lz logs if it does not come up"
        case VersionMismatch():
            return "lz down with the other version, or lz down --force with this one; then lz up"
        case Poison():
            return "change the inputs, or lz logs to see what died"
        case Busy():
            return "wait for calls to end, then try again"
    return ""
