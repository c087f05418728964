"""Files that others may have put there: read whole only when they are regular and not too large."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read(path: Path, most: int) -> bytes:
    """A regular file's bytes. Never waits, as for the writer of a FIFO. Raises OSError, also for what is no regular
    file, or is larger than `most` bytes."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    with os.fdopen(fd, "rb", buffering=0) as stream:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "no regular file")
        data = bytearray()
        while len(data) <= most and (part := stream.read(most + 1 - len(data))):
            data += part
    if len(data) > most:
        raise OSError(errno.EFBIG, f"larger than {most:,} bytes, the most that is allowed")
    return bytes(data)
