"""What the kernel has said of a process: that it was killed for lack of memory, faulted, or lost its GPU (Xid)."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

DEVICE = Path("/dev/kmsg")
MAX_LINES, MAX_CHARS, MAX_RECORDS = 10, 300, 100_000
_RECORD_BYTES = 8192


def lines_of(pids: Collection[int], device: Path = DEVICE) -> list[str] | str:
    """The last lines that name one of these processes; or why they are not known, for instance to a user that may not
    read the kernel's log."""
    wanted = {pid for pid in pids if pid}
    if not wanted:
        return []
    named = re.compile(rf"\b(?:pid[= ]|process |\w+\[)({'|'.join(map(str, wanted))})\b", re.IGNORECASE)
    try:
        fd = os.open(device, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as exc:
        return f"not known: {exc.strerror}"
    found = []
    try:
        for _ in range(MAX_RECORDS):
            try:
                record = os.read(fd, _RECORD_BYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:  # the ring has come around: what is next is newer
                continue
            if not record:
                break
            text = record.decode(errors="replace").partition(";")[2].partition("\n")[0]
            if named.search(text):
                found.append("".join(c if c.isprintable() else "?" for c in text)[:MAX_CHARS])
    except OSError as exc:
        return f"not known: {exc.strerror}"
    finally:
        os.close(fd)
    return found[-MAX_LINES:]
