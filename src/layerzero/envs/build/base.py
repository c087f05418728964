"""The interpreter below an overlay: which distributions it has, and where. It may be a venv's."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from packaging.markers import default_environment
from packaging.tags import Tag, compatible_tags, cpython_tags, platform_tags
from packaging.utils import canonicalize_name

from layerzero.envs.build.environ import tool_environ
from layerzero.envs.build.interpreters import Python
from layerzero.ipc.errors import EnvError

OVERLAY, EXISTING = "overlay interpreter", "interpreter"  # what one is wanted for
_REPAIRS = {
    OVERLAY: "lz env build --overlay PYTHON, or the variable LAYERZERO_OVERLAY, with another PYTHON",
    EXISTING: "name another one: lz.env(NAME, from_interpreter=PYTHON)",
}
_OLDEST = (3, 10)  # what the worker code runs on
_TIMEOUT_S = 60.0
# Folders are looked at before their contents are listed: what changes meanwhile is seen as a change later.
_ASK = """
import importlib.metadata, json, os, platform, site, sys, sysconfig
paths = [p for p in (sys.executable, *sys.path) if os.path.exists(p)]
seen = [(p, os.stat(p).st_mtime_ns) for p in paths]
dists = {}
for dist in importlib.metadata.distributions():
    name, version = dist.metadata["Name"], dist.metadata["Version"]
    if name and version:
        dists.setdefault(name, (version, dist.requires or []))
print()
print(json.dumps({
    "python": (sys.executable, platform.python_implementation(), platform.python_version(), sysconfig.get_platform()),
    "prefix": sys.prefix,
    "site": [p for p in site.getsitepackages() if os.path.isdir(p)],
    "abi": f"cp{sys.version_info[0]}{sys.version_info[1]}" + "t" * bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
    "dists": dists,
    "seen": seen,
}))
"""
_known: dict[str, Base] = {}  # by path; an entry holds as long as Base.is_current


@dataclass(frozen=True)
class Distribution:
    version: str
    requires: tuple[str, ...]


@dataclass(frozen=True)
class Base:
    python: Python
    prefix: Path
    site: tuple[Path, ...]  # its folders of packages, first counts
    abi: str  # "cp312"
    dists: Mapping[str, Distribution]  # by canonical name
    seen: tuple[tuple[str, int], ...]  # (path, st_mtime_ns) of all that it imports from

    @property
    def identity(self) -> list[str]:
        """What makes it this interpreter and no other; without what is installed."""
        python = self.python
        return [str(self.prefix.resolve()), python.implementation, python.version, python.platform, self.abi]

    @property
    def is_current(self) -> bool:
        """Whether nothing was installed or removed since."""
        try:
            return all(os.stat(path).st_mtime_ns == mtime for path, mtime in self.seen)
        except OSError:
            return False

    @cached_property
    def tags(self) -> Mapping[Tag, int]:
        """The wheel tags that it can install -> rank, best first."""
        version = (int(self.python.minor.split(".")[0]), int(self.python.minor.split(".")[1]))
        platforms = list(platform_tags())
        ours = [
            *cpython_tags(version, [self.abi], platforms),
            *compatible_tags(version, self.abi.rstrip("t"), platforms),
        ]
        return {tag: rank for rank, tag in enumerate(ours)}

    def markers(self, extra: str) -> dict[str, str]:
        """The environment in which a requirement's marker is to be read."""
        ours: dict[str, str] = {name: str(value) for name, value in default_environment().items()}
        python = self.python
        return {
            **ours,
            "implementation_name": python.implementation.lower(),
            "implementation_version": python.version,
            "platform_python_implementation": python.implementation,
            "python_full_version": python.version,
            "python_version": python.minor,
            "extra": extra,
        }


def inspect(python: Path, role: str = OVERLAY) -> Base:
    """Ask an interpreter what it is and has. Runs it, unless that is known and nothing changed. `role`: what it is
    wanted for, and what an error calls it. Raises EnvError."""
    found = shutil.which(str(python))
    if found is None:
        what = "is a folder" if python.is_dir() else "is no program that can be run"
        raise _unusable(python, f"{what}; name an interpreter, such as /opt/venv/bin/python", role)
    path = os.path.abspath(found)  # not resolved: a venv's python is a link, and the link is what makes it the venv's
    known = _known.get(path)
    if known is None or not known.is_current:
        known = _known[path] = _ask(Path(path), role)
    return known


def _ask(path: Path, role: str) -> Base:
    try:
        answer = subprocess.run(
            [path, "-I", "-B", "-c", _ASK],
            env=tool_environ(os.environ, {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_TIMEOUT_S,
        )
    except OSError as exc:
        is_foreign = exc.errno == errno.ENOEXEC
        why = "is no program for this machine" if is_foreign else f"cannot be run: {exc.strerror or exc}"
        raise _unusable(path, why, role) from exc
    except subprocess.TimeoutExpired as exc:
        raise _unusable(path, f"did not say within {_TIMEOUT_S:g} s what it has", role) from exc
    if answer.returncode != 0:
        last = answer.stderr.strip().rpartition("\n")[2]
        raise _unusable(path, f"ended with {answer.returncode} when asked what it has: {last[-200:]}", role)
    try:
        said = json.loads(answer.stdout.rstrip().rpartition("\n")[2])
        executable, *facts = map(str, said["python"])
        base = Base(
            python=Python(Path(executable), *facts),
            prefix=Path(said["prefix"]),
            site=tuple(map(Path, said["site"])),
            abi=str(said["abi"]),
            dists={
                canonicalize_name(name): Distribution(str(version), tuple(map(str, requires)))
                for name, (version, requires) in reversed(said["dists"].items())  # of two spellings the first counts
            },
            seen=tuple((str(name), int(mtime)) for name, mtime in said["seen"]),
        )
    except (ValueError, KeyError, TypeError) as exc:
        raise _unusable(path, f"is no Python interpreter: it answered {answer.stdout[-80:]!r}", role) from exc
    version = tuple(int(part) for part in base.python.minor.split("."))
    if base.python.implementation != "CPython" or version < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        here = f"is {base.python.implementation} {base.python.version}"
        raise _unusable(path, f"{here}; needs CPython {oldest} or newer", role)
    return base


def _unusable(python: Path, why: str, role: str) -> EnvError:
    return EnvError(f"{role} {python} {why}", env="", cause=f"{python} {why}", repair=_REPAIRS[role])
