"""Which backends from outside may be used: what `lz env add` has recorded.

A backends folder holds allowed.json, NAME -> sha256 under the policy's key `kernel_sources` (docs/policy.md), and one
folder for each backend that was not installed, but added from a folder or a wheel.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from layerzero.envs.build import store
from layerzero.envs.trust.bundle import Bundle, check_name
from layerzero.ipc import files
from layerzero.ipc.errors import ConfigError
from layerzero.ipc.vocabulary.policy import KERNEL_SOURCE, KERNEL_SOURCES

_FILE = "allowed.json"
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Allowed:
    """What policy says of one name: a hash, or REFUSE. `origin`: the file or variable that says it."""

    value: str
    origin: str


def record_path(backends: Path) -> Path:
    return backends / _FILE


def read_record(backends: Path) -> dict[str, str]:
    """NAME -> sha256; empty when nothing was added. Raises ConfigError for a file that is not ours."""
    path = record_path(backends)
    try:
        with path.open("rb") as stream:
            found = json.loads(stream.read(_MAX_BYTES))[KERNEL_SOURCES]
        if not all(isinstance(value, str) and re.match(KERNEL_SOURCE, value) for value in found.values()):
            raise ValueError(f"a value that is not of the form {KERNEL_SOURCE}")
        return dict(found)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as exc:
        raise ConfigError(f"{path}: is no list of allowed backends: {exc}; remove it, then lz env add again") from exc


def allow(backends: Path, bundle: Bundle, *, keep: bool) -> str:
    """Record these very sources, and with `keep` the sources themselves. Returns the hash that was allowed before, or
    "". Raises ConfigError."""
    with _changing(backends) as record:
        before = record.get(bundle.name, "")
        target = backends / bundle.name
        if keep:
            bundle.replace(target)
        else:
            _drop(target)
        record[bundle.name] = bundle.sha256
    return before


def forget(backends: Path, name: str) -> bool:
    """Take a backend from the record, and the sources that were kept of it. False when it was not there. Raises
    ConfigError for what is no name."""
    check_name(name, str(record_path(backends)))
    with _changing(backends) as record:
        _drop(backends / name)
        return record.pop(name, None) is not None


def kept(backends: Path) -> Mapping[str, Path]:
    """The backends that were added from a folder or a wheel."""
    return {path.name: path for path in sorted(backends.glob("[!.]*/")) if path.is_dir()}


@contextmanager
def _changing(backends: Path) -> Iterator[dict[str, str]]:
    path = record_path(backends)
    try:
        backends.mkdir(parents=True, exist_ok=True)
        with store.locked(path):
            record = read_record(backends)
            yield record
            files.put(path, json.dumps({KERNEL_SOURCES: record}, indent=1, sort_keys=True) + "\n")
    except OSError as exc:
        raise ConfigError(f"{exc.filename or path}: {exc.strerror or exc}") from exc


def _drop(target: Path) -> None:
    if target.is_dir():
        with store.locked(target):
            store.discard(target)
