"""Examples of functions in environments of their own, as a newcomer runs them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.envs.harness import STORE
from tests.process.harness import ROOT, Site

import layerzero as lz
from layerzero.broker.configuration import settings
from layerzero.envs import manifest
from layerzero.envs.build import build
from layerzero.envs.build.installers import find_uv

EXAMPLES = ROOT / "examples"


def run(store: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    site = Site(store)
    try:
        with site.environment():
            environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
            environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            return subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
    finally:
        site.stop()


@pytest.mark.timeout(300)
def test_a_node_that_crashes_is_red_and_the_server_lives(tmp_path: Path) -> None:
    """Two packs, of NumPy 1 and of NumPy 2; all that does not wait for the crash is done, twice."""
    answer = run(tmp_path, sys.executable, str(EXAMPLES / "comfyui" / "server.py"), "--build")
    assert answer.returncode == 0, answer.stderr
    for count in (1, 2):
        said = [line.partition(", ")[2] for line in answer.stdout.splitlines() if line.startswith(f"prompt {count}")]
        assert [said[0], said[1], said[4]] == ["node 1: done", "node 2: done", "node 5: done"]
        assert said[2].startswith("node 3: RED: adapter.run in pack-old-filters:")
        assert "worker died (signal 11)" in said[2]
        assert said[3] == "node 4: RED: waits for node 3, which is red"


@pytest.mark.long  # test_matrix_pytest.py has the rules in short
@pytest.mark.skipif(find_uv() is None, reason="uv is not installed")
@pytest.mark.timeout(300)
def test_a_projects_tests_run_in_three_versions_of_a_dependency() -> None:
    plugin = ("-p", "no:layerzero", "-p", "layerzero.envs.matrix.pytest_plugin", "-p", "no:cacheprovider")
    answer = run(STORE, sys.executable, "-m", "pytest", *plugin, "--lz-matrix", "-q", str(EXAMPLES / "abi-matrix"))
    assert answer.returncode == 0, answer.stdout
    assert "6 passed" in answer.stdout


@pytest.mark.long  # a minute of g++
@pytest.mark.timeout(900)
def test_a_compiled_extension_is_an_op_under_torch_compile(tmp_path: Path) -> None:
    """The program has the frameworks of tests/frameworks; the broker is this interpreter's."""
    found = manifest.load(ROOT / "tests/frameworks/frameworks.toml")
    python = build.ensure(found, store=settings.load().store).python
    lz.env("example-extension", requires=["torch==2.13.0", "ninja"], python="3.11").build(quiet=True)
    with tempfile.TemporaryDirectory(prefix="lz-") as runtime:
        lz.connect(runtime_dir=runtime)
        try:
            inherited = {name: os.environ[name] for name in ("PATH", "HOME", "LAYERZERO_STORE") if name in os.environ}
            environ = {**inherited, "PYTHONPATH": str(ROOT / "src"), "LAYERZERO_RUNTIME_DIR": runtime}
            environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)
            argv = [str(python), str(EXAMPLES / "torch_extension.py")]
            answer = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
        finally:
            lz.disconnect()
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "compiled for torch 2.13" in answer.stdout
    assert float(answer.stdout.partition("largest difference ")[2].split()[0]) < 1e-12
