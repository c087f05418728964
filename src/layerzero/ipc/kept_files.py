"""Files that are kept for later processes: written whole or not at all, for their user alone, and read with a check of
their own hash. Bounds are kept by age: a file's time says when it was used last."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

HASH_BYTES = 32
DRAFT_S = 3600.0  # an older draft is of a process that has ended while it wrote


def store(environ: Mapping[str, str]) -> Path:
    """The folder that all of them lie in: LAYERZERO_STORE, or one in the user's cache folder, by the XDG Base Directory
    Specification."""
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "layerzero"
    return Path(environ.get("LAYERZERO_STORE") or cache).absolute()


class NotWhole(Exception):
    """The bytes of a file are not those that were written."""


def seal(data: bytes) -> bytes:
    """The data, and what tells that it is whole."""
    return data + hashlib.sha256(data).digest()


def unseal(sealed: bytes) -> bytes:
    """The data that was sealed. Raises NotWhole."""
    data, told = sealed[:-HASH_BYTES], sealed[-HASH_BYTES:]
    if hashlib.sha256(data).digest() != told:
        raise NotWhole("its bytes are not those that were written")
    return data


def write(path: Path, data: bytes) -> None:
    """Raises OSError; there is no part of the file then."""
    draft = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(draft, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(data)
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def touch(path: Path) -> None:
    """It was used now."""
    with contextlib.suppress(OSError):
        os.utime(path)


def by_age(folder: Path) -> list[Path]:
    """Files that were written whole, the oldest first."""
    return sorted((path for path in _all(folder) if not path.name.startswith(".")), key=age)


def remove_drafts(folder: Path) -> None:
    """Those that nobody writes any more."""
    for path in _all(folder):
        if path.name.startswith(".") and time.time() - age(path) > DRAFT_S:
            remove(path)


def _all(folder: Path) -> list[Path]:
    try:
        return [*folder.iterdir()]
    except OSError:
        return []


def age(path: Path) -> float:
    """When it was used last, in seconds since 1970; 0.0 for one that is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def size(path: Path) -> int:
    """In bytes; 0 for one that is gone."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def remove(path: Path) -> int:
    """How many bytes are gone."""
    nbytes = size(path)
    with contextlib.suppress(OSError):
        path.unlink()
    return nbytes


def remove_all(folder: Path) -> int:
    """How many files there were."""
    count = 0
    remove_drafts(folder)
    for path in by_age(folder):
        with contextlib.suppress(OSError):
            path.unlink()
            count += 1
    return count
