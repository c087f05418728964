"""A folder of lifted calls on its way to another machine.

`manifest.json` names every other file with its size and SHA-256, and `manifest.sig` is the Ed25519 signature of its
bytes. `backends/NAME.json`, `calls/KEY` and `code/SHA256` are as contents.py and ipc/lifting have them. What the
manifest does not name is not read.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from layerzero.envs import signing
from layerzero.envs.lifted.contents import Wrong
from layerzero.ipc import files
from layerzero.ipc.errors import ConfigError
from layerzero.ipc.version import __version__

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

MANIFEST, SIGNATURE = "manifest.json", "manifest.sig"
MAX_MANIFEST_BYTES = 8 << 20
MAX_CALLS = 4096
MAX_BACKENDS = 64
MAX_BYTES = 4 << 30
_MAX_FILE_BYTES = {"backends": 8 << 20, "calls": 16 << 20, "code": 1 << 30}
_PATH = r"^(backends/[a-z0-9][a-z0-9_.@-]{0,63}\.json|calls/[0-9a-f]{64}|code/[0-9a-f]{64})$"


class File(BaseModel):
    """A file of the folder."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    path: Annotated[str, Field(pattern=_PATH)]
    size: Annotated[int, Field(ge=1, le=max(_MAX_FILE_BYTES.values()))]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

    @property
    def kind(self) -> str:
        return self.path.partition("/")[0]

    @property
    def name(self) -> str:
        """What the path says that the file is: a backend, a key, a digest."""
        return self.path.partition("/")[2].removesuffix(".json")


