"""Workers of functions that nobody calls are ended, and start again."""

from __future__ import annotations

from pathlib import Path

from tests.process import forks
from tests.process import isolated_pools as pool
from tests.process.harness import Site, is_running, made_on, wait_ended

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
