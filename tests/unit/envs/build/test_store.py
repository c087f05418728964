"""The store's folders: whole or absent, whatever happens while they are made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from layerzero.envs.build.store import (
    InUse,
    built_aside,
    discard,
    locked,
    locked_now,
    locked_unless,
    open_lock,
    tree_size,
)


def test_folder_appears_whole(tmp_path: Path) -> None:
    """Readers look at the name only."""
    target = tmp_path / "env"
    with built_aside(target) as folder:
        (folder / "file").write_text("x")
        assert not target.exists()
    assert [p.name for p in tmp_path.iterdir()] == ["env"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_failure_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    """A full disk must not stay full of half an environment."""

    def interrupted() -> None:
        with built_aside(tmp_path / "env") as folder:
            (folder / "file").write_text("x")
            raise error

    with pytest.raises(type(error)):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_failed_rebuild_keeps_the_old_folder(tmp_path: Path) -> None:
    """What worked until now must survive an attempt to renew it."""
    (tmp_path / "env").mkdir()
    with pytest.raises(RuntimeError), built_aside(tmp_path / "env"):
        raise RuntimeError
    assert (tmp_path / "env").is_dir()


def test_leftovers_of_a_killed_builder_are_removed_by_the_next(tmp_path: Path) -> None:
    """Of its own target only: another target's folder may be in the making."""
    others = {".building-env2-abc", ".building-env-b-abc"}
    for stale in (".building-env-abc", *others):
        (tmp_path / stale).mkdir()
    with built_aside(tmp_path / "env"):
        pass
    assert {p.name for p in tmp_path.iterdir()} == {"env", *others}


def test_shared_holders_exclude_a_remover(tmp_path: Path) -> None:
    """A worker must not lose its libraries while it runs."""
    target = tmp_path / "env"
    users = [open_lock(target, shared=True) for _ in range(2)]
    with pytest.raises(InUse), locked_now(target):
        pass
    for fd in users:
        os.close(fd)
    with locked_now(target), pytest.raises(InUse), locked_now(target):
        pass
    with locked(target):
        discard(target)  # absent: nothing to do


def test_freed_bytes_do_not_count_files_that_stay_elsewhere(tmp_path: Path) -> None:
    """uv hard-links from its cache; removing an environment gives that space not back."""
    (tmp_path / "cache").write_bytes(b"x" * 100)
    folder = tmp_path / "env"
    folder.mkdir()
    (folder / "linked").hardlink_to(tmp_path / "cache")
    (folder / "own").write_bytes(b"x" * 10)
    assert (tree_size(folder), tree_size(folder, freed=True)) == (110, 10)


def test_nobody_waits_for_the_users_of_what_he_wants_to_be_there(tmp_path: Path) -> None:
    """Its maker, or a worker, has it for as long as it lives: two backends that start at once share the staged code."""
    target = tmp_path / "stage"
    user = open_lock(target, shared=True)
    waited: list[str] = []

    def on_wait() -> None:
        waited.append("once")
        target.mkdir()

    with locked_unless(target, target.is_dir, on_wait=on_wait) as fd:
        assert fd is None
    with locked_unless(target, target.is_dir) as fd:
        assert fd is None
    os.close(user)
    target.rmdir()
    with locked_unless(target, target.is_dir) as fd:
        assert fd is not None
        with pytest.raises(InUse), locked_now(target):
            pass
    with locked_now(target):
        pass
    assert waited == ["once"]


def test_who_waits_for_a_maker_that_gives_up_makes_it(tmp_path: Path) -> None:
    target = tmp_path / "stage"
    maker = open_lock(target)
    with locked_unless(target, target.is_dir, on_wait=lambda: os.close(maker)) as fd:
        assert fd is not None
