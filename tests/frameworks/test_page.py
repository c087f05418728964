"""docs/torch.md: its examples run as they stand there, in order, as one program."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[2] / "docs/torch.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")


def test_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    """A reader has nothing at hand but a broker; the report that is printed has what the page says is served."""
    at_hand: dict[str, Any] = {}
    blocks = BLOCK.findall(PAGE)
    assert len(blocks) >= 2
    exec("\n".join(blocks), at_hand)
    assert at_hand["x"].grad is not None
    out = capsys.readouterr().out
    assert "accelerate: 2 calls taken over, 0 left to torch" in out
    assert {"linear", "silu"} <= set(out.split())
