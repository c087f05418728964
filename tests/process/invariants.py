"""What must hold after every fault (docs/reliability.md): checked from outside, by /proc and `lz status`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tests.process.harness import Site, is_running, wait_until

import layerzero as lz


def silu(x: np.ndarray) -> np.ndarray:
    wide = np.asarray(x, np.float64)
    with np.errstate(over="ignore"):
        return wide / (1 + np.exp(-wide))


class Asked:
    """Calls with a nonce each. Counts how they ended; a result of other inputs is an error at once."""

    def __init__(self) -> None:
        self.made = self.right = 0
        self.errors: list[lz.LayerZeroError] = []

    def silu(self, **options: Any) -> lz.LayerZeroError | None:
        """Returns the error that the call ended in. One without a type goes through."""
        self.made += 1
        x = np.random.default_rng(self.made).standard_normal(64, np.float32)
        before = x.copy()
        try:
            result = lz.silu(x, **options)
        except lz.LayerZeroError as exc:
            self.errors.append(exc)
            return exc
        finally:
            np.testing.assert_array_equal(x, before)
        np.testing.assert_allclose(result, silu(x), rtol=1e-6, atol=1e-7)
        self.right += 1
        return None

    @property
    def is_complete(self) -> bool:
        """Nothing lost, nothing told twice."""
        return self.made == self.right + len(self.errors)


def open_of(pid: int | None) -> int:
    """How many descriptors a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def check_settled(site: Site) -> None:
    """No call is open or running, and `ready` is said of workers that run and of no others."""
    wait_until(lambda: not any(client["open_calls"] for client in lz.status()["clients"]))
    wait_until(lambda: not any(row["running"] for row in lz.status()["backends"]))
    wait_until(lambda: _is_health_true(site))


def _is_health_true(site: Site) -> bool:
    """Workers that are being started or probed may be on either side."""
    rows = {row["pid"]: row for row in lz.status()["backends"] if row["pid"]}
    serving = {pid for pid, row in rows.items() if row["state"] in ("ready", "busy")}
    running = {pid for pid in site.worker_pids() if "probe" not in _command(pid)}
    return all(is_running(pid) for pid in serving) and running <= set(rows)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


@contextlib.contextmanager
def promises(site: Site, *, struck: Collection[str] = (), is_broker_same: bool = True) -> Iterator[Asked]:
    """A fault happens in the block, to the backends `struck`; calls are made with the Asked that it gets. Afterwards
    all is as it must be."""
    before = {row["name"]: row for row in lz.status()["backends"]}
    broker = site.broker_pid
    asked = Asked()
    yield asked
    assert asked.is_complete
    check_settled(site)
    if not is_broker_same:
        return
    assert site.broker_pid == broker
    for row in lz.status()["backends"]:
        was = before[row["name"]]
        if row["name"] not in struck and was["state"] == "ready":
            assert (row["pid"], row["failed"]) == (was["pid"], was["failed"]), f"{row['name']} was touched"
