"""The memory of clients as a worker sees it."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from layerzero.ipc.shm import memory


@dataclass
class Arena:
    """A client's arena: inputs are seen through the read-only map, outputs through the writable one."""

    nbytes: int
    read: memoryview
    write: memoryview
    problem: str = ""  # why it could not be mapped


def map_arena(fd: int, nbytes: int) -> Arena:
    """Takes the descriptor over."""
    try:
        read = memory.map_guarded(fd, nbytes, writable=False)
        return Arena(nbytes, read, memory.map_guarded(fd, nbytes, writable=True))
    except (OSError, ValueError) as exc:  # no memory, too many maps: calls that use it fail, the worker lives
        problem = f"the worker cannot map the caller's memory of {nbytes} bytes: {exc}"
        print(problem, file=sys.stderr)
        return Arena(0, memoryview(b""), memoryview(b""), problem)
    finally:
        os.close(fd)
