"""lz.readiness_check on an ordinary CPU installation: every backend of the project, each in its own environment."""

from __future__ import annotations

import pytest
from tests.envs.harness import ON_CPU

import layerzero as lz
from layerzero.client.tools import ready
from layerzero.ipc.vocabulary.ops import PUBLIC_OPS


@pytest.mark.timeout(900)  # all environments are probed, where nobody has done so before
@pytest.mark.usefixtures("installation")
def test_every_backend_of_a_cpu_installation_answers() -> None:
    """The example of docs/readiness.md: nothing is named, everything is tried. Backends that cannot run here are not
    tried: why they cannot is a check of its own."""
    report = lz.readiness_check()
    workers = {check.name.removeprefix("worker "): check for check in report.checks if check.name.startswith("worker ")}
    assert {name: check.detail for name, check in workers.items() if not check.ok} == {}
    assert set(workers) == ON_CPU


@pytest.mark.usefixtures("installation")
@pytest.mark.parametrize("op", PUBLIC_OPS)
def test_every_op_has_a_small_call_that_a_real_kernel_serves(op: str) -> None:
    """A backend may serve this op alone; its call must not fail for want of a dtype, or of indices that exist."""
    calls = ready.small_calls(op)
    assert calls
    for call in calls:
        call.function(**ready.plain_inputs(op, call.arrays), **call.params)
