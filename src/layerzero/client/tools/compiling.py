"""Have kernels compiled before calls need them. The broker does it, beside whatever runs; here somebody waits."""

from __future__ import annotations

import time
from collections.abc import Sequence

from layerzero.client.connection.report import Candidate, SelectionReport
from layerzero.client.session.session import Session

POLL_S = 0.05


def compile_ahead(session: Session, body: bytes, backends: Sequence[str]) -> None:
    """Return when every kernel of these backends that would serve a call (an encoded Route message) then is compiled
    for it, or could not be. It takes what compilers take, up to compile_timeout_s of the broker each."""
    while session.ask("compile", route=body, backends=list(backends))["pending"]:
        time.sleep(POLL_S)


def in_line(report: SelectionReport) -> list[Candidate]:
    """The candidates that may serve the call, those with the highest score first that they have once compiled: accepted
    ones, and those that only have to be compiled. Without those that no worker has."""
    found = [c for c in report.candidates if c.score is not None and not c.lifted_only]
    return sorted(found, key=lambda c: c.terms.get("jit", 0.0) - (c.score or 0.0))
