"""An interpreter of the user's as an environment: looked at, never changed. What it is named by is what is installed
there, so that another state of it is another environment.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import stat
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerzero.envs.build.base import EXISTING, Base, inspect
from layerzero.envs.build.requirements import unmet
from layerzero.envs.manifest import WORKER_REQUIREMENTS, EnvManifest
from layerzero.ipc.errors import EnvError

_SHOWN = 4  # changes that are named
_MAX_LINKS = 40  # as the kernel follows
_MAX_BYTES = 64 << 20  # of a file that tells what is installed
_TOLD_BY = ("RECORD", "METADATA", "PKG-INFO", "direct_url.json")  # what says which files a distribution has, and whence


@dataclass(frozen=True)
class Existing:
    """`installed`: distributions, .pth files and packages of conda -> a hash of what says which files they have."""

    manifest: EnvManifest
    path: Path
    base: Base
    installed: Mapping[str, str]
    lacks: tuple[tuple[str, str], ...]  # of what worker code needs, and why; it comes from beside the interpreter

    @property
    def identity(self) -> list[str]:
        return [str(self.path), *self.base.identity, self.digest]

    @property
    def beside(self) -> EnvManifest:
        """What is to be put beside it, as an environment that has it alone."""
        return self.manifest.beside(self.base.python.minor, [asked for asked, _ in self.lacks])

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(sorted(self.installed.items())).encode()).hexdigest()[:16]

    @property
    def text(self) -> str:
        return f"{self.path} (Python {self.base.python.version}, {len(self.base.dists)} distributions, {self.digest})"

    def record(self) -> dict[str, Any]:
        """What an environment's record keeps of it."""
        return {"path": str(self.path), "identity": self.identity, "installed": dict(self.installed)}

    def environ(self) -> dict[str, str]:
        """Variables of its workers: nothing is written there, and what conda's libraries look for."""
        is_conda = (self.base.prefix / "conda-meta").is_dir()
        return {"PYTHONDONTWRITEBYTECODE": "1", **({"CONDA_PREFIX": str(self.base.prefix)} if is_conda else {})}


def look(manifest: EnvManifest) -> Existing:
    """The interpreter of a manifest as it is now. Raises EnvError with what to do: for a path that is no Python, one
    that is too old or of another platform, what others may write to, and requirements that do not hold there."""
    path = _executable(manifest)
    _demand_ours(path, manifest.name)
    base = inspect(path, EXISTING)
    for folder in {base.prefix, *base.site, *(Path(name) for name, _ in base.seen)}:
        _demand_ours(folder, manifest.name)
    ours = sysconfig.get_platform()
    if base.python.platform != ours:
        why = f"is of another platform, {base.python.platform}; this machine's workers are of {ours}"
        raise _error(manifest.name, f"name another interpreter\n{path} {why}", f"{path} {why}")
    _demand_requirements(manifest, path, base)
    lacks = unmet(WORKER_REQUIREMENTS, base.dists.get, base.markers, is_deep=False)
    return Existing(manifest, path, base, _installed(base), tuple(lacks))


def changes(record: Mapping[str, Any], now: Existing) -> str:
    """What of the interpreter is no longer as it was recorded; empty when nothing."""
    then = record["interpreter"]
    if then["identity"] == now.identity:
        return ""
    before, after = then["installed"], now.installed
    was = {key.partition(" ")[0]: key for key in before.keys() - after.keys()}
    told = []
    for key in after.keys() - before.keys():
        name, _, version = key.partition(" ")
        told.append(f"{was.pop(name)} is now {version}" if name in was else f"{key} was added")
    told += [f"{key} is gone" for key in was.values()]
    told += [f"{key} has other files" for key in after.keys() & before.keys() if before[key] != after[key]]
    if not told:
        told = [f"Python {record['python']} is now {now.base.python.version}"]
    shown = ", ".join(sorted(told)[:_SHOWN]) + (f" and {len(told) - _SHOWN} more" if len(told) > _SHOWN else "")
    return f"{now.path} has changed since it was looked at: {shown}"


def pip_command(path: Path, base: Base, requirements: Sequence[str]) -> str:
    """What installs requirements into an interpreter, for its owner to run."""
    words = ["pip", "install", *requirements]
    if "pip" in base.dists:
        return shlex.join([str(path), "-m", *words])
    return shlex.join(["uv", *words[:2], "--python", str(path), *requirements])


