"""Runs tests/serving_engines in an environment that has flashinfer and SGLang, and no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.envs.test_frameworks import ROOT, run_on_a_broker

from layerzero.broker.configuration import settings
from layerzero.envs import manifest
from layerzero.envs.build import build

FOLDER = ROOT / "tests/serving_engines"


@pytest.fixture(scope="module")
def python() -> Path:
    found = manifest.load(FOLDER / "engines.toml")
    return build.ensure(found, store=settings.load().store).python


@pytest.mark.timeout(1800)
def test_serving_engines(python: Path) -> None:
    """Warnings of engines are none of ours. All files in one process, which imports them once."""
    run_on_a_broker(python, "tests/serving_engines", "-W", "default")
