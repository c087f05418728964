"""Which distribution owns which file, by RECORDs."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from layerzero.envs.matrix.owners import Shared, modules, shared_files


def install(site: Path, name: str, files: dict[str, bytes]) -> None:
    """Write files and a RECORD, as an installer does: the last one wins."""
    rows = []
    for path, content in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(content)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(content)}")
    folder = site / f"{name}-1.0.dist-info"
    folder.mkdir()
    (folder / "RECORD").write_text("\n".join([*rows, f"{folder.name}/RECORD,,"]) + "\n")


def test_the_same_file_with_other_contents(tmp_path: Path) -> None:
    """Both installed; one has overwritten the other, and the record tells which."""
    install(tmp_path, "one", {"cv2/__init__.py": b"1", "cv2/data.py": b"same"})
    install(tmp_path, "other", {"cv2/__init__.py": b"2", "cv2/data.py": b"same"})
    assert shared_files(tmp_path) == [Shared(("one", "other"), ("cv2/__init__.py",), ("cv2/data.py",), "other")]


def test_equal_files_are_no_clash(tmp_path: Path) -> None:
    """Namespace packages of one vendor do that."""
    install(tmp_path, "one", {"nvidia/__init__.py": b""})
    install(tmp_path, "other", {"nvidia/__init__.py": b""})
    assert [shared.different for shared in shared_files(tmp_path)] == [()]


def test_no_file_in_common(tmp_path: Path) -> None:
    """The common case."""
    install(tmp_path, "one", {"one.py": b""})
    install(tmp_path, "other", {"other.py": b""})
    assert shared_files(tmp_path) == []


def test_top_level_modules_of_a_distribution(tmp_path: Path) -> None:
    """Packages, modules and extensions; no data, and nothing private."""
    files = {
        "pkg/__init__.py": b"",
        "pkg/sub/__init__.py": b"",
        "mod.py": b"",
        "ext.cpython-311-x86_64-linux-gnu.so": b"",
    }
    install(tmp_path, "some_dist", {**files, "_private.py": b"", "data/table.csv": b""})
    assert modules(tmp_path, ("some-dist",)) == ("pkg", "mod", "ext")
