"""Ask the resolver whether requirements go together, and for the exact set of wheels if they do."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from packaging.utils import canonicalize_name

from layerzero.envs.build.environ import tool_environ
from layerzero.envs.build.installers import Uv, uv, without_passwords
from layerzero.envs.build.interpreters import Python
from layerzero.envs.matrix.bisect import above
from layerzero.ipc.errors import EnvError

_PIN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)", re.MULTILINE)
# How uv starts its reasons; anything else that it says on failure (no network, a broken index) is no verdict.
_REFUSAL = re.compile(r"No solution found|has no usable wheels|were not found in the package registry|Conflicting")


@dataclass(frozen=True)
class Resolved:
    """A lock: every wheel by its hashes."""

    text: str

    @property
    def versions(self) -> dict[str, str]:
        return {canonicalize_name(name): version for name, version in _PIN.findall(self.text)}


@dataclass(frozen=True)
class Refused:
    """The resolver's words."""

    message: str

    @property
    def summary(self) -> str:
        """The conclusion, in one line."""
        flat = re.sub(r"[^\x21-\x7e]+", " ", self.message).strip()  # without the arrows that uv draws
        flat = re.sub(r"^.*?(?:cause: )?(?=Because )", "", flat, count=1)
        return flat.partition(" hint: ")[0]


def the_uv() -> Uv:
    """uv. Raises EnvError where there is none: pip cannot resolve without installing."""
    tool = uv()
    if tool is None:
        raise EnvError("the matrix needs uv", env="", cause="no uv on PATH", repair="python -m pip install uv")
    return tool


def resolve(
    tool: Uv, requirements: Sequence[str], python: Python, *, with_dependencies: bool = True
) -> Resolved | Refused:
    """Resolve to wheels for this machine and the interpreter. Downloads metadata only. Raises EnvError when the
    resolver could not do its work."""
    argv = [
        *(tool.binary, "pip", "compile", "-", "--quiet", "--generate-hashes", "--only-binary", ":all:"),
        *("--python", python.path, "--no-python-downloads", "--no-header", "--no-annotate"),
        *("--no-emit-index-url", "--no-emit-find-links"),
        *(() if with_dependencies else ("--no-deps",)),
        *tool.flags,
    ]
    answer = subprocess.run(
        list(map(str, argv)),
        input="\n".join(dict.fromkeys(requirements)),
        env=tool_environ(os.environ, tool.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode == 0:
        return Resolved(answer.stdout)
    said = without_passwords(answer.stderr.strip())
    if _REFUSAL.search(said):
        return Refused(said)
    raise EnvError(
        f"{', '.join(requirements)} could not be resolved:\n{said}",
        env="",
        cause=said,
        repair="check the network and the indexes that pip and uv are configured with",
    )


def versions_between(
    tool: Uv, name: str, first: str, last: str, python: Python, on_found: Callable[[str], None] = lambda version: None
) -> list[str]:
    """The releases of a distribution that have a wheel for this machine, oldest first. Bounds are prefixes: 1.19 admits
    1.19.2. They are asked of the resolver one by one, so that all of its configuration counts. Raises EnvError."""
    found: list[str] = []
    below = above(last)
    while True:
        answer = resolve(tool, [f"{name}>={first},<{below}"], python, with_dependencies=False)
        version = None if isinstance(answer, Refused) else answer.versions.get(canonicalize_name(name))
        if version is None:
            return found[::-1]
        found.append(version)
        on_found(version)
        below = version.partition("+")[0]  # no bound may be a local version, such as 2.13.0+cpu
