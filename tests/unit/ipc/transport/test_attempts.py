"""A failed attempt as it crosses the wire."""

from __future__ import annotations

import pytest

from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.transport.attempts import as_failed_attempt, failed_attempt


@pytest.mark.parametrize(
    ("exit_code", "signal", "code"), [(None, None, None), (-9, 9, None), (0, None, 0), (3, None, 3)]
)
def test_an_exit_is_a_signal_or_a_code(exit_code: int | None, signal: int | None, code: int | None) -> None:
    """Reports name the one that it was, and neither for a worker that lives."""
    attempt = failed_attempt("torch", "torch.silu", "BACKEND_ERROR", "died", pid=5, exit_code=exit_code)
    assert (attempt["exit_signal"], attempt["exit_code"]) == (signal, code)
    assert as_failed_attempt(attempt) is attempt


@pytest.mark.parametrize("value", [None, [], {"backend": "torch"}])
def test_what_lacks_fields_is_no_attempt(value: object) -> None:
    """A broker of another version is told apart from a bug of the client."""
    with pytest.raises(ProtocolError, match="not an attempt"):
        as_failed_attempt(value)
