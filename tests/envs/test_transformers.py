"""Runs tests/transformer_models in an environment that has Transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.envs.test_frameworks import ROOT, run_on_a_broker

from layerzero.broker.configuration import settings
from layerzero.envs import manifest
from layerzero.envs.build import build

FOLDER = ROOT / "tests/transformer_models"


@pytest.fixture(scope="module")
def python() -> Path:
    found = manifest.load(FOLDER / "transformers.toml")
    return build.ensure(found, store=settings.load().store).python


@pytest.mark.timeout(1800)
def test_models_of_transformers(python: Path) -> None:
    """Warnings of Transformers are none of ours. All files in one process, which imports it once."""
    run_on_a_broker(python, "tests/transformer_models", "-m", "not long", "-W", "default")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_architecture(python: Path) -> None:
    """All that docs/transformers.md lists, and what tests/conftest.py has left out above."""
    run_on_a_broker(python, "tests/transformer_models", "-m", "long", "-W", "default")
