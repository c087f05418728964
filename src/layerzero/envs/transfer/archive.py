"""The file of `lz env export`: a gzipped tar (ustar) of an index and of exactly the files that the index lists.

What comes from elsewhere is hostile until shown otherwise: only plain files, in the index's order, under the four
folders below, of the sizes and SHA-256 that the index says, and no more than fits the disk. Nothing else of tar is
understood: no links, devices, long names or extended headers.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, NoReturn, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from layerzero.envs.manifest import NAME_PATTERN, VariantName
from layerzero.ipc.errors import EnvError

INDEX = "lz-export.json"
SCHEMA = 1
_MAX_INDEX_BYTES = 4 << 20
_MAX_FILE_BYTES = (8 << 30) - 1  # what a ustar header can say
_MAX_FILES = 4096
_MAX_TEXT_BYTES = 16 << 20  # of what is no wheel
_PATH = r"^(manifest|lock|wheels|probe)/[A-Za-z0-9_][A-Za-z0-9_.+!-]{0,99}$"
_CHUNK = 1 << 20


class File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    path: Annotated[str, Field(pattern=_PATH)]
    size: Annotated[int, Field(ge=0, le=_MAX_FILE_BYTES)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Index(BaseModel):
    """`python`, `platform`: of the interpreter that the wheels are for."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    variant: VariantName
    python: Annotated[str, Field(pattern=r"^3\.[0-9]{1,2}\.[0-9a-z]{1,8}$")]
    platform: Annotated[str, Field(pattern=r"^[a-z0-9_-]{1,40}$")]
    env_id: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    made_by: Annotated[str, Field(max_length=100)]
    files: Annotated[list[File], Field(max_length=_MAX_FILES)]

    @model_validator(mode="after")
    def _distinct(self) -> Index:
        paths = [file.path.lower() for file in self.files]  # as some file systems compare them
        if twice := sorted({path for path in paths if paths.count(path) > 1}):
            raise ValueError(f"lists {twice[0]!r} twice")
        for file in self.files:
            if not file.path.startswith("wheels/") and file.size > _MAX_TEXT_BYTES:
                raise ValueError(f"{file.path!r} has {file.size:,} bytes; {_MAX_TEXT_BYTES:,} are allowed")
        return self

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def minor(self) -> str:
        return ".".join(self.python.split(".")[:2])

    def named(self, folder: str) -> list[str]:
        """The files in one of the folders."""
        return [file.path for file in self.files if file.path.startswith(f"{folder}/")]


def write(target: Path, about: Mapping[str, object], files: Mapping[str, Path | bytes]) -> Index:
    """Make an archive of `files` (path in the archive -> content). Equal content gives equal bytes. Appears under its
    name when it is whole. Raises EnvError, OSError."""
    listed = [_listed(path, source) for path, source in sorted(files.items())]
    index = _index({"schema": SCHEMA, **about, "files": listed}, target)
    text = (index.model_dump_json(by_alias=True, indent=1) + "\n").encode()
    if len(text) > _MAX_INDEX_BYTES:
        _refuse(target, f"its index would have {len(text):,} bytes; {_MAX_INDEX_BYTES:,} are allowed")
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with aside.open("wb") as raw, gzip.GzipFile("", "wb", compresslevel=1, fileobj=raw, mtime=0) as packed:
            with tarfile.open(mode="w|", fileobj=cast(BinaryIO, packed), format=tarfile.USTAR_FORMAT) as tar:
                for path, source in [(INDEX, text), *((file.path, files[file.path]) for file in index.files)]:
                    _add(tar, path, source)
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)
    return index


def read(archive: Path, into: Path, sha256: str | None = None) -> Index:
    """Unpack a whole archive into the empty folder `into`, checking everything; `sha256` is what the whole file must
    have. Raises EnvError saying what is wrong; what was unpacked by then must not be used."""
    with _unreadable(archive), archive.open("rb") as file:
        hashed = _Hashed(file)
        try:
            with gzip.GzipFile(fileobj=cast(BinaryIO, hashed)) as stream:
                index = _read(archive, cast(BinaryIO, stream), into)
        except Exception:
            _check_hash(archive, hashed, sha256)  # another file than meant explains all other faults
            raise
        _check_hash(archive, hashed, sha256)
    return index


