"""The wheel: what users install, in a venv that has nothing else."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from layerzero.client.gpu import fastpath_library
from layerzero.client.gpu.lifting import lifted_library
from layerzero.workers import serving

ROOT = Path(__file__).parents[2]


def test_wheel_installs_and_runs_in_an_empty_venv(tmp_path: Path) -> None:
    """The packages come with their data, and need no checkout."""
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, ROOT], check=True, capture_output=True
    )
    (wheel,) = tmp_path.glob("layerzero_broker-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"layerzero", f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"}
    for compiled, module in (
        (fastpath_library.repeats, "client/gpu/_fastpath."),
        (lifted_library.lifted, "client/gpu/_lifted."),
        (serving.library, "workers/_serving."),
    ):
        assert (compiled is not None) == any(
            name.startswith(f"layerzero/{module}") and name.endswith(".so") for name in names
        )
    for needed in (
        "layerzero/py.typed",
        "layerzero/envs/manifests/torch.toml",
        "layerzero/envs/locks/torch.cpu.txt",
        "layerzero/envs/matrix/inside/lz_matrix_inside.py",
        "layerzero/envs/matrix/page.css",
        "layerzero/envs/matrix/page.js",
        "layerzero/envs/matrix/probes/torch.py",
        "layerzero/envs/matrix/subjects.toml",
        "layerzero/capabilities/descriptors/torch.json",
        "layerzero/workers/certify/vectors.json",
        "layerzero/workers/providers/torch_cpu.py",
    ):
        assert needed in names

    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    subprocess.run([venv / "bin/pip", "install", "--quiet", wheel], check=True)
    version = subprocess.run([venv / "bin/lz", "--version"], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert "0.1.0" in version.stdout
    script = "import layerzero as lz; lz.connect(); lz.null(); print(lz.last_report().backend); lz.disconnect()"
    with tempfile.TemporaryDirectory(prefix="lz-") as runtime:  # tmp_path is too long for a socket's name
        environ = {"LAYERZERO_RUNTIME_DIR": runtime, "LAYERZERO_STORE": str(tmp_path / "store"), "PATH": "/usr/bin"}
        python = str(venv / "bin/python")
        ran = subprocess.run([python, "-c", script], check=True, capture_output=True, text=True, env=environ)
        assert ran.stdout.strip() == "null"
