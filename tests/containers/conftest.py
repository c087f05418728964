"""One engine and one stack for all tests here, built once, started, and taken down again with nothing left."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from tests.containers.engine import Engine, NoEngine, engine
from tests.containers.stack import Stack, nodes_of, stack, why_no_network

WANTED = "LAYERZERO_TEST_CONTAINERS"


@pytest.fixture(scope="session")
def running_engine() -> Iterator[Engine]:
    if not os.environ.get(WANTED):
        pytest.skip("make test-containers runs these: they build images")
    try:
        with engine() as found:
            yield found
    except NoEngine as exc:
        pytest.skip(f"the containers are not tested: {exc}")


@pytest.fixture(scope="session")
def built(running_engine: Engine) -> Iterator[Stack]:
    with stack(running_engine) as made:
        yield made


@pytest.fixture(scope="session")
def up(built: Stack) -> Stack:
    """All is started; the application ends by itself when it has run the demo."""
    try:
        built.compose("up", "-d")
    except RuntimeError as exc:
        services = built.compose("ps")
        pytest.fail(f"{exc}\n{services}\n{built.compose('logs', '--tail=20')}", pytrace=False)
    return built


@pytest.fixture(scope="module")
def cluster(built: Stack) -> Iterator[Stack]:
    """Two nodes of Ray, healthy with their workers."""
    if why := why_no_network(built.engine):
        pytest.skip(f"nodes are not tested: this engine makes no network: {why}")
    with nodes_of(built) as made:
        try:
            made.compose("up", "-d")
            made.wait_healthy("one", "two", "mlx", "onnxruntime")
        except (RuntimeError, AssertionError) as exc:
            pytest.fail(f"{exc}\n{made.compose('ps')}\n{made.compose('logs', '--tail=30')}", pytrace=False)
        yield made
