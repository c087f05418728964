"""Clients and brokers of other versions: refused by name, on both sides, before anything else is said."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.process.harness import ROOT, Site, wait_until
from tests.process.join_site import Agent

import layerzero as lz
from layerzero.client.connection import start
from layerzero.ipc.transport import wire

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
    file = folder / "layerzero" / "ipc" / "transport" / "wire.py"
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
            [sys.executable, "-P", "-m", "layerzero.client.cli.app", "up"],
            env={**os.environ, "PYTHONPATH": str(package)},
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=120,
        )
    with pytest.raises(lz.VersionMismatch, match=f"{other}.*{wire.PROTOCOL}|{wire.PROTOCOL}.*{other}"):
        site.connect()
    assert connect(package) == "served"
    assert start.broker_pid(site.endpoints) is not None


STEPS = (-1, 0, 1)
CALL = """
import sys, layerzero as lz
try:
    lz.connect(runtime_dir=sys.argv[1], start=False)
    lz.null(backend="alpha")
    print("served")
except (lz.NoBackend, lz.VersionMismatch) as exc:
    print(exc.code, exc.message)
"""
STAGE = (
    "import sys; from pathlib import Path;from layerzero.envs.build import stage; print(stage.stage(Path(sys.argv[1])))"
)


@pytest.mark.parametrize("broker", STEPS)
def test_no_mix_of_three_versions_is_misread(new_site: Callable[..., Site], tmp_path: Path, broker: int) -> None:
    """Clients, brokers and workers that join, each older, ours or newer: calls are served where all three are one, and
    any other of the 27 ends in an error that says which two differ."""
    packages = {step: package_of(wire.PROTOCOL + step, tmp_path / f"v{step}") for step in STEPS}
    site = new_site(joined="alpha")

    def run(step: int, *command: str) -> str:
        with site.environment():
            done = subprocess.run(
                [sys.executable, "-P", *command],
                env={**os.environ, "PYTHONPATH": str(packages[step])},
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def names_both(text: str, role: str, step: int) -> bool:
        ours, theirs = wire.PROTOCOL + broker, wire.PROTOCOL + step
        return re.search(rf"speaks protocol {ours}; the {role} ?[^;]* speaks {theirs}\.", text) is not None

    run(broker, "-m", "layerzero.client.cli.app", "up")
    for worker in STEPS:
        code = Path(run(worker, "-c", STAGE, site.environ["LAYERZERO_STORE"]))
        agent = Agent(site, "alpha", code=code)
        try:
            is_served = worker == broker
            wait_until(lambda: ("worker.started" if is_served else "VERSION_MISMATCH") in agent.log.read_text())  # noqa: B023
            assert is_served or names_both(agent.log.read_text(), "agent", worker)
            for client in STEPS:
                answer = run(client, "-c", CALL, str(site.folder))
                if client != broker:
                    assert answer.startswith("VERSION_MISMATCH ")
                    assert names_both(answer, "client", client)
                else:
                    assert answer.startswith("served" if is_served else "NO_BACKEND ")
        finally:
            agent.end()
