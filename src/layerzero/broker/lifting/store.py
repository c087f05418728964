"""Lifted calls on disk, so that the next process needs no worker for them, and why others cannot be lifted.

`calls/KEY` is an entry, `code/SHA256` machine code that entries share, `faulted/HASH` a kernel that a process lost its
GPU with, as it was installed then, `suspects/KEY` a call that a process had launched last when it ended without a
word. They are written whole or not at all, belong to their user alone, and are read with
a check of their own hash: what does not hold is removed and counts as not there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from layerzero.ipc import kept_files
from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.lifting.form import Lifted, digest
from layerzero.ipc.lifting.results import Trials
from layerzero.ipc.lifting.specimen import Specimen, pack_trials, unpack_trials
from layerzero.ipc.logs import log
from layerzero.ipc.transport.plain import pack_body, unpack_body

MAX_BYTES = 4 << 30
MAX_ENTRIES = 4096
SUSPECT_S = 600.0  # how long what a client launched last is isolated when it ends without a word
SUSPICION = "a process that had just launched it ended without a word"
_FORMAT = 2


@dataclass(frozen=True)
class Entry:
    """What is known of a call: its packed Lifted as `form`, or why there is none. `what`: what its key was made of, for
    people. `trials`: what it gave on trial inputs, as of a Specimen; none of one that is like a neighbour. `imported`:
    of what was tried here and comes from an import, the digest of its file there."""

    kernel_id: str
    backend: str
    what: Mapping[str, str]
    form: bytes = b""
    reason: str = ""  # a LiftReason
    detail: str = ""
    made_s: float = 0.0  # seconds since 1970
    trials: Trials = field(default_factory=dict)
    imported: str = ""

    @property
    def digest(self) -> str:
        return digest(self.form) if self.form else ""


class LiftStore:
    """Raises no error: a store that cannot be written keeps nothing, and `problem` says why."""

    def __init__(self, folder: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self.folder = folder
        self.problem = ""
        self._calls, self._code, self._faulted = folder / "calls", folder / "code", folder / "faulted"
        self._suspects = folder / "suspects"
        self._max_bytes = max_bytes
        self._held: tuple[int, int] | None = None  # calls and bytes, at most: as they were counted, and what came since

    def find(self, key: str) -> Entry | None:
        """The entry of this key, if its file holds; all machine code that it needs is there, too."""
        path = self._calls / key
        entry = self._read(path)
        if entry is None or not entry.form:
            return entry
        try:
            codes = Lifted.unpack(entry.form).codes
        except ProtocolError as exc:
            self._drop(path, str(exc))
            return None
        if not self.has(codes):
            self._drop(path, "machine code that it needs is gone")
            return None
        for used in (path, *map(self.code_path, codes)):
            kept_files.touch(used)
        return entry

    def add(self, key: str, entry: Entry, specimen: Specimen | None) -> None:
        nbytes = 0 if specimen is None else self._write_code(specimen.codes)
        packed = pack_body(
            {
                "format": _FORMAT,
                "kernel_id": entry.kernel_id,
                "backend": entry.backend,
                "what": dict(entry.what),
                "form": entry.form,
                "reason": entry.reason,
                "detail": entry.detail,
                "made_s": entry.made_s or time.time(),
                "trials": pack_trials(entry.trials),
                "imported": entry.imported,
            }
        )
        sealed = kept_files.seal(packed)
        self._write(self._calls / key, sealed)
        self._keep_bounds(nbytes + len(sealed))

    def add_code(self, codes: Mapping[str, bytes]) -> None:
        """Machine code by its digests, of calls that are not kept themselves."""
        self._keep_bounds(self._write_code(codes))

    def _write_code(self, codes: Mapping[str, bytes]) -> int:
        nbytes = 0
        for name, code in codes.items():
            if not self.code_path(name).is_file():
                self._write(self.code_path(name), code)
                nbytes += len(code)
        return nbytes

    def remove(self, key: str) -> None:
        with contextlib.suppress(OSError):
            (self._calls / key).unlink()

    def code_path(self, name: str) -> Path:
        """Where machine code of this digest lies, or would."""
        return self._code / name

    def has(self, names: Iterable[str]) -> bool:
        """Whether there is machine code of each of these digests. It is not looked at."""
        return all(self.code_path(name).is_file() for name in names)

    def code(self, name: str) -> bytes | None:
        """Machine code by its digest; None where there is none that holds."""
        path = self.code_path(name)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        if digest(data) != name:
            self._drop(path, "its bytes are not those of its name")
            return None
        return data

    def note_fault(self, what: Mapping[str, str], text: str) -> None:
        """A process lost its GPU with the kernel that `what` tells of."""
        self._write(self._faulted / _name_of(what), json.dumps({**what, "fault": text}).encode())

    def fault_of(self, what: Mapping[str, str]) -> str:
        """What was noted of this kernel; empty for nothing."""
        try:
            return str(json.loads((self._faulted / _name_of(what)).read_bytes())["fault"])
        except OSError:
            return ""
        except (ValueError, KeyError):
            return "its note cannot be read"

    def note_suspect(self, key: str, what: Mapping[str, str]) -> None:
        """The call of this key is not to be launched by clients for a while, whoever the broker is then."""
        for path in kept_files.by_age(self._suspects):
            if not _is_fresh(path):
                kept_files.remove(path)
        self._write(self._suspects / key, json.dumps({**what, "fault": SUSPICION}).encode())

    def is_suspect(self, key: str) -> bool:
        return _is_fresh(self._suspects / key)

    def faults(self) -> list[dict[str, str]]:
        """All that was noted, suspicions, too, each with its `fault`."""
        found = []
        fresh = filter(_is_fresh, kept_files.by_age(self._suspects))
        for path in (*kept_files.by_age(self._faulted), *fresh):
            with contextlib.suppress(OSError, ValueError):
                found.append(json.loads(path.read_bytes()))
        return found

    def forgive(self) -> int:
        """Forget all faults and suspicions. Returns how many there were."""
        count = len(self.faults())
        kept_files.remove_all(self._faulted)
        kept_files.remove_all(self._suspects)
        return count

    def entries(self) -> Iterator[tuple[str, Entry]]:
        """All that hold, the last used last."""
        for path in kept_files.by_age(self._calls):
            entry = self._read(path)
            if entry is not None:
                yield path.name, entry

    def nbytes(self) -> int:
        return sum(kept_files.size(path) for folder in (self._calls, self._code) for path in kept_files.by_age(folder))

    def verify(self) -> list[str]:
        """Look at every byte. Removes what does not hold, and says what that was."""
        gone = []
        for path in kept_files.by_age(self._code):
            if self.code(path.name) is None:
                gone.append(f"machine code {path.name[:12]}")
        for path in kept_files.by_age(self._calls):
            if self.find(path.name) is None:
                gone.append(f"call {path.name[:12]}")
        return gone

    def clear(self) -> int:
        """Remove all but faults. Returns how many calls were there."""
        kept_files.remove_all(self._code)
        return kept_files.remove_all(self._calls)

    def _read(self, path: Path) -> Entry | None:
        try:
            data = path.read_bytes()
        except OSError:
            return None
        try:
            value = unpack_body(kept_files.unseal(data))
            if value["format"] != _FORMAT:
                return None
            fields = ("kernel_id", "backend", "what", "form", "reason", "detail", "made_s")
            its = {name: value[name] for name in fields}
            return Entry(**its, trials=unpack_trials(value.get("trials", {})), imported=value.get("imported", ""))
        except (kept_files.NotWhole, ProtocolError, KeyError, TypeError, ValueError, AttributeError) as exc:
            self._drop(path, str(exc))
            return None

    def _drop(self, path: Path, why: str) -> None:
        log("lifted.ignored", file=str(path), why=why)
        with contextlib.suppress(OSError):
            path.unlink()

    def _write(self, path: Path, data: bytes) -> None:
        try:
            kept_files.write(path, data)
            self.problem = ""
        except OSError as exc:
            self.problem = f"lifted calls are not kept: {exc}"

    def _keep_bounds(self, added: int) -> None:
        """After a call of so many bytes: where there may be too much, remove what was not used for longest, and enough
        for the next calls; looking at all files takes the broker's time."""
        if self._held is not None:
            count, total = self._held[0] + 1, self._held[1] + added
            if count <= MAX_ENTRIES and total <= self._max_bytes:
                self._held = count, total
                return
        for folder in (self._calls, self._code):
            kept_files.remove_drafts(folder)
        calls, codes = kept_files.by_age(self._calls), kept_files.by_age(self._code)
        count, total = len(calls), sum(map(kept_files.size, (*calls, *codes)))
        if count > MAX_ENTRIES or total > self._max_bytes:
            most, most_bytes = MAX_ENTRIES * 7 // 8, self._max_bytes * 7 // 8
            for path in sorted((*codes, *calls), key=kept_files.age):
                is_call = path.parent == self._calls
                if total > most_bytes or (is_call and count > most):
                    total -= kept_files.remove(path)
                    count -= is_call
        self._held = count, total


def _is_fresh(path: Path) -> bool:
    """A suspicion that lasts yet. The clock may have been set back since."""
    return abs(time.time() - kept_files.age(path)) < SUSPECT_S


def _name_of(what: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(dict(what), sort_keys=True).encode()).hexdigest()
