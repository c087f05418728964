"""Too little memory, too few descriptors, a full disk, a tiny /dev/shm: calls fail by name or not at all."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.process.harness import ROOT, Site, is_running, wait_until
from tests.process.invariants import check_settled, promises, silu

import layerzero as lz

MIB = 1 << 20
X = np.linspace(-3, 3, 64, dtype=np.float32)


@contextlib.contextmanager
def limited(pid: int, which: int, soft: int) -> Iterator[None]:
    """A process (0: this one) with a lower limit for a while."""
    before = resource.prlimit(pid, which)
    resource.prlimit(pid, which, (soft, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, which, before)


def test_a_worker_without_memory_costs_one_attempt_and_lives(connected: Site) -> None:
    """The next call may be small; a restart would not find more memory."""
    alpha, _ = connected.wait_ready("alpha", "beta")
    x, out = lz.share(np.full(16 * MIB, 0.5, np.float32)), lz.empty(16 * MIB)
    lz.silu(x, out=out)  # from now on the worker has both mapped
    used = int(Path(f"/proc/{alpha}/statm").read_text().split()[0]) * resource.getpagesize()
    with promises(connected, struck={"alpha"}) as asked:
        with limited(alpha, resource.RLIMIT_AS, used + 16 * MIB):  # no room for what the kernel makes on its way
            lz.silu(x, out=out)
            report = lz.last_report()
        np.testing.assert_allclose(out[::4096], silu(np.full(4096, 0.5)), rtol=1e-6)
        assert report is not None
        assert [(a.backend, a.outcome) for a in report.attempts] == [("alpha", "BACKEND_ERROR"), ("beta", None)]
        assert "MemoryError" in report.attempts[0].detail
        assert is_running(alpha)
        assert asked.silu(backend="alpha") is None
    assert connected.backend("alpha")["pid"] == alpha


def test_a_worker_that_cannot_map_the_callers_memory_says_so(connected: Site) -> None:
    """Not that the caller had named memory that is not there."""
    alpha, _ = connected.wait_ready("alpha", "beta")
    used = int(Path(f"/proc/{alpha}/statm").read_text().split()[0]) * resource.getpagesize()
    x = lz.share(np.full(32 * MIB, 0.5, np.float32))
    with promises(connected, struck={"alpha"}):
        with limited(alpha, resource.RLIMIT_AS, used + 16 * MIB):
            lz.silu(x)
            report = lz.last_report()
        assert report is not None
        assert [(a.backend, a.outcome) for a in report.attempts] == [("alpha", "BACKEND_ERROR"), ("beta", None)]
        assert "cannot map the caller's memory" in report.attempts[0].detail
        assert is_running(alpha)


def test_a_client_that_may_not_make_arenas_is_told_before_the_call(connected: Site) -> None:
    """ENOSPC at allocation, never a SIGBUS in the middle of a kernel; and calls go on once there is room."""
    connected.wait_ready("alpha", "beta")
    with promises(connected) as asked:
        assert asked.silu() is None
        big = np.ones(64 * MIB, np.float32)
        with limited(0, resource.RLIMIT_FSIZE, MIB):
            with pytest.raises(lz.OutOfMemory):
                lz.silu(big)
        lz.silu(big)
        assert asked.silu() is None


def test_a_client_without_descriptors_gets_an_error_with_a_type_and_goes_on(connected: Site) -> None:
    """A leak elsewhere in a program must not crash it here."""
    connected.wait_ready("alpha", "beta")
    with promises(connected) as asked:
        assert asked.silu() is None
        used = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
        with limited(0, resource.RLIMIT_NOFILE, used):
            with contextlib.ExitStack() as held:
                with contextlib.suppress(OSError):
                    while True:
                        held.enter_context(open("/dev/null"))
                assert asked.silu() is None  # needs none
                with pytest.raises((lz.LayerZeroError, OSError)):
                    lz.silu(np.ones(128 * MIB, np.float32))  # an arena of its own
        assert asked.silu() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_disk_under_everything_that_a_broker_writes_ends_no_call(
    new_site: Callable[..., Site], tmp_path: Path
) -> None:
    """Sockets are there already; logs and times are the least of what a broker is for."""
    site = new_site()
    small = site.folder / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", small], check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        site.environ["LAYERZERO_PERF_DB"] = str(small / "perf.db")
        site.endpoints.log.symlink_to(small / "broker.log")
        site.endpoints.worker_log("alpha").symlink_to(small / "alpha.log")
        site.connect()
        site.wait_ready("alpha", "beta")
        with open(small / "filler", "wb", buffering=0) as filler, contextlib.suppress(OSError):
            while True:
                filler.write(bytes(4096))
        with promises(site, struck={"alpha"}) as asked:
            for _ in range(50):
                assert asked.silu() is None
            (alpha,) = site.wait_ready("alpha")
            os.kill(alpha, 9)
            for _ in range(50):
                assert asked.silu() is None
            site.wait_ready("alpha")
        assert asked.right == 100
    finally:
        lz.disconnect()
        site.endpoints.log.unlink()
        pid = site.broker_pid
        if pid is not None:
            os.kill(pid, 15)
            wait_until(lambda: site.worker_pids() == [] and site.broker_pid is None)
        subprocess.run(["umount", "-l", small], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace of one's own needs root")
def test_a_tiny_dev_shm_does_not_matter(connected: Site) -> None:
    """Containers have 64 MiB of it, or less; arenas are memfds and take nothing from it."""
    code = (
        "import sys, numpy as np, layerzero as lz\n"
        "lz.connect(runtime_dir=sys.argv[1])\n"
        "x = lz.share(np.full(1 << 22, 2, np.float32))\n"
        "y = lz.silu(x)\n"
        "assert abs(float(y[-1]) - 1.7615942) < 1e-5\n"
        "print('right', flush=True)\n"
    )
    connected.wait_ready("alpha", "beta")
    script = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
    with connected.environment():
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-c", code, str(connected.folder)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount namespace here: {done.stderr.strip()}")
    assert done.stdout == "right\n", done.stderr
    check_settled(connected)
