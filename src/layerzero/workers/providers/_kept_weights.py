"""Weights of few bits made ready once, and kept for the calls after it. Used by providers that compute on the CPU."""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

MOST_BYTES = 1 << 30
_MOST = 4096  # weights
_SAMPLES, _SAMPLE = 8, 32  # places in the numbers that a weight is found by, and bytes at each

Place = tuple[int, int]
"""Address and bytes of an array without gaps."""


class _Kept(NamedTuple):
    copies: list[ctypes.Array[ctypes.c_char]]
    made: Any
    nbytes: int


class KeptWeights:
    """What `make` has made of arrays, for as long as a call gives the same bytes: they are compared at each, whole,
    with the copies that it was made of, so that nothing is given out for numbers that somebody has changed. An address
    says nothing of them, and a hash takes several times as long. Those unused for longest go first. For any thread."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self.nbytes = 0
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()
        self._lock = threading.Lock()
        self._compare = ctypes.CDLL(None).memcmp
        self._compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, kind: Hashable, places: Sequence[Place], make: Callable[[Sequence[Any]], tuple[Any, int]]) -> Any:
        """What is kept for these bytes, else what `make` gives of copies of them, with how many bytes it has; `kind`
        says all else that it depends on. Copies are buffers, and `make` may keep them."""
        with self._lock:
            return self._get((kind, _sample(*places[0])), places, make)

    def _get(self, key: Hashable, places: Sequence[Place], make: Callable[[Sequence[Any]], tuple[Any, int]]) -> Any:
        found = self._kept.get(key)
        if found is not None and self._is_of(found, places):
            self._kept.move_to_end(key)
            return found.made
        copies = [_copy(*place) for place in places]  # the caller can write to its own in the meantime
        made, nbytes = make(copies)
        self._drop(key)
        self._keep(key, _Kept(copies, made, nbytes + sum(map(len, copies))))
        return made

    def _is_of(self, kept: _Kept, places: Sequence[Place]) -> bool:
        return not any(
            self._compare(address, ctypes.addressof(copy), size)
            for (address, size), copy in zip(places, kept.copies, strict=True)
        )

    def _keep(self, key: Hashable, kept: _Kept) -> None:
        if kept.nbytes > self.most_bytes:
            return
        while self._kept and (len(self._kept) >= _MOST or self.nbytes + kept.nbytes > self.most_bytes):
            self._drop(next(iter(self._kept)))
        self._kept[key] = kept
        self.nbytes += kept.nbytes

    def _drop(self, key: Hashable) -> None:
        gone = self._kept.pop(key, None)
        self.nbytes -= 0 if gone is None else gone.nbytes


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
