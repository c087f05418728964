"""What is run against one version after the other: a script, a test for pytest, or a function of a module."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from layerzero.envs.matrix.inside import CALLER
from layerzero.ipc.errors import ConfigError

MAX_SOURCES = 2000  # files beside the target that count; a folder with more is none of sources alone
_FUNCTION = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")
_SKIPPED = {"node_modules", "__pycache__", "site-packages"}


def is_for_pytest(test: str) -> bool:
    """A file named as pytest wants it, or a node in one; anything else is a script."""
    return "::" in test or Path(test).name.startswith("test_") or test.endswith("_test.py")


@dataclass(frozen=True)
class Target:
    """`file`: its source; `node`: of pytest, "::test_x", or the name of a function in `module`; `folder`: from where
    `module` is imported."""

    kind: Literal["script", "pytest", "function"]
    file: Path
    folder: Path
    node: str = ""
    module: str = ""

    @classmethod
    def of(cls, text: str, folder: Path) -> Target:
        """FILE.py, FILE.py::NODE, or MODULE:FUNCTION of a module in `folder`. Raises ConfigError."""
        if match := _FUNCTION.fullmatch(text):
            stem = folder.joinpath(*match[1].split("."))
            file = next((one for one in (stem.with_suffix(".py"), stem / "__init__.py") if one.is_file()), None)
            if file is None:
                raise ConfigError(f"{text!r}: there is no module {match[1]} in {folder}: no {stem}.py; call from there")
            return cls("function", file, folder, match[2], match[1])
        name, separator, node = text.partition("::")
        file = (folder / name).absolute()
        if not file.is_file():
            raise ConfigError(f"{text!r}: there is no such file; allowed: FILE.py, FILE.py::TEST, MODULE:FUNCTION")
        return cls("pytest" if is_for_pytest(text) else "script", file, file.parent, separator + node)

    @property
    def requirements(self) -> tuple[str, ...]:
        """What it takes beside what the user has named."""
        return (f"pytest=={pytest_version()}",) if self.kind == "pytest" else ()

    def command(self, environment: Path) -> list[str]:
        """For the interpreter of an environment. Its exit code is 0 where the target passes."""
        python, file = str(environment / "bin" / "python"), str(self.file)
        if self.kind == "pytest":
            return [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", file + self.node]
        if self.kind == "function":
            return [python, "-P", str(CALLER), self.module, self.node, str(self.folder)]
        return [python, file]

    def digest(self) -> str:
        """Of what it is and of all Python sources in its folder and below, which it may import."""
        digest = hashlib.sha256(f"{self.kind}\0{self.file}\0{self.node}\0".encode())
        for path in self._sources():
            digest.update(f"{path}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()

    def _sources(self) -> Iterator[Path]:
        yield self.file
        count = 0
        for base, folders, files in os.walk(self.folder):
            folders[:] = sorted(one for one in folders if not one.startswith(".") and one not in _SKIPPED)
            for name in sorted(files):
                path = Path(base, name)
                if name.endswith(".py") and path != self.file:
                    count += 1
                    yield path
                if count >= MAX_SOURCES:
                    return


def without(name: str, requirements: Iterable[str]) -> list[str]:
    """The requirements of other distributions than this one, which is named canonically."""
    return [text for text in requirements if canonicalize_name(Requirement(text).name) != name]


def pytest_version() -> str:
    """Of the running process, so that a test means the same there. PackageNotFoundError where there is none."""
    return installed_version("pytest")
