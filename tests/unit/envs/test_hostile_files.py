"""Files that nobody has allowed: each disables itself with a message, and costs neither a hang nor an exception."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from layerzero.broker.configuration import policy_source
from layerzero.capabilities import descriptor
from layerzero.envs import manifest
from layerzero.envs.trust import bundle, third_party
from layerzero.ipc.errors import ConfigError


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(8 << 30)


EVIL: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "zeros": lambda path: path.symlink_to("/dev/zero"),
    "sparse": sparse,
    "digits": lambda path: path.write_text("summary = " + "9" * 5000),
    "dots": lambda path: path.write_text(".".join("a" * 30_000) + " = 1"),
    "latin": lambda path: path.write_bytes(b'summary = "\xe4"'),
    "deep": lambda path: path.write_text("a = " + "[" * 30_000),
}


@pytest.mark.parametrize("kind", EVIL)
def test_a_manifest_disables_itself(kind: str, tmp_path: Path) -> None:
    EVIL[kind](tmp_path / "evil.toml")
    begun_s = time.monotonic()
    found, problems = manifest.discover([tmp_path])
    assert time.monotonic() - begun_s < 5
    assert [problem.name for problem in problems] == ["evil"]
    assert "evil" not in found
    with pytest.raises(ConfigError):
        bundle.read_folder(tmp_path, "evil", "test")


@pytest.mark.parametrize("kind", ["fifo", "zeros", "sparse", "latin"])
def test_a_descriptor_disables_itself(kind: str, tmp_path: Path) -> None:
    EVIL[kind](tmp_path / "evil.json")
    with pytest.raises(descriptor.DescriptorError):
        descriptor.load(tmp_path / "evil.json")


@pytest.mark.parametrize("kind", ["fifo", "zeros", "sparse", "latin"])
def test_a_policy_is_refused(kind: str, tmp_path: Path) -> None:
    EVIL[kind](tmp_path / "policy.yaml")
    with pytest.raises(ConfigError, match=r"policy\.yaml"):
        policy_source.load_layer(tmp_path / "policy.yaml")


@pytest.mark.parametrize(
    ("file", "data"),
    [
        ("METADATA", b"Name: evil\nVersion: \xff\xfe\n"),
        ("entry_points.txt", b"[layerzero.backends]\nevil = \xff\xfe\n"),
        ("entry_points.txt", b"[layerzero.backends]\nevil\n"),
        ("entry_points.txt", b"[layerzero.backends]\nevil = = :\n[[["),
        ("METADATA", b""),
    ],
)
def test_metadata_of_a_package_keeps_nothing_from_work(
    file: str, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "evil-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[layerzero.backends]\nevil = evil\n")
    (folder / file).write_bytes(data)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    found, _ = third_party.discover([], backends=tmp_path / "backends", store=tmp_path / "store", allowed={})
    assert "evil" not in found
    assert found  # ours