class Manifest(BaseModel):
    """`signer`: fingerprint of the key that signed, for people; empty for none."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kind: Literal["layerzero lifted calls"] = "layerzero lifted calls"
    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    made_by: Annotated[str, Field(max_length=100)]
    signer: Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")]
    files: Annotated[list[File], Field(max_length=3 * MAX_CALLS + MAX_BACKENDS)]

    @model_validator(mode="after")
    def _bounded(self) -> Manifest:
        paths = [file.path for file in self.files]
        if len(set(paths)) != len(paths):
            raise ValueError("a file is listed twice")
        for file in self.files:
            if file.size > _MAX_FILE_BYTES[file.kind]:
                raise ValueError(f"{file.path} has {file.size:,} bytes; allowed: {_MAX_FILE_BYTES[file.kind]:,}")
        if self.nbytes > MAX_BYTES:
            raise ValueError(f"its files have {self.nbytes:,} bytes; allowed: {MAX_BYTES:,}")
        if len(self.of("calls")) > MAX_CALLS or len(self.of("backends")) > MAX_BACKENDS:
            raise ValueError(f"it has more than {MAX_CALLS} calls, or {MAX_BACKENDS} backends")
        return self

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)

    def of(self, kind: str) -> list[File]:
        return [file for file in self.files if file.kind == kind]


class Opened:
    """A folder whose manifest has been read, and its signature checked. `signer`: the name of the key that signed it;
    empty for nobody. `sha256`: of the manifest."""

    def __init__(self, folder: Path, manifest: Manifest, signer: str, sha256: str) -> None:
        self.folder, self.manifest, self.signer, self.sha256 = folder, manifest, signer, sha256

    def read(self, file: File) -> bytes:
        """Its bytes, which are those of the manifest. Raises Wrong."""
        try:
            path = (self.folder / file.path).resolve(strict=True)
            if not path.is_relative_to(self.folder.resolve()):
                raise Wrong(f"{file.path}: it leads out of the folder")
            data = files.read(path, file.size)
        except OSError as exc:
            more = f"larger than the {file.size:,} bytes of the manifest" if exc.errno == errno.EFBIG else exc.strerror
            raise Wrong(f"{file.path}: {more}") from exc
        if len(data) != file.size or hashlib.sha256(data).hexdigest() != file.sha256:
            raise Wrong(f"{file.path}: its bytes are not those of the manifest")
        return data


def open_folder(folder: Path, keys: Path, *, allows_unsigned: bool) -> Opened:
    """`keys`: the folder of keys. Raises ConfigError with what to do."""
    try:
        data = files.read(folder / MANIFEST, MAX_MANIFEST_BYTES)
    except OSError as exc:
        text = f"name a folder that lz lift export has written: {folder / MANIFEST} cannot be read: {exc.strerror}"
        raise ConfigError(text) from exc
    signer = _signer(folder, data, keys, allows_unsigned=allows_unsigned)
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise refused(folder, f"{MANIFEST}: {where}: {first['msg']} (got {first.get('input')!r:.120})") from exc
    return Opened(folder, manifest, signer, hashlib.sha256(data).hexdigest())


def refused(folder: Path, why: str) -> ConfigError:
    """The error of a folder that is refused as a whole."""
    return ConfigError(f"export it again, or fetch it again from there: nothing of {folder} was imported: {why}")


def _signer(folder: Path, data: bytes, keys: Path, *, allows_unsigned: bool) -> str:
    """Whose signature the manifest has: the name of a trusted key; empty where it has none and need not. Before that
    is known, nothing of it is parsed. Raises ConfigError."""
    try:
        signature = files.read(folder / SIGNATURE, signing.SIGNATURE_BYTES)
    except FileNotFoundError:
        if allows_unsigned:
            return ""
        text = "have it signed (lz lift export --key), or pass --allow-unsigned if you know by other means whose it is"
        raise ConfigError(f"{text}: {folder} has no signature, and nothing of it was imported") from None
    except OSError as exc:
        raise refused(folder, f"{SIGNATURE}: {exc.strerror}") from exc
    trusted = signing.trusted(keys)
    name = signing.signer_of(data, signature, trusted)
    if name is None:  # of no use to anybody: --allow-unsigned is for folders without one
        known = ", ".join(trusted) or "none"
        said = _said_signer(data)
        text = f"trust its key if it is to be trusted (lz lift trust FILE.pub --name NAME): {folder} is signed by"
        raise ConfigError(f"{text} {said}, or was changed since; trusted: {known}. Nothing of it was imported")
    return name


def _said_signer(data: bytes) -> str:
    """What a manifest says of its key, for people who look for that."""
    with contextlib.suppress(ValidationError):
        return f"a key of fingerprint {Manifest.model_validate_json(data).signer or '(none)'}"
    return "nobody known"


def write(folder: Path, contents: Iterator[tuple[str, bytes]], key: Ed25519PrivateKey | None) -> Manifest:
    """Make the folder, which appears whole or not at all. `contents`: path in it and bytes, each path once. Raises
    ConfigError."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"name a folder that is not there yet: {folder} is no empty folder")
    draft = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        manifest = _write(draft, contents, key)
        if folder.exists():
            folder.rmdir()
        draft.rename(folder)
    except OSError as exc:
        raise ConfigError(f"name another folder: {folder} cannot be written: {exc.strerror}") from exc
    except ValidationError as exc:
        what = exc.errors()[0]["msg"]
        raise ConfigError(f"export fewer calls (--backend, --kernel): {what}") from exc
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return manifest


def _write(draft: Path, contents: Iterator[tuple[str, bytes]], key: Ed25519PrivateKey | None) -> Manifest:
    listed: list[Mapping[str, Any]] = []
    draft.mkdir(mode=0o700, parents=True)
    for path, data in contents:
        target = draft / path
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(data)
        listed.append({"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()})
    signer = "" if key is None else signing.fingerprint(key.public_key())
    value = {"kind": "layerzero lifted calls", "schema": 1, "made_by": __version__, "signer": signer, "files": listed}
    text = (json.dumps(value, indent=1) + "\n").encode()
    manifest = Manifest.model_validate_json(text)
    (draft / MANIFEST).write_bytes(text)
    if key is not None:
        (draft / SIGNATURE).write_bytes(signing.sign(key, text))
    return manifest
