"""Kernels of the HF Kernel Hub as a backend, from a folder that stands for the hub: pinned, signed, built, called; and
what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.envs.harness import STORE
from tests.process import forks
from tests.process.harness import ROOT, Site

import layerzero as lz

EXAMPLE = ROOT / "examples" / "hub-kernels"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
INIT = '''"""A universal kernel: pure torch."""

import torch

from .gates import silu_and_mul


def silu(out, x):
    out.copy_(torch.nn.functional.silu(x))


def gelu(out, x):
    out.copy_(torch.nn.functional.gelu(x))


def gelu_tanh(out, x):
    out.copy_(torch.nn.functional.gelu(x, approximate="tanh"))
'''
GATES = """import torch


def silu_and_mul(out, x):
    half = x.shape[-1] // 2
    torch.mul(torch.nn.functional.silu(x[..., :half]), x[..., half:], out=out)
"""
Lz = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """As git clone makes it; the package lies one folder deeper, as older builds have it."""
    build = tmp_path / "repository" / "build" / "torch-universal" / "activation"
    build.mkdir(parents=True)
    (build / "__init__.py").write_text(INIT)
    (build / "gates.py").write_text(GATES)
    (build / "__pycache__").mkdir()
    (build / "__pycache__" / "gates.cpython-311.pyc").write_bytes(b"left by whoever has used the folder")
    return tmp_path / "repository"


@pytest.fixture
def manifests(tmp_path: Path) -> Path:
    """The example, with a commit for its revision: of a folder nobody can look it up."""
    folder = tmp_path / "manifests"
    shutil.copytree(EXAMPLE, folder)
    path = folder / "hub-activation.toml"
    path.write_text(path.read_text().replace('revision = "main"', f'revision = "{COMMIT}"'))
    return folder


@pytest.fixture
def lz_command(tmp_path: Path) -> Lz:
    """Run `lz ...` of a user without a network: the hub is nowhere."""

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "LAYERZERO_STORE": str(STORE), "LAYERZERO_KEYS": str(tmp_path / "keys")}
        environ["HF_HUB_OFFLINE"] = "1"
        return forks.run([sys.executable, "-m", "layerzero.client.cli.app", *map(str, words)], env=environ)

    return run


@pytest.fixture
def lz_env(lz_command: Lz, manifests: Path) -> Lz:
    """Run `lz env VERB hub-activation ...`."""
    return lambda verb, *words: lz_command("env", verb, "hub-activation", "--manifests", manifests, *words)


@pytest.fixture
def key(lz_command: Lz, tmp_path: Path) -> Path:
    """Of somebody whom the operator trusts."""
    file = tmp_path / "release"
    made = lz_command("lift", "key", file)
    assert made.returncode == 0, made.stderr
    trusted = lz_command("lift", "trust", f"{file}.pub", "--name", "release")
    assert trusted.returncode == 0, trusted.stderr
    return file


def test_unpinned_kernels_are_refused(lz_env: Lz, repository: Path, manifests: Path) -> None:
    """Whatever the hub has at the moment is nobody's decision."""
    shutil.copy(ROOT / "src/layerzero/envs/locks/torch.cpu.txt", manifests / "hub-activation.cpu.txt")
    built = lz_env("build", "--hub-folder", repository)
    assert built.returncode == 1
    assert "your-organisation/activation is not pinned" in built.stdout
    assert "repair: lz env lock hub-activation --manifests" in built.stdout


def test_a_branch_of_a_folder_is_no_pin(lz_env: Lz, repository: Path, manifests: Path) -> None:
    """Of a folder only its owner knows which commit it is."""
    shutil.copy(EXAMPLE / "hub-activation.toml", manifests)
    locked = lz_env("lock", "--hub-folder", repository)
    assert locked.returncode == 1
    assert "set hub.revision in the manifest" in locked.stderr
    assert "40 hexadecimal digits" in locked.stderr


def test_lock_names_every_file_and_no_bytecode(lz_env: Lz, repository: Path, manifests: Path) -> None:
    """What is not named is not taken."""
    locked = lz_env("lock", "--hub-folder", repository, "--json")
    assert locked.returncode == 0, locked.stderr
    (row,) = json.loads(locked.stdout)["environments"]
    assert row["hub"] == {
        "path": str(manifests / "hub-activation.cpu.hub.json"),
        "revision": COMMIT,
        "signed": False,
    }
    lock = json.loads((manifests / "hub-activation.cpu.hub.json").read_text())
    assert (lock["repository"], lock["build"]) == ("your-organisation/activation", "torch-universal")
    assert [file["path"] for file in lock["files"]] == ["activation/__init__.py", "activation/gates.py"]


def test_links_are_refused(lz_env: Lz, repository: Path) -> None:
    """A link would bring a file of this machine into the lock."""
    (repository / "build" / "torch-universal" / "more.py").symlink_to("/etc/hostname")
    locked = lz_env("lock", "--hub-folder", repository)
    assert locked.returncode == 1
    assert "more.py is a link" in locked.stderr


