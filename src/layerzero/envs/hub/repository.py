"""Where the files of a kernel repository come from: the hub, or a folder that has them already."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerzero.envs.manifest import COMMIT_PATTERN, Hub
from layerzero.ipc import files
from layerzero.ipc.errors import EnvError

_NOT_KERNELS = frozenset({"__pycache__"})  # bytecode that was made where the folder was used


@dataclass(frozen=True)
class Opened:
    """One build of a repository, as files. `folder`: build/BUILD. `revision`: the commit."""

    name: str
    folder: Path
    revision: str

    def files(self, most: int, most_bytes: int) -> Iterator[tuple[str, bytes]]:
        """Path and bytes of each file, in order of their paths. Raises EnvError for links, and for more than that."""
        paths = sorted(self._walk())
        if len(paths) > most:
            raise _failed(self.name, f"{self.folder} has {len(paths):,} files; allowed: {most:,}")
        for path in paths:
            yield path, self.read(path, most_bytes)

    def _walk(self) -> Iterator[str]:
        for base, folders, names in os.walk(self.folder):
            folders[:] = [name for name in folders if name not in _NOT_KERNELS]
            for name in (*folders, *names):
                if Path(base, name).is_symlink():
                    raise _failed(self.name, f"{Path(base, name)} is a link; a copy of the file must lie there")
            yield from (Path(base, name).relative_to(self.folder).as_posix() for name in names)

    def read(self, path: str, most_bytes: int) -> bytes:
        """A file's bytes. Raises EnvError where it is not there, leads elsewhere or is larger."""
        try:
            found = (self.folder / path).resolve(strict=True)
            if not found.is_relative_to(self.folder.resolve()):
                raise _failed(self.name, f"{self.folder / path} leads out of the repository")
            return files.read(found, most_bytes)
        except OSError as exc:
            raise _failed(self.name, f"{self.folder / path}: {exc.strerror}") from exc


@dataclass(frozen=True)
class Repository:
    """`folder`: a copy of the repository here, as git clone makes it; None for the hub itself, unless this build
    `is_offline`."""

    folder: Path | None = None
    is_offline: bool = False

    @contextmanager
    def opened(self, name: str, hub: Hub, build: str, revision: str = "") -> Iterator[Opened]:
        """One build, until the block ends. `name`: of the environment; `revision`: a commit, else what the manifest
        says, which a folder cannot look up. Raises EnvError."""
        wanted = revision or hub.revision
        if self.folder is None and self.is_offline:
            cause = f"the kernels of {hub.repository} are on the hub, and this build uses no network"
            raise _failed(name, cause, repair="pass --hub-folder DIR with a copy of the repository")
        if self.folder is None:
            with tempfile.TemporaryDirectory(prefix="lz-hub-") as into:
                commit = _download(name, hub.repository, wanted, build, Path(into))
                yield Opened(name, Path(into) / "build" / build, commit)
            return
        found = self.folder.absolute() / "build" / build
        if not re.fullmatch(COMMIT_PATTERN, wanted):
            cause = f"of a folder only you know the commit: hub.revision is {wanted!r}; allowed: 40 hexadecimal digits"
            raise _failed(name, cause, repair="set hub.revision in the manifest to the commit that the folder has")
        if not found.is_dir():
            there = ", ".join(sorted(path.name for path in found.parent.glob("*/"))) or "none"
            raise _failed(name, f"{found} is not there; builds of this folder: {there}", repair="set hub.build")
        yield Opened(name, found, wanted)


def _download(name: str, repository: str, revision: str, build: str, into: Path) -> str:
    """Into a folder; returns the commit."""
    try:
        import huggingface_hub
    except ImportError as exc:
        cause = "kernels come from the hub by the package huggingface_hub, which is not installed"
        raise _failed(name, cause, repair="pip install 'layerzero-broker[hub]', or pass --hub-folder DIR") from exc
    api: Any = huggingface_hub.HfApi(library_name="layerzero")
    try:
        commit = revision
        if not re.fullmatch(COMMIT_PATTERN, revision):
            commit = str(api.repo_info(repository, repo_type="kernel", revision=revision).sha)
        api.snapshot_download(
            repository, repo_type="kernel", revision=commit, allow_patterns=[f"build/{build}/*"], local_dir=into
        )
    except Exception as exc:  # of its HTTP library, of its own, of the system: all mean that it did not come
        first = (str(exc).splitlines() or [""])[0]
        cause = f"{repository} at {revision} cannot be had from the hub: {type(exc).__name__}: {first}"[:500]
        raise _failed(name, cause, repair="try again, or pass --hub-folder DIR with a copy of the repository") from exc
    if not (into / "build" / build).is_dir():
        raise _failed(name, f"{repository} at {commit} has no build/{build}", repair="set hub.build in the manifest")
    return commit


def _failed(name: str, cause: str, repair: str = "mend the repository's folder, or take it from the hub") -> EnvError:
    return EnvError(f"{repair}: environment {name}: {cause}", env=name, cause=cause, repair=repair)
