"""`lz env probe` as a process: what it leaves when it is told to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.process.harness import PATIENCE_S, ROOT, Site, processes, wait_until


def test_a_probe_that_is_told_to_end_leaves_neither_folder_nor_process(
    new_site: Callable[..., Site], tmp_path: Path
) -> None:
    """Job managers send SIGTERM; what is left then would be left at every restart."""
    site = new_site()
    site.add_backend("endless", provider="import threading\ndef load():\n    threading.Event().wait()\n")
    command = [
        sys.executable,
        "-m",
        "layerzero.client.cli.app",
        "env",
        "probe",
        "endless",
        "--manifests",
        str(site.manifests),
    ]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(tmp_path)}
    probe = subprocess.Popen([*command, "--store", str(site.folder / "store")], env=environ)
    wait_until(lambda: any("layerzero.workers.probe" in command for command in processes(site.folder).values()))
    probe.terminate()
    assert probe.wait(timeout=PATIENCE_S) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []
    wait_until(lambda: processes(site.folder) == {})
