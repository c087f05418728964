"""`pytest --lz-matrix`: tests of a user's inside other environments, by real child processes. Needs a network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.envs.harness import STORE

from layerzero.envs.build.installers import find_uv

pytest_plugins = ("pytester",)
pytestmark = pytest.mark.skipif(find_uv() is None, reason="uv is not installed")

SOURCE = str(Path(__file__).parents[2] / "src")
# By module and not by entry point: works in a checkout that was not installed, too.
PLUGIN = ("-p", "no:layerzero", "-p", "layerzero.envs.matrix.pytest_plugin", "-p", "no:cacheprovider")

TESTS = """
import os
import pytest

inside = pytest.mark.lz_env("colorama==0.4.6")

@pytest.mark.lz_env("colorama==0.4.6", "colorama==0.4.5")
def test_versions(lz_env, shared):
    import colorama
    assert f"colorama=={colorama.__version__}" == lz_env
    assert shared == "from conftest"

@inside
@pytest.mark.parametrize("dies", [False, True])
def test_crashes(dies, tmp_path):
    if dies:
        os.kill(os.getpid(), 11)

@inside
def test_fails():
    print("said before")
    left = 1
    assert left == 2

@inside
def test_ends():
    os._exit(0)

@inside
def test_skips():
    pytest.skip("not today")

@inside
@pytest.mark.xfail(reason="known")
def test_known():
    raise ValueError

@pytest.mark.lz_env("colorama==99")
def test_nowhere():
    pass

def test_here():
    assert os.getpid() == os.getpid()
"""
CONFTEST = """
import pytest

@pytest.fixture
def shared():
    return "from conftest"
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("LAYERZERO_STORE", str(STORE))
    monkeypatch.setenv("PYTHONPATH", SOURCE)
    for name in [name for name in os.environ if name.startswith("PYTEST_XDIST")]:
        monkeypatch.delenv(name)
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_them=TESTS)
    return pytester


def test_each_outcome_inside_becomes_the_outcome_here(project: pytest.Pytester) -> None:
    """Under xdist: two processes share what is built. Fixtures and conftest work inside; a crash ends one test."""
    result = project.runpytest_subprocess(*PLUGIN, "--lz-matrix", "-n", "2", "-v", timeout=150)
    result.assert_outcomes(passed=4, failed=4, skipped=1, xfailed=1)
    out = result.stdout
    out.fnmatch_lines(["*PASSED*test_them.py::test_versions?colorama==0.4.5?*"])
    out.fnmatch_lines(["*PASSED*test_them.py::test_crashes?*False*"])
    out.fnmatch_lines(["died of SIGSEGV, inside colorama==0.4.6", "*Fatal Python error: Segmentation fault*"])
    out.fnmatch_lines(["assert 1 == 2, inside colorama==0.4.6, call", "*left = 1*", "*assert 1 == 2*", "*said before*"])
    out.fnmatch_lines(["there is no environment for 'colorama==99':", "*no version of colorama==99*"])
    out.fnmatch_lines(["pytest ended with exit code 0 and no result, inside colorama==0.4.6"])
    out.fnmatch_lines(["FAILED *test_fails*- assert 1 == 2, in*"])


def test_a_test_that_hangs_is_ended(project: pytest.Pytester) -> None:
    """With all that it has started, after the time that was given."""
    project.makepyfile(
        test_them=(
            "import pytest, threading\n@pytest.mark.lz_env('colorama==0.4.6')\n"
            "def test_it():\n    threading.Event().wait()\n"
        )
    )
    result = project.runpytest_subprocess(*PLUGIN, "--lz-matrix", "--lz-timeout", "3", timeout=100)
    result.stdout.fnmatch_lines(["no end within 3 s, inside colorama==0.4.6"])


def test_without_the_flag_marked_tests_are_skipped(project: pytest.Pytester) -> None:
    """Their libraries are not here; the reason says what runs them."""
    result = project.runpytest_subprocess(*PLUGIN, "-rs", timeout=60)
    result.assert_outcomes(passed=1, skipped=8)
    result.stdout.fnmatch_lines(["SKIPPED*runs inside colorama==0.4.6, colorama==0.4.5: needs --lz-matrix"])


def test_a_mark_that_names_nothing_is_refused(project: pytest.Pytester) -> None:
    """It would run nowhere, and pass."""
    project.makepyfile(test_them="import pytest\n@pytest.mark.lz_env()\ndef test_it(): pass")
    result = project.runpytest_subprocess(*PLUGIN, "--lz-matrix", timeout=60)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*lz_env takes environments as strings*"])
    result.stdout.no_fnmatch_line("*lz_matrix_inside.py*")  # a sentence, and no traceback of ours


def test_the_plugin_is_light() -> None:
    """pytest imports it at every start of everyone who has LayerZero installed."""
    code = (
        "import sys, pytest; old = {*sys.modules}\n"
        "import layerzero.envs.matrix.pytest_plugin\n"
        "print(len({*sys.modules} - old))"
    )
    environ = {**os.environ, "PYTHONPATH": SOURCE}
    assert int(subprocess.check_output([sys.executable, "-c", code], env=environ, text=True)) <= 6
