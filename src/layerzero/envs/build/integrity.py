"""The files of an environment: what they were when it was built, whether they still are, and whose they are.

A look at sizes, times and inodes finds what may have changed; only that is hashed. What Python compiles (__pycache__)
does not count, and of new files only those that Python would import do.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

FILES = "lz-files.json"
_OURS = frozenset({FILES, "lz-env.json"})
_IMPORTABLE = (".py", ".so", ".pth", ".pyc")
_SCHEMA = 1
_SHOWN = 3
_Stat = list[int]  # size, mtime_ns, inode


@dataclass(frozen=True)
class Change:
    path: str  # below the environment's folder
    what: Literal["changed", "missing", "added"]
    dist: str  # "numpy 2.1.0"; empty for a file of no distribution


@dataclass(frozen=True)
class _List:
    """`rows`: path -> [size, mtime_ns, inode, SHA-256, index into `dists`], as the file has them: thousands are read
    at each start of a worker."""

    dists: list[str]
    rows: dict[str, list[Any]]

    def dist(self, path: str) -> str:
        return self.dists[int(self.rows[path][4])]

    def owners(self) -> dict[str, str]:
        return {path: self.dists[row[4]] for path, row in self.rows.items()}


def take(prefix: Path) -> list[Change]:
    """Hash every file and keep the list in the environment. Returns what differs from its wheel's own RECORD."""
    files, wrong = _compare(prefix)
    _write(prefix, files)
    return wrong


def _compare(prefix: Path) -> tuple[_List, list[Change]]:
    """Every file, hashed, and what differs from its wheel's own RECORD."""
    now = _scan(prefix)
    owners = _owners(prefix)
    hashes = _hashes(prefix, now)
    dists, wrong = {}, []
    for path in now:
        claims = owners.get(path, {})
        dist = next((dist for dist, digest in claims.items() if digest in ("", hashes[path])), "")
        if claims and not dist:  # of several owners of a path the last to be installed is right
            dist = next(iter(claims))
            wrong.append(Change(path, "changed", dist))
        dists[path] = dist
    wrong += [Change(path, "missing", next(iter(claims))) for path, claims in owners.items() if path not in now]
    names = sorted(set(dists.values()))
    number = {dist: index for index, dist in enumerate(names)}
    return _List(names, {path: [*stat, hashes[path], number[dists[path]]] for path, stat in now.items()}), wrong


def changes(prefix: Path, *, verify: bool = False) -> list[Change]:
    """What has changed since the build; nothing is written but new times of files that are the same. `verify` hashes
    every file. An environment without a list, of a version of us that made none, is compared with its wheels' RECORDs.
    """
    before = _read(prefix)
    if before is None:
        files, wrong = _compare(prefix)
        if not wrong:  # never a list of what is wrong: to whoever reads it, it would be right
            with suppress(OSError):  # a read-only store: they are hashed each time
                _write(prefix, files)
        return wrong
    now, rows = _scan(prefix), before.rows
    moved = {path for path, stat in now.items() if path in rows and rows[path][:3] != stat}
    hashes = _hashes(prefix, now.keys() & rows.keys() if verify else moved)
    found = [Change(path, "changed", before.dist(path)) for path in sorted(hashes) if hashes[path] != rows[path][3]]
    found += [Change(path, "missing", before.dist(path)) for path in sorted(rows.keys() - now.keys())]
    found += [Change(path, "added", "") for path in sorted(now.keys() - rows.keys()) if _is_importable(prefix, path)]
    if moved and not found:  # copied, or touched
        with suppress(OSError):  # a read-only store: they are hashed each time
            _write(prefix, _List(before.dists, {path: [*now[path], *row[3:]] for path, row in rows.items()}))
    return found


def _is_importable(prefix: Path, path: str) -> bool:
    """A module, or a link to a folder of them."""
    return path.endswith(_IMPORTABLE) or (prefix / path).is_dir()


def describe(prefix: Path, found: Sequence[Change]) -> str:
    """One line: the distribution that was replaced, else the first files and whose they are. Empty for no change."""
    if not found:
        return ""
    replaced = _replaced(prefix, found)
    if replaced:
        return f"{'; '.join(replaced)} since the build ({len(found)} files differ)"
    words = {"changed": "has changed", "missing": "is missing", "added": "was added"}
    shown = [f"{_short(one.path)}{f' of {one.dist}' * bool(one.dist)} {words[one.what]}" for one in found[:_SHOWN]]
    more = f", and {len(found) - _SHOWN} more files" if len(found) > _SHOWN else ""
    return f"{'; '.join(shown)}{more} since the build"


