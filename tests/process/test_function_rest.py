"""Workers of functions that nobody calls are ended, and start again."""

from __future__ import annotations

from pathlib import Path

from tests.process import forks
from tests.process import isolated_pools as pool
from tests.process.harness import ROOT, Site, is_running, made_on, wait_ended, wait_until

import layerzero as lz


def test_workers_that_nobody_calls_end_and_start_again(tmp_path: Path) -> None:
    """One that keeps something stays until it is let go of; one with an express lane ends, too. That is no crash."""
    forks.start_server()
    (tmp_path / "store").mkdir()
    (tmp_path / "met").mkdir()
    site = Site(tmp_path / "store", functions_rest_s=0.2, restart_budget=0)
    with site.environment():
        pool.PAIR.build(quiet=True)
        try:
            site.start().connect()
            handle = pool.kept("here")
            home = handle.fetch()[1]
            pids = set(next(pool.gather.map([str(tmp_path / "met")] * 2, [2] * 2)))
            (other,) = pids - {home}
            wait_ended(other)
            assert is_running(home)
            assert handle.fetch() == ["here", home]
            handle.close()
            wait_ended(home)
            again = made_on("express", pool.pid.options(workers=1))
            assert again not in pids
            wait_ended(again)
            assert pool.pid() != again
            assert pool.pid.last_report().failures == ()
        finally:
            lz.disconnect()
            site.stop()


def test_workers_end_where_they_hold_more_of_a_gpu_than_they_may(tmp_path: Path) -> None:
    """Those that were called longest ago, unless they keep something; that is no crash, and they start again."""
    forks.start_server()
    for name in ("store", "met", "again"):
        (tmp_path / name).mkdir()
    held = tmp_path / "held"
    held.touch()
    site = Site(tmp_path / "store", gpu_budget_mib=150, functions_rest_s=0, restart_budget=0)
    site.environ |= {"LZ_SOFT_HELD": str(held), "PYTHONPATH": str(ROOT / "tests" / "soft_gpu" / "broker")}
    with site.environment():
        pool.PAIR.build(quiet=True)
        try:
            site.start().connect()
            handle = pool.kept("here")
            home = handle.fetch()[1]
            pids = set(next(pool.gather.map([str(tmp_path / "met")] * 2, [2] * 2)))
            (other,) = pids - {home}
            held.write_text(f"{home} {100 << 20}\n{other} {100 << 20}\n")
            wait_ended(other)
            assert is_running(home)
            held.write_text("")
            handle.close()
            pids = set(next(pool.gather.map([str(tmp_path / "again")] * 2, [2] * 2)))
            used = pool.pid()
            (other,) = pids - {used}
            held.write_text("".join(f"{pid} {100 << 20}\n" for pid in pids))

            def is_alone() -> bool:
                assert pool.pid() in (used, other)
                return not is_running(other)

            wait_until(is_alone)
            assert pool.pid() == used
            assert pool.pid.last_report().failures == ()
        finally:
            lz.disconnect()
            site.stop()
