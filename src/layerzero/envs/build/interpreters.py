"""Find the Python that an environment wants."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from layerzero.envs.build.environ import tool_environ
from layerzero.envs.build.installers import find_uv
from layerzero.ipc.errors import EnvError

_MINORS = tuple(f"3.{minor}" for minor in range(10, 20))
_TIMEOUT_S = 60.0
_ASK = (
    "import json, platform as p, sys, sysconfig;"
    "print(json.dumps([sys.executable, p.python_implementation(), p.python_version(), sysconfig.get_platform()]))"
)


@dataclass(frozen=True)
class Python:
    path: Path
    implementation: str
    version: str  # "3.11.7"
    platform: str  # "linux-x86_64"

    @property
    def minor(self) -> str:
        return ".".join(self.version.split(".")[:2])


def host() -> Python:
    """The interpreter that runs this code."""
    facts = platform.python_implementation(), platform.python_version(), sysconfig.get_platform()
    return Python(Path(sys.executable), *facts)


def find(minor: str, env: str) -> Python:
    """An interpreter of version `minor` ("3.11"): ours, one that uv knows, or pythonX.Y on PATH. Raises EnvError."""
    for python in _candidates(minor):
        if python.minor == minor:
            return python
    here = ", ".join(available())
    raise EnvError(
        f"environment {env} needs Python {minor}, and none was found; here are: {here}; install it (for one: uv python "
        f"install {minor}) so that `python{minor}` is on PATH",
        env=env,
        cause=f"Python {minor} not found; here are: {here}",
        repair=f"uv python install {minor}",
    )


@cache
def available() -> tuple[str, ...]:
    """The versions ("3.11") that `find` would find: ours, those that uv knows, pythonX.Y on PATH. Takes seconds where
    there are many; asked once."""
    found = {host().minor}
    if binary := find_uv():
        listed = _output([str(binary), "python", "list", "--only-installed", "--no-python-downloads"]) or ""
        found |= set(re.findall(r"^cpython-(3\.\d+)\.", listed, re.MULTILINE))
    else:  # uv looks at PATH itself
        found |= {minor for minor in _MINORS if (path := shutil.which(f"python{minor}")) and _inspect(path)}
    return tuple(sorted(found, key=lambda minor: int(minor.partition(".")[2])))


def _candidates(minor: str) -> Iterator[Python]:
    yield host()
    if binary := find_uv():
        known = _output([str(binary), "python", "find", "--no-project", "--no-python-downloads", minor])
        if known and (python := _inspect(known.strip())):
            yield python
    if (found := shutil.which(f"python{minor}")) and (python := _inspect(found)):
        yield python


def _inspect(path: str) -> Python | None:
    answer = _output([path, "-I", "-c", _ASK])
    if not answer:  # for one, a version manager's shim without that version
        return None
    executable, *facts = json.loads(answer)
    return Python(Path(executable), *facts)


def _output(argv: list[str]) -> str | None:
    """Of a program; None when it fails, or has no answer in time: a broker waits for it."""
    environ, quiet = tool_environ(os.environ, {}), subprocess.DEVNULL
    try:
        run = subprocess.run(
            argv, env=environ, stdin=quiet, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout if run.returncode == 0 else None
