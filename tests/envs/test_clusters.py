"""Runs tests/clusters in an environment that has Ray."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.envs.test_frameworks import ROOT, run_pytest

from layerzero.broker.configuration import settings
from layerzero.envs import manifest
from layerzero.envs.build import build
from layerzero.ipc.errors import EnvError

FOLDER = ROOT / "tests/clusters"


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        return build.ensure(manifest.load(FOLDER / "ray.toml"), store=settings.load().store).python
    except EnvError as exc:
        pytest.skip(f"Ray's environment cannot be built here: {exc.message}")


@pytest.mark.timeout(1200)
def test_nodes_of_a_ray_cluster(python: Path) -> None:
    """Real Ray, three nodes on this machine: agents, brokers and raylets are killed in the middle of calls."""
    run_pytest(python, "tests/clusters", "-W", "default", LZ_TEST_CLUSTERS="1")
