"""What compilers keep, and what is noted of it."""

from __future__ import annotations

from pathlib import Path

from layerzero.envs.build.build import plan, resolve
from layerzero.envs.build.env import Env
from layerzero.envs.probe.caches import MAX_UNITS, compiled, make_folder, note_compiled

ONE, TWO = ("k", "row=1"), ("k", "row=2")


def env(store: Path) -> Env:
    return plan(resolve("null"), store=store)


def test_notes_are_added_and_outlive_their_writer(tmp_path: Path) -> None:
    """A restart compiles nothing again."""
    assert list(compiled(env(tmp_path), "key")) == []
    note_compiled(env(tmp_path), "key", [ONE])
    note_compiled(env(tmp_path), "key", [TWO, ONE])
    assert list(compiled(env(tmp_path), "key")) == [ONE, TWO]


def test_notes_on_other_code_count_no_more(tmp_path: Path) -> None:
    """Its kernels are others, and so is what the caches have of them."""
    note_compiled(env(tmp_path), "old", [ONE])
    assert list(compiled(env(tmp_path), "new")) == []
    note_compiled(env(tmp_path), "new", [TWO])
    assert list(compiled(env(tmp_path), "new")) == [TWO]


def test_notes_that_are_damaged_or_foreign_are_as_good_as_none(tmp_path: Path) -> None:
    """A full disk cuts files short."""
    file = make_folder(env(tmp_path)) / ".lz" / "compiled.json"
    for text in ("", '{"key": "key", "uni', "[]", '{"key": "key", "units": [1]}', '{"key": "key", "units": 7}'):
        file.write_text(text)
        assert list(compiled(env(tmp_path), "key")) == []
    note_compiled(env(tmp_path), "key", [ONE])
    assert list(compiled(env(tmp_path), "key")) == [ONE]


def test_notes_are_bounded(tmp_path: Path) -> None:
    """Lengths change for ever."""
    note_compiled(env(tmp_path), "key", [("k", f"row={n}") for n in range(MAX_UNITS + 3)])
    assert next(compiled(env(tmp_path), "key")) == ("k", "row=3")


def test_the_folder_is_its_users_alone(tmp_path: Path) -> None:
    """What lies there is loaded as code."""
    assert make_folder(env(tmp_path)).stat().st_mode & 0o777 == 0o700
