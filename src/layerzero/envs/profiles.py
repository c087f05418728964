"""Profiles by name: LayerZero's own, and those learned of calls, one file each in the store's folder `profiles/`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layerzero.capabilities.profiles import PROFILES, Profile
from layerzero.ipc import files
from layerzero.ipc.errors import ConfigError
from layerzero.ipc.names import unknown_name
from layerzero.ipc.vocabulary.ops import PUBLIC_OPS
from layerzero.ipc.vocabulary.shape_class import ANY
from layerzero.ipc.vocabulary.tensors import ITEMSIZE

FOLDER = "profiles"
SCHEMA = 1
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
_DTYPES = (ANY, *ITEMSIZE)


def read(name: str, store: Path) -> Profile:
    """The profile that is called so. Raises ConfigError."""
    if name in PROFILES:
        return PROFILES[name]
    path = _path(name, store)
    if not path.is_file():
        text = unknown_name("profile", name, (*PROFILES, *learned(store)))
        raise ConfigError(f"{text}; lz profile learn {name} makes one of the calls that were made")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path}: cannot be read: {exc}; make it anew: lz profile learn {name}") from exc
    return Profile(name, _calls(data, path))


def learned(store: Path) -> list[str]:
    """The names of those in the store."""
    return sorted(path.stem for path in (store / FOLDER).glob("*.json") if _NAME.fullmatch(path.stem))


def write(profile: Profile, store: Path) -> Path:
    """Keep one that was learned. Raises ConfigError for a name that it cannot have."""
    path = _path(profile.name, store)
    if profile.name in PROFILES:
        raise ConfigError(f"the profile {profile.name!r} is LayerZero's own; learn one by another name")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    files.put(path, json.dumps({"schema": SCHEMA, "calls": profile.to_json()}, indent=1) + "\n")
    return path


def _path(name: str, store: Path) -> Path:
    if not _NAME.fullmatch(name):
        text = "a profile's name has up to 40 small letters, digits, '-' and '_'"
        raise ConfigError(f"profile {name!r:.60}: {text}")
    return store / FOLDER / f"{name}.json"


def _calls(data: Any, path: Path) -> Mapping[str, tuple[str, ...]]:
    calls = data.get("calls") if isinstance(data, dict) and data.get("schema") == SCHEMA else None
    if not isinstance(calls, dict):
        raise ConfigError(f'{path}: it must be {{"schema": {SCHEMA}, "calls": {{"OP": ["DTYPE", ...]}}}}')
    found: dict[str, tuple[str, ...]] = {}
    for op, dtypes in calls.items():
        if op not in PUBLIC_OPS:
            raise ConfigError(f"{path}: {unknown_name('op', op, PUBLIC_OPS)}")
        if not isinstance(dtypes, list) or not dtypes:
            raise ConfigError(f"{path}: {op} must have a list of dtypes")
        for dtype in dtypes:
            if dtype not in _DTYPES:
                raise ConfigError(f"{path}: {op}: {unknown_name('dtype', dtype, _DTYPES)}")
        found[op] = tuple(dtypes)
    return found
