"""How long until the first answer: of a fresh clone with cold and with warm download caches, and of a broker whose
environments are built. Writes results/environments.md.

The clone's environments and the cold caches are in a folder that is removed afterwards.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from common import backend_versions, finish, parser, verdict

import layerzero as lz

ROOT = Path(__file__).resolve().parents[1]
LZ = Path(sys.executable).with_name("lz")
LIGHT = ("null", "mlx", "onnxruntime", "tokenizers-0.13", "tokenizers-0.23")
BUILT = "mlx"  # the environment that the fresh clone builds
CALL = (
    "import numpy as np, layerzero as lz; lz.connect();"
    "print(lz.softmax(np.ones((4, 64), np.float32), -1, backend='mlx').shape, lz.last_report().backend)"
)
AIM_S = 3.0


def clone_times(folder: Path, caches: Mapping[str, str]) -> dict[str, float]:
    """Seconds of each step from nothing to the first answer."""
    clone, python = folder / "clone", folder / "clone/.venv/bin/python"
    own = {"LAYERZERO_STORE": str(folder / "store"), "LAYERZERO_RUNTIME_DIR": str(folder / "run"), **caches}
    (folder / "run").mkdir(mode=0o700)
    steps: dict[str, list[str | Path]] = {
        "clone": ["git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", clone],
        "venv": [sys.executable, "-m", "venv", clone / ".venv"],
        "install": [python, "-m", "pip", "install", "--quiet", f"{clone}[envs]", "numpy"],
        "build": [clone / ".venv/bin/lz", "env", "build", BUILT],
        "first answer": [python, "-c", CALL],
    }
    taken = {}
    try:
        for name, argv in steps.items():
            start = time.perf_counter()
            subprocess.run(argv, env={**os.environ, **own}, cwd=folder, check=True, stdout=subprocess.DEVNULL)
            taken[name] = time.perf_counter() - start
    finally:
        subprocess.run([clone / ".venv/bin/lz", "down"], env={**os.environ, **own}, check=False, capture_output=True)
    return taken


def ready_time(backend: str) -> float:
    """Seconds from `lz.connect()` without a broker until the backend's worker is READY and all its checks are good."""
    with tempfile.TemporaryDirectory(prefix="lz-") as runtime:
        os.environ["LAYERZERO_RUNTIME_DIR"] = runtime
        start = time.perf_counter()
        lz.connect(runtime_dir=runtime)
        report = lz.readiness_check(backends=[backend])
        taken = time.perf_counter() - start
        if not report.ok:
            sys.exit(f"{backend} is not ready:\n{report}")
        VERSIONS.update(backend_versions())
        lz.disconnect()
        subprocess.run([LZ, "down"], check=False, capture_output=True)  # it may have ended with its last client
        return taken


VERSIONS: dict[str, Mapping[str, str]] = {}


def main() -> None:
    args = parser(__doc__, "broker starts alone").parse_args()
    rows = []
    for name in LIGHT:
        best = min(ready_time(name) for _ in range(3))
        rows.append([f"broker start to READY: {name}", f"{best:.2f} s", f"under {AIM_S:g} s: {verdict(best < AIM_S)}"])
    write(rows, is_quick=args.quick)
    for kind in () if args.quick else ("warm", "cold"):
        with tempfile.TemporaryDirectory(prefix="lz-clone-") as name:
            folder = Path(name)
            cold = {"UV_CACHE_DIR": f"{folder}/uv", "PIP_CACHE_DIR": f"{folder}/pip", "XDG_CACHE_HOME": f"{folder}/xdg"}
            taken = clone_times(folder, cold if kind == "cold" else {})
        rows += [[f"fresh clone, {kind} caches: {step}", f"{seconds:.1f} s", ""] for step, seconds in taken.items()]
        rows.append([f"fresh clone, {kind} caches: all", f"{sum(taken.values()):.1f} s", ""])
        write(rows, is_quick=False)


def write(rows: list[list[str]], *, is_quick: bool) -> None:
    """After each part: they take minutes."""
    notes = [
        "READY: the best of three; the time from `lz.connect()` without a broker, with all of them built and probed,",
        "until the worker has loaded its library and `lz.readiness_check` is good, the look at its files included.",
        f"Load of other processes at the start: {LOAD:.1f} (mean over one minute).",
    ]
    if len(rows) > len(LIGHT):
        notes += [
            f"Fresh clone: clone, venv, `pip install '.[envs]' numpy`, `lz env build {BUILT}` with its certification",
            "(all kernels, dtypes and shape classes), and a process that connects, starts both, calls silu.",
            "Cold: pip's and uv's caches are empty folders.",
        ]
    headings = ("what", "time", "aim")
    finish("environments", "Time to the first answer", VERSIONS, headings, rows, notes, is_quick=is_quick)


if __name__ == "__main__":
    LOAD = os.getloadavg()[0]
    main()
