"""Backends from outside, made for a test: the files, a package that is installed beside us, a wheel."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

PROVIDER = "raise RuntimeError('nothing of a backend from outside may run here')\n"
LOCK = "".join(f"{pin} \\\n    --hash=sha256:{'0' * 64}\n" for pin in ("msgpack==1.1.0", "pyzmq==27.0.0"))


def descriptor(name: str, **changes: Any) -> dict[str, Any]:
    """One silu kernel."""
    claims = {"priority": 40, "source": "test", "dtypes": ["float32"], "deterministic": True}
    return {
        "schema_version": "1.0",
        "backend": name,
        "backend_version": "1",
        "platform": "cpu",
        "ops": {"silu": [{"kernel_id": f"{name}.silu", **claims}]},
        **changes,
    }


def files(name: str, **changes: str) -> dict[str, str]:
    """The files of a good backend; `changes` replaces some by their key: manifest, provider, descriptor, lock."""
    manifest = 'summary = "test"\nprovider = "provider.py"\ndescriptor = "ops.json"\npython = "3.11"\n'
    texts = {
        "manifest": f"{manifest}[variants.cpu]\nrequirements = []\n",
        "provider": PROVIDER,
        "descriptor": json.dumps(descriptor(name)),
        "lock": LOCK,
        **changes,
    }
    keys = {f"{name}.toml": "manifest", "provider.py": "provider", "ops.json": "descriptor", f"{name}.cpu.txt": "lock"}
    return {file: texts[key] for file, key in keys.items()}


def write(folder: Path, name: str, **changes: str) -> Path:
    """The files in a folder of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in files(name, **changes).items():
        (folder / file).write_text(text)
    return folder


def install(site: Path, name: str, *, package: str = "", dist: str = "", value: str = "", **changes: str) -> Path:
    """A package with an entry point in a folder of packages. Importing it is an error. Returns its folder."""
    package = package or f"lz_{name}"
    folder = write(site / package, name, **changes)
    (folder / "__init__.py").write_text(PROVIDER)
    for file, text in metadata(dist or package, name, value or package).items():
        path = site / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def wheel(path: Path, name: str, *, value: str = "lz_outside", **changes: str) -> Path:
    """A wheel of the package lz_outside."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, text in files(name, **changes).items():
            archive.writestr(f"lz_outside/{file}", text)
        for file, text in metadata("lz_outside", name, value).items():
            archive.writestr(file, text)
    return path


def metadata(dist: str, name: str, value: str) -> dict[str, str]:
    return {
        f"{dist}-1.0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n",
        f"{dist}-1.0.dist-info/entry_points.txt": f"[layerzero.backends]\n{name} = {value}\n",
    }
