"""A runtime folder that is taken away under its broker."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
from tests.process.harness import Site, processes, wait_ended, wait_until

import layerzero as lz


@pytest.mark.parametrize("is_made_anew", [False, True])
def test_a_broker_that_nobody_finds_any_more_ends(new_site: Callable[..., Site], is_made_anew: bool) -> None:
    """Else it lives for ever, with its workers and their memory; and it takes nothing of its successor."""
    site = new_site().start()
    session = site.connect()
    first = session.broker_pid
    site.wait_ready("alpha")
    shutil.rmtree(site.folder)
    site.folder.mkdir(mode=0o700)
    if is_made_anew:
        (site.folder / "layerzero").mkdir()
        site.set_policy()
        site.start()
    wait_ended(first, 30)
    lz.disconnect()
    if is_made_anew:
        second = site.broker_pid
        assert second not in (None, first)
        assert site.connect().broker_pid == second
        wait_until(lambda: first not in processes(site.folder))
        lz.disconnect()
