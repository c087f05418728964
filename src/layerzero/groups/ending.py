"""Whether a process is on its way to its end, as the kernel says of its threads.

One that was killed gives back its memory before it closes its sockets, 0.3 s for each GB of small pages; one that
crashes may write a core first; and with a GPU its own end comes 0.1 to 3 s later, which tells where a child of it has
its sockets. All that time it says nothing any more, and its descriptors look as if it lived.
"""

from __future__ import annotations

import os
from pathlib import Path

LOOK_MS = 50  # between two looks at who is waited for
_ENDING = 0x4 | 0x8 | 0x200  # flags of a thread, linux/sched.h: PF_EXITING, PF_POSTCOREDUMP, PF_DUMPCORE


def is_ending(pid: int) -> bool:
    """Whether no thread of it runs its program any more. False where nobody knows."""
    if not _has_ended(f"/proc/{pid}/stat"):
        return False
    try:  # the first thread may have ended alone
        return all(_has_ended(f"/proc/{pid}/task/{thread}/stat") for thread in os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return False


def _has_ended(stat: str) -> bool:
    try:
        return bool(int(Path(stat).read_bytes().rpartition(b")")[2].split()[6]) & _ENDING)
    except (OSError, ValueError, IndexError):
        return False
