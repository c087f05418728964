"""What can be run against one version after the other, and when an earlier verdict on it still holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from layerzero.envs.matrix.inside import CALLER
from layerzero.envs.matrix.target import Target
from layerzero.ipc.errors import ConfigError

SOURCE = Path(__file__).parents[4] / "src"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("")
    (tmp_path / "pkg" / "work.py").write_text("def f():\n    return None\n")
    for name in ("works.py", "test_works.py"):
        (tmp_path / name).write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "kind", "file", "node", "module"),
    [
        ("works.py", "script", "works.py", "", ""),
        ("test_works.py", "pytest", "test_works.py", "", ""),
        ("test_works.py::test_a[x:y]", "pytest", "test_works.py", "::test_a[x:y]", ""),
        ("pkg.work:f", "function", "pkg/work.py", "f", "pkg.work"),
        ("pkg:Class.f", "function", "pkg/__init__.py", "Class.f", "pkg"),
    ],
)
def test_kinds(folder: Path, text: str, kind: str, file: str, node: str, module: str) -> None:
    found = Target.of(text, folder)
    assert (found.kind, found.file, found.node, found.module) == (kind, folder / file, node, module)


@pytest.mark.parametrize(
    ("text", "said"),
    [("absent.py", "no such file"), ("pkg.absent:f", "no module pkg.absent"), ("softmx", "MODULE:FUNCTION")],
)
def test_what_is_not_there_says_what_is_allowed(folder: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Target.of(text, folder)


def test_a_verdict_holds_until_a_source_changes_that_it_may_import(folder: Path) -> None:
    target = Target.of("works.py", folder)
    before = target.digest()
    (folder / "data.txt").write_text("no source")
    assert target.digest() == before
    (folder / "pkg" / "work.py").write_text("def f():\n    return 1\n")
    after = target.digest()
    assert after != before
    assert Target.of("test_works.py", folder).digest() != after


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("return None", 0, ""),
        ("return True", 0, ""),
        ("return False", 1, "pkg.work:f returned False"),
        ("raise ValueError('why')", 1, "ValueError: why"),
        ("import absent_library", 1, "No module named 'absent_library'"),
    ],
)
def test_a_function_fails_by_an_exception_or_by_false(folder: Path, body: str, code: int, said: str) -> None:
    (folder / "pkg" / "work.py").write_text(f"def f():\n    {body}\n")
    argv = [sys.executable, "-P", "-I", str(CALLER), "pkg.work", "f", str(folder)]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (ended.returncode, said in ended.stderr) == (code, True)
