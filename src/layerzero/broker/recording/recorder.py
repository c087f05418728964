"""A broker's core that writes down what it is told and what it does: lines of JSON in a file that its owner alone can
read. Off unless settings name a file. docs/recording.md has the form."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.core.state import BrokerState
from layerzero.broker.recording.form import Names, encode
from layerzero.broker.recording.sketch import sketch
from layerzero.broker.recording.start import HEAD, SCHEMA, Start
from layerzero.broker.selection.ranking import Engine, Table
from layerzero.ipc.errors import ConfigError
from layerzero.ipc.logs import log
from layerzero.ipc.version import __version__

_line = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False).encode


class _Written(Names):
    """Identities by the order in which they come, tokens by a key that is in no file: who has the record can neither
    pose as a peer nor try out what a hash is of."""

    def __init__(self) -> None:
        self._peers: dict[bytes, str] = {b"": ""}
        self._key = os.urandom(16)

    def peer(self, identity: bytes) -> str:
        return self._peers.setdefault(identity, f"peer-{len(self._peers)}")

    def token(self, value: bytes) -> str:
        return hashlib.blake2b(value, key=self._key, digest_size=8).hexdigest() if value else ""


class Recorder:
    """Writes to `path`, and moves what is there to `path`.1. Beyond `most_bytes` it writes a last line that says so,
    and no more: a record is of use from its beginning. Raises ConfigError."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        self.names = _Written()
        self.count = 0
        self._left_bytes = most_bytes
        self._path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            if path.is_file() and not path.is_symlink():
                path.replace(path.with_name(f"{path.name}.1"))
            self._fd: int | None = os.open(path, flags, 0o600)
        except OSError as exc:
            raise ConfigError(
                f"setting record (LAYERZERO_RECORD): {path} cannot be written: {exc.strerror}; name a file in a "
                "folder of yours"
            ) from exc

    @property
    def is_on(self) -> bool:
        return self._fd is not None

    def write(self, *lines: Mapping[str, Any]) -> None:
        """Whole lines, or none of them."""
        if self._fd is None:
            return
        data = "".join(f"{_line(line)}\n" for line in lines).encode()
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            self._end("full")
            return
        try:
            if os.write(self._fd, data) != len(data):
                raise OSError("not all was written")
        except OSError as exc:  # a full disk must not end a broker
            self._end(f"cannot be written: {exc}")

    def _end(self, why: str) -> None:
        fd, self._fd = self._fd, None
        assert fd is not None
        try:
            os.write(fd, f"{json.dumps({'end': why, 'events': self.count})}\n".encode())
            os.close(fd)
        except OSError:
            pass  # then its last line says it by being cut off
        log("record.ended", file=str(self._path), why=why, events=self.count)

    def close(self) -> None:
        if self._fd is not None:
            self._end("broker ended")


class RecordedEngine(Engine):
    """What it is told past the events is written down as well."""

    recorder: Recorder | None = None  # once the record has begun
    told_epoch = 0  # what the record's reader has made of `epoch`

    def _tell(self, what: str, *values: Any) -> None:
        if self.recorder is not None and self.recorder.is_on:
            values = tuple(encode(one, self.recorder.names) for one in values)
            self.note_epoch()
            self.recorder.write({"told": what, "with": list(values)})

    def note_epoch(self) -> None:
        """It has been changed past all that is written: by what callers launch themselves."""
        if self.recorder is not None and self.epoch != self.told_epoch:
            self.recorder.write({"told": "epoch", "with": [self.epoch - self.told_epoch]})
            self.told_epoch = self.epoch

    def set_table(self, table: Table | None) -> None:
        self._tell("table", table)
        super().set_table(table)
        self.told_epoch = self.epoch

    def note_env(self, backend: str, env: str) -> None:
        self._tell("env", backend, env)
        super().note_env(backend, env)
        self.told_epoch = self.epoch

    def note_free_memory(self, nbytes: int | None, device: str = "") -> None:
        self._tell("free_memory", nbytes, device)
        super().note_free_memory(nbytes, device)
        self.told_epoch = self.epoch


class RecordedState(BrokerState):
    """Begins the record with all that the core begins with. Notes for the broker's log get `by_event`, the number of
    the event that they come of."""

    def __init__(self, recorder: Recorder, start: Start) -> None:
        engine = self._recorded = start.engine(RecordedEngine)
        super().__init__(engine, start.unusable, start.limits, random.Random(start.seed), joined=start.joined)
        self._recorder = recorder
        head = {"record": HEAD, "schema": SCHEMA, "package": __version__, "unix_s": time.time()}
        recorder.write({**head, "start": encode(start, recorder.names)})
        engine.recorder, engine.told_epoch = recorder, engine.epoch

    def handle(self, event: ev.Event, now_s: float) -> list[act.Action]:
        recorder = self._recorder
        if not recorder.is_on:
            return super().handle(event, now_s)
        self._recorded.note_epoch()
        recorder.count = number = recorder.count + 1
        told = {"n": number, "at_s": now_s, "event": type(event).__name__, "with": encode(event, recorder.names)}
        try:
            actions = super().handle(event, now_s)
        except Exception as exc:
            recorder.write({**told, "raised": type(exc).__name__}, *self._done(number, self.effects.actions))
            raise
        finally:
            self._recorded.told_epoch = self.engine.epoch
        recorder.write(told, *self._done(number, actions))
        return [_numbered(one, number) if type(one) is act.Note else one for one in actions]

    def _done(self, number: int, actions: list[act.Action]) -> list[dict[str, Any]]:
        return [
            {
                "n": f"{number}.{n}",
                "cause": number,
                "action": type(one).__name__,
                "with": sketch(one, self._recorder.names),
            }
            for n, one in enumerate(actions, 1)
        ]


def _numbered(note: act.Note, number: int) -> act.Note:
    return dataclasses.replace(note, facts={**note.facts, "by_event": number})
