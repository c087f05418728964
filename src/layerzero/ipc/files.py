"""Files that others read and write, too: read whole only when they are regular and not too large, written whole or not
at all."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path


def read(path: Path, most: int, *, is_own: bool = False) -> bytes:
    """A regular file's bytes. Never waits, as for the writer of a FIFO. Raises OSError, also for what is no regular
    file, or is larger than `most` bytes, and with `is_own` for what another user owns or may write to."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    with os.fdopen(fd, "rb", buffering=0) as stream:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "no regular file")
        if is_own and (info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o022):
            mode = f"owner {info.st_uid} and mode {stat.S_IMODE(info.st_mode):04o}"
            raise OSError(errno.EPERM, f"it has {mode}, so another user can have written it")
        data = bytearray()
        while len(data) <= most and (part := stream.read(most + 1 - len(data))):
            data += part
    if len(data) > most:
        raise OSError(errno.EFBIG, f"larger than {most:,} bytes, the most that is allowed")
    return bytes(data)


def put(path: Path, data: bytes | str) -> None:
    """A file with this content, text in UTF-8. Whoever reads it finds all of it, or what was there before; of threads
    and processes that put it at once the last one's stays. Raises OSError."""
    draft = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        draft.write_bytes(data.encode() if isinstance(data, str) else data)
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
