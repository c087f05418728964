"""Brokers of other users: what is left when one cannot be started. tests/process/test_other_users.py has the rest."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from layerzero.broker.io.poller import Poller
from layerzero.broker.processes.user_brokers import UserBrokers
from layerzero.ipc.errors import LayerZeroError
from layerzero.ipc.transport.endpoints import Endpoints


def test_a_start_that_fails_leaves_no_process_and_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptor is left for the pidfd of the one that runs by then."""
    started: list[int] = []

    def refuse(pid: int, flags: int = 0) -> int:
        started.append(pid)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    poller = Poller()
    users = UserBrokers(Endpoints(tmp_path), poller, lambda: None, stays=False)
    found: list[Path | LayerZeroError] = []
    before = sorted(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(os, "pidfd_open", refuse)
        answer: Callable[[Path | LayerZeroError], None] = found.append
        users.find(4711, answer)
    assert sorted(os.listdir("/proc/self/fd")) == before
    (error,) = found
    assert isinstance(error, LayerZeroError)
    assert "no broker can be started for user 4711: Too many open files" in error.message
    assert users.is_empty
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)
    poller.close()
