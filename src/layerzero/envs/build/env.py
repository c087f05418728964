"""A place to run one backend, as it is built or is to be built."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerzero.envs.manifest import EnvManifest, VariantName

RECORD = "lz-env.json"


@dataclass(frozen=True)
class Env:
    """A place to run one backend. `environ` is to be merged over environ.worker_environ's passed variables."""

    name: str
    variant: VariantName
    id: str  # of what is installed
    python: Path
    prefix: Path
    environ: Mapping[str, str]
    lock_hash: str  # of the lock, or of what an overlay was asked for; empty for the broker's own interpreter
    source_hash: str  # of the staged worker code
    store: Path
    base: Path | None = None  # the interpreter that it is an overlay of
    wheelhouse: Path | None = None  # where its wheels come from; None: the user's indexes
    other_python: str = ""  # "3.12", where that is not the manifest's first choice
    folder: Path | None = None  # of the manifest, where it is no built-in one
    existing: EnvManifest | None = None  # that names `python`, an interpreter of the user's
    place: str = ""  # of its compilers' caches: hardware, driver, toolkit, variables; empty where it has none

    @property
    def on_host(self) -> bool:
        """Runs in the interpreter of the broker; nothing is built."""
        return not self.lock_hash

    @property
    def lock_target(self) -> Path:
        """What store.py's locks call this environment."""
        return self.store / "envs" / f"{self.name}-{self.id}"

    @property
    def cache(self) -> Path:
        """Where its compilers keep what they make. Named by what is installed and by what they compile for: another
        environment, and another kind of machine, compiles anew."""
        return cache_folder(self.store, self.name, self.id, self.place)

    @property
    def is_built(self) -> bool:
        # Not the record alone: bin/python dangles when the interpreter below the venv was removed.
        return self.on_host or ((self.prefix / RECORD).is_file() and self.python.exists())

    def record(self) -> dict[str, Any]:
        """What lz-env.json says: id, versions, sizes, times. Empty for host environments."""
        if self.on_host or not self.is_built:
            return {}
        found: dict[str, Any] = json.loads((self.prefix / RECORD).read_text(encoding="utf-8"))
        return found


def cache_folder(store: Path, name: str, env_id: str, place: str) -> Path:
    """The folder of an environment's compiler caches."""
    return store / "caches" / f"{name}-{env_id}" / place
