"""An attempt of a call that failed, as the broker tells clients of it: what is in the list `attempts` of an Outcome."""

from __future__ import annotations

from typing import Any, TypedDict

from layerzero.ipc.errors import ProtocolError


class FailedAttempt(TypedDict):
    """A dict on the wire and on both sides of it: most are never looked at."""

    backend: str
    kernel_id: str
    worker_pid: int  # 0: no worker had the call
    code: str  # of the error, or why no worker had it
    detail: str
    exit_signal: int | None  # that ended the worker, if it ended
    exit_code: int | None  # likewise
    phase: str  # in which the worker had the call when it ended


def failed_attempt(
    backend: str, kernel_id: str, code: str, detail: str, *, pid: int = 0, exit_code: int | None = None, phase: str = ""
) -> FailedAttempt:
    """`exit_code`: of the worker, if it ended; negative when a signal ended it."""
    return {
        "backend": backend,
        "kernel_id": kernel_id,
        "worker_pid": pid,
        "code": code,
        "detail": detail,
        "exit_signal": -exit_code if exit_code is not None and exit_code < 0 else None,
        "exit_code": exit_code if exit_code is not None and exit_code >= 0 else None,
        "phase": phase,
    }


def as_failed_attempt(value: Any) -> FailedAttempt:
    """What a broker sent as one. Raises ProtocolError when fields are missing."""
    if not isinstance(value, dict) or not FailedAttempt.__required_keys__ <= value.keys():
        raise ProtocolError(f"not an attempt: {value!r:.200}")
    return value  # type: ignore[return-value]
