"""Fuzzing in CI: the corpora, with what was found in the past, then some seconds of libFuzzer for each target
(`make test-all`)."""

from __future__ import annotations

import json
import tempfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.fuzz import __main__ as program
from tests.fuzz.__main__ import CORPUS, fuzz, targets
from tests.fuzz.budget import Checked

SECONDS = 6  # thousands of inputs, of every kind of change; the start of a process takes as long


@pytest.mark.parametrize("target", targets())
def test_corpus_is_handled(target: str) -> None:
    """It has real messages, and every input that once was a finding."""
    checked = Checked(import_module(f"tests.fuzz.{target}"))
    for path in sorted((CORPUS / target).iterdir()):
        checked(path.read_bytes())


@pytest.mark.parametrize("finding", ["", "it raised"])
def test_folder_is_kept_for_findings_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], finding: str
) -> None:
    """Unless the caller names one. The line of JSON says which."""
    first, second = targets()[:2]

    def found(target: str, seconds: int, keep: Path, seed: int = 0) -> dict[str, Any]:
        (keep / target / "corpus").mkdir(parents=True)
        return {"finding": finding if target == second else ""}

    monkeypatch.setattr(program, "fuzz", found)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert program.main([first, second]) == bool(finding)
    kept = [json.loads(line)["kept"] for line in capsys.readouterr().out.splitlines()]
    assert [path.parent.name[:13] for path in tmp_path.glob("*/*")] == ["lz-fuzz-kept-"] * bool(finding)
    assert kept == ["", *map(str, tmp_path.glob("*/*")), ""][:2]
    own = tmp_path / "own"
    program.main([first, "--keep", str(own)])
    assert (own / first / "corpus").is_dir()


@pytest.mark.long
@pytest.mark.skipif(find_spec("atheris") is None, reason="atheris has no build for this Python or platform")
@pytest.mark.parametrize("target", targets())
def test_fuzzing_finds_nothing(target: str, tmp_path: Path) -> None:
    """One seed, so that what is found is found again. For others, and for longer: make fuzz."""
    found = fuzz(target, SECONDS, tmp_path, seed=1)
    assert found["finding"] == ""
    assert found["executions"] > 0
