"""The compilers' caches of the environment that this process runs in, checked before anything is loaded from them."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path

from layerzero.ipc.compile_caches import exported
from layerzero.ipc.compile_caches.exported import Exported, Wrong
from layerzero.ipc.compile_caches.folder import User

KEEP_VARIABLE = "LAYERZERO_KEEP_COMPILED"
SHARED_VARIABLE = "LAYERZERO_CACHE_SHARED"
"""Lines of SHA256:FOLDER, of manifests that are trusted: the broker checked their signature, or an image has them."""


def enter(folder: str, environ: Mapping[str, str]) -> User:
    """Use them until the end of this process. What does not fit is set aside, and stderr says so. Raises OSError."""
    shared = [line.partition(":") for line in environ.get(SHARED_VARIABLE, "").splitlines()]
    keeps = environ.get(KEEP_VARIABLE, "1") != "0"

    def fill(target: Path) -> None:
        for sha256, _, where in shared:
            _fill(target, Path(where), sha256)

    user = User.enter(Path(folder), keeps=keeps, say=_say, fill=fill)
    user.mark()
    return user


def _say(text: str) -> None:
    print(f"layerzero: compile cache: {text}", file=sys.stderr, flush=True)


def _fill(target: Path, shared: Path, sha256: str) -> None:
    """Take over what a folder for the whole fleet has; without it everything is compiled here."""
    try:
        data = exported.read(shared)
        if hashlib.sha256(data).hexdigest() != sha256:
            raise Wrong(f"{exported.MANIFEST}: it is another one than was checked")
        found = Exported.unpack(data)
        count = exported.take_over(shared, found, target)
        exported.note(target, found)
        _say(f"took over {count} files of {shared}")
    except (OSError, Wrong) as exc:
        _say(f"nothing was taken over from {shared}: {exc}")
