"""Kernels of AMD's and Intel's GPUs and Gaudi: claims that nobody of us has tried, and tensors of the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from layerzero.capabilities import descriptor
from layerzero.capabilities.context import SelectionContext
from layerzero.capabilities.descriptor import Capability, load, parse
from layerzero.capabilities.device import DeviceSpec
from layerzero.capabilities.match import match
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.vocabulary.tensors import TensorSpec

FOLDER = Path(descriptor.__file__).parent / "descriptors"
OTHERS = [load(FOLDER / f"torch-{name}.json") for name in ("rocm", "xpu", "hpu")]
X = TensorSpec.contiguous("float32", (4, 8))


def silu_on(device: DeviceSpec) -> SelectionContext:
    return SelectionContext("silu", (X,), (X,), {}, device)


@pytest.mark.parametrize("claims", OTHERS, ids=lambda one: one.backend)
def test_they_take_tensors_of_the_cpu_and_no_others(claims: Capability) -> None:
    """The memory of these devices is shared with nobody: what lies there cannot be named in a call."""
    (kernel,) = claims.ops["silu"]
    assert (kernel.copies_inputs, kernel.copies_outputs) == (True, True)
    assert match(silu_on(DeviceSpec()), kernel) == []
    gpu = DeviceSpec("cuda", device_name="NVIDIA H200", sm_version=90)
    (why,) = match(silu_on(gpu), kernel)
    assert (why.code, why.detail) == (Reason.PLATFORM_MISMATCH, "the device is cuda; the kernel needs cpu")


@pytest.mark.parametrize("claims", OTHERS, ids=lambda one: one.backend)
def test_they_say_that_nobody_has_run_them(claims: Capability) -> None:
    """In the field that selection and `lz ops` heed, and with each claim, whose source is the library's own text."""
    assert claims.not_run
    sources = [kernel.source for kernels in claims.ops.values() for kernel in kernels]
    assert [source for source in sources if not source.endswith("; not run")] == []
    assert [source for source in sources if "https://" not in source and "PyTorch" not in source] == []
    assert not any(kernel.deterministic for kernels in claims.ops.values() for kernel in kernels)


def test_they_come_after_every_backend_that_was_run() -> None:
    """Without times that were measured here, none of them is chosen while another takes the call."""
    run = [one for one in map(load, FOLDER.glob("*.json")) if not one.not_run and one.platform == "cpu"]
    least = {op: min(kernel.priority for one in run for kernel in one.ops.get(op, ())) for op in OTHERS[0].ops}
    for claims in OTHERS:
        assert [op for op, (kernel,) in claims.ops.items() if kernel.priority >= least[op]] == []


def test_whether_it_was_run_changes_no_hash() -> None:
    """Times and dispatch tables are of what kernels do; the day that somebody runs one, they stay."""
    claims = OTHERS[0]
    assert parse(claims.model_copy(update={"not_run": False}).model_dump_json(), "x").hash == claims.hash
    assert replace(DeviceSpec(), architecture="gfx942") != DeviceSpec()
