"""Every kernel of every GPU backend against the float64 reference, in the interpreter that runs the tests.

One process per backend, so that a kernel which ends its CUDA context fails its own tests only. A backend whose library
this interpreter lacks is skipped, with the reason.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

import pytest

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads manifests")
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 570  # the first run of a library that compiles its kernels takes minutes
DESCRIPTORS = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "src" / "layerzero" / "capabilities" / "descriptors").glob("*.json"))
}
GPU = {name: descriptor for name, descriptor in DESCRIPTORS.items() if descriptor["platform"] == "cuda"}
KERNELS = [
    pytest.param(backend, kernel, id=kernel["kernel_id"])
    for backend, descriptor in GPU.items()
    for kernels in descriptor["ops"].values()
    for kernel in kernels
]
pytestmark = pytest.mark.timeout(TIMEOUT_S + 30)


@cache
def checked(backend: str) -> dict[str, Any]:
    """What provider_checks.py says of a backend; skips where the library or the GPU is missing."""
    manifest = tomllib.loads(
        (ROOT / "src" / "layerzero" / "envs" / "manifests" / f"{backend}.toml").read_text(encoding="utf-8")
    )
    site, caches = sysconfig.get_path("purelib"), str(ROOT / ".gpu-caches")
    variables = {
        name: value.replace("{cache}", f"{caches}/{backend}").replace("{site}", site)
        for name, value in manifest.get("env", {}).items()
    }
    ran = subprocess.run(
        [
            *(sys.executable, str(Path(__file__).with_name("provider_checks.py"))),
            f"layerzero.workers.providers.{manifest['provider']}",
            str(ROOT / "src" / "layerzero" / "capabilities" / "descriptors" / f"{backend}.json"),
        ],
        env={**os.environ, **variables, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ran.returncode == 0, f"{backend}: exit code {ran.returncode}: {ran.stderr[-3000:]}"
    answer: dict[str, Any] = json.loads(ran.stdout)
    return answer


def found(backend: str) -> dict[str, Any]:
    answer = checked(backend)
    error = answer["probe"]["error"]
    if error is not None and not answer["probe"]["kernels"]:
        is_absent = error["kind"] == "import" or "no CUDA device" in error["message"] or "libcuda" in error["message"]
        if is_absent:
            pytest.skip(f"{backend}: {error['message']}")
        pytest.fail(f"{backend}: {error['kind']}: {error['message']}\n{error['traceback']}")
    return answer


@pytest.mark.parametrize(("backend", "kernel"), KERNELS)
def test_probe_certifies_every_class(backend: str, kernel: dict[str, Any]) -> None:
    """What the descriptor claims and the probe refuses is a wrong claim, or a wrong kernel."""
    verdict = found(backend)["probe"]
    failures = [failure for failure in verdict["failures"] if failure["kernel_id"] == kernel["kernel_id"]]
    assert failures == []
    assert sorted(verdict["certified"][kernel["kernel_id"]]) == sorted(kernel["dtypes"])


@pytest.mark.parametrize("name", ["random", "repeated", "replayed"])
@pytest.mark.parametrize(("backend", "kernel"), KERNELS)
def test_kernel_is_right(backend: str, kernel: dict[str, Any], name: str) -> None:
    """On shapes and starts that no list has; bit for bit where it says so; in a replayed graph where it says so."""
    answer, kernel_id = found(backend), kernel["kernel_id"]
    claimed = {"random": True, "repeated": kernel["deterministic"], "replayed": kernel.get("is_cuda_graph_safe")}
    if not claimed[name]:
        pytest.skip(f"{kernel_id} does not claim it")
    assert answer["wrong"][name][kernel_id] == {}
    assert answer["ran"][name][kernel_id] > 0
