"""What torch-rocm, torch-xpu and torch-hpu share, on devices that are here: their own nobody of us has run."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.envs.harness import STORE

from layerzero.envs.build.build import ensure, resolve
from layerzero.envs.build.environ import worker_environ
from layerzero.workers.providers import _torch_staged, torch_hpu

SCRIPT = Path(__file__).with_name("staged_torch.py")
NAMES = ("torch-rocm", "torch-xpu", "torch-hpu")
Rows = list[tuple[str, str, str, str | None]]


@pytest.fixture(scope="module")
def rows() -> Rows:
    env = ensure(resolve("torch"), store=STORE)
    argv = [str(env.python), str(SCRIPT), str(resolve("torch-rocm").descriptor_path)]
    ended = subprocess.run(
        argv, env=worker_environ(env.environ, os.environ), capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return [tuple(json.loads(line)) for line in ended.stdout.splitlines()]


def test_copies_to_and_from_a_device_leave_results_right(rows: Rows) -> None:
    """Every kernel that the descriptors claim, where the device is the CPU."""
    assert [row for row in rows if row[0] == "cpu" and row[3] is not None] == []
    assert {op for device, op, _, _ in rows if device == "cpu"} == set(_torch_staged.STAGED)


def test_a_kernel_computes_with_what_is_on_the_device_alone(rows: Rows) -> None:
    """A tensor that is left in the CPU's memory does no harm where the device is the CPU. On a device without memory
    all goes well until the result is to be copied back, but for embedding, which looks at the ids before."""
    said = {op: why for device, op, _, why in rows if device == "meta"}
    assert set(said) == set(_torch_staged.STAGED)
    assert {op for op, why in said.items() if "copy out of meta tensor" not in str(why)} <= {"embedding"}, said
    assert "meta" in str(said["embedding"])


@pytest.mark.parametrize("name", NAMES)
def test_what_is_claimed_is_what_there_is(name: str) -> None:
    """A descriptor with a kernel that its provider lacks fails when it is first built, which is never here."""
    claimed = set(json.loads(resolve(name).descriptor_path.read_text())["ops"])
    assert claimed == set(torch_hpu.DOCUMENTED if name == "torch-hpu" else _torch_staged.STAGED)
