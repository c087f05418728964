"""Lifted calls that were imported, in the store of this user.

`NAME.json` is an import: who signed it, its backends and calls, and which folder of `data/` has their files. That file
is written last and whole, so that an import is there or is not; a folder that no such file names is removed by the next
import. What is read later is checked by its hash again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from layerzero.envs.lifted.contents import ExportedBackend, ExportedCall, Wrong
from layerzero.envs.lifted.folder import MAX_MANIFEST_BYTES, File, Opened, refused
from layerzero.ipc import files
from layerzero.ipc.errors import ConfigError
from layerzero.ipc.lifting.form import digest
from layerzero.ipc.lifting.specimen import MAX_BYTES, Specimen
from layerzero.ipc.logs import log

MAX_INDEX_BYTES = 4 * MAX_MANIFEST_BYTES
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class ImportedCall(BaseModel):
    """An imported call. `call`: digest of the call alone; `file`: of its file; `proof`: the key of the call whose
    trials show that it works, its own or that of a neighbour which it is like."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    key: _Sha256
    call: _Sha256
    file: _Sha256
    size: Annotated[int, Field(ge=1)]
    proof: _Sha256
    alignments: list[int]
    what: dict[str, str]


class _Index(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    data: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    signer: str  # name of a trusted key; empty for nobody
    manifest: _Sha256
    imported_s: float
    backends: dict[str, File]
    calls: list[ImportedCall]


class Import:
    """One import, by its name."""

    def __init__(self, name: str, index: _Index, data: Path) -> None:
        self.name, self._data = name, data
        self.signer, self.imported_s = index.signer, index.imported_s
        self._backends = index.backends
        self.calls = {call.key: call for call in index.calls}

    @property
    def backends(self) -> list[str]:
        return sorted(self._backends)

    def calls_of(self, backend: str) -> list[ImportedCall]:
        return [call for call in self.calls.values() if call.what["backend"] == backend]

    def backend(self, name: str) -> ExportedBackend:
        """Raises Wrong."""
        file = self._backends[name]
        return ExportedBackend.unpack(self._read(file.path, file.sha256, file.size), name)

    def specimen(self, call: ImportedCall) -> tuple[Specimen, Specimen]:
        """The call with its machine code, and what is to be tried to show that it works: the same, or a neighbour.
        Raises Wrong."""
        exported, proof = (self._call(one) for one in (call, self.calls[call.proof]))
        codes = {code: self._code(code) for code in exported.lifted.codes}
        if proof.lifted is not exported.lifted and not proof.lifted.is_like(exported.lifted):
            raise Wrong(f"calls/{call.key}: it is not like {call.proof}")
        return Specimen(exported.lifted, codes, exported.trials), Specimen(proof.lifted, codes, proof.trials)

    def _call(self, call: ImportedCall) -> ExportedCall:
        return ExportedCall.unpack(self._read(f"calls/{call.key}", call.file, call.size), call.key)

    def _code(self, name: str) -> bytes:
        return self._read(f"code/{name}", name, 1 << 30)

    def _read(self, path: str, sha256: str, most: int) -> bytes:
        try:
            data = files.read(self._data / path, most)
        except OSError as exc:
            raise Wrong(f"{path}: {exc.strerror}") from exc
        if hashlib.sha256(data).hexdigest() != sha256:
            raise Wrong(f"{path}: its bytes are not those that were imported")
        return data


class Imports:
    """All of a store. Raises ConfigError."""

    def __init__(self, store: Path) -> None:
        """`store`: of environments."""
        self.folder = store / "lifted" / "imported"

    def all(self) -> tuple[list[Import], list[str]]:
        """Those that can be used, the newest first, and what is wrong with the others."""
        found, problems = [], []
        for name in self._names():
            try:
                index = self._index(name)
                found.append(Import(name, index, self.folder / "data" / index.data))
            except (OSError, ValidationError) as exc:
                why = exc.errors()[0]["msg"] if isinstance(exc, ValidationError) else exc.strerror
                problems.append(f"import {name} cannot be read: {why}; repair: lz lift remove {name}, or import again")
        return sorted(found, key=lambda one: -one.imported_s), problems

    def install(self, opened: Opened, name: str) -> Import:
        """Check every file and take them over; an import of that name is replaced. Nothing changes unless all of it
        holds."""
        if not _NAME.fullmatch(name):
            raise ConfigError(f"choose a name (--name): {name!r:.80} is none; allowed: {_NAME.pattern}")
        try:
            with self._locked():
                self._collect()
                number = secrets.token_hex(8)
                data = self.folder / "data" / number
                try:
                    backends, calls = _take_over(opened, data)
                except Wrong as exc:
                    shutil.rmtree(data, ignore_errors=True)
                    raise refused(opened.folder, str(exc)) from exc
                value = {
                    "schema": 1,
                    "data": number,
                    "signer": opened.signer,
                    "manifest": opened.sha256,
                    "imported_s": time.time(),
                    "backends": {one: file.model_dump() for one, file in backends.items()},
                    "calls": [call.model_dump() for call in calls],
                }
                text = json.dumps(value).encode()
                if len(text) > MAX_INDEX_BYTES:
                    raise refused(opened.folder, f"its index would have {len(text):,} bytes")
                draft = self.folder / f".{name}.{os.getpid()}"
                draft.write_bytes(text)
                draft.replace(self._path(name))
                self._collect()
        except OSError as exc:
            raise ConfigError(f"make room or a writable {self.folder}: nothing was imported: {exc.strerror}") from exc
        log("lifted.imported", name=name, signer=opened.signer or "nobody: --allow-unsigned", calls=len(calls))
        return Import(name, _Index.model_validate_json(text), data)

    def remove(self, name: str) -> bool:
        """Whether there was one."""
        if name not in self._names():
            return False
        try:
            with self._locked():
                self._path(name).unlink(missing_ok=True)
                self._collect()
        except OSError as exc:
            raise ConfigError(f"remove {self._path(name)}: {exc.strerror}") from exc
        log("lifted.import_removed", name=name)
        return True

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _names(self) -> list[str]:
        with contextlib.suppress(OSError):
            return sorted(path.stem for path in self.folder.glob("*.json") if _NAME.fullmatch(path.stem))
        return []

    def _index(self, name: str) -> _Index:
        """Raises OSError, ValidationError."""
        return _Index.model_validate_json(files.read(self._path(name), MAX_INDEX_BYTES))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Nobody else imports or removes meanwhile. The system gives the lock back of who is killed."""
        (self.folder / "data").mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _collect(self) -> None:
        """Remove what no import has: of earlier ones, and of those that were killed half-way. Needs the lock."""
        used = set()
        for name in self._names():
            try:
                used.add(self._index(name).data)
            except ValidationError:
                continue  # nobody can use its files either
        for path in (self.folder / "data").iterdir():
            if path.name not in used:
                shutil.rmtree(path, ignore_errors=True)
        for path in self.folder.glob(".*.[0-9]*"):
            path.unlink(missing_ok=True)


def _take_over(opened: Opened, target: Path) -> tuple[Mapping[str, File], list[ImportedCall]]:
    """Copy every file after it was checked; what is copied is what was checked. Raises Wrong, OSError."""
    manifest = opened.manifest
    backends: dict[str, ExportedBackend] = {}
    calls: dict[str, tuple[File, ExportedCall]] = {}
    codes = {file.name: file.size for file in manifest.of("code")}
    for file in manifest.files:
        data = opened.read(file)
        match file.kind:
            case "backends":
                backends[file.name] = ExportedBackend.unpack(data, file.name)
            case "calls":
                calls[file.name] = file, ExportedCall.unpack(data, file.name)
            case "code" if digest(data) != file.name:
                raise Wrong(f"{file.path}: it is other machine code than its name says")
        path = target / file.path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(data)
    needed: set[str] = set()
    for _, call in calls.values():
        backend = backends.get(call.what["backend"])
        if backend is None:
            raise Wrong(f"calls/{call.key}: its backend {call.what['backend']!r:.80} is not in the folder")
        backend.check(call)
        needed |= set(call.lifted.codes)
        if sum(codes.get(name, 0) for name in call.lifted.codes) > MAX_BYTES:
            raise Wrong(f"calls/{call.key}: its machine code has more than {MAX_BYTES:,} bytes")
    if needed != codes.keys():
        raise Wrong("its machine code is not what its calls need")
    if not calls:
        raise Wrong("it has no calls")
    if unused := backends.keys() - {call.what["backend"] for _, call in calls.values()}:
        raise Wrong(f"backends/{min(unused)}.json: no call is of it")
    whole = [_imported(file, call, calls) for file, call in calls.values()]
    return {file.name: file for file in manifest.of("backends")}, whole


def _imported(file: File, call: ExportedCall, calls: Mapping[str, tuple[File, ExportedCall]]) -> ImportedCall:
    proof = call.key if call.trials else neighbour(call, (other for _, other in calls.values()))
    if not proof:
        raise Wrong(f"{file.path}: nothing shows that it works: it has no trials, nor is it like a call that has some")
    fields: dict[str, Any] = {"file": file.sha256, "size": file.size, "alignments": list(call.lifted.alignments)}
    return ImportedCall(key=call.key, call=call.digest, proof=proof, what=dict(call.what), **fields)


def neighbour(call: ExportedCall, others: Iterator[ExportedCall]) -> str:
    """The key of a call with trials that this one is like, so that its proof is one of this, too; empty for none."""
    return next((o.key for o in others if o.trials and o.what == call.what and o.lifted.is_like(call.lifted)), "")
