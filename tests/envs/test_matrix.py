"""`lz matrix` on a part of the default set, for real: installs, imports, crashes. Needs network or warm caches."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.envs.harness import STORE

from layerzero.envs.build.installers import find_uv
from layerzero.envs.build.store import locked

pytestmark = pytest.mark.skipif(find_uv() is None, reason="uv is not installed")

SOURCE = Path(__file__).parents[2] / "src"
NAMES = ("tokenizers-0.13", "tokenizers-0.23", "onnxruntime-1.16", "blis-0.7")


def command(store: Path, *words: str) -> dict[str, Any]:
    """Arguments of subprocess for an `lz matrix` of this very checkout."""
    environ = {**os.environ, "LAYERZERO_STORE": str(store), "PYTHONPATH": str(SOURCE)}
    return {
        "args": [sys.executable, "-P", "-m", "layerzero.client.cli.app", "matrix", *words],
        "env": environ,
        "text": True,
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, str]:
    """The JSON, the page and the progress of one run that uses nothing that is kept; made once for all processes."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    done, html = folder / "lz-matrix.json", folder / "lz-matrix.html"
    with locked(done):
        if not done.exists():
            words = command(STORE, *NAMES, "--fresh", "--json", "--html", str(html))
            answer = subprocess.run(**words, capture_output=True, timeout=170, check=False)
            assert answer.returncode == 0, answer.stderr
            done.write_text(json.dumps([answer.stdout, answer.stderr]), encoding="utf-8")
    out, err = json.loads(done.read_text(encoding="utf-8"))
    return json.loads(out), html.read_text(encoding="utf-8"), err


def cell(data: dict[str, Any], *names: str) -> dict[str, Any]:
    (found,) = [one for one in data["cells"] if set(one["subjects"]) == set(names)]
    assert isinstance(found, dict)
    return found


def test_the_resolver_refuses_two_versions_of_one_library(made: tuple[dict[str, Any], str, str]) -> None:
    """The cell has the resolver's own words."""
    found = cell(made[0], "tokenizers-0.13", "tokenizers-0.23")
    assert (found["state"], found["kind"]) == ("conflict", "resolver")
    assert "tokenizers==0.13.3" in found["plain"]["evidence"]


def test_a_crash_is_a_result_and_names_its_signal(made: tuple[dict[str, Any], str, str]) -> None:
    """onnxruntime 1.16 has no cap on NumPy and dies with NumPy 2 at its first use; with NumPy 1 it works."""
    found = cell(made[0], "onnxruntime-1.16", "tokenizers-0.13")
    assert (found["state"], found["kind"], found["care"]) == ("care", "crash", ["numpy<2"])
    assert (found["plain"]["missing"], found["plain"]["subject"]) == ("SIGSEGV", "onnxruntime-1.16")
    assert found["plain"]["versions"]["numpy"].startswith("2.")
    assert found["careful"]["versions"]["numpy"].startswith("1.")
    assert [order["order"] for order in found["careful"]["orders"]] == [
        ["tokenizers-0.13", "onnxruntime-1.16"],
        ["onnxruntime-1.16", "tokenizers-0.13"],
    ]


def test_a_changed_struct_is_told_from_other_errors(made: tuple[dict[str, Any], str, str]) -> None:
    """blis 0.7 was compiled against NumPy 1."""
    found = cell(made[0], "blis-0.7")
    assert (found["kind"], found["plain"]["missing"]) == ("struct", "numpy.dtype")
    assert "Expected 96 from C header, got 88" in found["plain"]["summary"]


def test_isolated_all_of_them_work(made: tuple[dict[str, Any], str, str]) -> None:
    """What this project is for: workers where we have a backend, else a process."""
    isolated = {one["name"]: one["isolated"] for one in made[0]["subjects"]}
    assert {name: (one["ok"], one["through"]) for name, one in isolated.items()} == {
        "tokenizers-0.13": (True, "worker"),
        "tokenizers-0.23": (True, "worker"),
        "onnxruntime-1.16": (True, "process"),
        "blis-0.7": (True, "process"),
    }


def test_two_environments_serve_all(made: tuple[dict[str, Any], str, str]) -> None:
    """Only the two tokenizers are apart; the sets were tried as sets."""
    answer = made[0]["environments"]
    assert (len(answer["groups"]), answer["is_fewest"], answer["unserved"]) == (2, True, [])
    assert sorted(name for group in answer["groups"] for name in group) == sorted(NAMES)


def test_the_page_has_the_evidence(made: tuple[dict[str, Any], str, str]) -> None:
    """And no path of the machine that it was made on."""
    _, page, _ = made
    assert "died of SIGSEGV in the first op of onnxruntime-1.16" in page
    assert str(STORE) not in page
    assert str(SOURCE.parent) not in page


