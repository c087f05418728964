"""envs/build/installers.py: uv and pip themselves, on a wheelhouse of our own."""

from __future__ import annotations

import hashlib
import io
import sys
import tarfile
from pathlib import Path

import pytest
from tests.envs.wheels import make_wheel

from layerzero.envs.build.installers import InstallerName, Runner, ToolFailed, pick

BACKEND = """
from pathlib import Path
Path({marker!r}).touch()
"""
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""


def make_sdist(folder: Path, name: str, version: str, marker: Path) -> Path:
    """Whoever builds it runs its code, which makes the file `marker`."""
    folder.mkdir(exist_ok=True)
    path, root = folder / f"{name}-{version}.tar.gz", f"{name}-{version}"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = {"PKG-INFO": metadata, "pyproject.toml": PROJECT, "backend.py": BACKEND.format(marker=str(marker))}
    with tarfile.open(path, "w:gz") as archive:
        for file, text in files.items():
            info = tarfile.TarInfo(f"{root}/{file}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return path


def hashed(path: Path) -> str:
    return f" --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


def install(folder: Path, installer: InstallerName, lock: str) -> Path:
    """The lock, in a new venv, from the wheelhouse beside it."""
    one, run, venv = pick(installer), Runner(folder, lock_fd=0), folder / "venv"
    (folder / "lock.txt").write_text(lock)
    venv.mkdir()
    one.create(venv, Path(sys.executable), run)
    one.install(venv, folder / "lock.txt", run, folder / "wheels")
    return venv


@pytest.mark.parametrize("installer", ["uv", "pip"])
def test_what_the_lock_has_no_hash_of_is_not_installed(tmp_path: Path, installer: InstallerName) -> None:
    """A lock that lost its hashes says nothing about what would run."""
    make_wheel(tmp_path / "wheels", "lz-sample", "1.0")
    with pytest.raises(ToolFailed, match=r"(?i)hash"):
        install(tmp_path, installer, "lz-sample==1.0\n")


@pytest.mark.parametrize("installer", ["uv", "pip"])
def test_what_is_locked_by_hash_is_installed_alone(tmp_path: Path, installer: InstallerName) -> None:
    """What it asks for is in the lock, or left out of it on purpose."""
    wheel = make_wheel(tmp_path / "wheels", "lz-sample", "1.0", requires=["lz-never-packed>=1"])
    venv = install(tmp_path, installer, f"lz-sample==1.0{hashed(wheel)}\n")
    assert list(venv.rglob("lz_sample.py"))


@pytest.mark.parametrize("installer", ["uv", "pip"])
def test_no_code_of_a_source_distribution_runs(tmp_path: Path, installer: InstallerName) -> None:
    """Its hash may be right: what it builds, on this machine and with our rights, is in no lock."""
    marker = tmp_path / "code ran"
    sdist = make_sdist(tmp_path / "wheels", "lz_sample", "1.0", marker)
    with pytest.raises(ToolFailed):
        install(tmp_path, installer, f"lz-sample==1.0{hashed(sdist)}\n")
    assert not marker.exists()
