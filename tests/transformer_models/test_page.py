"""docs/transformers.md: its examples run, in order, as one program, and its lists are those of the tests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.transformer_models.architectures import ARCHITECTURES, NOT_ASKED, REFUSED
from tests.transformer_models.comparing import ids
from tests.transformer_models.tokenizers import gpt2

PAGE = (Path(__file__).parents[2] / "docs/transformers.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def test_examples_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A reader has the name of a model with a tokenizer, and ids."""
    llama = next(one for one in ARCHITECTURES if one.name == "llama")
    llama.build("eager").save_pretrained(tmp_path)
    gpt2().save_pretrained(tmp_path)
    at_hand: dict[str, Any] = {"name": str(tmp_path), "ids": ids()}
    exec("\n".join(BLOCK.findall(PAGE)), at_hand)
    out = capsys.readouterr().out
    assert "0 handed over" in out
    assert "RMSNorm" in out
    assert "['Kernels run', 'in environments']" in out


def named(after: str, before: str) -> set[str]:
    part = PAGE.partition(f"\n{after}")[2].partition(before)[0]
    rows = re.findall(r"^- (?:[A-Za-z ]+: )?(.*?)\.$", part, re.DOTALL | re.MULTILINE)
    return {name for row in rows for name in row.replace("\n", " ").replace(" ", "").split(",")}


@pytest.mark.parametrize(
    ("after", "before", "outcomes"),
    [
        ("Served:", "\nNot asked", {"served"}),
        ("Not asked:", "\nRefused", {NOT_ASKED}),
        ("Refused:", "\n## ", {REFUSED}),
    ],
)
def test_lists_are_those_of_the_tests(after: str, before: str, outcomes: set[str]) -> None:
    """Nothing is claimed that no test shows."""
    assert named(after, before) == {one.name for one in ARCHITECTURES if one.outcome in outcomes}
