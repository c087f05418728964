"""The compilers' caches in a store: listed, verified, and removed when there are too many."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from layerzero.ipc.compile_caches import folder as folders
from layerzero.ipc.compile_caches import manifest
from layerzero.ipc.compile_caches.folder import Found, InUse

_GONE = ".gone-"


@dataclass(frozen=True)
class Kept:
    """The caches of one environment for one kind of machine. `used_s`: when a process began to use them last."""

    folder: Path
    files: int
    nbytes: int
    used_s: float
    is_in_use: bool
    set_aside: int

    @property
    def name(self) -> str:
        """Of the environment."""
        return self.folder.parent.name.rpartition("-")[0]

    @property
    def env(self) -> str:
        return self.folder.parent.name.rpartition("-")[2]

    @property
    def place(self) -> str:
        return self.folder.name

    def facts(self) -> dict[str, object]:
        """For JSON."""
        return {
            "name": self.name,
            "env": self.env,
            "place": self.place,
            "folder": str(self.folder),
            "files": self.files,
            "bytes": self.nbytes,
            "used_s": self.used_s,
            "in_use": self.is_in_use,
            "set_aside": self.set_aside,
        }


@dataclass(frozen=True)
class Bounds:
    """What all caches together may take; 0: any amount."""

    nbytes: int
    entries: int


def kept(store: Path) -> list[Kept]:
    """All of them, those used last first."""
    return sorted(map(_kept, _folders(store)), key=lambda one: (-one.used_s, str(one.folder)))


def _folders(store: Path) -> Iterator[Path]:
    for ours in sorted((store / "caches").glob(f"[!.]*/[!.]*/{manifest.OURS}")):
        if not ours.is_symlink() and not ours.parent.is_symlink():
            yield ours.parent


def _kept(folder: Path) -> Kept:
    sizes = [info.st_size for _, info in manifest.walk(folder)]
    in_use = folders.is_in_use(folder)
    return Kept(folder, len(sizes), sum(sizes), folders.used_s(folder), in_use, folders.aside_count(folder))


def verify(store: Path) -> Iterator[tuple[Kept, Found]]:
    """Look at every byte; what does not fit is set aside. Raises OSError."""
    for one in kept(store):
        try:
            with folders.alone(one.folder):
                found = folders.look(one.folder)
                if found.unfit:
                    folders.set_aside(one.folder, found.unfit)
                if found.unfit or found.missing:
                    folders.seal(one.folder)
        except InUse:
            found = folders.look(one.folder, is_alone=False)
            if found.unfit:
                folders.set_aside(one.folder, found.unfit)
        yield one, found


def collect(store: Path, bounds: Bounds, *, dry_run: bool = False) -> list[Kept]:
    """Remove what was not used for longest, until the rest is within the bounds; never what is in use, nor what was
    used last. Returns what was removed. Raises OSError."""
    found = kept(store)
    nbytes, entries = sum(one.nbytes for one in found), len(found)
    removed = []
    for one in reversed(found[1:]):
        is_within = (not bounds.nbytes or nbytes <= bounds.nbytes) and (not bounds.entries or entries <= bounds.entries)
        if is_within:
            break
        if one.is_in_use or not (dry_run or remove(one.folder)):
            continue
        removed.append(one)
        nbytes, entries = nbytes - one.nbytes, entries - 1
    if not dry_run:
        for stale in (store / "caches").glob(f"*/{_GONE}*"):  # of somebody who was killed
            shutil.rmtree(stale, ignore_errors=True)
    return removed


def forget_aside(store: Path) -> int:
    """Remove what was set aside, which nobody loads; how many files that was."""
    count = 0
    for folder in _folders(store):
        count += folders.aside_count(folder)
        shutil.rmtree(folder / manifest.OURS / folders.ASIDE, ignore_errors=True)
    return count


def remove(folder: Path) -> bool:
    """Remove a cache. Whether it is gone; not when somebody has begun to use it."""
    with suppress(InUse), folders.alone(folder):
        discard(folder)
        return True
    return False


def discard(folder: Path) -> None:
    """As `remove`, for who is alone in it. Raises OSError."""
    gone = folder.with_name(f"{_GONE}{secrets.token_hex(4)}")
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)
    with suppress(OSError):
        folder.parent.rmdir()
