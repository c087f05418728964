"""A broker that knows an environment of functions, for the tests of modules about those."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.process import forks
from tests.process import isolated_functions as fn
from tests.process.harness import Site

import layerzero as lz
from layerzero.functions.environment import FunctionEnv

__all__ = ["serving", "site", "store"]


@contextmanager
def serving(site: Site, env: FunctionEnv) -> Iterator[Site]:
    """Its broker, which knows the environment, and this process as a client; nothing of them is left."""
    with site.environment():
        env.build(quiet=True)
        site.start().connect()
        yield site
        lz.disconnect()
    site.stop()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One in which no other test's broker looks for backends."""
    forks.start_server()
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def site(store: Path) -> Iterator[Site]:
    """A broker that knows the environment `plain`, and this process as its client."""
    one = Site(store, restart_budget=100, backoff_s=0.01)
    with serving(one, fn.PLAIN):
        yield one
