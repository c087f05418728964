"""docs/settings.md and the list of variables are what is declared, and what is read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from layerzero.broker.configuration import settings_page
from layerzero.broker.configuration.settings import Settings
from layerzero.ipc.vocabulary import variables

ROOT = Path(__file__).parents[4]
FOLDERS = ("src/layerzero", "containers", "tests/containers")
NAMED = re.compile(r"LAYERZERO_([A-Z][A-Z_]*[A-Z])\b")


def test_the_page_is_made_from_the_declarations() -> None:
    """A page that is written by hand is wrong after the next change."""
    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert text == settings_page.page(), (
        "run: python -m layerzero.broker.configuration.settings_page > docs/settings.md"
    )


def test_the_list_of_settings_is_that_of_the_broker() -> None:
    """A client does not load the broker's declarations, and must know their names."""
    assert list(variables.SETTINGS) == list(Settings.model_fields)
    assert set(variables.PATHS) <= set(variables.SETTINGS)
    paths = {name for name, field in Settings.model_fields.items() if "Path" in str(field.annotation)}
    assert paths - {"runtime_dir", "overlay"} <= set(variables.PATHS), "a broker runs in another folder"


def test_every_variable_that_the_source_names_is_declared() -> None:
    """One that is read and not declared would be called misspelt."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".sh", "")]
    texts = [path.read_text() for path in ROOT.glob("docker-compose*.yml")] + [
        p.read_text() for p in files if p.is_file()
    ]
    named = {name for text in texts for name in NAMED.findall(text)}
    assert named <= {*variables.names()}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("LAYERZERO_AVOID_SOURCE", "LAYERZERO_AVOID_SOURCE has no effect: did you mean LAYERZERO_AVOID_SOURCES?"),
        ("LAYERZERO_TIMEOUT", "LAYERZERO_TIMEOUT has no effect: did you mean LAYERZERO_TIMEOUT_S?"),
        ("LAYERZERO_GPU_TRANSPRT", "LAYERZERO_GPU_TRANSPRT has no effect: did you mean LAYERZERO_GPU_TRANSPORT?"),
        ("LAYERZERO_RULES", "LAYERZERO_RULES has no effect: nothing reads it; docs/settings.md has all variables"),
        ("LAYERZERO_XYZZY", "LAYERZERO_XYZZY has no effect: nothing reads it; docs/settings.md has all variables"),
    ],
)
def test_a_variable_that_nothing_reads_is_told(name: str, said: str) -> None:
    """A setting that is set and ignored is looked for in every other place first."""
    assert list(variables.mistakes({name: "1", "PATH": "/"})) == [said]


@pytest.mark.parametrize("name", ["LAYERZERO_SERVICE_HOST", "LAYERZERO_PORT_8080_TCP_ADDR", "LAYERZERO_WORKER_OF_MINE"])
def test_variables_of_others_are_left_alone(name: str) -> None:
    """Kubernetes makes some for a service called layerzero; a provider may read what is passed to its worker."""
    assert list(variables.mistakes({name: "1"})) == []
