"""A folder of wheels: what an environment is built from on a machine without a network."""

from __future__ import annotations

import hashlib
import shlex
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from functools import cached_property
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, platform_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from layerzero.envs.build.base import Base
from layerzero.envs.build.interpreters import Python
from layerzero.ipc.errors import EnvError

# pip takes a platform to the letter, so a command has to name each that projects build for.
_GLIBC_MINORS = (5, 12, 17, 24, 26, 27, 28, 31, 34, 35, 38, 39)


@dataclass(frozen=True)
class Wheel:
    path: Path
    name: str  # canonical
    version: Version
    build: tuple[int, str] | tuple[()]
    tags: frozenset[Tag]

    @cached_property
    def sha256(self) -> str:
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    @cached_property
    def _metadata(self) -> tuple[tuple[str, ...], str]:
        try:
            with zipfile.ZipFile(self.path) as archive:
                names = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA") and n.count("/") == 1]
                message = HeaderParser().parsestr(archive.read(names[0]).decode("utf-8"))
        except (OSError, zipfile.BadZipFile, IndexError, UnicodeDecodeError) as exc:
            cause = f"{self.path} is no readable wheel ({exc}); fetch it again"
            raise EnvError(cause, env="", cause=cause, repair=f"rm {shlex.quote(str(self.path))}") from exc
        return tuple(message.get_all("Requires-Dist", [])), message.get("Requires-Python", "")

    @property
    def requires(self) -> tuple[str, ...]:
        return self._metadata[0]

    def misfit(self, base: Base) -> str:
        """Why `base` cannot use it; empty when it can."""
        if not self.tags & base.tags.keys():
            return f"is not for {base.abi} on {base.python.platform}"
        if not SpecifierSet(self._metadata[1]).contains(base.python.version, prereleases=True):
            return f"needs Python {self._metadata[1]}"
        return ""

    def rank(self, base: Base) -> int:
        """Place of its best tag; lower is more specific."""
        return min(base.tags[tag] for tag in self.tags if tag in base.tags)


class Wheelhouse:
    """The wheels directly in a folder. None is the empty one."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder.absolute() if folder else None
        self._wheels: dict[str, list[Wheel]] = {}
        self._files: list[Path] = []
        if self.folder is None:
            return
        if not self.folder.is_dir():
            cause = f"wheelhouse {self.folder} is no folder; name one with --wheelhouse or LAYERZERO_WHEELHOUSE"
            raise EnvError(cause, env="", cause=cause, repair=f"mkdir {shlex.quote(str(self.folder))}")
        self._files = sorted(path for path in self.folder.iterdir() if path.is_file())
        for path in self._files:
            if path.suffix == ".whl":
                try:
                    name, version, build, tags = parse_wheel_filename(path.name)
                except InvalidWheelFilename:
                    continue  # pip and uv ignore it too; `has` shows it
                self._wheels.setdefault(name, []).append(Wheel(path, name, version, build, tags))

    def wheels(self, name: str) -> Sequence[Wheel]:
        return self._wheels.get(name, ())

    def has(self, name: str, base: Base | None = None) -> str:
        """What is here of a distribution, and what is wrong with it for `base`, for an error message."""
        if self.folder is None:
            return "no wheelhouse is given (--wheelhouse DIR)"
        found = []
        misfits = {wheel.path: wheel.misfit(base) if base else "" for wheel in self.wheels(name)}
        for path in self._files:
            if path in misfits:
                found.append(path.name + (f" ({misfits[path]})" if misfits[path] else ""))
            elif canonicalize_name(path.name).startswith(f"{name}-"):
                found.append(f"{path.name} (is no wheel of {name})")
        return f"{self.folder} has {', '.join(found) or f'no {name}'}"

    def download_command(self, requirements: Iterable[str], python: Python) -> str:
        """The `pip download` that brings these here, to be run where there is a network."""
        machine = python.platform.partition("-")[2].replace("-", "_")
        ours = set(platform_tags())
        platforms = [f"manylinux_2_{minor}_{machine}" for minor in _GLIBC_MINORS]
        chosen = [platform for platform in platforms if platform in ours]
        argv = [
            *("python", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
            *("--dest", str(self.folder or "wheelhouse"), "--python-version", python.minor),
            *(part for platform in chosen for part in ("--platform", platform)),
            *requirements,
        ]
        return shlex.join(argv)
