"""Dispatch tables that policy names, and that are no files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.unit.broker.driver import Driver

from layerzero.broker.configuration import table_source
from layerzero.ipc.errors import ConfigError


@pytest.mark.parametrize("kind", ["nothing", "FIFO", "folder", "not text"])
def test_what_is_no_table_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    """A broker does nothing else meanwhile; nobody may ever write into a FIFO."""
    path = tmp_path / "table.json"
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "not text":
        path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=f"the dispatch table {path} cannot be read: "):
        table_source.read(path, Driver("alpha").state.engine, {})
