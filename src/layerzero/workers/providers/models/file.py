"""A model's file, whose hash the caller names."""

from __future__ import annotations

import contextlib
import hashlib
import os
from types import TracebackType

from layerzero.ipc.errors import InvalidArgument
from layerzero.workers.functions.code import demand_own

CHUNK_BYTES = 1 << 20


class ModelFile:
    """An open file that has the hash. What `path` leads to is what was hashed, whatever its name leads to."""

    def __init__(self, path: str, sha256: str) -> None:
        """Raises InvalidArgument for one that cannot be read, is another user's, or has changed."""
        with contextlib.ExitStack() as refused:
            try:
                self._file = refused.enter_context(open(path, "rb"))
                demand_own(path, os.fstat(self._file.fileno()).st_uid)
                found = self._hash()
            except OSError as exc:
                text = f"{path} cannot be read by the worker: {exc.strerror}; models are loaded from their files"
                raise InvalidArgument(text) from exc
            if found != sha256:
                text = f"{path} has changed since lz.load read it; load it again, or put the file back"
                raise InvalidArgument(text, expected=sha256, found=found)
            refused.pop_all()

    @property
    def path(self) -> str:
        """Another name of the open file."""
        return f"/proc/self/fd/{self._file.fileno()}"

    def read(self) -> bytes:
        """Its bytes."""
        self._file.seek(0)
        return self._file.read()

    def _hash(self) -> str:
        found = hashlib.sha256()
        while chunk := self._file.read(CHUNK_BYTES):
            found.update(chunk)
        return found.hexdigest()

    def __enter__(self) -> ModelFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()