def owner(prefix: Path, missing: str | None, text: str) -> str:
    """The distribution that an error is about, as "numpy 2.1.0": it has the module, library or file that is named.
    `missing`: what the error lacks. Empty when no wheel of the environment has it."""
    known = _read(prefix)
    claims = known.owners() if known else {path: next(iter(dists)) for path, dists in _owners(prefix).items()}
    for path in re.findall(r"/[^\s:'\",()]+", text):  # the file that the error names: it needs what is missing
        with suppress(ValueError):
            if dist := claims.get(str(Path(path).relative_to(prefix))):
                return dist
    if not missing:
        return ""
    parts = missing.split(".")
    library = next((dist for path, dist in claims.items() if path.rpartition("/")[2] == missing and dist), "")
    if library:
        return library
    while parts:
        stem = re.escape("/".join(parts))
        pattern = re.compile(rf"lib/python[0-9.]+/site-packages/{stem}(/|\.py$|\.[^/]*so$)")
        for path, dist in claims.items():
            if dist and pattern.match(path):
                return dist
        parts.pop()
    return ""


def _replaced(prefix: Path, found: Iterable[Change]) -> list[str]:
    """Distributions of which another version is there now."""
    gone = {one.dist for one in found if one.what == "missing" and one.path.endswith(".dist-info/RECORD")}
    now = dict(_dist_infos(prefix))
    there = {dist.partition(" ")[0].lower().replace("-", "_"): dist for dist in now.values()}
    texts = []
    for dist in sorted(gone):
        name, _, version = dist.partition(" ")
        new = there.get(name.lower().replace("-", "_"))
        texts.append(f"{name} {version} was {f'replaced by {new}' if new else 'removed'}")
    return texts


def _scan(prefix: Path) -> dict[str, _Stat]:
    """Every file and link below `prefix`. By descriptors: twice as fast as by paths, 6 us a file."""
    found: dict[str, _Stat] = {}

    def walk(parent: int | None, name: str, before: str) -> None:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent)
        try:
            folders = []
            with os.scandir(fd) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        if entry.name != "__pycache__":
                            folders.append(entry.name)
                    else:
                        stat = entry.stat(follow_symlinks=False)
                        found[before + entry.name] = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
            for folder in folders:
                walk(fd, folder, f"{before}{folder}/")
        finally:
            os.close(fd)

    walk(None, str(prefix), "")
    for name in _OURS:
        found.pop(name, None)
    return found


def _hashes(prefix: Path, paths: Iterable[str]) -> dict[str, str]:
    listed = list(paths)
    if not listed:
        return {}
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(listed, pool.map(lambda path: _sha256(prefix / path), listed), strict=True))


def _sha256(path: Path) -> str:
    """Of a file's bytes, or of where a link leads. Empty for what cannot be read."""
    try:
        if path.is_symlink():
            return hashlib.sha256(os.readlink(path).encode(errors="surrogateescape")).hexdigest()
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def _dist_infos(prefix: Path) -> Iterator[tuple[Path, str]]:
    """(folder, "NAME VERSION") for all that is installed."""
    for folder in sorted(prefix.glob("lib/python*/site-packages/*.dist-info")):
        name, _, version = folder.name.removesuffix(".dist-info").partition("-")
        yield folder, f"{name} {version}"


def _owners(prefix: Path) -> dict[str, dict[str, str]]:
    """Path -> distribution -> the SHA-256 that its RECORD has for it; empty where it has none."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for folder, dist in _dist_infos(prefix):
        site = folder.parent.relative_to(prefix)
        with suppress(OSError), (folder / "RECORD").open(encoding="utf-8", newline="") as file:
            for row in csv.reader(file):
                if len(row) < 2 or "__pycache__" in row[0] or row[0].startswith("/"):
                    continue
                path = os.path.normpath(site / row[0])
                kind, _, digest = row[1].partition("=")
                with suppress(ValueError):
                    known = base64.urlsafe_b64decode(digest + "=" * (-len(digest) % 4)).hex()
                    found[path][dist] = known if kind == "sha256" else ""
    return found


def _write(prefix: Path, files: _List) -> None:
    aside = prefix / f".{FILES}.{os.getpid()}"
    aside.write_text(json.dumps({"schema": _SCHEMA, "dists": files.dists, "files": files.rows}), encoding="utf-8")
    aside.replace(prefix / FILES)


def _read(prefix: Path) -> _List | None:
    try:
        data = json.loads((prefix / FILES).read_text(encoding="utf-8"))
        files = _List(list(map(str, data["dists"])), dict(data["files"]))
        is_whole = data["schema"] == _SCHEMA and all(
            len(row) == 5 and 0 <= row[4] < len(files.dists) for row in files.rows.values()
        )
        return files if is_whole else None
    except (OSError, ValueError, KeyError, TypeError):  # absent, or cut short
        return None


def _short(path: str) -> str:
    return re.sub(r"^lib/python[0-9.]+/site-packages/", "", path)
