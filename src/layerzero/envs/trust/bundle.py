"""A backend from outside: the few files that make it, read without importing any of them, and named by their hash.

Manifest, provider, descriptor and locks lie side by side in one folder; nothing else of a package counts.
"""

from __future__ import annotations

import configparser
import hashlib
import itertools
import os
import re
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from layerzero.envs.build import store
from layerzero.envs.manifest import parse_toml
from layerzero.ipc.errors import ConfigError

ENTRY_POINTS = "layerzero.backends"
MAX_FILE_BYTES = 1 << 20
MAX_WHEEL_MEMBERS = 10_000
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_BACKEND_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_PACKAGE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_HASHED = b"layerzero backend 1\0"  # raise it when the way of hashing changes

Read = Callable[[str], bytes]  # by file name; raises ConfigError


@dataclass(frozen=True)
class Bundle:
    """`files`: all that counts, by plain name. `origin`: where they come from, for people."""

    name: str
    files: Mapping[str, bytes]
    origin: str

    @cached_property
    def sha256(self) -> str:
        """Of every name and byte, as `kernel_sources` has it."""
        digest = hashlib.sha256(_HASHED)
        for name, data in sorted(self.files.items()):
            digest.update(f"{name}\0{len(data)}\0".encode() + data)
        return f"sha256:{digest.hexdigest()}"

    def staged_path(self, root: Path) -> Path:
        return root / "backends" / f"{self.name}-{self.sha256.removeprefix('sha256:')[:16]}"

    def stage(self, root: Path) -> Path:
        """Make sure that these very bytes lie in the store, and return their folder. Cost: it reads the copy."""
        target = self.staged_path(root)
        if not self._is_in(target):
            with store.locked(target):
                if not self._is_in(target):  # nobody was faster: who reads the copy may be starting a worker
                    with store.built_aside(target) as folder:
                        self._write(folder)
        return target

    def replace(self, target: Path) -> None:
        """Become what lies in `target`. Killed at any moment, the old or the new is there, whole."""
        target.parent.mkdir(parents=True, exist_ok=True)
        with store.locked(target), store.built_aside(target) as folder:
            self._write(folder)

    def _write(self, folder: Path) -> None:
        for name, data in self.files.items():
            (folder / name).write_bytes(data)

    def _is_in(self, folder: Path) -> bool:
        try:
            return {path.name for path in folder.iterdir()} >= set(self.files) and all(
                _read_file(folder / name) == data for name, data in self.files.items()
            )
        except (OSError, ConfigError):
            return False


def read_folder(folder: Path, name: str, origin: str) -> Bundle:
    """The backend `name` whose manifest is FOLDER/NAME.toml. Raises ConfigError."""
    return _read(name, origin, lambda file: _read_file(folder / file), str(folder))


def read_wheel(path: Path) -> list[Bundle]:
    """All backends that a wheel declares. Nothing is unpacked. Raises ConfigError."""
    try:
        with zipfile.ZipFile(path) as archive:
            if len(archive.infolist()) > MAX_WHEEL_MEMBERS:
                raise ConfigError(f"{path}: has {len(archive.infolist())} files; allowed: {MAX_WHEEL_MEMBERS}")
            return list(_in_wheel(path, archive))
    except (OSError, EOFError, zlib.error, zipfile.BadZipFile, NotImplementedError, RuntimeError) as exc:
        # RuntimeError: it is encrypted
        raise ConfigError(f"{path}: cannot be read as a wheel: {exc}") from exc


