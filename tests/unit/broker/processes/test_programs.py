"""Programs by their names, as policy means them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from layerzero.broker.processes.programs import program_of


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["-X", "utf8", "{folder}/train.py", "-m", "x"], "train.py"),
        (["-u", "-m", "timeit"], "timeit"),
        (["-c", "CODE"], Path(sys.executable).resolve().name),
    ],
)
def test_a_program_is_called_as_its_script(words: list[str], name: str, tmp_path: Path) -> None:
    """Code that was typed in has no name but its interpreter's."""
    waits = "import sys; print(flush=True); sys.stdin.read()"
    for file in ("train.py", "timeit.py"):
        (tmp_path / file).write_text(waits)
    given = [waits if word == "CODE" else word.format(folder=tmp_path) for word in words]
    command = [Path(sys.executable).resolve(), *given]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert program_of(process.pid) == name
    assert program_of(2**22 + 1) == ""
