"""Settings that would let others decide what is executed."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from layerzero.broker.configuration import settings
from layerzero.ipc.errors import ConfigError


@pytest.mark.parametrize("name", ["store", "backends_dir"])
def test_a_folder_of_code_that_everybody_may_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Whoever puts an environment there has his code run by all who use it."""
    monkeypatch.setenv(f"LAYERZERO_{name.upper()}", str(tmp_path / "folder"))
    settings.load()  # it will be made
    (tmp_path / "folder").mkdir()
    assert getattr(settings.load(), name) == tmp_path / "folder"
    for mode in (0o777, 0o1777):
        (tmp_path / "folder").chmod(mode)
        with pytest.raises(ConfigError, match=f"chmod o-w {tmp_path}/folder"):
            settings.load()
    (tmp_path / "folder").chmod(stat.S_IRWXU)
    settings.load()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
@pytest.mark.parametrize(("owner", "said"), [(0, ""), (65534, ""), (1234, "belongs to user 1234")])
def test_a_folder_of_code_is_ours_or_roots(owner: int, said: str) -> None:
    """Seen by user 65534."""
    code = (
        "import os, sys; from layerzero.broker.configuration import settings; from layerzero.ipc.errors import "
        "ConfigError\n"
        "os.setuid(65534)\n"
        "try: print(settings.load().store)\n"
        "except ConfigError as exc: print(exc)"
    )
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top) / "folder"
        folder.mkdir()
        os.chown(folder, owner, -1)
        os.chmod(top, 0o755)
        environ = {**os.environ, "LAYERZERO_STORE": str(folder), "HOME": "/nonexistent"}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environ, cwd="/")
    assert (said or str(folder)) in done.stdout
