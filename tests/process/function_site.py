"""A broker that knows an environment of functions, for the tests of modules about those."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.process import forks
from tests.process import isolated_functions as fn
from tests.process.harness import Site

import layerzero as lz

__all__ = ["site", "store"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One in which no other test's broker looks for backends."""
    forks.start_server()
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def site(store: Path) -> Iterator[Site]:
    """A broker that knows the environment `plain`, and this process as its client."""
    one = Site(store, restart_budget=100, backoff_s=0.01)
    with one.environment():
        fn.PLAIN.build(quiet=True)
        one.start().connect()
        yield one
        lz.disconnect()
    one.stop()
