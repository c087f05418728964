"""docs/diffusers.md: its examples run, in order, as one program."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from diffusers.models.attention_dispatch import AttentionBackendName
from tests.diffusion_models.models import BUILD, LAYERS, build, fed

PAGE = (Path(__file__).parents[2] / "docs/diffusers.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def test_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    """A reader has two models, and what they are given."""
    noise, _, text = fed("unet").values()
    at_hand: dict[str, Any] = {"transformer": build("flux"), "unet": build("unet"), "latents": fed("flux")}
    exec("\n".join(BLOCK.findall(PAGE)), at_hand | {"noise": noise, "text": text})
    out = capsys.readouterr().out
    assert f"{LAYERS['flux'] + LAYERS['unet']} calls served, 0 handed over" in out
    assert f"{LAYERS['unet']} calls served, 0 handed over" in out.splitlines()
    assert "LAYERZERO" not in AttentionBackendName.__members__


def test_models_are_those_of_the_tests() -> None:
    """Nothing is claimed that no test shows."""
    part = PAGE.partition("Tiny models with random weights")[2].partition("The largest error")[0]
    assert set(re.findall(r"\b[A-Z]\w*(?:Model|KL)\b", part)) == {type(build(name)).__name__ for name in BUILD}
