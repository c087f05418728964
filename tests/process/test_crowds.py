"""Many threads, many open calls, a client that floods, and nobody left to serve."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tests.backends.toy import COUNT
from tests.process.harness import PATIENCE_S, Site, wait_until
from tests.process.invariants import check_settled, promises

import layerzero as lz

THREADS, CALLS = 64, 60
FEW = 20
FLOOD, IN_TURN = 400, 10  # three calls of one client and as many of the flood between them, and what is under way


def test_64_threads_with_mixed_calls_get_their_own_answers(connected: Site) -> None:
    """One session, one reader for all, lanes and the broker's way at the same time."""
    connected.wait_ready("alpha", "beta")

    def work(thread: int) -> int:
        rng = np.random.default_rng(thread)
        for _ in range(CALLS):
            kind = int(rng.integers(4))
            x = rng.standard_normal((4, 8), np.float32)
            want = x / (1 + np.exp(-x))
            if kind == 0:
                np.testing.assert_allclose(lz.silu(x), want, rtol=1e-5, atol=1e-6)
            elif kind == 1:
                futures = [lz.submit(lz.silu, x + n) for n in range(3)]
                for n, future in enumerate(futures):
                    want = (x + n) / (1 + np.exp(-x - n))
                    np.testing.assert_allclose(future.result(PATIENCE_S), want, rtol=1e-5, atol=1e-6)
            elif kind == 2:
                np.testing.assert_allclose(lz.matmul(x, x.T), x @ x.T, rtol=1e-4, atol=1e-5)
            else:
                lz.null(backend="beta")
        return CALLS

    with promises(connected), ThreadPoolExecutor(THREADS) as threads:
        assert sum(threads.map(work, range(THREADS))) == THREADS * CALLS


def test_who_finds_no_room_knows_it_at_once(new_site: Callable[..., Site]) -> None:
    """BUSY late is a queue without bounds: it is said while nothing moves. The limit is per client: another one is
    served meanwhile."""
    site = new_site(max_in_flight=FEW, express=False)
    site.connect()
    alpha, _ = site.wait_ready("alpha", "beta")
    x = np.ones(4, np.float32)
    lz.silu(x)
    os.kill(alpha, signal.SIGSTOP)
    try:
        open_calls = [lz.submit(lz.silu, x, backend="alpha") for _ in range(FEW)]
        for _ in range(50):
            with pytest.raises(lz.Busy, match=f"allowed: {FEW}"):
                lz.submit(lz.silu, x, backend="alpha")
        other = site.python(
            "import sys, numpy as np\nlz.connect()\nprint(lz.silu(np.zeros(2, np.float32), backend='beta').sum())"
        )
        assert other.communicate(timeout=PATIENCE_S)[0] == "0.0\n"
    finally:
        os.kill(alpha, signal.SIGCONT)
    for future in open_calls:
        np.testing.assert_allclose(future.result(PATIENCE_S), x / (1 + np.exp(-x)), rtol=1e-6)
    check_settled(site)


def test_with_all_backends_down_callers_learn_it_at_once_and_each_reason(new_site: Callable[..., Site]) -> None:
    """No kernel is an answer, too, and not one that waits for a restart: those take ten minutes here."""
    site = new_site(restart_budget=0, backoff_s=600, backoff_max_s=600)
    site.connect()
    names = ("alpha", "beta", "gamma")
    for pid in site.wait_ready(*names):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: all(site.backend(name)["state"] == "disabled" for name in names))
    x = np.ones(4, np.float32)
    for _ in range(50):
        with pytest.raises(lz.NoBackend) as failure:
            lz.silu(x)
        for name in names:
            assert f"{name}.silu: BACKEND_DISABLED" in str(failure.value)
    check_settled(site)


def test_clients_are_served_in_turn_whoever_came_first_with_hundreds(new_site: Callable[..., Site]) -> None:
    """One who floods must wait for others as they wait for it: a call that comes behind 400 of another client's must
    not come after them. The worker itself numbers what it runs, so no process's delay tells of another order."""
    site = new_site(express=False, depth=1)
    site.connect()
    alpha, _ = site.wait_ready("alpha", "beta")
    x = np.full(4, COUNT, np.float32)
    lz.silu(x, backend="alpha")
    code = (
        "import sys, numpy as np\n"
        "lz.connect()\n"
        f"x = np.full(2, {COUNT}, np.float32)\n"
        "lz.null(backend='beta')\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "futures = [lz.submit(lz.silu, x, backend='alpha') for _ in range(3)]\n"
        "print('sent', flush=True)\n"
        "print(max(f.result()[0] for f in futures), flush=True); sys.stdin.readline()\n"
    )
    other = site.python(code, stdin=-1)
    assert other.stdout is not None
    assert other.stdin is not None
    assert other.stdout.readline() == "ready\n"
    os.kill(alpha, signal.SIGSTOP)
    flood = [lz.submit(lz.silu, x, backend="alpha") for _ in range(FLOOD)]
    other.stdin.write("go\n")
    other.stdin.flush()
    assert other.stdout.readline() == "sent\n"
    wait_until(lambda: site.backend("alpha")["running"] > 0)
    wait_until(lambda: Counter(c["open_calls"] for c in lz.status()["clients"])[3] == 1)
    os.kill(alpha, signal.SIGCONT)
    last = float(other.stdout.readline())
    other.stdin.write("end\n")
    other.stdin.close()
    other.stdout.close()
    other.wait(30)
    assert max(future.result(PATIENCE_S)[0] for future in flood) == 1 + FLOOD + 3
    assert last <= 1 + IN_TURN
    check_settled(site)