def test_unsigned_kernels_are_refused(lz_env: Lz, repository: Path) -> None:
    """A hash says that it is the same file, not whose it is."""
    assert lz_env("lock", "--hub-folder", repository).returncode == 0
    built = lz_env("build", "--hub-folder", repository)
    assert built.returncode == 1
    assert "are signed by nobody" in built.stdout
    assert "--allow-unsigned" in built.stdout


def test_kernels_that_a_stranger_signed_are_refused(
    lz_command: Lz, lz_env: Lz, repository: Path, tmp_path: Path, key: Path
) -> None:
    """Also with --allow-unsigned, which is for those that nobody signed."""
    assert lz_command("lift", "key", tmp_path / "stranger").returncode == 0
    assert lz_env("lock", "--hub-folder", repository, "--key", tmp_path / "stranger").returncode == 0
    built = lz_env("build", "--hub-folder", repository, "--allow-unsigned")
    assert built.returncode == 1
    assert "signed by a key that is not trusted" in built.stdout
    assert "trusted: release" in built.stdout


def test_a_lock_that_was_changed_after_it_was_signed_is_refused(
    lz_env: Lz, repository: Path, manifests: Path, key: Path
) -> None:
    """Else the hashes of the lock would be worth nothing."""
    assert lz_env("lock", "--hub-folder", repository, "--key", key).returncode == 0
    path = manifests / "hub-activation.cpu.hub.json"
    path.write_text(path.read_text().replace("gates.py", "other.py"))
    built = lz_env("build", "--hub-folder", repository)
    assert built.returncode == 1
    assert "was changed since" in built.stdout


@pytest.mark.parametrize("change", ["other bytes", "gone", "a link"])
def test_a_file_that_is_not_the_one_of_the_lock_is_refused(
    lz_env: Lz, repository: Path, key: Path, change: str
) -> None:
    """Whatever the repository has at that commit now; and nothing is left in the store."""
    assert lz_env("lock", "--hub-folder", repository, "--key", key).returncode == 0
    (file,) = repository.rglob("gates.py")
    if change == "other bytes":
        file.write_text(GATES.replace("silu(x", "gelu(x"))
    else:
        file.unlink()
    if change == "a link":
        file.symlink_to("/etc/hostname")
    built = lz_env("build", "--hub-folder", repository, "--force")
    assert built.returncode == 1
    assert "gates.py" in built.stdout
    assert "build failed" in built.stdout


@pytest.fixture
def site(new_site: Callable[..., Site], manifests: Path) -> Site:
    made = new_site()
    made.environ |= {"LAYERZERO_STORE": str(STORE), "LAYERZERO_MANIFEST_DIRS": str(manifests)}
    return made


def silu(x: Any) -> Any:
    return x / (1 + np.exp(-x))


@pytest.mark.long  # builds an environment with torch
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("trust", ["signed", "allowed"])
def test_kernels_serve_when_they_are_pinned_and_trusted(
    lz_env: Lz, site: Site, repository: Path, key: Path, trust: str
) -> None:
    """From a repository to a right answer, and to a refusal of what was changed in the environment itself."""
    flags = ["--key", key] if trust == "signed" else []
    assert lz_env("lock", "--hub-folder", repository, *flags).returncode == 0
    flags = [] if trust == "signed" else ["--allow-unsigned"]
    built = lz_env("build", "--hub-folder", repository, "--force", *flags, "--json")
    assert built.returncode == 0, built.stdout + built.stderr
    (row,) = json.loads(built.stdout)["environments"]
    record = json.loads((Path(row["prefix"]) / "lz-env.json").read_text())
    assert record["hub"] == {
        "repository": "your-organisation/activation",
        "revision": COMMIT,
        "build": "torch-universal",
        "signer": "release" if trust == "signed" else "",
    }
    shutil.rmtree(repository)  # nothing asks for it any more, nor for the hub
    site.start().connect()

    rng = np.random.default_rng(0)
    x, gate, up = (rng.standard_normal((5, 33), np.float32) for _ in range(3))
    explained = lz.explain("silu", x, backend="hub-activation")
    assert explained.kernel_id == "hub-activation.silu", str(explained)
    np.testing.assert_allclose(lz.silu(x, backend="hub-activation"), silu(x.astype(np.float64)), atol=1e-6)
    np.testing.assert_allclose(
        lz.swiglu(gate, up, backend="hub-activation"), silu(gate.astype(np.float64)) * up, atol=1e-5
    )
    tanh = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    np.testing.assert_allclose(lz.gelu(x, approximate="tanh", backend="hub-activation"), tanh, atol=1e-6)
    assert lz.last_report().backend == "hub-activation"

    (file,) = (Path(row["prefix"]) / "hub-kernels").rglob("gates.py")
    file.write_text(GATES + "\n# edited\n")
    listed = {one["name"]: one for one in json.loads(lz_env_list(site))["environments"]}
    assert listed["hub-activation"]["state"] == "changed"
    assert "gates.py has changed since the build" in listed["hub-activation"]["cause"]


def lz_env_list(site: Site) -> str:
    with site.environment():
        command = [sys.executable, "-m", "layerzero.client.cli.app", "env", "list", "--json"]
        return str(forks.run(command, env=os.environ).stdout)
