"""Fixtures of the tests that run providers in their own environments."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.envs.harness import Harnesses


@pytest.fixture(scope="session")
def harnesses() -> Iterator[Harnesses]:
    running = Harnesses()
    yield running
    running.close()
