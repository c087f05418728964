"""What counts as a change of an environment's files; the real environments are in tests/envs/test_integrity.py."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest

from layerzero.envs.build.integrity import Change, changes, take


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """An environment's folder of packages, with one that is as its RECORD says."""
    site = tmp_path / "lib" / "python3.11" / "site-packages"
    (site / "leaf-1.0.dist-info").mkdir(parents=True)
    (site / "leaf.py").write_text("VALUE = 1\n")
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"VALUE = 1\n").digest()).rstrip(b"=").decode()
    (site / "leaf-1.0.dist-info" / "RECORD").write_text(f"leaf.py,sha256={digest},10\n")
    return site


def test_a_wrong_environment_without_a_list_stays_wrong(tmp_path: Path, site: Path) -> None:
    """A list made of what is wrong would tell whoever reads it that all is well."""
    (site / "leaf.py").write_text("VALUE = 2\n")
    wrong = [Change("lib/python3.11/site-packages/leaf.py", "changed", "leaf 1.0")]
    assert changes(tmp_path) == wrong
    assert not (tmp_path / "lz-files.json").exists()
    assert changes(tmp_path) == wrong


def test_an_added_link_to_a_folder_is_a_change(tmp_path: Path, site: Path) -> None:
    """Python imports a package through it as through a folder."""
    assert take(tmp_path) == []
    (tmp_path.parent / "elsewhere").mkdir()
    (site / "extra").symlink_to(tmp_path.parent / "elsewhere")
    assert changes(tmp_path) == [Change("lib/python3.11/site-packages/extra", "added", "")]
