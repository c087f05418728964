"""What the broker does when the machine gives it no more."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tests.process.harness import Site, wait_until

import layerzero as lz
from layerzero.ipc import control


def test_a_broker_without_descriptors_turns_callers_away_and_recovers(new_site: Callable[..., Site]) -> None:
    """accept() fails with EMFILE while the caller stays in the queue: that must neither end the broker nor spin it."""
    site = new_site().start()
    session = site.connect()
    site.wait_ready("alpha", "beta")  # nothing opens or closes descriptors any more
    pid = session.broker_pid
    x = np.ones(4, np.float32)
    expected = lz.silu(x)
    used = len(os.listdir(f"/proc/{pid}/fd"))
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (used, limits[1]))
    turned_away = 0
    with contextlib.ExitStack() as callers:
        for _ in range(5):
            sock = callers.enter_context(control.connect(site.endpoints.control, timeout_s=5))
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
            turned_away += 1
    assert turned_away == 5
    np.testing.assert_array_equal(lz.silu(x), expected)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    with control.connect(site.endpoints.control, timeout_s=5) as sock:
        sock.setblocking(False)
        wait_until(lambda: len(os.listdir(f"/proc/{pid}/fd")) > used)
        with contextlib.suppress(BlockingIOError):
            assert sock.recv(1, socket.MSG_PEEK) != b""
    assert session.is_alive
    assert Path(f"/proc/{pid}").exists()
