"""Runs tests/diffusion_models in an environment that has Diffusers."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.envs.test_frameworks import ROOT, run_on_a_broker

from layerzero.broker.configuration import settings
from layerzero.envs import manifest
from layerzero.envs.build import build

FOLDER = ROOT / "tests/diffusion_models"


@pytest.fixture(scope="module")
def python() -> Path:
    found = manifest.load(FOLDER / "diffusers.toml")
    return build.ensure(found, store=settings.load().store).python


@pytest.mark.timeout(1800)
def test_models_of_diffusers(python: Path) -> None:
    """Warnings of Diffusers are none of ours. All files in one process, which imports it once."""
    run_on_a_broker(python, "tests/diffusion_models", "-m", "not long", "-W", "default")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_more_models_of_diffusers(python: Path) -> None:
    """What tests/conftest.py has left out above."""
    run_on_a_broker(python, "tests/diffusion_models", "-m", "long", "-W", "default")
