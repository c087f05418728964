"""A folder of compilers' caches, as the processes use it that load from it.

Whoever uses it holds a shared lock on `.lz/lock` until its end; gc, import and the strict check need it alone. What is
new since the folder was sealed last is of a process that was killed before it could say that it was whole, or of
somebody else: whoever finds that when nobody uses the folder sets it aside, and compiles it anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from layerzero.ipc.compile_caches import manifest
from layerzero.ipc.compile_caches.manifest import Changed, Entry

FRESH_S = 0.5  # a file that was written to so lately may be written to still
NOTES = "compiled.json"  # in `.lz`: what is compiled, as the broker has it (envs/probe/caches.py)
ASIDE = "aside"
MAX_NAMED = 5  # files that one line names


class InUse(Exception):
    """A process uses the folder."""


@dataclass
class Found:
    """What a check has found. `changed`: other bytes than were sealed; `unknown`: never sealed; `outside`: symbolic
    links to elsewhere; `missing`: sealed, and gone. Without a seal at all, everything is unknown."""

    sealed: int = 0
    nbytes: int = 0
    changed: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def unfit(self) -> list[str]:
        """What must not be loaded."""
        return sorted({*self.changed, *self.unknown, *self.outside})

    def __str__(self) -> str:
        parts = []
        for what, paths in (
            ("changed", self.changed),
            ("not sealed", self.unknown),
            ("links to elsewhere", self.outside),
            ("missing", self.missing),
        ):
            if paths:
                more = f" and {len(paths) - MAX_NAMED} more" if len(paths) > MAX_NAMED else ""
                parts.append(f"{what}: {', '.join(paths[:MAX_NAMED])}{more}")
        return "; ".join(parts)


def look(folder: Path, *, is_alone: bool = True) -> Found:
    """Compare every file with what was sealed. While others use the folder (not `is_alone`), what they write is not
    sealed yet: only what has the time of its seal and not its bytes is wrong then."""
    known = manifest.read(folder) or {}
    found, seen = Found(), set()
    for path, info in manifest.walk(folder):
        seen.add(path)
        entry = known.get(path)
        if manifest.leads_out(folder, path) or not manifest.is_path(path):
            found.outside.append(path)
            continue
        if entry is None:
            if is_alone:
                found.unknown.append(path)
            continue
        if not is_alone and info.st_mtime_ns != entry.time_ns:
            continue
        try:
            now = manifest.entry_of(folder, path)
        except (OSError, Changed):
            if is_alone:
                found.changed.append(path)
            continue
        if (now.size, now.sha256) != (entry.size, entry.sha256):
            found.changed.append(path)
            continue
        found.sealed += 1
        found.nbytes += now.size
    if is_alone:
        found.missing = sorted(known.keys() - seen)
    return found


def seal(folder: Path, *, is_last: bool = True) -> int:
    """Write down what the folder holds now; hashes what is new. Without `is_last`, what was written to a moment ago is
    left for the next time. Returns how many files were sealed anew. Raises OSError."""
    with _locked(folder / manifest.OURS / "seal", fcntl.LOCK_EX):
        known = manifest.read(folder) or {}
        entries: dict[str, Entry] = {}
        now_ns, fresh = time.time_ns(), 0
        for path, info in manifest.walk(folder):
            old = known.get(path)
            if old is not None and (old.size, old.time_ns) == (_size(info), info.st_mtime_ns):
                entries[path] = old
                continue
            if not is_last and now_ns - info.st_mtime_ns < FRESH_S * 1e9:
                continue
            if len(entries) >= manifest.MAX_FILES or not manifest.is_path(path) or manifest.leads_out(folder, path):
                continue
            with contextlib.suppress(OSError, Changed):
                entries[path] = manifest.entry_of(folder, path)
                fresh += 1
        if entries != known:
            manifest.write(folder, entries)
        return fresh


def _size(info: os.stat_result) -> int:
    return 0 if stat.S_ISLNK(info.st_mode) else info.st_size


def set_aside(folder: Path, paths: list[str]) -> Path:
    """Move files to where nobody loads them; what was set aside before is removed. Notes of what is compiled go, too.
    Raises OSError."""
    ours = folder / manifest.OURS
    aside = ours / ASIDE
    shutil.rmtree(aside, ignore_errors=True)
    for path in paths:
        target = aside / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.rename(folder / path, target)
    (ours / NOTES).unlink(missing_ok=True)
    return aside


def aside_count(folder: Path) -> int:
    """How many files were set aside last."""
    return sum(len(names) for _, _, names in os.walk(folder / manifest.OURS / ASIDE))


def make(folder: Path) -> None:
    """For its user alone. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / manifest.OURS).mkdir(mode=0o700, exist_ok=True)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """While nobody else uses it. Raises InUse at once where somebody does, OSError."""
    fd = _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        yield
    finally:
        os.close(fd)


