"""Bytecode of installed distributions, handed from one throw-away environment to the next of the same run.

uv's cache has none, so every environment would compile torch anew, which takes longer than all else. Python checks
bytecode against time and size of its source, so what does not fit is compiled again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from layerzero.envs.matrix.owners import records


def keep(site: Path, versions: Mapping[str, str], shelf: Path) -> None:
    """Link all bytecode of an environment into `shelf`, by distribution and version."""
    for name, files in records(site).items():
        target = shelf / f"{name}-{versions.get(name, '')}"
        for folder in sorted({file.rpartition("/")[0] for file in files if file.endswith(".py")}):
            for path in _bytecode(site / folder / "__pycache__"):
                _link(path, target / folder / "__pycache__" / path.name)


def restore(site: Path, versions: Mapping[str, str], shelf: Path) -> None:
    """Link what `keep` kept of the same versions into an environment."""
    for name, version in versions.items():
        kept = shelf / f"{name}-{version}"
        for base, _, files in os.walk(kept):
            for file in files:
                _link(Path(base, file), site / Path(base).relative_to(kept) / file)


def _bytecode(folder: Path) -> Iterator[Path]:
    with suppress(FileNotFoundError):
        yield from (path for path in folder.iterdir() if path.suffix == ".pyc")


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        os.link(source, target)
