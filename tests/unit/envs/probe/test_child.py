"""What a throw-away process may cost whoever runs it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from layerzero.envs.probe import child
from layerzero.ipc.errors import ConfigError
from layerzero.ipc.transport.endpoints import open_endpoints


def test_output_without_end_is_read_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read into the broker."""
    code = "import sys\nfor _ in range(8): sys.stdout.write('x' * (1 << 20))\nprint()\nprint('verdict')"
    ended = child.run_process([sys.executable, "-c", code], environ=dict(os.environ), timeout_s=60)
    assert ended.code == 0
    assert len(ended.out) == child.MAX_SAID_BYTES
    assert ended.out.endswith(b"\nverdict\n")


def test_a_process_fills_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor the memory that a temporary folder often lies in."""
    monkeypatch.setattr(child, "MAX_FILE_BYTES", 1 << 20)
    code = (  # it begins when it is limited, which takes a moment
        "import os, resource, sys\n"
        "while resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 1 << 20: os.sched_yield()\n"
        "while True: sys.stdout.write('x' * (1 << 16))"
    )
    ended = child.run_process([sys.executable, "-c", code], environ=dict(os.environ), timeout_s=60)
    assert ended.code not in (None, 0)
    assert len(ended.out) <= 2 << 20


@pytest.mark.parametrize("kind", ["file", "fifo"])
def test_what_lies_in_place_of_the_runtime_folder_is_named_with_a_repair(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    os.mkfifo(path) if kind == "fifo" else path.write_text("")
    with pytest.raises(ConfigError, match="Remove what lies there"):
        open_endpoints(path)
