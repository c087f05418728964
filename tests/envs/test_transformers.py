"""Runs tests/transformer_models in an environment that has Transformers."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from tests.envs.test_frameworks import ROOT, run_pytest

import layerzero as lz
from layerzero.broker.configuration import settings
from layerzero.envs import manifest
from layerzero.envs.build import build

FOLDER = ROOT / "tests/transformer_models"


@pytest.fixture(scope="module")
def python() -> Path:
    found = manifest.load(FOLDER / "transformers.toml")
    return build.ensure(found, store=settings.load().store).python


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_models_of_transformers(python: Path, file: str) -> None:
    """Warnings of Transformers are none of ours."""
    run_on_a_broker(python, f"tests/transformer_models/{file}", "-m", "not long", "-W", "default")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_architecture(python: Path) -> None:
    """All that docs/transformers.md lists."""
    run_on_a_broker(python, "tests/transformer_models", "-m", "long", "-W", "default")


def run_on_a_broker(python: Path, *arguments: str) -> None:
    with tempfile.TemporaryDirectory(prefix="lz-") as runtime:
        lz.connect(runtime_dir=runtime)
        try:
            run_pytest(python, *arguments, LZ_TEST_FRAMEWORKS="1", LAYERZERO_RUNTIME_DIR=runtime)
        finally:
            lz.disconnect()
