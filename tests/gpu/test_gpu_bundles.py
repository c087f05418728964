"""Bundles of plans on a real GPU: written by one process, opened by another, with the kernels and at the speed of the
plan. tests/process/test_gpu_bundles.py has what needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.gpu.test_gpu_plans import lifted, no_grad, replayed, shared, store
from tests.process.harness import ROOT, Site, wait_until

import layerzero as lz

pytest.importorskip("torch")
from tests.gpu.test_calls import randn, torch

__all__ = ["lifted", "no_grad", "shared", "store"]

OPEN = """
import sys, time, torch
import layerzero as lz
lz.connect()
bundle, given = lz.load_bundle(sys.argv[1]), torch.load(sys.argv[2], weights_only=True)
with torch.no_grad():
    result = bundle(given["x"])
    for wanted, found in zip(given["wanted"], (result["h"], result["rest"][0]), strict=True):
        assert torch.equal(wanted, found), (wanted - found).abs().max()
print([step.how for step in bundle.timings()], "right")
"""


def model(weight: Any) -> Any:
    def block(x: Any) -> Any:
        h = lz.matmul(lz.silu(x[1:]), weight)
        return {"h": lz.silu(h.T), "rest": [lz.matmul(h[1:], weight.T)]}

    return block


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_process_gets_the_bits_of_the_plan(lifted: Site, tmp_path: Path, dtype: Any) -> None:
    """Views, a constant that is read in two ways, results that are views."""
    x, weight = randn(65, 64).to(dtype), randn(64, 96).to(dtype)
    plan = replayed(lz.plan(model(weight), fixed_weights=True), x)
    wanted = plan(x)
    lz.write_bundle(plan, tmp_path / "block.lzb")
    torch.save({"x": x, "wanted": [wanted["h"], wanted["rest"][0]]}, tmp_path / "given.pt")
    environ = os.environ | {
        "LAYERZERO_RUNTIME_DIR": str(lifted.folder),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    }
    command = [sys.executable, "-c", OPEN, str(tmp_path / "block.lzb"), str(tmp_path / "given.pt")]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("right\n")


def test_it_is_captured_as_its_plan_was(lifted: Site, tmp_path: Path) -> None:
    x, weight = randn(1024, 512), randn(512, 512)
    plan = replayed(lz.plan(model(weight), fixed_weights=True), x, paths={"lifted"})
    lz.write_bundle(plan, tmp_path / "block.lzb")
    bundle = lz.load_bundle(tmp_path / "block.lzb")

    def is_there() -> bool:
        for _ in range(20):
            bundle(x)
        torch.cuda.synchronize()
        return {step.how for step in bundle.timings()} == {"lifted"}

    wait_until(is_there)
    torch.testing.assert_close(bundle(x), plan(x), rtol=0, atol=0)
    times: dict[str, list[float]] = {"plan": [], "bundle": []}
    for _ in range(10):
        for name, run in (("plan", plan), ("bundle", bundle)):
            torch.cuda.synchronize()
            start_s = time.perf_counter()
            for _ in range(50):
                run(x)
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - start_s) / 50)
    least = {name: 1e6 * min(one) for name, one in times.items()}
    print(f"least us a run: {least}")
