"""`lz env lock` of what programs declare: lock files of environments of functions."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from layerzero.envs import functions, sources
from layerzero.envs.build.lock import Lock
from layerzero.envs.cli.rows import failing_cleanly, out, print_json
from layerzero.envs.declared import Declared
from layerzero.envs.locked import LockFile
from layerzero.envs.manifest import EnvManifest
from layerzero.ipc.errors import ConfigError, InvalidArgument

HERE = f"3.{sys.version_info[1]}"


def lock_program(manifest: EnvManifest, store: Path, *, as_json: bool) -> dict[str, Any]:
    """What `lz.env(..., lock=PATH)` has declared. Returns the row of the answer."""
    with failing_cleanly():
        return _shown(*functions.lock(manifest, store), as_json=as_json)


def lock_file(
    path: Path, store: Path, *, python: str | None, output: Path | None, extras: Sequence[str], as_json: bool
) -> None:
    """What a file of a project asks for. A lock file is resolved again, for what its head says."""
    with failing_cleanly():
        try:
            asked = _declared(path, python, output, extras)
        except InvalidArgument as exc:
            raise ConfigError(exc.message) from exc
        row = _shown(*functions.write(asked, store), as_json=as_json)
    if as_json:
        print_json([row])


def _declared(path: Path, python: str | None, output: Path | None, extras: Sequence[str]) -> Declared:
    target = output or path.with_name(f"{'pyproject' if path.is_dir() else path.stem}.lock.txt")
    if path.is_dir():
        target = output or path / "pyproject.lock.txt"
    if path.suffix == ".txt" and not extras:
        with suppress(ConfigError):
            old = LockFile.read(path)
            return Declared.of(old.name, old.requires, python or old.python, lock=output or path)
    chosen = python or HERE
    asked = sources.of_file(path, extras=extras, python=chosen)
    return Declared.of(asked.name, asked.requires, chosen, lock=target)


def _shown(written: Lock, backend: str, *, as_json: bool) -> dict[str, Any]:
    if not as_json:
        text = f"{written.path}: {len(written.pins)} packages; to build it: lz env build {backend}"
        out.print(text, highlight=False, soft_wrap=True)
    return {"name": backend, "variant": "cpu", "path": str(written.path), "pins": written.pins}
