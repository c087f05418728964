"""Clients and brokers of other versions: refused by name, on both sides, before anything else is said."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.process.harness import ROOT, Site, wait_until

import layerzero as lz
from layerzero.client import start
from layerzero.ipc import wire

CONNECT = """
import sys, layerzero as lz
try:
    lz.connect(runtime_dir=sys.argv[1])
    lz.null(backend="alpha")
    print("served")
except lz.VersionMismatch as exc:
    print(exc.code, exc.message)
"""


def package_of(protocol: int, folder: Path) -> Path:
    """The folder to import a package from that is this one, but for its protocol."""
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src" / "layerzero", folder / "layerzero", symlinks=False, ignore=skip)
    file = folder / "layerzero" / "ipc" / "wire.py"
    text = file.read_text()
    assert f"\nPROTOCOL = {wire.PROTOCOL}" in text
    file.write_text(text.replace(f"\nPROTOCOL = {wire.PROTOCOL}", f"\nPROTOCOL = {protocol}"))
    return folder


@pytest.mark.parametrize("step", [-1, 1], ids=["older", "newer"])
def test_another_version_is_refused_by_both_sides_with_both_numbers(
    new_site: Callable[..., Site], tmp_path: Path, step: int
) -> None:
    """Bytes that are read by another version's rules would be wrong results."""
    other = wire.PROTOCOL + step
    package = package_of(other, tmp_path)

    def connect(source: Path) -> str:
        with site.environment():
            done = subprocess.run(
                [sys.executable, "-P", "-c", CONNECT, str(site.folder)],
                env={**os.environ, "PYTHONPATH": str(source)},
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
        assert done.stdout, done.stderr
        return done.stdout.strip()

    # Their client, our broker: it goes on serving ours.
    site = new_site()
    site.connect()
    answer = connect(package)
    assert answer.startswith("VERSION_MISMATCH")
    assert str(other) in answer
    assert str(wire.PROTOCOL) in answer
    lz.null(backend="alpha")
    lz.disconnect()
    wait_until(lambda: site.broker_pid is None)

    # Our client, their broker.
    with site.environment():
        subprocess.run(
            [sys.executable, "-P", "-m", "layerzero.client.cli", "up"],
            env={**os.environ, "PYTHONPATH": str(package)},
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=120,
        )
    with pytest.raises(lz.VersionMismatch, match=f"{other}.*{wire.PROTOCOL}|{wire.PROTOCOL}.*{other}"):
        site.connect()
    assert connect(package) == "served"
    assert start.broker_pid(site.endpoints) is not None
