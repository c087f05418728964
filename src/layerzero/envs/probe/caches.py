"""Caches of compilers: one folder for each environment, which its user alone may enter, since what lies there is loaded
as code. Compilers keep the code of several GPU architectures apart; what is noted here names the architecture."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from layerzero.envs.build.env import Env
from layerzero.envs.build.store import locked
from layerzero.ipc import files
from layerzero.ipc.compile_caches.folder import NOTES
from layerzero.ipc.compile_caches.manifest import OURS

MAX_UNITS = 8192  # of one environment; the oldest go


def make_folder(env: Env) -> Path:
    """The folder, made where it is missing."""
    folder = env.cache
    for path in (folder.parent, folder, folder / OURS) if env.place else (folder, folder / OURS):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def compiled(env: Env, key: str) -> Iterator[tuple[str, str]]:
    """What was noted under this key: (kernel id, which calls it is compiled for)."""
    try:
        notes = json.loads((env.cache / OURS / NOTES).read_text(encoding="utf-8"))
        units = notes["units"] if notes["key"] == key else []
        yield from ((str(kernel_id), str(calls)) for kernel_id, calls in units)
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return  # absent, cut short, or of another version of us: compiled again, from what the caches have


def note_compiled(env: Env, key: str, units: Iterable[tuple[str, str]]) -> None:
    """Add to what is noted. Another key, of other code or another environment, begins anew."""
    path = make_folder(env) / OURS / NOTES
    with locked(path):
        known = dict.fromkeys((*compiled(env, key), *units))
        files.put(path, json.dumps({"key": key, "units": list(known)[-MAX_UNITS:]}))
