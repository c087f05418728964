"""The dispatch table that policy names, as it lies in its file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from layerzero.broker.selection import dispatch_table
from layerzero.broker.selection.ranking import Engine
from layerzero.ipc import files
from layerzero.ipc.errors import ConfigError
from layerzero.ipc.version import __version__

MAX_FILE_BYTES = 64 << 20


def read(path: Path, engine: Engine, env_ids: Mapping[str, str]) -> dispatch_table.DispatchTable:
    """Raises ConfigError for one that cannot be used here."""
    try:
        text = files.read(path, MAX_FILE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"the dispatch table {path} cannot be read: {exc}") from exc
    return dispatch_table.load(
        text,
        str(path),
        dispatch_table.hardware_of(engine.devices.values()),
        {name: capability.hash for name, capability in engine.capabilities.items()},
        env_ids,
        layerzero_version=__version__,
    )