def _executable(manifest: EnvManifest) -> Path:
    """The interpreter that is named, or the one of the folder that is. Not resolved: a venv's is a link."""
    named = Path(str(manifest.executable))
    path = named
    if named.is_dir():
        found = [named / "bin" / name for name in ("python", "python3") if (named / "bin" / name).exists()]
        if not found:
            why = f"{named} is a folder without bin/python"
            raise _error(manifest.name, f"name an interpreter, or the folder of a venv\n{why}", why)
        path = found[0]
    if not path.exists():
        why = "does not exist" if not path.is_symlink() else f"leads to {os.readlink(path)}, which does not exist"
        raise _error(manifest.name, f"name an interpreter that is there\n{path} {why}", f"{path} {why}")
    if shutil.which(str(path)) is None:
        repair = shlex.join(["chmod", "u+x", str(path)])
        why = "is not executable" if path.is_file() else "is no file"
        raise _error(manifest.name, f"run: {repair}, if it is a Python\n{path} {why}", f"{path} {why}")
    return path


def _demand_ours(path: Path, env: str) -> None:
    """What lies there is executed: nobody but us and root may put something in its place (docs/security.md)."""
    real = path.resolve()
    direct = {real} if path.is_dir() else {real, real.parent, *(one.parent for one in _links(path))}
    above = {one for place in direct for one in place.parents} - direct
    for one in sorted(direct | above):
        info = one.stat()
        is_guarded = one in above and bool(info.st_mode & stat.S_ISVTX)  # what lies there only its owner can replace
        if info.st_mode & stat.S_IWOTH and not is_guarded:
            repair = shlex.join(["chmod", "o-w", str(one)])
            why = f"everybody may write to {one}, and what lies there would be executed"
            raise _error(env, f"run: {repair}\n{why} for {path}", why, repair)
        if info.st_uid not in (0, os.geteuid()):
            why = f"{one} belongs to user {info.st_uid}, who could change what is executed; you are {os.geteuid()}"
            raise _error(env, f"name an interpreter of your own, or of root's\n{why}", why)


def _links(path: Path) -> Iterator[Path]:
    """The path, and each link that it leads over."""
    one = path.absolute()
    for _ in range(_MAX_LINKS):
        yield one
        if not one.is_symlink():
            return
        one = one.parent / os.readlink(one)


def _demand_requirements(manifest: EnvManifest, path: Path, base: Base) -> None:
    requirements = manifest.variants["cpu"].requirements
    wrong = unmet(requirements, base.dists.get, base.markers, is_deep=False)
    if wrong:
        repair = pip_command(path, base, list(dict.fromkeys(asked for asked, _ in wrong)))
        why = "; ".join(f"{asked}: {reason}" for asked, reason in wrong)
        text = f"{path} does not have what environment {manifest.name} requires: {why}"
        raise _error(manifest.name, f"run: {repair}, or name another interpreter\n{text}", text, repair)


def _installed(base: Base) -> dict[str, str]:
    found: dict[str, str] = {}
    for folder in dict.fromkeys(Path(name) for name, _ in base.seen):
        if folder.is_dir():
            for key, digest in _of_folder(folder):
                found.setdefault(key, digest)
    with suppress(OSError):
        for one in (base.prefix / "conda-meta").glob("*-*-*.json"):
            name, version, build = one.stem.rsplit("-", 2)
            found[f"conda:{name} {version}-{build}"] = ""
    return found


def _of_folder(folder: Path) -> Iterator[tuple[str, str]]:
    for entry in sorted(os.scandir(folder), key=lambda one: one.name):
        stem, dot, kind = entry.name.rpartition(".")
        if dot and kind in ("dist-info", "egg-info"):
            name, _, version = stem.partition("-")
            files = [Path(entry.path, one) for one in _TOLD_BY] if entry.is_dir() else [Path(entry.path)]
            yield f"{name} {version}".rstrip(), _digest(files)
        elif dot and kind in ("pth", "egg-link"):
            yield entry.name, _digest([Path(entry.path)])


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with suppress(OSError), file.open("rb") as stream:
            digest.update(f"{file.name}\0".encode() + stream.read(_MAX_BYTES))
    return digest.hexdigest()[:16]


def _error(env: str, text: str, cause: str, repair: str = "") -> EnvError:
    return EnvError(text, env=env, cause=cause, repair=repair or f"name another interpreter, or: lz env remove {env}")
