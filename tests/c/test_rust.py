"""The Rust crate on top of liblayerzero: its own tests, against a broker of ours."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.backends.toy import KILL, fault
from tests.c.conftest import LIBRARY, Built, libzmq, run
from tests.process.harness import Site
from tests.process.planned import X, block, settled

import layerzero as lz

CARGO = shutil.which("cargo")


@pytest.mark.skipif(CARGO is None, reason="no cargo here")
def test_crate_passes_its_tests(built: Built, connected: Site, tmp_path: Path) -> None:
    """With cargo alone, without a network: it has no dependencies. Warnings are errors."""
    assert CARGO is not None
    connected.wait_ready("alpha")
    lz.write_bundle(settled(lz.plan(block), X), tmp_path / "block.lzb")
    lz.disconnect()
    environ = {k: v for k, v in os.environ.items() if not k.startswith("LAYERZERO_")} | {
        "CARGO_TARGET_DIR": str(tmp_path),
        "CARGO_INCREMENTAL": "0",
        "CFLAGS": "-O0",  # of the C library that the crate builds
        "CARGO_PROFILE_DEV_DEBUG": "0",
        "CARGO_PROFILE_TEST_DEBUG": "0",
        "RUSTFLAGS": "-D warnings",
        "LAYERZERO_RUNTIME_DIR": str(connected.folder),
        "LZ_TEST_LIBZMQ": libzmq(),
        "LZ_TEST_KILL": str(fault(KILL, "alpha")),
        "LZ_TEST_BUNDLE": str(tmp_path / "block.lzb"),
        "LZ_TEST_SIZES": run(built["sizes"]).stdout.decode(),
    }
    command = [CARGO, "test", "--offline", "--quiet", "--manifest-path", str(LIBRARY / "rust" / "Cargo.toml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "10 passed" in done.stdout
