"""A package of the HF Kernel Hub in this worker's environment, for providers: loaded by path from the folder into which
the build has put it, never by the network."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

from layerzero.ipc.errors import ConfigError
from layerzero.workers.boot import import_file

VARIABLE = "LAYERZERO_HUB_KERNELS"  # set by envs/hub/placing.py


def load_package() -> ModuleType:
    """Its module: `__init__.py` of the build, or of the one folder in it that has such a file. Raises ConfigError."""
    said = os.environ.get(VARIABLE)
    if not said:
        raise ConfigError("add a table [hub] to the backend's manifest: this environment has no kernels of the hub")
    folder = Path(said)
    found = [path for path in (folder / "__init__.py", *sorted(folder.glob("*/__init__.py"))) if path.is_file()]
    if not found or (len(found) > 1 and found[0].parent != folder):
        there = ", ".join(str(path.parent.relative_to(folder)) for path in found) or "none"
        raise ConfigError(f"pin a build with one package in it: {folder} has these: {there}")
    return import_file("layerzero_hub_kernels", found[0])
