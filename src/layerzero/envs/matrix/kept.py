"""What the matrix keeps in the store, and which of it nobody uses any more."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from layerzero.envs.build import store

UNUSED_S = 7 * 86_400  # of environments of tests
CELL_UNUSED_S = 90 * 86_400  # of verdicts, which are small and cost minutes
CELL_S = 8.0  # of a cell with cached wheels, on two cores
BUILT = "lz-built"  # a file whose time says when an environment of tests was last used


def tests(root: Path) -> Path:
    """Environments of `pytest --lz-matrix`."""
    return root / "matrix" / "tests"


def cells(root: Path) -> Path:
    """Verdicts; the time of a file says when it was last used."""
    return root / "matrix" / "cells"


def tries(root: Path) -> Path:
    """What came of versions that were tried; the time of a file says when it was last used."""
    return root / "matrix" / "tries"


def last(root: Path) -> Path:
    """The file of the matrix that was made last, as `lz matrix --json` has it."""
    return root / "matrix" / "last.json"


def cell_seconds(root: Path) -> float:
    """How long a cell takes: the mean of what is kept, or a guess where nothing is."""
    seconds = []
    for path in cells(root).glob("*.json"):
        with suppress(OSError, ValueError, LookupError, TypeError):
            seconds.append(float(json.loads(path.read_text(encoding="utf-8"))["seconds"]))
    return sum(seconds) / len(seconds) if seconds else CELL_S


def work(root: Path) -> Path:
    """A folder for each run, gone when it ends."""
    return root / "matrix" / "work"


def collect(root: Path, *, dry_run: bool = False) -> Iterator[tuple[Path, int]]:
    """Remove what killed runs left and what was not used for long; (path, bytes that the disk got back) of each."""
    yield from collect_work(work(root), dry_run=dry_run)
    yield from collect_tests(tests(root), dry_run=dry_run)
    for path in sorted([*cells(root).glob("*"), *tries(root).glob("*")]):
        if (freed := _expired(path, CELL_UNUSED_S)) is not None:
            if not dry_run:
                path.unlink(missing_ok=True)
            yield path, freed


def collect_work(folder: Path, *, dry_run: bool = False) -> list[tuple[Path, int]]:
    """The folders of runs that were killed, and their locks: no other run has such a name."""
    listed = [*((path, path) for path in folder.glob("[!.]*")), *store.leftovers(folder)]
    removed = _remove_all(listed, dry_run=dry_run)
    for path, _ in removed:
        if not dry_run:
            store.lock_path(path).unlink(missing_ok=True)
    return removed


def collect_tests(folder: Path, *, dry_run: bool = False) -> list[tuple[Path, int]]:
    """Environments that no session has used for a week, and what killed builders left."""
    unused = [(path.parent, path.parent) for path in folder.glob(f"*/{BUILT}") if _expired(path, UNUSED_S) is not None]
    return _remove_all([*unused, *store.leftovers(folder)], dry_run=dry_run)


def _expired(path: Path, unused_s: float) -> int | None:
    """The size of a file that was not used for so long; None for any other, and for one that is gone."""
    with suppress(FileNotFoundError):
        stat = path.stat()
        return stat.st_size if time.time() - stat.st_mtime > unused_s else None
    return None


def _remove_all(listed: Iterable[tuple[Path, Path]], *, dry_run: bool) -> list[tuple[Path, int]]:
    """(folder, the target whose lock guards it) of each; returns those that were not in use, with the bytes."""
    found = ((path, _remove(path, target, dry_run=dry_run)) for path, target in sorted(listed))
    return [(path, freed) for path, freed in found if freed is not None]


def _remove(path: Path, target: Path, *, dry_run: bool) -> int | None:
    """The bytes that it gave back; None when it is in use, or gone. Killed halfway, nothing has its name."""
    with suppress(store.InUse, FileNotFoundError), store.locked_now(target):
        freed = store.tree_size(path, freed=True)
        if dry_run:
            pass
        elif path == target:
            store.discard(path)
        else:
            shutil.rmtree(path)
        return freed
    return None
