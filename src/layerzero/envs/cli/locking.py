"""`lz env lock` and `lz env show` of what programs declare: environments of functions and their lock files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from layerzero.envs import conflicts, functions, sources
from layerzero.envs.build.lock import Lock
from layerzero.envs.cli.rows import failing_cleanly, out, print_json
from layerzero.envs.declared import Declared
from layerzero.envs.locked import LockFile
from layerzero.envs.manifest import EnvManifest, load
from layerzero.ipc.errors import ConfigError, EnvError, InvalidArgument

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


def show(name: str, store: Path, *, as_json: bool) -> None:
    """What a program has declared, and what of it does not hold in this interpreter."""
    with failing_cleanly():
        full = functions.full_name(name, store)
        path = functions.folder(store) / f"{full}.toml"
        if not path.is_file():
            known = ", ".join(sorted(one.stem for one in functions.folder(store).glob("*.toml"))) or "none"
            text = f"no program has declared an environment {name!r} here; known: {known}"
            raise EnvError(text, env=name, cause=text, repair="run the program that declares it")
        manifest = load(path)
        asked = functions.declared_by(manifest)
        pins = functions.pins(asked, store) if asked.backend == full else {}
        found = conflicts.find(asked.requires, asked.python, asked.interpreter, pins)
        row = {
            "name": full,
            "python": asked.python or asked.interpreter,
            "requires": list(asked.requires),
            "lock": asked.lock or None,
            "image": asked.image or None,
            "built": functions.built(asked, store) is not None,
            "conflicts": [one._asdict() for one in found],
        }
    if as_json:
        print_json([row])
        return
    shown = {
        "name": full,
        "python": asked.python or asked.interpreter,
        "requires": ", ".join(asked.requires) or "-",
        "lock": asked.lock or "-",
        **(
            {"image": asked.image, "worker": f"python -m layerzero.workers.join --backend {full}"}
            if asked.image
            else {}
        ),
        "built": "yes" if row["built"] else "no",
    }
    for key, text in shown.items():
        out.print(f"{key:10}{text}", highlight=False, markup=False, soft_wrap=True)
    out.print(f"\n{found}", highlight=False, markup=False, soft_wrap=True)


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