def _in_wheel(path: Path, archive: zipfile.ZipFile) -> Iterator[Bundle]:
    def read(member: str) -> bytes:
        try:
            info = archive.getinfo(member)
        except KeyError:
            raise ConfigError(f"{path}: {member} is not in it") from None
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # what wheels have; others take memory
            raise ConfigError(f"{path}: {member} is compressed as type {info.compress_type}; allowed: stored, deflated")
        with archive.open(info) as stream:
            data = stream.read(MAX_FILE_BYTES + 1)  # the size that the archive states may be a lie
        return _checked(data, f"{path}: {member}")

    infos = [name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/entry_points\.txt", name)]
    declared = _declared(read(infos[0]).decode("utf-8", "replace"), f"{path}: {infos[0]}") if len(infos) == 1 else {}
    if not declared:
        raise ConfigError(f"{path}: declares no backend; it needs an entry point of the group {ENTRY_POINTS!r}")
    for name, package in declared.items():
        inside = PurePosixPath(*package_parts(name, package, str(path)))
        yield _read(name, path.name, lambda file, inside=inside: read(str(inside / file)), f"{path}: {inside}")  # type: ignore[misc]


def _declared(text: str, where: str) -> dict[str, str]:
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[method-assign,assignment]  # names are case-sensitive
    try:
        parser.read_string(text)
    except configparser.Error as exc:
        raise ConfigError(f"{where}: {str(exc).splitlines()[0]}") from exc
    return dict(parser[ENTRY_POINTS]) if parser.has_section(ENTRY_POINTS) else {}


def check_name(name: str, where: str) -> None:
    """Raises ConfigError for what is no name of a backend: names become those of files and folders."""
    if not _BACKEND_NAME.fullmatch(name):
        raise ConfigError(f"{where}: {name!r:.80} is no name of a backend; allowed: {_BACKEND_NAME.pattern}")


def package_parts(name: str, package: str, where: str) -> tuple[str, ...]:
    """The folders that an entry point NAME = PACKAGE leads to. Raises ConfigError."""
    check_name(name, where)
    if not _PACKAGE.fullmatch(package):
        raise ConfigError(
            f"{where}: entry point {name}: {package!r:.80} must be a package, such as my_backend: it is looked into, "
            "never imported"
        )
    return tuple(package.split("."))


def _read(name: str, origin: str, read: Read, where: str) -> Bundle:
    """Follow the manifest to the other files. Its values are checked for what they lead to, no further."""
    check_name(name, where)
    files = {f"{name}.toml": read(f"{name}.toml")}
    manifest = parse_toml(files[f"{name}.toml"], f"{where}: {name}.toml")
    if manifest.get("interpreter", "venv") != "venv":
        raise ConfigError(
            f"{where}: {name}.toml: interpreter is {manifest['interpreter']!r:.80}; a backend from outside has an "
            "environment of its own: leave it out, and give `python` and [variants.*]"
        )
    for key, suffix in (("provider", ".py"), ("descriptor", ".json")):
        file = manifest.get(key)
        if not isinstance(file, str) or not _PLAIN_NAME.fullmatch(file) or not file.endswith(suffix):
            raise ConfigError(
                f"{where}: {name}.toml: {key} is {file!r:.80}; it must be a file {suffix} beside the manifest"
            )
        files[file] = read(file)
    variants, others = manifest.get("variants"), manifest.get("other_pythons")
    tags = ["", *(f".py{str(one).replace('.', '')}" for one in (others if isinstance(others, list) else ()))]
    for variant, tag in itertools.product(variants if isinstance(variants, dict) else (), tags):
        lock = f"{name}.{variant}{tag}.txt"
        if not _PLAIN_NAME.fullmatch(lock):
            raise ConfigError(f"{where}: {name}.toml: {variant!r:.80} is no variant")
        try:
            files[lock] = read(lock)
        except ConfigError as exc:
            raise ConfigError(
                f"{exc.message}. What a backend from outside requires is locked by its author: "
                f"lz env lock {name} --manifests FOLDER, where FOLDER holds {name}.toml"
            ) from exc
    for variant in variants if "hub" in manifest and isinstance(variants, dict) else ():  # names are checked above
        files[f"{name}.{variant}.hub.json"] = read(f"{name}.{variant}.hub.json")
    return Bundle(name, files, origin)


def _read_file(path: Path) -> bytes:
    """A regular file, not through a link and not a large one."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as stream:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ConfigError(f"{path}: is no regular file")
            return _checked(stream.read(MAX_FILE_BYTES + 1), str(path))
    except OSError as exc:
        what = "is a link; a copy of the file must lie there" if path.is_symlink() else exc.strerror
        raise ConfigError(f"{path}: {what}") from exc


def _checked(data: bytes, where: str) -> bytes:
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{where}: larger than {MAX_FILE_BYTES:,} bytes, the most that is allowed")
    return data
