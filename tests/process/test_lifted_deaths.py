"""Lifted calls when a process dies: the worker they came from, the broker, the client that launches them; and when a
lifted kernel costs a client its GPU. Over the GPU of threads."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any

import numpy as np
import pytest
from tests.process.gpu_site import close, randn, report, silu, soft
from tests.process.harness import Site, is_paused, wait_ended, wait_until
from tests.process.invariants import check_settled
from tests.process.lifted_site import LiftedSites, kernels, lift, lifted_site, lifted_store, refused, rows
from tests.process.test_cli import lz as lz_command
from tests.soft_gpu.soft_kernels import STRIKING

import layerzero as lz
from layerzero.ipc.lifting.reasons import LiftReason

__all__ = ["kernels", "lifted_site", "lifted_store", "soft"]
CALLS = 200
CLIENT = """
import sys
import numpy as np
from tests.soft_gpu import soft_cupy, soft_kernels
soft_cupy.install()
soft_kernels.install()
lz.connect(runtime_dir=sys.argv[1])
x = soft_cupy.asarray(np.ones(FIRST_SIZE, np.float32))
def lift(call):
    while True:
        call()
        if lz.last_report().path == "lifted":
            return
"""


def client(site: Site, code: str, size: int) -> subprocess.Popen[str]:
    """Another process that sees the GPU; `x` is an array of ones in it."""
    return site.python(CLIENT.replace("FIRST_SIZE", str(size)) + code)


def all_lifted(x: Any, values: np.ndarray) -> None:
    for _ in range(CALLS):
        result = lz.silu(x)
        assert report().path == "lifted"
    close(result, silu(values))


def test_the_worker_may_die_and_be_stopped(lifted_site: LiftedSites) -> None:
    site = lifted_site().start()
    site.connect()
    x, values = randn(32, 32)
    lift(lambda: lz.silu(x))
    worker = site.backend("one")["pid"]
    os.kill(worker, signal.SIGKILL)
    all_lifted(x, values)
    wait_ended(worker)
    all_lifted(x, values)
    wait_until(lambda: site.backend("one")["state"] == "ready")
    worker = site.backend("one")["pid"]
    os.kill(worker, signal.SIGSTOP)
    wait_until(lambda: is_paused(worker))
    all_lifted(x, values)
    os.kill(worker, signal.SIGCONT)
    y, more = randn(33)
    close(lz.silu(y), silu(more))


def test_a_worker_that_is_given_up_takes_no_lifted_call_with_it(lifted_site: LiftedSites) -> None:
    """Nothing of the worker is needed, not even that there may be another one."""
    site = lifted_site(restart_budget=0).start()
    site.connect()
    x, values = randn(32, 32)
    lift(lambda: lz.silu(x))
    os.kill(site.backend("one")["pid"], signal.SIGKILL)
    wait_until(lambda: site.backend("one")["state"] == "disabled")
    y, _ = randn(33)
    with pytest.raises(lz.NoBackend):
        lz.silu(y)
    status = lz.status()["broker"]["up_s"]  # the broker has looked since whom it ranks first
    wait_until(lambda: (all_lifted(x, values), lz.status()["broker"]["up_s"] > status + 2)[1])


def test_the_broker_may_die(lifted_site: LiftedSites) -> None:
    """Lifted calls go on; what needs a broker says so, and a new session has them from the store."""
    site = lifted_site().start()
    site.connect()
    x, values = randn(32, 32)
    lift(lambda: lz.silu(x))
    pid = site.broker_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_ended(pid)
    all_lifted(x, values)
    y, more = randn(33)
    with pytest.raises(lz.BrokerLost):
        lz.silu(y)
    site.connect()
    close(lz.silu(x), silu(values))
    assert report().path == "lifted"
    close(lz.silu(y), silu(more))


def test_a_client_that_ends_in_order_leaves_nothing_suspect(lifted_site: LiftedSites) -> None:
    site = lifted_site().start()
    site.connect()
    x, values = randn(32, 32)
    for _ in range(2):
        lift(lambda: lz.silu(x))
        all_lifted(x, values)
        lz.disconnect()
        site.connect()
    assert site.events("lifted.suspect") == []


def test_what_a_killed_client_launched_last_is_isolated(lifted_site: LiftedSites) -> None:
    """Nobody knows why it ended. Others go on, and so do other kernels."""
    site = lifted_site().start()
    site.connect()
    x, values = randn(32, 32)
    lift(lambda: lz.silu(x))
    other = client(site, "lift(lambda: lz.silu(x))\nprint('up', flush=True)\nwhile True: lz.silu(x)\n", 77)
    assert other.stdout is not None
    assert other.stdout.readline() == "up\n"
    other.kill()
    other.wait()
    other.stdout.close()
    all_lifted(x, values)
    wait_until(lambda: site.events("lifted.suspect"))
    check_settled(site)
    (event,) = site.events("lifted.suspect")
    assert event["kernel"] == "one.silu"
    lz.disconnect()
    site.connect()
    y, more = randn(77)
    assert refused(lambda: lz.silu(y)).startswith("FAULTED: a process that had just launched it ended without a word")
    close(lz.silu(y), silu(more))
    lift(lambda: lz.matmul(x, x))
    lift(lambda: lz.silu(x))  # the same kernel, of another call
    lz.disconnect()
    site = lifted_site().start()  # another broker knows of it
    site.connect()
    assert refused(lambda: lz.silu(y)).startswith("FAULTED")
    told = lz_command(site, "cache", "list").stdout
    assert "one.silu: a process that had just launched it ended without a word" in told
    assert lz_command(site, "cache", "forgive").stdout == "forgiven: 1\n"
    lz.disconnect()
    site.connect()
    lift(lambda: lz.silu(y))


@pytest.fixture
def struck(lifted_site: LiftedSites) -> Site:
    """A client has lost its GPU in a lifted kernel."""
    site = lifted_site().start()
    site.connect()
    code = f"""
lift(lambda: lz.silu(x))
x.fill({STRIKING})
try:
    while True: lz.silu(x)
except lz.LayerZeroError as exc:
    print(exc.code, lz.last_report().path, flush=True)
"""
    other = client(site, code, 77)
    assert other.stdout is not None
    assert other.communicate()[0].split() == ["BACKEND_ERROR", "lifted"]
    wait_until(lambda: site.events("lifted.faulted"))
    return site


def test_a_kernel_that_cost_a_client_its_gpu_stays_in_its_worker(
    struck: Site, lifted_site: LiftedSites, kernels: Any
) -> None:
    """In the next client, whatever the call; in the next broker; until it is forgiven."""
    x, values = randn(32, 32)
    for _ in range(2):
        told = refused(lambda: lz.silu(x))
        assert told.startswith(LiftReason.FAULTED.value)
        assert "lz cache forgive" in told
        close(lz.silu(x), silu(values))
        lift(lambda: lz.matmul(x, x))
        lz.disconnect()
        struck = lifted_site().start()
        struck.connect()
    lz.disconnect()
    assert lz_command(struck, "cache", "forgive").stdout == "forgiven: 1\n"
    struck.connect()
    lift(lambda: lz.silu(x))
    assert ("one.silu", "lifted", "") in rows()
