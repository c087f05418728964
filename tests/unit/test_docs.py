"""Documents point at what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE = re.compile(r"`((?:[a-z_]+/)+[a-z0-9_.-]+\.(?:py|md|json|toml))`")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


@pytest.mark.parametrize("document", [pytest.param(path, id=path.name) for path in DOCUMENTS])
def test_every_file_that_a_document_names_exists(document: Path) -> None:
    """A table that walks the code is worth nothing once it leads astray."""
    named = set(FILE.findall(document.read_text(encoding="utf-8")))
    assert not [name for name in sorted(named) if not (ROOT / name).exists()]
