"""lz.plan where things go wrong or change on the way: deaths in steps, policy, threads, forks, connections."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.backends.toy import HANG, fault
from tests.process.harness import Site, is_paused, is_running, wait_until
from tests.process.planned import W, X, agree, block, expected, settled, silu, some, two_ready

import layerzero as lz
from layerzero.client.connection.arena import pool


@pytest.fixture
def site(new_site: Callable[..., Site]) -> Site:
    return two_ready(new_site)


# --- what goes wrong on the way


@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("action", ["kill", "exit0", "raise"])
def test_a_worker_lost_in_any_step_costs_one_attempt_and_no_result(
    new_site: Callable[..., Site], step: int, action: str
) -> None:
    """What ended before the step is whole; the step itself goes to the next backend, with the attempt counted."""
    nth = 301 + step  # of the worker's kernels: that of the first one is its probe's
    site = new_site(failpoints=f"faulty:executing={action}@{nth}", standby=0, backoff_s=600, backoff_max_s=600)
    site.add_backend("faulty", ndim=2)
    site.connect()
    site.wait_ready("faulty", "beta")
    plan, wanted = lz.plan(lambda x: lz.silu(lz.silu(lz.silu(x)))), silu(silu(silu(X)))
    settled(plan, X)
    for _ in range(nth):
        agree(plan(X), wanted)
        runs = plan.timings()
        if any(run.attempts for run in runs):
            break
    else:
        pytest.fail("the failpoint was never passed")
    at = next(n for n, run in enumerate(runs) if run.attempts)
    assert [run.how for run in runs[:at]] == ["chain"] * at
    assert runs[at].how == "call"
    served = runs[at].kernel_id.partition(".")[0]  # one that raises lives, and is tried once more by the broker
    assert served in (("faulty",) if action == "raise" else ("alpha", "beta"))
    for seed in range(10):
        agree(plan(some(seed)), silu(silu(silu(some(seed)))))


def three(a: Any, b: Any, c: Any) -> Any:
    """Three steps in one chain, each on an argument of its own, that may ask for a fault."""
    return tuple(lz.silu(x, backend="alpha") for x in (a, b, c))


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_broker_killed_in_a_step_ends_the_run_and_no_later_one(site: Site, step: int) -> None:
    """The run knows at once; its memory is not used again, and the next broker's workers run the plan."""
    plan, pid = settled(lz.plan(three), X, X + 1, X + 2), site.broker_pid
    assert pid is not None
    given = [X, X + 1, X + 2]
    given[step] = given[step].copy()
    given[step].flat[0] = fault(HANG, "alpha")
    alpha = site.backend("alpha")["pid"]
    with ThreadPoolExecutor(1) as thread:
        hanging = thread.submit(plan, *given)
        wait_until(lambda: site.backend("alpha")["running"])
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(lz.BrokerLost):
            hanging.result(timeout=30)
    wait_until(lambda: not is_running(alpha))
    lz.disconnect()
    site.start().connect()
    for seed in range(3):
        one, other, last = (some(seed + n) for n in range(3))
        for got, wanted in zip(plan(one, other, last), (silu(one), silu(other), silu(last)), strict=True):
            agree(got, wanted)


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_client_killed_in_a_step_harms_nobody(site: Site, step: int) -> None:
    """Its chain ends, its memory is given back, and the worker serves others."""
    other = site.python(
        "import numpy as np\n"
        "from tests.backends.toy import PAUSE, fault\n"
        "from tests.process.test_plan_faults import three\n"
        "lz.connect()\n"
        "x = [np.ones((4, 6), np.float32) for _ in range(3)]\n"
        "plan = lz.plan(three, keep_choice=False)\n"
        "while plan(*x) is None or plan.phase != 'FROZEN' or not plan.explain().messages: pass\n"
        f"x[{step}][0] = fault(PAUSE, 'alpha')\n"
        "plan(*x)\n"
    )
    alpha = site.backend("alpha")["pid"]
    wait_until(lambda: is_paused(alpha))
    os.kill(other.pid, signal.SIGKILL)
    other.communicate()
    os.kill(alpha, signal.SIGCONT)
    plan = settled(lz.plan(three), X, X + 1, X + 2)
    agree(plan(X, X + 1, X + 2)[0], silu(X))
    assert {t.kernel_id for t in plan.timings()} == {"alpha.silu"}
    assert site.events("worker.exited") == []


