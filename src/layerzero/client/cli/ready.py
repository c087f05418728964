"""`lz doctor`: is everything in order, and what repairs it."""

from __future__ import annotations

from collections.abc import Sequence

from layerzero.client.cli.calls import Connected
from layerzero.client.cli.output import err, out, print_json
from layerzero.client.tools.ready import readiness_check


def doctor(backends: Sequence[str], *, ready: bool, as_json: bool) -> int:
    """Print the checks. Returns the exit code: 0 when all are good, 1 when not."""
    with Connected(), err().status("checking ..."):
        report = readiness_check(backends=backends or None, starts_workers=ready)
    if as_json:
        print_json(report.to_dict())
    else:
        out().print(report)
    return report.exit_code
