"""Copy our worker code to where a foreign interpreter can import it: layerzero.ipc and layerzero.workers, alone.

The copy is named by the hash of what it holds: an upgrade of LayerZero makes a new one, and workers that still run
keep theirs. What is compiled of workers comes along, and is no part of the hash that verdicts depend on: without it the
same steps run in Python, as in an image that has no such file.
"""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path

from layerzero.envs.build.store import built_aside, locked_unless
from layerzero.envs.manifest import package_folder

_PACKAGES = ("ipc", "workers")
_SUFFIXES = (".py", ".json")
_COMPILED = ".so"


@cache
def sources() -> dict[str, bytes]:
    """Path inside the staged package -> content. Read once: a process stages the code it started with, and the hash
    is of what is copied."""
    return _files(_SUFFIXES)


@cache
def compiled() -> dict[str, bytes]:
    """Likewise, what is compiled; empty where there was no C compiler."""
    return _files((_COMPILED,))


def _files(suffixes: tuple[str, ...]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for package in _PACKAGES:
        top = str(package_folder(package))
        for folder, _, files in os.walk(top):
            inside = package + folder.removeprefix(top)
            for name in files:
                if name.endswith(suffixes):
                    found[f"{inside}/{name}"] = Path(folder, name).read_bytes()
    return {name: found[name] for name in sorted(found, key=lambda name: name.split("/"))}  # as workers/agent.py


def _hash_of(files: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, data in files.items():
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()[:16]


@cache
def source_hash() -> str:
    """Part of what makes a probe's verdict valid."""
    return _hash_of(sources())


@cache
def _copy_name() -> str:
    return f"{source_hash()}-{_hash_of(compiled())}" if compiled() else source_hash()


def staged_path(store: Path) -> Path:
    """The folder that goes onto PYTHONPATH."""
    return store / "stage" / _copy_name()


def stage(store: Path) -> Path:
    """Make sure that the copy exists. Cost: some milliseconds the first time, else one stat."""
    target = staged_path(store)
    if not target.is_dir():
        with locked_unless(target, target.is_dir) as lock_fd:
            if lock_fd is not None and not target.is_dir():
                with built_aside(target) as folder:
                    _copy(folder / "layerzero")
    return target


def _copy(package: Path) -> None:
    package.mkdir()
    (package / "__init__.py").touch()  # empty: the real one is the client's public API
    for name, data in {**sources(), **compiled()}.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_bytes(data)
