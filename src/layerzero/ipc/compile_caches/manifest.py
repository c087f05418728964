"""What a folder of compilers' caches holds: every file with its SHA-256, and what does not fit that.

The files of ours lie in `.lz` inside of the folder: `manifest.json`, `aside/` with what was set aside, locks and notes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from layerzero.ipc import files

OURS = ".lz"
SCHEMA = 1
MAX_FILES = 200_000
MAX_MANIFEST_BYTES = 64 << 20
MAX_PATH = 1024
_CHUNK = 1 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Entry(NamedTuple):
    """A file as it was sealed; of a symbolic link the hash is of where it leads."""

    size: int
    sha256: str
    time_ns: int


class Changed(Exception):
    """A file was changed while it was read."""


def is_path(text: str) -> bool:
    """Whether it names a file inside of a folder of caches, and none of ours: printable, relative, without `..`."""
    parts = text.split("/")
    return (
        0 < len(text) <= MAX_PATH
        and text.isprintable()
        and "\\" not in text
        and not {"", ".", ".."} & set(parts)
        and parts[0] != OURS
    )


def walk(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Every file and symbolic link in the folder but ours, by its path in it."""
    stack = [""]
    while stack:
        inside = stack.pop()
        try:
            entries = sorted(os.scandir(folder / inside), key=lambda entry: entry.name)
        except OSError:
            continue  # a compiler's own folder, gone by now
        for entry in entries:
            path = f"{inside}/{entry.name}" if inside else entry.name
            if path == OURS:
                continue
            try:
                if entry.is_dir(follow_symlinks=False):
                    stack.append(path)
                    continue
                info = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode):
                yield path, info


def entry_of(folder: Path, path: str) -> Entry:
    """The file as it is now. Raises OSError, Changed."""
    file = folder / path
    info = file.lstat()
    if stat.S_ISLNK(info.st_mode):
        return Entry(0, hashlib.sha256(f"link:{os.readlink(file)}".encode()).hexdigest(), info.st_mtime_ns)
    sha256 = sha256_of(file)
    after = file.lstat()
    if (after.st_size, after.st_mtime_ns, after.st_ino) != (info.st_size, info.st_mtime_ns, info.st_ino):
        raise Changed(path)
    return Entry(info.st_size, sha256, info.st_mtime_ns)


def sha256_of(file: Path) -> str:
    """Raises OSError, also for a symbolic link."""
    digest = hashlib.sha256()
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, "rb", buffering=0) as stream:
        while part := stream.read(_CHUNK):
            digest.update(part)
    return digest.hexdigest()


def leads_out(folder: Path, path: str) -> bool:
    """Whether it is a symbolic link to something that is not in the folder."""
    file = folder / path
    return file.is_symlink() and not Path(os.path.realpath(file)).is_relative_to(os.path.realpath(folder))


def manifest_path(folder: Path) -> Path:
    return folder / OURS / "manifest.json"


def read(folder: Path) -> dict[str, Entry] | None:
    """What was sealed; None where nothing was, or what was written of it is not whole."""
    try:
        value = json.loads(files.read(manifest_path(folder), MAX_MANIFEST_BYTES))
        if value["schema"] != SCHEMA:
            return None
        return {path: _entry(path, one) for path, one in value["files"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _entry(path: str, value: tuple[int, str, int]) -> Entry:
    size, sha256, time_ns = value
    if not (is_path(path) and type(size) is int and type(time_ns) is int and _SHA256.fullmatch(sha256)):
        raise ValueError(path)
    return Entry(size, sha256, time_ns)


def write(folder: Path, entries: Mapping[str, Entry]) -> None:
    """Whole or not at all. Raises OSError."""
    files.put(manifest_path(folder), json.dumps({"schema": SCHEMA, "files": dict(sorted(entries.items()))}))