class _Hashed:
    """A file that is read once, from its start, and hashed as it is read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digest = file, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._digest.update(data)
        return data

    def rest(self) -> str:
        """The hash of the whole, when the rest has been read, too."""
        while self.read(_CHUNK):
            pass
        return self._digest.hexdigest()


def _check_hash(archive: Path, hashed: _Hashed, sha256: str | None) -> None:
    """Of the bytes that were read: a file that is looked at twice may have been replaced in between."""
    if sha256 is not None and (found := hashed.rest()) != sha256.lower():
        cause = f"{archive}: SHA-256 is {found}, and not {sha256}"
        raise EnvError(cause, env="", cause=cause, repair="fetch it again, from where the hash comes from")


def _read(archive: Path, source: BinaryIO, into: Path) -> Index:
    name, size = _header(archive, source)
    if name != INDEX or size > _MAX_INDEX_BYTES:
        _refuse(archive, f"it starts with {name!r} of {size:,} bytes, and not with {INDEX}: no export of ours")
    try:
        index = _index(json.loads(_body(archive, source, size)), archive)
    except (ValueError, RecursionError) as exc:
        _refuse(archive, f"{INDEX}: {exc}")
    _check_room(archive, into, index.nbytes)
    for folder in {file.path.partition("/")[0] for file in index.files}:
        (into / folder).mkdir()
    for file in index.files:
        found = _header(archive, source)
        if found != (file.path, file.size):
            _refuse(archive, f"{file.path} of {file.size:,} bytes is next in the index, {found} in the archive")
        _unpack(archive, source, file, into / file.path)
    if any(source.read(2 * tarfile.BLOCKSIZE)) or any(source.read(tarfile.RECORDSIZE)) or source.read(1):
        _refuse(archive, "it has more than its index lists")
    return index


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _listed(path: str, source: Path | bytes) -> dict[str, object]:
    if isinstance(source, bytes):
        return {"path": path, "size": len(source), "sha256": hashlib.sha256(source).hexdigest()}
    return {"path": path, "size": source.stat().st_size, "sha256": sha256_of(source)}


def _index(data: object, archive: Path) -> Index:
    try:
        return Index.model_validate(data)
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(map(str, first["loc"])) or "index"
        _refuse(archive, f"{INDEX}: {where}: {first['msg']} (got {first['input']!r:.120})")


def _add(tar: tarfile.TarFile, path: str, source: Path | bytes) -> None:
    info = tarfile.TarInfo(path)
    info.mode = 0o644
    if isinstance(source, bytes):
        info.size = len(source)
        tar.addfile(info, io.BytesIO(source))
        return
    with source.open("rb") as file:
        info.size = os.fstat(file.fileno()).st_size
        tar.addfile(info, file)


def _header(archive: Path, source: BinaryIO) -> tuple[str, int]:
    """The next file's (path, size)."""
    block = source.read(tarfile.BLOCKSIZE)
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
    except (tarfile.HeaderError, UnicodeDecodeError) as exc:
        _refuse(archive, f"a header of the tar is wrong ({exc}); it may have been cut short")
    if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        kinds = {b"1": "a hard link", b"2": "a symbolic link", b"5": "a folder", b"x": "an extended header"}
        what = kinds.get(info.type, f"of type {info.type!r}")
        _refuse(archive, f"{info.name!r:.120} is {what}; only plain files are allowed")
    if info.name != INDEX and not re.fullmatch(_PATH, info.name):
        _refuse(archive, f"{info.name!r:.200} is no path of an export; allowed: {_PATH}")
    if not 0 <= info.size <= _MAX_FILE_BYTES:
        _refuse(archive, f"{info.name!r} says that it has {info.size} bytes")
    return info.name, info.size


def _body(archive: Path, source: BinaryIO, size: int) -> bytes:
    padded = -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    data = source.read(padded)
    if len(data) < padded:
        _refuse(archive, "it was cut short")
    return data[:size]


def _unpack(archive: Path, source: BinaryIO, file: File, target: Path) -> None:
    digest, left = hashlib.sha256(), file.size
    with target.open("xb") as out:
        while left > _CHUNK:
            chunk = _body(archive, source, _CHUNK)
            digest.update(chunk)
            out.write(chunk)
            left -= _CHUNK
        chunk = _body(archive, source, left)
        digest.update(chunk)
        out.write(chunk)
    if digest.hexdigest() != file.sha256:
        _refuse(archive, f"{file.path}: SHA-256 is {digest.hexdigest()}, the index says {file.sha256}")


def _check_room(archive: Path, into: Path, nbytes: int) -> None:
    free = shutil.disk_usage(into).free
    if nbytes > free:
        _refuse(archive, f"it says that it unpacks to {nbytes:,} bytes; {free:,} are free in {into}")


@contextmanager
def _unreadable(archive: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as exc:
        _refuse(archive, f"it is no whole gzip file ({exc})")
    except OSError as exc:
        _refuse(archive, f"{exc.strerror or exc} ({exc.filename or archive})")


def _refuse(archive: Path, why: str) -> NoReturn:
    cause = f"{archive}: {why}"
    raise EnvError(cause, env="", cause=cause, repair="export it again, where it came from: lz env export NAME FILE")
