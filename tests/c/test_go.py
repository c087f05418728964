"""The example in Go: cgo on liblayerzero, which runs a bundle."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from tests.c.conftest import LIBRARY, ROOT, Built, libzmq
from tests.process.harness import Site
from tests.process.planned import X, agree, block, settled

import layerzero as lz

GO = shutil.which("go")


@pytest.mark.skipif(GO is None, reason="no go here")
def test_the_example_runs_a_bundle(built: Built, connected: Site, tmp_path: Path) -> None:
    """With the go of Debian 12 alone, without a network: it has no dependencies."""
    assert GO is not None
    connected.wait_ready("alpha")
    path, program = tmp_path / "block.lzb", tmp_path / "run"
    lz.write_bundle(settled(lz.plan(block), X), path)
    library, zmq = built.shared_library(), Path(libzmq())
    (tmp_path / "liblayerzero.so.1").symlink_to(library)
    if zmq.is_absolute():
        (tmp_path / "libzmq.so.5").symlink_to(zmq)
    environ = {k: v for k, v in os.environ.items() if not k.startswith("LAYERZERO_")} | {
        "CGO_ENABLED": "1",
        "CGO_CFLAGS": f"-O0 -I{LIBRARY}",
        "CGO_LDFLAGS": f"-L{library.parent}",
        "GOCACHE": str(built.folder / "go"),
        "GOFLAGS": "-mod=mod",
        "GOPROXY": "off",
        "LAYERZERO_RUNTIME_DIR": str(connected.folder),
        "LD_LIBRARY_PATH": os.pathsep.join([str(tmp_path), str(zmq.parent)]),
    }

    def done(command: list[str]) -> subprocess.CompletedProcess[str]:
        place = ROOT / "examples" / "go"
        return subprocess.run(command, cwd=place, env=environ, capture_output=True, text=True, check=False)

    made = done([GO, "build", "-o", str(program), "."])
    assert made.returncode == 0, made.stderr
    ran = done([str(program), str(path)])
    assert ran.returncode == 0, ran.stderr
    first, *kernels = ran.stdout.splitlines()
    assert kernels == ["by alpha.silu", "by alpha.matmul", "by alpha.silu"]
    name, _, numbers = first.partition(" ")
    x = (np.arange(24, dtype=np.float32) % 4 / 4).reshape(4, 6)
    assert name == "result"
    agree(np.array(numbers.strip("[]").split(), np.float32).reshape(4, 6), block(x))
    refused = done([str(program), str(tmp_path / "none")])
    assert refused.returncode == 1
    assert refused.stderr.startswith("INVALID_ARGUMENT: Name a file that lz.write_bundle or `lz bundle write`")
