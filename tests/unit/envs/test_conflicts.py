"""Why an environment cannot be in this process, by distributions that are really here."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path

import pytest
import typer

import layerzero as lz
from layerzero.envs import conflicts, functions
from layerzero.envs.cli import locking
from layerzero.envs.conflicts import Conflict
from layerzero.envs.declared import Declared

PYTEST = importlib.metadata.version("pytest")
PLUGGY = importlib.metadata.version("pluggy")


@pytest.fixture(autouse=True)
def _store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYERZERO_STORE", str(tmp_path))


def test_what_holds_here_has_none() -> None:
    found = lz.env("a", requires=[f"pytest=={PYTEST}", "msgpack"]).conflicts()
    assert not found
    assert str(found) == "no conflict: its requirements hold in this process"


def test_each_row_has_what_is_asked_for_what_is_here_and_who_refuses() -> None:
    """pytest itself needs a newer pluggy, so that an older one cannot be put here."""
    found = lz.env("a", requires=["pluggy==0.13.1", "no-such-thing>=3", "msgpack"]).conflicts()
    rows = {row.requirement: row for row in found}
    assert set(rows) == {"pluggy==0.13.1", "no-such-thing>=3"}
    assert rows["no-such-thing>=3"] == Conflict("no-such-thing>=3", "not installed", "no-such-thing>=3")
    assert rows["pluggy==0.13.1"].here == f"pluggy {PLUGGY}"
    assert rows["pluggy==0.13.1"].needs.startswith("pluggy 0.13.1, which is refused by ")
    assert f"pytest {PYTEST} (pluggy" in rows["pluggy==0.13.1"].needs


def test_another_python_or_interpreter_is_one(tmp_path: Path) -> None:
    other = "3.11" if sys.version_info[1] != 11 else "3.12"
    (row,) = lz.env("a", python=other).conflicts()
    assert row == Conflict(f"Python {other}", f"Python 3.{sys.version_info[1]}", f"Python {other} to run this program")
    (row,) = lz.env("a", from_interpreter=tmp_path).conflicts()
    assert row[:2] == (str(tmp_path), sys.executable)
    assert not lz.env("a", from_interpreter=sys.prefix).conflicts()


def test_lock_tells_which_version_of_a_range_it_would_be() -> None:
    """Without one nobody knows which of them, and who refuses it."""
    (row,) = conflicts.find(["pluggy<1"], "", "", {"pluggy": "0.13.1"})
    assert "refused by" in row.needs
    (row,) = conflicts.find(["pluggy<1"], "", "", {})
    assert row.needs == "pluggy<1"


def test_table_has_80_columns() -> None:
    text = str(lz.env("a", requires=["pluggy==0.13.1", f"{'long-' * 12}name>=3"], python="3.12").conflicts())
    assert text.startswith("requirement               here                    it would need\n")
    assert max(map(len, text.splitlines())) <= 80


def test_command_shows_a_declared_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    declared = Declared.of("old", ["pluggy==0.13.1"], "3.11")
    functions.declare(declared, tmp_path)
    locking.show("old", tmp_path, as_json=True)
    (row,) = json.loads(capsys.readouterr().out)["environments"]
    assert (row["name"], row["built"], row["lock"]) == (declared.backend, False, None)
    assert row["conflicts"][-1]["requirement"] == "pluggy==0.13.1"
    locking.show(declared.backend, tmp_path, as_json=False)
    assert "requires  pluggy==0.13.1" in capsys.readouterr().out
    with pytest.raises(typer.Exit):
        locking.show("new", tmp_path, as_json=False)
