"""`lz bench`: chaos, and the checker of a history that was kept."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from layerzero.client.chaos import checker
from layerzero.client.chaos.run import Chaos, run
from layerzero.client.cli.output import FAILED, note, out, print_json


def chaos(
    *,
    seed: int,
    minutes: float,
    clients: int,
    gap_s: float,
    backends: Sequence[str],
    folder: Path | None,
    as_json: bool,
) -> int:
    """Run, check, print. Returns the exit code: 1 when a promise was broken."""
    for number in (signal.SIGINT, signal.SIGTERM):  # whoever ends this early wants its processes gone, too
        signal.signal(number, signal.default_int_handler)
    kept = folder if folder is not None else Path(tempfile.mkdtemp(prefix="lz-chaos-history-"))
    is_wanted = folder is not None
    try:
        run(Chaos(seed, 60 * minutes, clients, kept, gap_s=gap_s, backends=tuple(backends)), note)
        note("the history is checked")
        verdict = checker.check(kept)
        is_wanted = is_wanted or bool(verdict.violations)
    finally:
        if not is_wanted:
            shutil.rmtree(kept)
    if verdict.violations:
        note(f"the history is in {kept}; lz bench check reads it again")
    return _show(verdict, {"seed": seed, "history": str(kept) if is_wanted else None}, as_json=as_json)


def check(folder: Path, *, as_json: bool) -> int:
    """Check a history that was kept. Returns the exit code."""
    return _show(checker.check(folder), {"history": str(folder)}, as_json=as_json)


def _show(verdict: checker.Verdict, more: dict[str, Any], *, as_json: bool) -> int:
    found = verdict.to_dict()
    if as_json:
        print_json({**more, **found})
    else:
        for name, value in found.items():
            if name != "violations":
                text = ", ".join(f"{k} {v:,}" for k, v in value.items()) if isinstance(value, dict) else f"{value:,}"
                out().print(Text.assemble((f"{name:17}", "dim"), text), soft_wrap=True)
        for text in verdict.violations:
            out().print(Text(text, style="red"), soft_wrap=True)
        out().print("every promise was kept" if not verdict.violations else "promises were broken")
    return FAILED if verdict.violations else 0
