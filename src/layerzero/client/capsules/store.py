"""Where capsules lie: a folder of this user's alone, with as much in it as LAYERZERO_CAPSULE_MIB allows, the newest."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from layerzero.client.capsules.form import CALL, LOG, MAX_SEGMENTS, REPORT, Capsule, memory_name, read
from layerzero.ipc import kept_files
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.names import nearest

if TYPE_CHECKING:
    from tarfile import TarInfo

MOST = 64  # capsules that are kept
MAX_ARCHIVE_BYTES = 2 << 30
LEFT_S = 3600.0  # so old is what a process that was interrupted has left
_FILES = (CALL, REPORT, LOG)


def folder_of(environ: Mapping[str, str]) -> Path:
    """LAYERZERO_CAPSULE_DIR, or `capsules` in the store."""
    if environ.get("LAYERZERO_CAPSULE_DIR"):
        return Path(environ["LAYERZERO_CAPSULE_DIR"]).absolute()
    return kept_files.store(environ) / "capsules"


def names(folder: Path) -> list[str]:
    """Of what is in the folder, oldest first: names begin with the time."""
    try:
        return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    except FileNotFoundError:
        return []


def entries(folder: Path) -> Iterator[tuple[str, Capsule | None, str]]:
    """Name and capsule of each, oldest first, or why it is none."""
    for name in names(folder):
        try:
            yield name, read(folder / name), ""
        except InvalidArgument as exc:
            yield name, None, exc.message


def find(folder: Path, name: str) -> Path:
    """The folder of the capsule with this name, or of which it is the only beginning; or a folder that is meant as it
    is written. Raises InvalidArgument."""
    known = names(folder)
    if name in known:
        return folder / name
    given = Path(name)
    if os.sep in name or given.is_dir():
        return given
    alike = [one for one in known if one.startswith(name)]
    if len(alike) == 1:
        return folder / alike[0]
    if alike:
        raise InvalidArgument(f"{name!r:.80} begins several capsules: {', '.join(alike[:4])}")
    said = "lz capsule list has all" if known else f"there is none in {folder}"
    raise InvalidArgument(f"no capsule is called {name!r:.80}; {said}{nearest(name, known)}")


def is_own(folder: Path, capsule: Path) -> bool:
    """Whether a capsule lies among this user's own, in `folder`, where nobody else can have put it."""
    if capsule.resolve().parent != folder.resolve():
        return False
    found = [one.stat() for one in (folder, capsule)]
    return all(one.st_uid == os.geteuid() and not one.st_mode & (stat.S_IWGRP | stat.S_IWOTH) for one in found)


def remove(folder: Path) -> None:
    """A capsule, and what is in it. Whoever still hashes it does not find it any more."""
    gone = folder.with_name(f".{folder.name}.gone")
    with contextlib.suppress(FileNotFoundError):  # another process removes it, or is through
        folder.rename(gone)
        shutil.rmtree(gone)


def nbytes(folder: Path) -> int:
    """Of a capsule's files."""
    return sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(folder) if entry.is_file())


def keep_within(folder: Path, most_bytes: int) -> None:
    """Remove the oldest capsules until the others are within both bounds, and what others have left half made or half
    removed."""
    _sweep(folder)
    kept, total = 0, 0
    for name in reversed(names(folder)):
        try:
            total += nbytes(folder / name)
        except FileNotFoundError:  # another process has removed it
            continue
        kept += 1
        if kept > 1 and (kept > MOST or total > most_bytes):
            with contextlib.suppress(OSError):
                remove(folder / name)


def _sweep(folder: Path) -> None:
    """What nobody has touched for an hour."""
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            with contextlib.suppress(FileNotFoundError):
                is_left = entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
                if is_left and entry.stat(follow_symlinks=False).st_mtime < time.time() - LEFT_S:
                    shutil.rmtree(entry.path, ignore_errors=True)


def pack(folder: Path, capsule: Capsule, archive: Path, *, with_data: bool) -> None:
    """Write a capsule into a .tar.gz for others; without data no byte of an argument is in it, nor the worker's log.
    Raises InvalidArgument where the file is there already."""
    import tarfile

    told = capsule if with_data else capsule.without_data()
    text = json.dumps(told.to_dict(), indent=1).encode()
    others = [REPORT, *((LOG, *map(memory_name, range(len(capsule.segments)))) if with_data else ())]
    try:
        with archive.open("xb") as raw, tarfile.open(fileobj=raw, mode="w:gz", format=tarfile.USTAR_FORMAT) as packed:
            info = tarfile.TarInfo(f"{capsule.name}/{CALL}")
            info.size, info.mode = len(text), 0o600
            packed.addfile(info, io.BytesIO(text))
            for name in others:
                path = folder / name
                if path.is_file():
                    packed.add(path, f"{capsule.name}/{name}", recursive=False, filter=_anonymous)
    except FileExistsError:
        raise InvalidArgument(f"{archive} is there already; remove it, or name another file") from None


def unpack(archive: Path, target: Path) -> Path:
    """The capsule of such a file, in a folder below `target`. Raises InvalidArgument for what is none."""
    import tarfile

    allowed = {*_FILES, *map(memory_name, range(MAX_SEGMENTS))}
    try:
        with tarfile.open(archive, mode="r:gz") as packed:
            total, found = 0, ""
            for member in packed:
                top, _, name = member.name.partition("/")
                total += member.size
                if not member.isfile() or name not in allowed or top != Path(top).name or (found and top != found):
                    raise InvalidArgument(f"{archive} is no capsule: it has {member.name!r:.80}")
                if total > MAX_ARCHIVE_BYTES:
                    raise InvalidArgument(f"{archive} unpacks to more than {MAX_ARCHIVE_BYTES:,} bytes")
                found = top
                (target / top).mkdir(mode=0o700, exist_ok=True)
                source = packed.extractfile(member)
                assert source is not None
                with source, (target / top / name).open("xb") as file:
                    shutil.copyfileobj(source, file)
    except (OSError, tarfile.TarError, EOFError) as exc:
        raise InvalidArgument(f"{archive} is no capsule: {exc!s:.200}") from exc
    if not found:
        raise InvalidArgument(f"{archive} is no capsule: it is empty")
    return target / found


def _anonymous(info: TarInfo) -> TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mode = stat.S_IRUSR | stat.S_IWUSR
    return info