def is_in_use(folder: Path) -> bool:
    try:
        with alone(folder):
            return False
    except InUse:
        return True
    except OSError:
        return False


def used_s(folder: Path) -> float:
    """When a process began to use it last, in seconds since 1970; 0.0 for never."""
    try:
        return (folder / manifest.OURS / "lock").stat().st_mtime
    except OSError:
        return 0.0


def _lock(folder: Path, how: int) -> int:
    """The descriptor of a lock on the folder that is there: gc may have removed another of its name meanwhile."""
    path = folder / manifest.OURS / "lock"
    while True:
        make(folder)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, how)
            if _is_there(fd, path):
                return fd
        except BlockingIOError:
            os.close(fd)
            raise InUse(str(folder)) from None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _is_there(fd: int, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), path.stat())
    return False


@contextlib.contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, how)
        yield
    finally:
        os.close(fd)


class User:
    """A process that loads from a folder of caches and writes to it: from `enter` to its end. Then its files are sealed
    as they come: after `mark`, at once and ever more rarely, for a compiler may take its time."""

    PAUSES_S = (1.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)

    def __init__(self, folder: Path, fd: int, *, keeps: bool) -> None:
        self.folder, self._fd, self._keeps = folder, fd, keeps
        self._marked = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def enter(
        cls, folder: Path, *, keeps: bool, say: Callable[[str], None], fill: Callable[[Path], None] | None = None
    ) -> User:
        """Check the folder, and use it from now on. `keeps`: what earlier processes compiled is used, and sealed for
        later ones; else it is removed. `fill`: called for a folder of which nothing is sealed, before it is used.
        Raises OSError."""
        try:
            fd, is_alone = _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB), True
        except InUse:
            fd, is_alone = _lock(folder, fcntl.LOCK_SH), False
        try:
            if is_alone and not keeps:
                _empty(folder)
            elif is_alone and fill is not None and manifest.read(folder) is None and not any(manifest.walk(folder)):
                fill(folder)
            found = look(folder, is_alone=is_alone)
            if found.unfit:
                aside = set_aside(folder, found.unfit)
                say(f"set aside {len(found.unfit)} files of {folder}, which are not used: {found}; they are in {aside}")
            if is_alone and (found.unfit or found.missing):
                seal(folder)
            os.utime(fd)
            fcntl.flock(fd, fcntl.LOCK_SH)  # gives the other up first: gc may come between
        except BaseException:
            os.close(fd)
            raise
        if _is_there(fd, folder / manifest.OURS / "lock"):
            return cls(folder, fd, keeps=keeps)
        os.close(fd)
        return cls.enter(folder, keeps=keeps, say=say, fill=fill)

    def mark(self) -> None:
        """Something may be compiled from now on."""
        if not self._keeps:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="seal", daemon=True)
            self._thread.start()
        self._marked.set()

    def seal(self) -> None:
        """All of it, now. A full disk leaves what is there unsealed."""
        if self._keeps:
            with contextlib.suppress(OSError):
                seal(self.folder)

    def leave(self) -> None:
        """Use it no more; nothing is sealed from now on."""
        self._keeps = False
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _work(self) -> None:
        while True:
            self._marked.wait()
            self._marked.clear()
            for pause_s in self.PAUSES_S:
                if self._marked.wait(pause_s):
                    break
                if not self._keeps:
                    return
                with contextlib.suppress(OSError):
                    seal(self.folder, is_last=False)


def _empty(folder: Path) -> None:
    """Raises OSError."""
    for path, _ in manifest.walk(folder):
        (folder / path).unlink(missing_ok=True)
    ours = folder / manifest.OURS
    for name in (manifest.manifest_path(folder).name, NOTES):
        (ours / name).unlink(missing_ok=True)
    shutil.rmtree(ours / ASIDE, ignore_errors=True)
