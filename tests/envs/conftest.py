"""Fixtures of the tests that run providers in their own environments."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.envs.harness import ON_CPU, STORE, Harnesses
from tests.process.harness import Site

import layerzero as lz
from layerzero.envs.build import build


@pytest.fixture(scope="session")
def harnesses() -> Iterator[Harnesses]:
    running = Harnesses()
    yield running
    running.close()


@pytest.fixture(scope="module")
def installation() -> Iterator[Site]:
    """An ordinary CPU installation, with this process as a client: every backend of the project, no toys."""
    for name in ON_CPU:
        build.ensure(build.resolve(name), store=STORE)
    site = Site(STORE)
    del site.environ["LAYERZERO_MANIFEST_DIRS"]
    site.start().connect()
    yield site
    lz.disconnect()
    site.stop()
