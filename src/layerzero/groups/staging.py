"""Memory that the ranks of a group share: each writes its own, and maps that of the others to read.

It has two areas, which rounds of a call use in turn. A rank writes an area again only when all others have told that
they are in the round after it, hence done with it (groups/shared_memory.py); so nobody locks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from layerzero.ipc.errors import ConfigError
from layerzero.ipc.shm.memory import check_memfd, create_memfd, map_fd

VARIABLE = "LAYERZERO_GROUP_KIB"
DEFAULT_KIB, MIN_KIB, MAX_KIB = 2048, 4, 1 << 20
_LINE = 64


def chunk_bytes(environ: Mapping[str, str]) -> int:
    """Bytes that one rank gives to the others at once. Raises ConfigError."""
    text = environ.get(VARIABLE, "").strip() or str(DEFAULT_KIB)
    if not text.isdecimal() or not MIN_KIB <= int(text) <= MAX_KIB:
        raise ConfigError(f"{VARIABLE}={text!r:.40}; allowed: whole KiB from {MIN_KIB} to {MAX_KIB}")
    return int(text) << 10


def aligned(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE


class OwnMemory:
    """What this rank writes. `areas`: bytes, as NumPy's."""

    def __init__(self, chunk: int) -> None:
        """Raises OutOfMemory."""
        self.nbytes = 2 * chunk
        self._fd = create_memfd("layerzero-group", self.nbytes)
        try:
            whole = np.frombuffer(map_fd(self._fd, self.nbytes, writable=True, is_inherited=False), np.uint8)
        except BaseException:
            os.close(self._fd)
            raise
        self.areas = (whole[:chunk], whole[chunk:])

    def share(self) -> int:
        """A new descriptor of it that cannot be written by."""
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._fd)
        self.areas = (self.areas[0][:0], self.areas[1][:0])


def map_other(fd: int, chunk: int) -> tuple[Any, Any]:
    """The areas of another rank; takes the descriptor over. Raises ProtocolError, OSError."""
    try:
        check_memfd(fd, 2 * chunk)
        whole = np.frombuffer(map_fd(fd, 2 * chunk, writable=False, is_inherited=False), np.uint8)
    finally:
        os.close(fd)
    return whole[:chunk], whole[chunk:]
