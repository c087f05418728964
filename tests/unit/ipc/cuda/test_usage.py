"""What processes hold of GPUs' memory, by a library that answers as NVML does."""

from __future__ import annotations

import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from layerzero.client.cli import broker
from layerzero.client.history.recorder import Recorder
from layerzero.ipc.cuda.usage import GpuUsage

NVML = r"""
#include <stdio.h>
typedef struct { unsigned pid; unsigned long long used; unsigned gpu, compute; } Info;
int nvmlInit_v2(void) { return FAILS == 1; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 3; return FAILS == 2; }
int nvmlDeviceGetHandleByIndex_v2(unsigned n, void **gpu) { *gpu = (void *)(1L + n); return n == 2; }
int nvmlDeviceGetUUID(void *gpu, char *text, unsigned room) { return snprintf(text, room, "GPU-%ld", (long)gpu) < 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *gpu, unsigned *n, Info *its) {
  its[0] = (Info){11, (long)gpu << 20, 0, 0}; its[1] = (Info){12, -1, 0, 0}; *n = 2; return FAILS == 3; }
"""
MPS = r"""
int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *gpu, unsigned *n, Info *its) {
  its[0] = (Info){13, 7, 0, 0}; *n = gpu == (void *)2; return 0; }
"""
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def library(folder: Path, *, fails: int = 0, mps: str = MPS) -> str:
    """`fails`: 1 at once, 2 without GPUs, 3 it tells of no process."""
    source, target = folder / "nvml.c", folder / f"libnvml{fails}.so"
    source.write_text(f"#define FAILS {fails}\n{NVML}{mps}")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", target, source], check=True)
    return str(target)


def test_bytes_are_of_each_process_and_gpu(tmp_path: Path) -> None:
    """A GPU that cannot be opened and a process of which nothing is told are left out; those of MPS are there."""
    usage = GpuUsage(library(tmp_path))
    assert usage.by_process() == {11: {"GPU-1": 1 << 20, "GPU-2": 2 << 20}, 13: {"GPU-2": 7}}
    assert usage.of({"torch-cuda": 11, "mlx": 99, "toy": 12}) == {"torch-cuda": {"GPU-1": 1 << 20, "GPU-2": 2 << 20}}


@pytest.mark.parametrize("fails", [1, 2, 3])
def test_a_driver_that_does_not_tell_is_none(tmp_path: Path, fails: int) -> None:
    assert GpuUsage(library(tmp_path, fails=fails, mps="")).by_process() == {}


def test_no_driver_is_none() -> None:
    assert GpuUsage("libof-another-machine.so").of({"torch-cuda": 11}) == {}


def test_history_has_the_sum_and_status_each_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = GpuUsage(library(tmp_path))
    seen: dict[str, Any] = {"up_s": 1.0, "pids": {"torch-cuda": 11}, "durations": [], "queued": []}
    seen |= {
        "arena_bytes": {},
        "errors": [],
        "fallbacks": [],
        "restarts": [],
        "workers": [["torch-cuda", "ready", 0, 0, 0]],
    }
    sample = Recorder(None, usage).take(seen)
    assert sample is not None
    assert sample.workers["torch-cuda"].gpu_bytes == 3 << 20
    monkeypatch.setattr(broker, "GpuUsage", partial(GpuUsage, library(tmp_path)))
    answer = {"backends": [{"name": "torch-cuda", "pid": 11}, {"name": "mlx", "pid": None}]}
    broker.add_gpu_memory(answer)
    assert [row["gpu_bytes"] for row in answer["backends"]] == [{"GPU-1": 1 << 20, "GPU-2": 2 << 20}, {}]
