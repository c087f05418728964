"""Which backends join: what the setting `joined` says."""

from __future__ import annotations

from collections.abc import Mapping

from layerzero.envs.manifest import EnvManifest
from layerzero.ipc.errors import ConfigError
from layerzero.ipc.vocabulary import pools

ALL = "all"  # of the setting `joined`


def command(backend: str) -> str:
    return f"python -m layerzero.workers.join --backend {backend}"


def named(setting: str, manifests: Mapping[str, EnvManifest]) -> frozenset[str]:
    """The backends that `joined` names. Raises ConfigError."""
    if setting.strip() == ALL:
        return frozenset(manifests)
    names = frozenset(filter(None, (name.strip() for name in setting.split(","))))
    unknown = sorted(name for name in names - manifests.keys() if not pools.is_environment(name))
    if unknown:
        known = ", ".join(sorted(manifests))
        raise ConfigError(
            f"setting joined (LAYERZERO_JOINED): {unknown[0]!r:.60}; allowed: {ALL}, or names of: {known}"
        )
    return names
