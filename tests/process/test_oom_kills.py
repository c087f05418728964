"""Workers that the kernel kills for lack of memory: the cause is named, and a SIGKILL of anybody else's is not taken
for it. With a cgroup of the tests' own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.backends.toy import HOARD, HOARD_BYTES, KILL, fault
from tests.process.harness import Site, wait_until
from tests.process.join_site import Agent, can_unshare

import layerzero as lz
from layerzero.ipc import oom

LIMIT_MIB = 400  # a broker and two toys need about 200
X = np.linspace(-3, 3, 8, dtype=np.float32)


class Box:
    """A cgroup with a limit of memory."""

    def __init__(self) -> None:
        ours = oom.cgroup_of(os.getpid())
        if ours is None:
            pytest.skip("no cgroup that counts memory shows here")
        assert LIMIT_MIB << 20 < HOARD_BYTES
        self.path = f"/layerzero-test-{os.getpid()}"
        self.folder = Path(f"{ours.top}{self.path}")
        names = ("memory.max", "memory.swap.max")
        if ours.version == 1:
            names = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
        limit, swap = (self.folder / name for name in names)
        try:
            self.folder.mkdir()
        except OSError as exc:
            pytest.skip(f"no cgroup can be made here: {exc}")
        if not limit.exists():
            self.folder.rmdir()
            pytest.skip(f"a new cgroup here has no {limit.name}")
        limit.write_text(str(LIMIT_MIB << 20))
        if swap.exists():
            swap.write_text("0" if ours.version == 2 else str(LIMIT_MIB << 20))

    def put(self, pid: int) -> None:
        """It, and what it starts from now on."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        wait_until(lambda: (self.folder / "cgroup.procs").read_text() == "")
        self.folder.rmdir()


@pytest.fixture
def box() -> Iterator[Box]:
    made = Box()
    yield made
    made.remove()


def boxed(box: Box, site: Site) -> Site:
    """A broker in the box, and this process, outside, as its client."""
    site.start()
    assert site.broker_pid is not None
    box.put(site.broker_pid)
    site.connect()
    site.wait_ready("alpha", "beta")
    return site


def first_attempt(action: int) -> lz.Attempt:
    """Of a call that strikes alpha alone, and that beta serves."""
    lz.silu(np.array([fault(action, "alpha"), 1.0], np.float32))
    report = lz.last_report()
    assert report is not None
    failed, served = report.attempts
    assert (failed.backend, failed.exit_signal, served.backend) == ("alpha", signal.SIGKILL, "beta")
    return failed


def test_a_worker_that_runs_out_of_its_cgroups_memory_is_reported_so(box: Box, new_site: Callable[..., Site]) -> None:
    """SIGKILL alone sends people to look for who sent it."""
    site = boxed(box, new_site(standby=0, backoff_s=0.01))
    wanted = f"for lack of memory (signal 9; cgroup {box.path}, limit {LIMIT_MIB} MiB)"
    assert wanted in first_attempt(HOARD).detail
    assert wanted in site.events("worker.exited")[-1]["cause"]
    site.wait_ready("alpha")
    # The same signal, from somebody else.
    assert first_attempt(KILL).detail == "the alpha worker died (signal 9)"
    site.wait_ready("alpha")
    assert wanted in first_attempt(HOARD).detail


def test_a_backend_that_needs_more_memory_than_there_is_says_what_repairs_it(
    box: Box, new_site: Callable[..., Site]
) -> None:
    """A restart alone would end in the same."""
    site = boxed(box, new_site(standby=0, restart_budget=0))
    first_attempt(HOARD)
    wait_until(lambda: site.backend("alpha")["state"] == "disabled")
    repair = "raise the limit of that cgroup or container, or run less in it, then lz restart alpha"
    assert site.backend("alpha")["unavailable"]["repair"] == repair
    with pytest.raises(lz.NoBackend, match="for lack of memory"):
        lz.silu(X, backend="alpha")


def test_a_joined_worker_that_runs_out_of_its_containers_memory_is_reported_so(
    box: Box, new_site: Callable[..., Site]
) -> None:
    """Only its agent sees that cgroup."""
    site = new_site(joined="alpha", backoff_s=0.01)
    agent = Agent(site, "alpha", is_pid_1=can_unshare())
    try:
        box.put(agent.pid)  # it waits for the broker
        site.start().connect()
        wait_until(lambda: site.backend("alpha")["state"] == "ready")
        site.wait_ready("beta")
        detail = first_attempt(HOARD).detail
        assert f"for lack of memory (signal 9; cgroup {box.path}, limit {LIMIT_MIB} MiB)" in detail
        site.wait_ready("alpha")
        assert first_attempt(KILL).detail == "the alpha worker died (signal 9)"
    finally:
        agent.end()
