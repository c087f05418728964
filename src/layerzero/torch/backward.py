"""Backward passes that are ops: a kernel computes them, and where none serves, this process, which the report says."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import layerzero as lz
from layerzero.client.connection.report import IN_PROCESS, SelectionReport

HERE = "this process"
T = TypeVar("T")


class _Thread(threading.local):
    """`why`: of the last backward pass, why it was computed here; "" where a kernel did."""

    why = ""


thread = _Thread()


def by_kernel(op: str, formula: str, call: Callable[[], T]) -> T | None:
    """What the call returns. None where it fails: the caller then computes by `formula`, as `thread` and
    lz.last_report() say. Raises InvalidArgument."""
    try:
        found = call()
    except lz.InvalidArgument:
        raise
    except lz.LayerZeroError as error:
        thread.why = f"{error.code}: {str(error).partition(chr(10))[0]:.160}"
        tell(op, formula, f"computed in this process: {thread.why}", getattr(error, "report", None))
        return None
    thread.why = ""
    return found


def tell(op: str, kernel: str, note: str, report: SelectionReport | None = None) -> None:
    """As lz.last_report(), of a call that this process has computed itself. `report`: of what was tried before."""
    made = SelectionReport(op, kernel, HERE, None, IN_PROCESS, notes=(note,))
    if report is not None:
        made = replace(made, attempts=report.attempts, candidates=report.candidates)
    with contextlib.suppress(lz.NotConnected):
        lz.session().note(made)
