"""Fuzzing in CI: the corpora, with what was found in the past, then twenty seconds of libFuzzer for each target
(`make test-all`)."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.fuzz.__main__ import CORPUS, fuzz, targets
from tests.fuzz.budget import Checked

SECONDS = 20


@pytest.mark.parametrize("target", targets())
def test_corpus_is_handled(target: str) -> None:
    """It has real messages, and every input that once was a finding."""
    checked = Checked(import_module(f"tests.fuzz.{target}"))
    for path in sorted((CORPUS / target).iterdir()):
        checked(path.read_bytes())


@pytest.mark.long
@pytest.mark.skipif(find_spec("atheris") is None, reason="atheris has no build for this Python or platform")
@pytest.mark.parametrize("target", targets())
def test_fuzzing_finds_nothing(target: str, tmp_path: Path) -> None:
    """One seed, so that what is found is found again. For others, and for longer: make fuzz."""
    found = fuzz(target, SECONDS, tmp_path, seed=1)
    assert found["finding"] == ""
    assert found["executions"] > 0
