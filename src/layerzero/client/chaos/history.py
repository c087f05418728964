"""What a run leaves: a folder of JSON lines, one file for each client process, one for faults, one of facts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from layerzero.ipc.errors import InvalidArgument

FACTS, FAULTS = "run.json", "faults.jsonl"


def client_file(folder: Path, number: int, incarnation: int) -> Path:
    """Where a client process writes: its lines are in the order of what happened to it."""
    return folder / f"client-{number}-{incarnation}.jsonl"


class Writer:
    """Appends lines to a file, each with one write(2): a process that is killed has written all it knew."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, **line: Any) -> None:
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        if os.write(self._fd, data) != len(data):
            raise OSError(f"the history was cut short: is the disk full? {line}")

    def close(self) -> None:
        os.close(self._fd)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Lines of a file. Raises InvalidArgument for one that is none of ours."""
    with open(path, "rb") as file:
        for number, text in enumerate(file, start=1):
            try:
                line = json.loads(text)
            except ValueError:
                raise InvalidArgument(f"{path}:{number} is not JSON: {text[:80]!r}") from None
            if not isinstance(line, dict):
                raise InvalidArgument(f"{path}:{number} is not an object: {text[:80]!r}")
            yield line


def clients_of(folder: Path) -> Iterator[tuple[int, int, Path]]:
    """Number, incarnation and file of each client process of a run."""
    for path in sorted(folder.glob("client-*-*.jsonl")):
        _, number, incarnation = path.stem.split("-")
        yield int(number), int(incarnation), path
