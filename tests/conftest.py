"""Fixtures of the tests that need a broker: private ones, a shared one per module, and the check for leaks."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from tests.process.harness import PREFIX, Site, arena_files, open_files, processes, wait_until

import layerzero as lz
from layerzero.client.connection import arena

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in a background job: children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Images set it to be small. Then each of the thousand processes that tests start would compile all that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# How long an example takes is the machine's affair: it says nothing about what is tested.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

# Tests of the simulator itself: they look for planted bugs in thousands of schedules. What torch has to check ops with:
# each op, as it is traced, compiled and differentiated, on its own samples.
LONG = (
    "test_simulation.py::test_planted_bug_is_found",
    "test_framework_applications_share_a_broker[test_torch_ops.py]",
    "test_framework_applications_share_a_broker[test_torch_opinfo.py]",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(name in item.nodeid for name in LONG):
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where probes are remembered; one for all processes of a test run."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "store"


@pytest.fixture(scope="module")
def broker(store: Path) -> Iterator[Site]:
    """A broker for the tests of a module that leave it intact. Its workers may die often: they restart at once."""
    site = Site(store, restart_budget=100_000, backoff_s=0.01, backoff_max_s=0.01)
    try:
        yield site.start()
    finally:
        site.stop()


@pytest.fixture
def connected(no_leaks: None, broker: Site) -> Iterator[Site]:
    """This process is a client of the module's broker, which has forgotten the failures of earlier tests."""
    broker.connect().ask("reset")
    yield broker
    lz.disconnect()


@pytest.fixture
def new_site(no_leaks: None, store: Path) -> Iterator[Callable[..., Site]]:
    """Make sites for tests that break their broker or need settings of their own."""
    made: list[Site] = []

    def make(**settings: object) -> Site:
        made.append(Site(store, **settings))
        return made[-1]

    yield make
    lz.disconnect()
    for site in made:
        site.stop()


FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """After the test: no process, descriptor, arena or slot that was not there before."""
    gc.collect()
    gc.freeze()  # what was imported so far need not be looked at again by each gc.collect() below
    files, slots = open_files(), arena.pool.stats()["slots"]
    yield
    if request.node.stash[FAILED]:  # its traceback keeps all sorts of things
        return
    wait_until(lambda: gc.collect() >= 0 and arena.pool.stats()["slots"] <= slots)
    wait_until(lambda: not open_files() - files)
    assert arena_files() == 2 * arena.pool.stats()["arenas"]  # the arena's own, and mmap's copy of it
    strays = processes(Path(tempfile.gettempdir()) / PREFIX)
    known = [processes(site.folder) for site in Site.live] if strays else []
    strays = {pid: command for pid, command in strays.items() if not any(pid in site for site in known)}
    assert strays == {}
