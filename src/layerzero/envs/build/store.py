"""The folder that environments live in: kernel locks, folders built aside, sizes. Linux only.

A lock belongs to a target folder (`.locks/NAME.lock` beside it) and is an flock: it ends with its holder, however
the holder ends. Whoever creates, replaces or removes a target holds its lock exclusively; whoever uses it, shared.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_ASIDE = ".building-"
_BETWEEN_S = 0.01  # looks at what somebody uses although it is not there


def lock_path(target: Path) -> Path:
    """The file of the lock of `target`. Only of a name that is never used again may it be removed."""
    return target.parent / ".locks" / f"{target.name}.lock"


def open_lock(target: Path, *, shared: bool = False, on_wait: Callable[[], None] | None = None) -> int:
    """Take the lock of `target` and return its descriptor; closing it gives the lock back. Waits for the holder
    after calling `on_wait`."""
    path = lock_path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if on_wait is not None:
                on_wait()
            fcntl.flock(fd, kind)
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextlib.contextmanager
def locked(target: Path, *, on_wait: Callable[[], None] | None = None) -> Iterator[int]:
    """Hold the exclusive lock of `target`."""
    fd = open_lock(target, on_wait=on_wait)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def locked_unless(
    target: Path, is_there: Callable[[], bool], *, on_wait: Callable[[], None] | None = None
) -> Iterator[int | None]:
    """Hold the exclusive lock of `target`, or None once it is there: who has made it may use it for as long as it
    lives, and with it the lock that is waited for."""
    fd = None
    try:
        while fd is None and not is_there():
            try:
                fd = open_lock(target, on_wait=_give_up(target))
            except InUse:
                if on_wait is not None:
                    on_wait()
                    on_wait = None
                os.close(open_lock(target, shared=True))  # its maker is through
                if not is_there():
                    time.sleep(_BETWEEN_S)
        yield fd
    finally:
        if fd is not None:
            os.close(fd)


class InUse(Exception):
    """Another process holds the lock."""


@contextlib.contextmanager
def locked_now(target: Path) -> Iterator[int]:
    """Hold the exclusive lock of `target`, or raise InUse at once."""
    with locked(target, on_wait=_give_up(target)) as fd:
        yield fd


def _give_up(target: Path) -> Callable[[], None]:
    def give_up() -> None:
        raise InUse(target.name)

    return give_up


@contextlib.contextmanager
def built_aside(target: Path) -> Iterator[Path]:
    """A fresh folder beside `target` that becomes `target` when the block succeeds and is removed when it fails.

    Hold the lock of `target`: then every other folder aside is what a killed builder left, and is removed.
    """
    for stale, meant in leftovers(target.parent):  # not by a pattern: "a-*" is "a-b", too, whose lock we do not hold
        if meant == target:
            shutil.rmtree(stale)
    folder = Path(tempfile.mkdtemp(prefix=f"{_ASIDE}{target.name}-", dir=target.parent))
    try:
        yield folder
        discard(target)
        folder.rename(target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def discard(target: Path) -> None:
    """Remove a folder such that a kill never leaves half of it under its name. Hold its lock."""
    if target.exists():
        aside = tempfile.mkdtemp(prefix=f"{_ASIDE}{target.name}-", dir=target.parent)
        target.rename(aside)
        shutil.rmtree(aside)


def leftovers(folder: Path) -> Iterator[tuple[Path, Path]]:
    """(what was built aside, the target it was meant to become) for all of them, live builds included."""
    for path in sorted(folder.glob(f"{_ASIDE}*")):
        yield path, folder / path.name.removeprefix(_ASIDE).rpartition("-")[0]


def tree_size(folder: Path, *, freed: bool = False) -> int:
    """Bytes in all files below `folder`; with `freed`, only what removing it gives back (files with no other hard
    link: uv's cache keeps the rest)."""
    total = 0
    for base, _, files in os.walk(folder):
        for file in files:
            stat = os.lstat(os.path.join(base, file))
            if not freed or stat.st_nlink == 1:
                total += stat.st_size
    return total
