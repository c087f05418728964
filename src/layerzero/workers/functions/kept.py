"""Answers that their callers have no room for yet: kept until they are fetched."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from typing import Any, NamedTuple

from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.functions.frames import Frame

MAX_KEPT, MAX_BYTES = 1024, 4 << 30  # of all clients; the newest one is kept in any case
KEPT_S = 600.0


class Written:
    """A frame as it was: arrays that it was made of may be written by the next call."""

    def __init__(self, made: Frame) -> None:
        self._data = bytes(made)
        self.nbytes = len(self._data)

    def write(self, target: memoryview) -> None:
        target[: self.nbytes] = self._data


class Result(NamedTuple):
    """What a function returned, parts of which are on a GPU. `what`: begins the error where it cannot cross."""

    value: Any
    what: str


class _Kept(NamedTuple):
    since_s: float
    what: Written | Result
    nbytes: int


class Kept:
    """By client and token."""

    def __init__(self) -> None:
        self._of: OrderedDict[tuple[int, int], _Kept] = OrderedDict()
        self._nbytes = 0
        self._tokens = int.from_bytes(os.urandom(5))  # those of an earlier process are none here

    def __len__(self) -> int:
        return len(self._of)

    def add(self, client: int, what: Written | Result, nbytes: int) -> int:
        """Its token. The oldest ones make room."""
        now_s = time.monotonic()
        self._tokens += 1
        self._of[client, self._tokens] = _Kept(now_s, what, nbytes)
        self._nbytes += nbytes
        while len(self._of) > 1:
            first = next(iter(self._of.values()))
            if len(self._of) <= MAX_KEPT and self._nbytes <= MAX_BYTES and first.since_s >= now_s - KEPT_S:
                break
            self._drop(next(iter(self._of)))
        return self._tokens

    def take(self, client: int, token: int) -> Written | Result:
        """Once. Raises ProtocolError."""
        if (client, token) not in self._of:
            most = f"{KEPT_S:g} s, {MAX_KEPT:,} answers or {MAX_BYTES >> 30} GiB of them"
            raise ProtocolError(f"no answer {token} is kept: it was fetched, or more than {most} came after it")
        return self._drop((client, token))

    def forget(self, client: int) -> None:
        """It has left."""
        for key in [key for key in self._of if key[0] == client]:
            self._drop(key)

    def _drop(self, key: tuple[int, int]) -> Written | Result:
        kept = self._of.pop(key)
        self._nbytes -= kept.nbytes
        return kept.what
