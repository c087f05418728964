"""Wheels made for a test: tiny ones, and installed distributions packed again. No network."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

_NOT_PACKED = ("INSTALLER", "REQUESTED", "RECORD", "direct_url.json")


def make_wheel(
    folder: Path,
    name: str,
    version: str,
    *,
    requires: Sequence[str] = (),
    requires_python: str = "",
    tag: str = "py3-none-any",
) -> Path:
    """A wheel with one module that knows its version."""
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    metadata += [f"Requires-Dist: {text}" for text in requires]
    metadata += [f"Requires-Python: {requires_python}"] if requires_python else []
    module, info = name.replace("-", "_"), f"{name.replace('-', '_')}-{version}.dist-info"
    files = {
        f"{module}.py": f"VERSION = {version!r}\n".encode(),
        f"{info}/METADATA": ("\n".join(metadata) + "\n").encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n".encode(),
    }
    return _write(folder / f"{module}-{version}-{tag}.whl", info, files)


def pack(folder: Path, name: str) -> Path:
    """The wheel that an installed distribution came from, as far as its files say."""
    dist = importlib.metadata.distribution(name)
    packed = {str(path): path for path in dist.files or () if ".." not in path.parts and path.suffix != ".pyc"}
    files = {
        file: Path(str(dist.locate_file(path))).read_bytes()
        for file, path in packed.items()
        if path.name not in _NOT_PACKED
    }
    info = next(file.partition("/")[0] for file in files if file.endswith(".dist-info/METADATA"))
    tags = [line.removeprefix("Tag: ") for line in files[f"{info}/WHEEL"].decode().split("\n") if line[:4] == "Tag:"]
    parts = [".".join(dict.fromkeys(column)) for column in zip(*(tag.split("-") for tag in tags), strict=True)]
    return _write(folder / f"{info.removesuffix('.dist-info')}-{'-'.join(parts)}.whl", info, files)


def unpack(wheel: Path, site: Path) -> None:
    """Install a wheel into a folder of packages."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)


def _write(path: Path, info: str, files: Mapping[str, bytes]) -> Path:
    lines = []
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={digest},{len(data)}")
        archive.writestr(f"{info}/RECORD", "\n".join([*lines, f"{info}/RECORD,,"]) + "\n")
    return path
