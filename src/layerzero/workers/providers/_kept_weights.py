"""Weights of few bits made ready once, and kept for the calls after it. Used by providers that compute on the CPU."""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layerzero.ipc.errors import ConfigError

VARIABLE = "LAYERZERO_WORKER_WEIGHTS_MIB"
MOST_BYTES = 1 << 30  # without it
_MOST = 4096  # weights
_PATIENCE = 4  # so many calls for each that is kept, and none for one of them: it goes where another needs its place
_SAMPLES, _SAMPLE = 8, 32  # places in the numbers that a weight is found by, and bytes at each

Place = tuple[int, int]
"""Address and bytes of an array without gaps."""


def read_most_bytes(environ: Mapping[str, str]) -> int:
    """What one worker may keep of weights. Raises ConfigError for what is no number of MiB."""
    text = environ.get(VARIABLE, "")
    if not text:
        return MOST_BYTES
    if not text.isdecimal():
        raise ConfigError(f"{VARIABLE}={text!r:.40}; allowed: a whole number of MiB, 0 to keep no weights")
    return int(text) << 20


@dataclass(slots=True)
class _Kept:
    copies: list[ctypes.Array[ctypes.c_char]]
    made: Any
    nbytes: int
    used: int  # the call that it was given to last


class KeptWeights:
    """What `make` has made of arrays, for as long as a call gives the same bytes: they are compared at each, whole,
    with the copies that it was made of, so that nothing is given out for numbers that somebody has changed. An address
    says nothing of them, and a hash takes several times as long. Where there is no place for all, those that are kept
    stay while calls still come for them: a model that is too large finds a part of its weights at each pass, where the
    last ones in place of the first would be none that it finds. For any thread."""

    def __init__(self, most_bytes: int = MOST_BYTES, most: int = _MOST) -> None:
        self.most_bytes = most_bytes
        self.nbytes = 0
        self._most = most
        self._calls = 0
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()
        self._lock = threading.Lock()
        self._compare = ctypes.CDLL(None).memcmp
        self._compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

    def __len__(self) -> int:
        return len(self._kept)

    def get(
        self, kind: Hashable, places: Sequence[Place], nbytes: int, make: Callable[[Sequence[Any]], Any]
    ) -> Any | None:
        """What is kept for these bytes, else what `make` gives of copies of them, which has `nbytes`; None where it
        cannot be kept. `kind` says all else that it depends on. Copies are buffers, and `make` may keep them."""
        with self._lock:
            self._calls += 1
            key = (kind, _sample(*places[0]))
            found = self._kept.get(key)
            if found is not None:
                if self._is_of(found, places):
                    found.used = self._calls
                    self._kept.move_to_end(key)
                    return found.made
                self._drop(key)
            nbytes += sum(size for _, size in places)
            if not self._has_place(nbytes):
                return None
            copies = [_copy(*place) for place in places]  # the caller can write to its own in the meantime
            self._kept[key] = kept = _Kept(copies, make(copies), nbytes, self._calls)
            self.nbytes += nbytes
            return kept.made

    def _is_of(self, kept: _Kept, places: Sequence[Place]) -> bool:
        return not any(
            self._compare(address, ctypes.addressof(copy), size)
            for (address, size), copy in zip(places, kept.copies, strict=True)
        )

    def _has_place(self, nbytes: int) -> bool:
        if nbytes > self.most_bytes:
            return False
        while self._kept and (len(self._kept) >= self._most or self.nbytes + nbytes > self.most_bytes):
            key, oldest = next(iter(self._kept.items()))
            if self._calls - oldest.used < _PATIENCE * len(self._kept):
                return False
            self._drop(key)
        return True

    def _drop(self, key: Hashable) -> None:
        self.nbytes -= self._kept.pop(key).nbytes


def _sample(address: int, size: int) -> bytes:
    """A few of the bytes: by all of them it is decided."""
    if size <= _SAMPLES * _SAMPLE:
        return ctypes.string_at(address, size)
    step = (size - _SAMPLE) // (_SAMPLES - 1)
    return b"".join(ctypes.string_at(address + step * i, _SAMPLE) for i in range(_SAMPLES))


def _copy(address: int, size: int) -> ctypes.Array[ctypes.c_char]:
    made = (ctypes.c_char * size)()
    ctypes.memmove(made, address, size)
    return made
