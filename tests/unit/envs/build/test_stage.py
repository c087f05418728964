"""Staging: a foreign interpreter imports our worker code, and nothing else of ours."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from layerzero.envs.build.stage import compiled, source_hash, sources, stage


def test_bare_interpreter_imports_the_staged_code(tmp_path: Path) -> None:
    """The environment of a backend has no layerzero and may not get one: its dependencies would come along."""
    code = (
        "import importlib.util as u, json, layerzero, layerzero.ipc.errors, layerzero.ipc.vocabulary.ops;"
        "print(json.dumps([layerzero.__file__, *[bool(u.find_spec('layerzero.' + p)) "
        "for p in ('workers.provider', 'broker', 'client', 'envs')]]))"
    )
    folder = stage(tmp_path)
    answer = subprocess.run(
        [sys.executable, "-S", "-c", code],  # -S: no site-packages
        env={"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(answer.stdout) == [str(folder / "layerzero" / "__init__.py"), True, False, False, False]


def test_staged_folder_holds_exactly_the_sources(tmp_path: Path) -> None:
    """Bytecode and stray files would make the hash lie."""
    folder = stage(tmp_path)
    staged = {str(p.relative_to(folder / "layerzero")): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert staged.pop("__init__.py") == b""
    assert staged == {**sources(), **compiled()}
    assert folder.name.startswith(source_hash())
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, ".locks"}


def test_second_staging_changes_nothing(tmp_path: Path) -> None:
    """Workers may run from the folder."""
    before = {p: p.stat().st_mtime_ns for p in stage(tmp_path).rglob("*")}
    assert {p: p.stat().st_mtime_ns for p in stage(tmp_path).rglob("*")} == before
