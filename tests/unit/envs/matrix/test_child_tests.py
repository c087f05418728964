"""Environments of `pytest --lz-matrix`: shared by all processes, built by one."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from layerzero.envs.matrix import child_tests, kept
from layerzero.envs.matrix.child_tests import Environments
from layerzero.envs.matrix.resolver import Resolved


class Tool:
    """Stands for uv."""

    def __init__(self) -> None:
        self.built: list[Path] = []

    def create(self, folder: Path, python: Path, run: Any) -> None:
        self.built.append(folder)

    def install(self, folder: Path, lock: Path, run: Any) -> None:
        pass


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Tool:
    def resolve(tool: Tool, requirements: Sequence[str], python: Any) -> Resolved:
        return Resolved("\n".join(requirements))

    monkeypatch.setattr(child_tests, "resolve", resolve)
    return Tool()


def test_sessions_use_an_environment_at_the_same_time(tmp_path: Path, tool: Tool, pytestconfig: pytest.Config) -> None:
    """The processes of xdist end together: one that waited for another's end would wait for ever."""
    sessions = [Environments(pytestconfig, kept.tests(tmp_path), tool) for _ in range(2)]  # type: ignore[arg-type]
    found: list[Path] = []

    def use() -> None:
        found.extend(session._environment("leaf==1") for session in sessions)

    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    thread.join(60)
    assert len(set(found)) == 1
    assert len(found) == 2
    assert len(tool.built) == 1
    for session in sessions:
        session.close()


def test_what_a_session_uses_is_not_removed(tmp_path: Path, tool: Tool, pytestconfig: pytest.Config) -> None:
    """It may run for longer than a week, and gc at any time."""
    session = Environments(pytestconfig, kept.tests(tmp_path), tool)  # type: ignore[arg-type]
    prefix = session._environment("leaf==1")
    long_ago = time.time() - kept.UNUSED_S - 60
    os.utime(prefix / kept.BUILT, (long_ago, long_ago))
    assert list(kept.collect(tmp_path)) == []
    session.close()
    assert [path for path, _ in kept.collect(tmp_path)] == [prefix]
    assert not prefix.exists()