def test_progress_is_on_stderr(made: tuple[dict[str, Any], str, str]) -> None:
    """10 cells of one and two, and the set of all."""
    assert "11/11" in made[2]


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    """Neither environments nor processes; what was found out is kept for the next run."""
    words = command(tmp_path, "tokenizers-0.13", "colorama==0.4.6", "numpy==2.2.6", "--jobs", "1")
    with subprocess.Popen(**words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        try:
            assert process.stderr.readline().startswith("1/7 ")
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode != 0
    work = tmp_path / "matrix" / "work"
    assert [path.name for path in work.rglob("*")] == [".locks"]
    assert list((tmp_path / "matrix" / "cells").glob("*.json"))


def test_requirements_of_before_numpy_2_are_tried_with_an_older_one(tmp_path: Path) -> None:
    """Nobody wrote down that this blis needs one; and of colorama no op is known, so nothing computed right."""
    words = command(tmp_path, "blis==0.7.11", "colorama==0.4.6", "--json")
    answer = subprocess.run(**words, capture_output=True, timeout=170, check=False)
    assert answer.returncode == 0, answer.stderr
    data = json.loads(answer.stdout)
    alone = cell(data, "blis==0.7.11")
    assert (alone["state"], alone["kind"], alone["care"]) == ("care", "struct", ["numpy<2"])
    assert data["environments"]["unserved"] == []
    assert cell(data, "colorama==0.4.6")["plain"]["summary"] == "imported; no op is known for it"
    both = cell(data, "blis==0.7.11", "colorama==0.4.6")["careful"]["summary"]
    assert both == "imported in both orders; computed right: blis==0.7.11; no op is known for colorama==0.4.6"


def test_the_whole_default_matrix_is_not_tried_unasked(tmp_path: Path) -> None:
    """It takes a quarter of an hour. Without a terminal it is an error that says what to type, with one a question."""
    answer = subprocess.run(**command(tmp_path), capture_output=True, timeout=60, check=False, stdin=subprocess.DEVNULL)
    assert answer.returncode == 2
    assert "add --yes, or name a few: lz matrix torch mlx" in answer.stderr
    assert re.search(r"tries 21 libraries, alone and in pairs: 231 environments, about \d+ minutes", answer.stderr)
    own, theirs = pty.openpty()
    with subprocess.Popen(**command(tmp_path), stdin=theirs, stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        said = b""
        while b"Go on? [y/N]" not in said:
            said += os.read(own, 4096)
        os.write(own, b"n\n")
        assert process.wait(timeout=60) == 0
        assert process.stdout is not None
        assert process.stdout.read() == ""
    os.close(own)
    assert not list(tmp_path.iterdir())


def test_a_wrong_word_is_wrong_usage(tmp_path: Path) -> None:
    """Before anything is installed."""
    answer = subprocess.run(**command(tmp_path, "no such thing!"), capture_output=True, timeout=60, check=False)
    assert answer.returncode == 2
    assert "neither a subject nor requirements" in answer.stderr
    assert not list(tmp_path.iterdir())


def test_bisect_finds_the_version_that_broke_a_script(tmp_path: Path) -> None:
    """Real releases, each in an environment of its own, and nothing of them left."""
    script = tmp_path / "works.py"
    script.write_text(
        "import colorama\nassert not hasattr(colorama, 'just_fix_windows_console'), colorama.__version__\n"
    )
    words = ("--bisect", "colorama 0.4.3..0.4", "--test", str(script), "--json")
    answer = subprocess.run(**command(tmp_path, *words), capture_output=True, timeout=150, check=False)
    assert answer.returncode == 0, answer.stderr
    data = json.loads(answer.stdout)
    assert data["versions"] == ["0.4.3", "0.4.4", "0.4.5", "0.4.6"]
    assert (data["answer"], data["before"], data["at"]) == ("broken", "0.4.5", "0.4.6")
    assert [one["why"] for one in data["tried"] if one["version"] == "0.4.6"] == ["exit code 1: AssertionError: 0.4.6"]
    assert [path.name for path in (tmp_path / "matrix" / "work").rglob("*")] == [".locks"]


def test_bisect_needs_a_test(tmp_path: Path) -> None:
    """Wrong usage, before anything is resolved."""
    words = ("--bisect", "colorama 0.4.3..0.4.6")
    answer = subprocess.run(**command(tmp_path, *words), capture_output=True, timeout=60, check=False)
    assert answer.returncode == 2
    assert "--test" in answer.stderr
