"""How often each layer's calls were taken over, by which kernel, and how often they stayed with torch, and why."""

from __future__ import annotations

import sys
import threading
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from layerzero.client.connection.record import kernel_of
from layerzero.client.session.session import Session

OUTSIDE = "(no layer)"
COMPILED = "(compiled)"
FRAMES = 6  # so far above a call its layer is looked for
_MODULE = torch.nn.Module


class Key(NamedTuple):
    """What is counted together. `why` is empty for calls that were taken over, and `kernel` for others."""

    layer: str
    op: str
    why: str = ""
    kernel: str = ""
    path: str = ""


class Tally:
    """Threads may share it: each counts for itself."""

    def __init__(self, model: torch.nn.Module | None) -> None:
        named = () if model is None else model.named_modules()
        self.names = {id(module): name or type(module).__name__ for name, module in named}
        self.local = threading.local()  # `counts`, of each thread
        self._lock = threading.Lock()
        self._all: list[dict[tuple[str, str, str, str, str], int]] = []
        self._unsettled: dict[tuple[str, ...], tuple[Session, Any]] = {}
        self.moved: dict[tuple[str, ...], int] = {}  # of them, calls that began on another kernel

    def took(self, layer: str, op: str, session: Session) -> None:
        """A call of ours has ended well in this thread."""
        record = session.last_record
        kernel, path, was_moved = kernel_of(record)
        key = (layer, op, "", kernel, path)
        self.count(key)
        if was_moved:
            with self._lock:
                self.moved[key] = self.moved.get(key, 0) + 1
        if not kernel:  # on a GPU, where it is known later
            self._unsettled[key] = session, record

    def left(self, layer: str, op: str, why: str) -> None:
        self.count((layer, op, why, "", ""))

    def traced(self, op: str, why: str) -> None:
        """A call that is in a compiled graph now, as ours or, with `why`, as torch's."""
        self.count((COMPILED, op, why, "", ""))

    def count(self, key: tuple[str, str, str, str, str]) -> None:
        """A plain tuple: making a Key would take longer than all else here."""
        try:
            counts: dict[tuple[str, str, str, str, str], int] = self.local.counts
        except AttributeError:
            counts = self.local.counts = {}
            with self._lock:
                self._all.append(counts)
        counts[key] = counts.get(key, 0) + 1

    def counts(self) -> dict[Key, int]:
        """Of all threads, in the order in which they were first seen."""
        found: dict[Key, int] = {}
        with self._lock:
            everyone = [dict(counts) for counts in self._all]
        for counts in everyone:
            for key, count in counts.items():
                known = self._settled(Key(*key))
                found[known] = found.get(known, 0) + count
        return found

    def _settled(self, key: Key) -> Key:
        """With the kernel of the last such call, on a GPU."""
        late = self._unsettled.get(key)
        if late is None:
            return key
        session, record = late
        report = session.report_of(record)
        return key if report is None else key._replace(kernel=report.kernel_id or "", path=report.path or "")

    def notes(self) -> dict[tuple[str, str, str], tuple[str, ...]]:
        """By layer, op and kernel, what the report of the last call on a GPU's ring says beside them: why it is not
        lifted, for one."""
        with self._lock:
            late = list(self._unsettled.items())
        found = {}
        for key, (session, record) in late:
            report = session.report_of(record)
            if report is not None and report.notes:
                found[key[0], key[1], report.kernel_id or ""] = report.notes
        return found

    def last_kernel(self, layer: str, op: str) -> str:
        """That of the last kind of calls of this layer that was taken over; "" where there is none."""
        kernels = [key.kernel for key in self.counts() if (key.layer, key.op) == (layer, op) and not key.why]
        return kernels[-1] if kernels else ""

    def layer(self, depth: int) -> str:
        """The name of the innermost module whose method, or function with a module as its first argument, has made the
        call that is being handled. `depth`: so many frames above this one that call was made."""
        frame: FrameType | None = sys._getframe(depth)
        left = FRAMES
        while frame is not None and left:
            code = frame.f_code
            known = CODES.get(id(code))
            first = known[1] if known is not None else _first_argument(code)
            if first:
                # Before Python 3.13 this keeps the frame's variables alive until it returns.
                owner = frame.f_locals.get(first)
                if isinstance(owner, _MODULE):
                    return self.names.get(id(owner)) or type(owner).__name__
            frame = frame.f_back
            left -= 1
        return OUTSIDE


CODES: dict[int, tuple[CodeType, str]] = {}
"""By the id of a code, which is kept: to hash one takes longer than all else here."""


def _first_argument(code: CodeType) -> str:
    """Its name, "" where there is none that could be a module."""
    name = code.co_varnames[0] if code.co_argcount else ""
    return CODES.setdefault(id(code), (code, name if name in ("self", "module", "layer", "model") else ""))[1]
