"""Kernels of the hub in an environment: copied into its folder, each file compared with the lock."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import platformdirs

from layerzero.envs.hub import lock as locks
from layerzero.envs.hub.lock import HubLock
from layerzero.envs.hub.repository import Repository
from layerzero.envs.manifest import EnvManifest, VariantName
from layerzero.ipc.errors import EnvError

FOLDER = "hub-kernels"  # in an environment's own; the list of its files has them, too (envs/build/integrity.py)
VARIABLE = "LAYERZERO_HUB_KERNELS"  # read by workers/hub_kernels.py
KEYS = platformdirs.user_config_path("layerzero") / "keys"


@dataclass(frozen=True)
class HubAccess:
    """Where a build takes kernels from, and whose it takes: `keys` is the folder of the keys that are trusted."""

    repository: Repository = field(default_factory=Repository)
    keys: Path = KEYS
    allows_unsigned: bool = False

    def offline(self) -> HubAccess:
        """The same, but for the network."""
        return replace(self, repository=replace(self.repository, is_offline=True))


@dataclass(frozen=True)
class Kernels:
    """The kernels that an environment gets. `signer`: the name of a trusted key; empty for nobody."""

    manifest: EnvManifest
    lock: HubLock
    signer: str
    repository: Repository

    @property
    def told(self) -> str:
        """For people who watch a build."""
        allowed = (
            "allowed by the hash of its sources" if self.manifest.source else "UNSIGNED, as --allow-unsigned allows"
        )
        return f"kernels of {self.lock}, {'signed by ' + self.signer if self.signer else allowed}"

    def place(self, prefix: Path) -> None:
        """Copy every file that the lock names into the environment `prefix`. Raises EnvError for one that differs."""
        name, hub, content = self.manifest.name, self.manifest.hub, self.lock.content
        assert hub is not None
        with self.repository.opened(name, hub, content.build, content.revision) as opened:
            for file in content.files:
                data = opened.read(file.path, file.size)
                if len(data) != file.size or hashlib.sha256(data).hexdigest() != file.sha256:
                    cause = f"{opened.folder / file.path} is not the file that {self.lock.path} pins"
                    again = locks.lock_command(self.manifest, self.lock.variant)
                    repair = f"take the repository as it is at {content.revision}, or pin it anew: {again}"
                    raise EnvError(f"{repair}: {cause}", env=name, cause=cause, repair=repair)
                target = prefix / FOLDER / file.path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)

    def record(self) -> dict[str, Any]:
        """For the environment's record."""
        content = self.lock.content
        return {
            "repository": content.repository,
            "revision": content.revision,
            "build": content.build,
            "signer": self.signer,
        }


def kernels_of(manifest: EnvManifest, variant: VariantName, access: HubAccess) -> Kernels | None:
    """What a build of a manifest has to place; None for none. Raises EnvError where they are not pinned, or signed by
    nobody who is trusted."""
    found = locks.read(manifest, variant)
    if found is None:
        return None
    by = locks.signer(manifest, found, access.keys, allows_unsigned=access.allows_unsigned)
    return Kernels(manifest, found, by, access.repository)


def environ(manifest: EnvManifest, prefix: Path) -> dict[str, str]:
    """What a worker finds them by: a folder. Nothing in it asks the hub."""
    return {} if manifest.hub is None else {VARIABLE: str(prefix / FOLDER), "HF_HUB_OFFLINE": "1"}
