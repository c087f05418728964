"""Runs tests/frameworks, and the framework parts of tests/unit/client, in the environment that has the frameworks."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from tests.frameworks import isolated_ops

import layerzero as lz
from layerzero.broker.configuration import settings
from layerzero.envs import manifest
from layerzero.envs.build import build

ROOT = Path(__file__).parents[2]
LONG = (  # files with tests that are long; the last two have no others
    "test_torch_compile.py",
    "test_torch_gradients.py",
    "test_torch_accelerate.py",
    "test_torch_ops.py",
    "test_torch_opinfo.py",
)
FILES = sorted((ROOT / "tests/frameworks").glob("test_*.py"))
QUICK = [f"tests/frameworks/{path.name}" for path in FILES if path.name not in LONG[3:]]


@pytest.fixture(scope="module")
def python() -> Path:
    found = manifest.load(ROOT / "tests/frameworks/frameworks.toml")
    return build.ensure(found, store=settings.load().store).python


def run_pytest(python: Path, *arguments: str, **environ: str) -> None:
    """Everything passes and nothing is skipped for want of a framework."""
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    inherited = {name: os.environ[name] for name in ("PATH", "HOME", "LZ_EXAMPLES") if name in os.environ}
    inherited["PYTHONPATH"] = str(ROOT / "src")
    ran = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, env={**inherited, **environ})
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert "could not import" not in ran.stdout, ran.stdout[-3000:]


def test_client_units_with_every_framework(python: Path) -> None:
    """The test interpreter has NumPy alone; torch, JAX and MLX arrays must not go untested for that. Files that need
    none of them have run already."""
    files = sorted((ROOT / "tests/unit/client").rglob("test_*.py"))
    files = [path for path in files if "importorskip(" in path.read_text()]
    assert files
    run_pytest(python, *map(str, files))


@pytest.mark.timeout(1800)
def test_framework_applications_share_a_broker(python: Path) -> None:
    """Another interpreter's broker serves an application that has frameworks of its own. All files in one process: to
    import the frameworks takes as long as most of the tests."""
    run_on_a_broker(python, *QUICK, "-m", "not long")


@pytest.mark.long
@pytest.mark.timeout(1800)  # those of torch compile C++
@pytest.mark.parametrize("files", [LONG[:3], LONG[3:]], ids=["of others", "of ops"])
def test_the_long_tests_of_framework_applications(python: Path, files: tuple[str, ...]) -> None:
    """What tests/conftest.py has left out above."""
    run_on_a_broker(python, *[f"tests/frameworks/{file}" for file in files], "-m", "long")


def run_on_a_broker(python: Path, *arguments: str) -> None:
    isolated_ops.ENV.build(quiet=True)  # of test_torch_functions.py
    with tempfile.TemporaryDirectory(prefix="lz-") as runtime:
        # Tests of several files kill workers; four within half a minute would leave the next ones without torch.
        with mock.patch.dict(os.environ, LAYERZERO_RESTART_BUDGET="100"):
            lz.connect(runtime_dir=runtime)
        try:
            run_pytest(python, *arguments, LZ_TEST_FRAMEWORKS="1", LAYERZERO_RUNTIME_DIR=runtime)
        finally:
            lz.disconnect()
