"""Calls that no kernel takes, which a framework computes itself: to ask the broker for each of them would cost a
millisecond, or many where a GPU is busy. They are asked again after a pause, since a backend may have come."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor

import layerzero as lz
from layerzero.client.connection import overlay
from layerzero.client.session.session import Session
from layerzero.torch import autocasting

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # each is twice the one before
MAX_KNOWN = 4096  # kinds; then all are forgotten


class _Refused(NamedTuple):
    why: str
    pause_s: float
    until_s: float


class Refusals:
    """By op, arguments, policy and autocast, of one connection. Threads may share it."""

    def __init__(self) -> None:
        self.known: dict[Hashable, _Refused] = {}
        self._session: ref[Session] | None = None  # whose calls they were

    def why(self, op: str, given: Sequence[Any]) -> str:
        """Why a call as this one was refused a short while ago; "" where it is to be made. `given`: its arguments,
        tensors and plain values."""
        if not self.known:
            return ""
        if self._session is None or self._session() is not _session():
            self.known.clear()
            return ""
        refused = self.known.get(_kind(op, given))
        return refused.why if refused is not None and time.monotonic() < refused.until_s else ""

    def note(self, op: str, given: Sequence[Any], why: str) -> None:
        """It is refused."""
        session = _session()
        if session is None:
            return
        if len(self.known) >= MAX_KNOWN:
            self.known.clear()
        self._session = ref(session)
        kind = _kind(op, given)
        before = self.known.get(kind)
        pause_s = FIRST_PAUSE_S if before is None else min(2 * before.pause_s, LONGEST_PAUSE_S)
        self.known[kind] = _Refused(why, pause_s, time.monotonic() + pause_s)

    def forget(self, op: str, given: Sequence[Any]) -> None:
        """It is served."""
        if self.known:
            self.known.pop(_kind(op, given), None)


def _session() -> Session | None:
    try:
        return lz.session()
    except lz.NotConnected:
        return None


def _kind(op: str, given: Sequence[Any]) -> Hashable:
    asked = overlay.current()
    return op, "" if asked is None else asked.text, autocasting.state(), *map(_seen, given)


def _seen(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    return tuple(value) if isinstance(value, list) else value
