"""A folder of compilers' caches on its way to another machine.

`manifest.json` names the environment that it is of, and every file with its size and SHA-256; `files/SHA256` are their
bytes. Triton's groups hold absolute paths, since Triton loads what they name (`FileCacheManager.put_group` and
`get_group` of its runtime/cache.py): on the way they hold `{cache}` in the place of the folder.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerzero.ipc import files
from layerzero.ipc.compile_caches import folder as folders
from layerzero.ipc.compile_caches import manifest as manifests

KIND, SCHEMA = "layerzero compile cache", 1
MANIFEST, SIGNATURE, FILES = "manifest.json", "manifest.sig", "files"
MAX_FILE_BYTES = 4 << 30
PLACE = "{cache}"
ABOUT = ("name", "env", "place", "lock", "made_by", "signer")
_MAX_TEXT = 300
_SHA256 = re.compile(r"[0-9a-f]{64}")
_GROUP = re.compile(r"__grp__.*\.json")


class Wrong(Exception):
    """What comes from elsewhere is not what it must be. The text says what and where."""


@dataclass(frozen=True)
class File:
    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Exported:
    """`about`: whose cache it is (ABOUT); `key` and `units`: what is noted to be compiled, and for which code."""

    about: Mapping[str, str]
    key: str
    units: Sequence[tuple[str, str]]
    files: Sequence[File]

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)

    def pack(self) -> bytes:
        value = {
            "kind": KIND,
            "schema": SCHEMA,
            "about": dict(self.about),
            "compiled": {"key": self.key, "units": [list(unit) for unit in self.units]},
            "files": [[file.path, file.size, file.sha256] for file in self.files],
        }
        return (json.dumps(value, indent=1) + "\n").encode()

    @classmethod
    def unpack(cls, data: bytes) -> Exported:
        """Raises Wrong."""
        try:
            value = json.loads(data)
            if not isinstance(value, dict) or (value.get("kind"), value.get("schema")) != (KIND, SCHEMA):
                raise Wrong(f"{MANIFEST} is none of {KIND!r}, schema {SCHEMA}")
            about, compiled = value["about"], value["compiled"]
            if set(about) != set(ABOUT) or not all(_is_text(one) for one in about.values()):
                raise Wrong(f"{MANIFEST}: about: other names than {', '.join(ABOUT)}, or no texts")
            units = [(unit[0], unit[1]) for unit in compiled["units"]]
            if not (_is_text(compiled["key"]) and all(_is_text(one) for unit in units for one in unit)):
                raise Wrong(f"{MANIFEST}: compiled: no texts")
            listed = [_file(*one) for one in value["files"]]
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as exc:
            raise Wrong(f"{MANIFEST}: {type(exc).__name__}: {exc}"[:_MAX_TEXT]) from exc
        paths = {file.path for file in listed}
        if len(paths) != len(listed) or len(listed) > manifests.MAX_FILES:
            raise Wrong(f"{MANIFEST}: a file is listed twice, or there are more than {manifests.MAX_FILES:,}")
        folded = {"/".join(parts[:n]) for parts in (path.split("/") for path in paths) for n in range(1, len(parts))}
        if both := folded & paths:
            raise Wrong(f"{MANIFEST}: {min(both)} is a file and a folder")
        return cls(about, compiled["key"], units, listed)


def _is_text(value: Any) -> bool:
    return type(value) is str and len(value) <= _MAX_TEXT


def _file(path: Any, size: Any, sha256: Any) -> File:
    if type(path) is not str or not manifests.is_path(path):
        raise Wrong(f"{MANIFEST}: {path!r:.120} is no path inside of a cache")
    if type(size) is not int or not 0 <= size <= MAX_FILE_BYTES:
        raise Wrong(f"{MANIFEST}: {path} has {size!r:.40} bytes; allowed: {MAX_FILE_BYTES:,}")
    if type(sha256) is not str or not _SHA256.fullmatch(sha256):
        raise Wrong(f"{MANIFEST}: {path}: {sha256!r:.80} is no SHA-256")
    return File(path, size, sha256)


def write(source: Path, target: Path, make: Callable[[Sequence[File]], Exported]) -> tuple[Exported, bytes]:
    """Copy what is sealed of a folder of caches to the new folder `target`, and describe it there. Returns that, too,
    as it was written. What no longer is as it was sealed raises Wrong; symbolic links are left out. Raises OSError."""
    store = target / FILES
    store.mkdir(parents=True, mode=0o700)
    listed = []
    for path, entry in (manifests.read(source) or {}).items():
        if (source / path).is_symlink():
            continue
        try:
            data = files.read(source / path, MAX_FILE_BYTES)
        except FileNotFoundError:
            continue  # the compiler's own doing: it was of use to nobody else
        if (len(data), hashlib.sha256(data).hexdigest()) != (entry.size, entry.sha256):
            raise Wrong(f"{path}: its bytes are not those that were sealed")
        leaving = _leaving(path, data, source)
        if leaving is None:
            continue
        data = leaving
        name = hashlib.sha256(data).hexdigest()
        if not (store / name).exists():
            (store / name).write_bytes(data)
        listed.append(File(path, len(data), name))
    exported = make(listed)
    text = exported.pack()
    (target / MANIFEST).write_bytes(text)
    return exported, text


def read(source: Path) -> bytes:
    """The manifest as it lies there, of which nothing is known yet. Raises OSError."""
    return files.read(source / MANIFEST, manifests.MAX_MANIFEST_BYTES)


def shipped(top: Path, name: str, env: str) -> list[str]:
    """What an image ships of an environment's caches, in a folder that `lz cache export` has written: "SHA256:FOLDER"
    of each, for workers/compile_cache.py. Its files are trusted as those of the image are. Raises OSError."""
    found = []
    for path in sorted(top.glob(f"{name}-{env}/[!.]*/{MANIFEST}")):
        found.append(f"{hashlib.sha256(read(path.parent)).hexdigest()}:{path.parent}")
    return found


def take_over(source: Path, exported: Exported, target: Path) -> int:
    """Check every file, and put those that `target` lacks into it: all of them or, when one is wrong, none. Nobody else
    may use `target`. Returns how many were new. Raises Wrong, OSError."""
    folders.make(target)
    ours = target / manifests.OURS
    draft = ours / f"import-{os.getpid()}"
    shutil.rmtree(draft, ignore_errors=True)
    try:
        for file in exported.files:
            data = _read(source, file)
            place = draft / file.path
            place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            place.write_bytes(_arriving(file.path, data, target))
        fresh = [file.path for file in exported.files if not os.path.lexists(target / file.path)]
        folders.seal(target)  # what it has of its own stays its own
        for path in fresh:
            (target / path).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.rename(draft / path, target / path)
        folders.seal(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return len(fresh)


def note(target: Path, exported: Exported) -> None:
    """Take over what is noted to be compiled, where nothing is noted yet. Raises OSError."""
    notes = target / manifests.OURS / folders.NOTES
    if exported.units and not notes.exists():
        files.put(notes, json.dumps({"key": exported.key, "units": list(exported.units)}))


def _read(source: Path, file: File) -> bytes:
    """Raises Wrong."""
    path = source / FILES / file.sha256
    try:
        if path.is_symlink() or path.parent.is_symlink():
            raise Wrong(f"{file.path}: {FILES}/{file.sha256} is a symbolic link")
        data = files.read(path, file.size)
    except OSError as exc:
        more = f"larger than the {file.size:,} bytes of the manifest" if exc.errno == errno.EFBIG else exc.strerror
        raise Wrong(f"{file.path}: {FILES}/{file.sha256}: {more}") from exc
    if len(data) != file.size or hashlib.sha256(data).hexdigest() != file.sha256:
        raise Wrong(f"{file.path}: its bytes are not those of the manifest")
    return data


def _leaving(path: str, data: bytes, folder: Path) -> bytes | None:
    """A file as it travels; None for a group that Triton can use nowhere else."""
    if not _is_group(path):
        return data
    children, inside = _children(data), f"{folder}/"
    if children is None or not all(at.startswith(inside) for at in children.values()):
        return None
    moved = {name: f"{PLACE}/{at.removeprefix(inside)}" for name, at in children.items()}
    return json.dumps({"child_paths": moved}).encode()


def _arriving(path: str, data: bytes, folder: Path) -> bytes:
    """A file as it is used in `folder`. Raises Wrong for a group that would lead elsewhere."""
    if not _is_group(path):
        return data
    moved = {}
    for name, at in (_children(data) or {"": ""}).items():
        inside = at.removeprefix(f"{PLACE}/")
        if inside == at or not manifests.is_path(inside):
            raise Wrong(f"{path}: {at!r:.120} is not inside of the cache")
        moved[name] = str(folder / inside)
    return json.dumps({"child_paths": moved}).encode()


def _is_group(path: str) -> bool:
    return _GROUP.fullmatch(path.rpartition("/")[2]) is not None


def _children(data: bytes) -> dict[str, str] | None:
    """What a group of Triton's names; None for what is none."""
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        children = json.loads(data)["child_paths"]
        if isinstance(children, dict) and all(type(at) is str for at in children.values()):
            return children
    return None