def test_a_worker_killed_between_runs_is_no_matter(site: Site) -> None:
    """The next run goes as calls where it has to, and as one message again."""
    plan = settled(lz.plan(block), X)
    pid = next(b["pid"] for b in lz.status()["backends"] if b["name"] == "alpha")
    os.kill(pid, signal.SIGKILL)
    for seed in range(5):
        agree(plan(some(seed)), expected(some(seed)))
    wait_until(lambda: not is_running(pid))
    settled(plan, X)


def test_policy_is_followed_as_by_calls(site: Site) -> None:
    """Both that of a scope, which is another plan, and that of the file, which ends leases."""
    plan = settled(lz.plan(block), X)
    with lz.prefer("beta"):
        agree(plan(X), expected(X))
        settled(plan, X)
        assert {t.kernel_id for t in plan.timings()} == {"beta.silu", "beta.matmul"}
    plan(X)
    assert {t.kernel_id for t in plan.timings()} == {"alpha.silu", "alpha.matmul"}
    site.set_policy("avoid_kernels: [alpha.*]\n")

    def has_moved() -> bool:
        agree(plan(X), expected(X))
        return {t.kernel_id for t in plan.timings()} == {"beta.silu", "beta.matmul"}

    wait_until(has_moved)


def test_a_step_that_policy_wants_in_this_process_runs_here(new_site: Callable[..., Site]) -> None:
    """The others cross as before; the whole is right, before the probe in this interpreter has passed and after."""
    made = new_site()
    made.set_policy("backend_isolation: {alpha: in_process}\nlocks: {matmul: beta.matmul, silu: alpha.silu}\n")
    made.start().connect()
    made.wait_ready("alpha", "beta")

    def function(x: Any) -> Any:
        return lz.silu(lz.matmul(lz.matmul(x, W), W))

    plan = lz.plan(function)
    how: set[tuple[str, ...]] = set()

    def is_there() -> bool:
        agree(plan(X), silu(X @ W @ W))
        how.add(tuple(t.how for t in plan.timings()))
        return ("chain", "chain", "call") in how

    wait_until(is_there)
    assert {t.kernel_id for t in plan.timings()} == {"beta.matmul", "alpha.silu"}


def test_threads_do_not_share_a_run(site: Site) -> None:
    """A plan's memory is for one run at a time; the others are calls."""
    plan = settled(lz.plan(block), X)
    wrong: list[int] = []

    def work(first: int) -> None:
        for seed in range(first, first + 40):
            if not np.allclose(plan(some(seed)), expected(some(seed)), rtol=1e-4, atol=1e-5):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(1000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forked_child_has_a_plan_of_its_own(site: Site) -> None:
    """Parent and child use no memory together."""
    plan = settled(lz.plan(block), X)
    pid = os.fork()
    if not pid:
        code = 1
        with contextlib.suppress(BaseException):
            good = all(np.allclose(plan(some(seed)), expected(some(seed)), rtol=1e-4, atol=1e-5) for seed in range(10))
            code = 0 if good else 2
        os._exit(code)
    for seed in range(50):
        agree(plan(some(seed)), expected(some(seed)))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_another_connection_makes_the_plan_anew(site: Site) -> None:
    """Nothing of the old connection's lanes and memory is used."""
    plan = settled(lz.plan(block), X)
    lz.disconnect()
    site.connect()
    for seed in range(5):
        agree(plan(some(seed)), expected(some(seed)))
    settled(plan, X)


def test_a_plan_gives_its_memory_back(site: Site) -> None:
    """Slots, tables and copies go with it."""
    slots = []
    for _ in range(3):
        settled(lz.plan(lambda x: lz.silu(block(x))), X)
        gc.collect()
        lz.session().repeats.clear()
        slots.append(pool.stats()["slots"])
    assert slots[2] <= slots[1]


def test_a_plan_is_looked_at_step_by_step(site: Site) -> None:
    """The results may be seen, and changed, before the next step reads them."""
    plan = settled(lz.plan(block), X)
    seen = [(step.name, results[0].copy()) for step, results in plan.debug(X)]
    assert [name for name, _ in seen] == ["silu", "matmul", "silu"]
    agree(seen[0][1], silu(X))
    agree(seen[2][1], expected(X))
    with pytest.raises(lz.InvalidArgument, match="FROZEN first"):
        list(plan.debug(some(0, 3, 6)))


def test_a_dry_run_of_a_plan_shows_its_functions_calls(site: Site) -> None:
    """Tools that ask what a function would do are told so."""
    plan = settled(lz.plan(block), X)
    assert [call.op for call in lz.dry_run(plan, X).calls] == ["silu", "matmul", "silu"]
