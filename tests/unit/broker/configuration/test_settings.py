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


def test_the_command_line_goes_before_the_environment_and_that_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the file before the defaults. Names of variables may be in small letters."""
    file = tmp_path / "config.toml"
    monkeypatch.setattr(settings, "CONFIG_FILE", file)
    monkeypatch.setenv("LAYERZERO_RUNTIME_DIR", str(tmp_path / "variable"))
    monkeypatch.setenv("layerzero_depth", "7")
    assert settings.load().timeout_s == 60.0
    file.write_text('depth = 3\ntimeout_s = 20\nmanifest_dirs = ["/one", "/two"]\nruntime_dir = "/file"\n')
    found = settings.load(runtime_dir=str(tmp_path / "option"), timeout_s=None)
    assert (found.runtime_dir, found.depth, found.timeout_s) == (tmp_path / "option", 7, 20.0)
    assert found.manifest_dirs == (Path("/one"), Path("/two"))
    monkeypatch.setenv("LAYERZERO_MANIFEST_DIRS", "/three:/four")
    assert settings.load().manifest_dirs == (Path("/three"), Path("/four"))
    assert settings.load().runtime_dir == tmp_path / "variable"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dept = 3", r"setting dept \(LAYERZERO_DEPT\): .* known settings: runtime_dir, "),
        ("depth = 0", r"setting depth \(LAYERZERO_DEPTH\): .*greater than or equal to 1, got 0"),
        ("depth: 3", "config.toml: cannot be read as TOML: "),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    monkeypatch.setattr(settings, "CONFIG_FILE", file)
    with pytest.raises(ConfigError, match=said):
        settings.load()
