"""docs/engines.md: its examples run, and name what there is."""

from __future__ import annotations

import pkgutil
import re
from importlib.metadata import version
from pathlib import Path

import flashinfer
import pytest
import tomllib
import torch
from tests.serving_engines import flashinfer_kernels as kernels
from tests.serving_engines import signatures

import layerzero.engines.flashinfer as ours
from layerzero.engines import sglang, vllm
from layerzero.ipc.vocabulary import variables

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/engines.md").read_text(encoding="utf-8")


def test_example_of_flashinfer_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A reader has flashinfer, two tensors and a GPU."""
    kernels.replace(monkeypatch)
    ours.clear()
    block = re.search(
        r"^## flashinfer\n\n```python\n(.*?)^```\n\n```text\n.*?\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE
    )
    assert block is not None
    exec(block[1], {"flashinfer": flashinfer, "x": torch.randn(3, 64), "weight": torch.ones(64)})
    rows = {line.rstrip() for line in capsys.readouterr().out.splitlines()[1:]}
    assert rows == set(block[2].splitlines())


def test_kinds_are_all_there() -> None:
    """Nothing is claimed that there is not."""
    table = PAGE.partition("| kind | API | op |")[2].partition("\n\n")[0]
    named = dict(re.findall(r"^\| (\w+) \| `([\w.]+)`", table, re.MULTILINE))
    assert {kind: one.api for kind, one in ours.KINDS.items()}.keys() == named.keys()
    assert all(ours.KINDS[kind].api.endswith(f".{api}") for kind, api in named.items())


def test_versions_are_those_that_were_tried() -> None:
    """The page names them."""
    assert f"| flashinfer | {version('flashinfer-python')} |" in PAGE
    assert f"| vLLM | {signatures.recorded('vllm')['version']} |" in PAGE
    assert f"| SGLang | {signatures.recorded('sglang')['version']} |" in PAGE


def test_backends_and_variables_are_all_there() -> None:
    """Nothing is claimed that there is not."""
    assert set(re.findall(r"^\| `(\w*LAYERZERO)` \| \w+ \|$", PAGE, re.MULTILINE)) == set(vllm.BACKENDS)
    assert dict(re.findall(r"^\| `(layerzero_\w*)` \| (\w+) \|$", PAGE, re.MULTILINE)) == sglang.BACKENDS
    named = set(re.findall(r"`LAYERZERO_(ENGINE_\w+)=", PAGE))
    assert named == {one.name for one in variables.OTHERS if one.name.startswith("ENGINE_")}


def test_plugins_are_those_of_the_package() -> None:
    """An entry point that leads nowhere is an error in an engine's log, at best."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    assert pkgutil.resolve_name(declared["vllm.general_plugins"]["layerzero"]) is vllm.register
    assert pkgutil.resolve_name(declared["sglang.srt.plugins"]["layerzero"]) is sglang.register
