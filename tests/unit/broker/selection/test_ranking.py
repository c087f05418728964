"""Who may serve a call, in which order, and why not the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulation import CAPABILITIES, DEVICES, GPU, GPU_CAPABILITIES, route_body

from layerzero.broker.selection.explain import explain
from layerzero.broker.selection.policy import Layer, Policy
from layerzero.broker.selection.ranking import GPU_TIE_US, TIE_US, Engine
from layerzero.broker.selection.signature import CallSpec, Verdict, no_backend
from layerzero.capabilities import descriptor
from layerzero.capabilities.context import SelectionContext
from layerzero.capabilities.descriptor import Capability
from layerzero.capabilities.device import DeviceSpec
from layerzero.capabilities.match import Rejection
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.errors import BackendError
from layerzero.ipc.transport.messages import Route, encode
from layerzero.ipc.vocabulary.tensors import TensorSpec

DESCRIPTORS = sorted((Path(descriptor.__file__).parent / "descriptors").glob("*.json"))
OURS = {path.stem: descriptor.load(path) for path in DESCRIPTORS}
CPU = DeviceSpec(device_uuid="cpu-1")


def engine(capabilities: dict[str, Capability] = CAPABILITIES, **more: Any) -> Engine:
    return Engine(capabilities, CPU, **more)


def ranked(one: Engine, body: bytes = route_body(), now_s: float = 0.0, **down: Rejection) -> list[Verdict]:
    spec = CallSpec.parse(body)
    return list(one.rank(spec, one.context(spec), down, now_s))


def order(one: Engine, body: bytes = route_body(), now_s: float = 0.0, **down: Rejection) -> list[str]:
    return [v.backend for v in ranked(one, body, now_s, **down) if v.is_accepted]


def measured(one: Engine, body: bytes = route_body(), **times_us: float) -> None:
    """Two runs each: the first one warms up."""
    cell = one.cell(one.context(CallSpec.parse(body)))
    for backend, us in times_us.items():
        for _ in range(3):
            one.note_time(f"{backend}.silu", cell, round(us * 1e3), 0.0, is_clean=True)


def softmax(*shape: int, strides: tuple[int, ...] | None = None, dtype: str = "float32") -> bytes:
    dense = TensorSpec.contiguous(dtype, shape)
    x = dense if strides is None else TensorSpec(dtype, shape, strides)
    return encode(Route(op="softmax", inputs=[x.to_wire()], outputs=[dense.to_wire()], attrs={"dim": len(shape) - 1}))


def test_without_times_priority_decides() -> None:
    """The descriptor's author knows the library."""
    assert order(engine()) == ["alpha", "beta", "gamma", "delta"]


def test_a_kernel_that_takes_half_the_time_wins_over_priority() -> None:
    """A measurement on this machine knows more than a descriptor."""
    one = engine()
    measured(one, alpha=900.0, beta=400.0)
    assert order(one)[0] == "beta"
    assert ranked(one)[0].measured_us == 400.0


def test_times_that_differ_by_noise_are_a_tie() -> None:
    """Else calls would wander between backends from one start to the next."""
    one = engine()
    measured(one, alpha=20.0 + TIE_US, beta=20.0)
    assert order(one)[0] == "alpha"


@pytest.mark.parametrize(("slower", "first"), [(1.015, "alpha"), (1.05, "beta")])
def test_noise_of_long_kernels_is_a_share_of_their_time(slower: float, first: str) -> None:
    """A twentieth of a call's time is worth another backend; less than a fiftieth is not to be told from noise."""
    one = engine()
    measured(one, alpha=1000.0 * slower, beta=1000.0)
    assert order(one)[0] == first


def test_noise_is_less_on_a_gpu() -> None:
    """Its kernels take some us, and its clock tells them apart."""
    body = route_body(device=GPU)
    one = engine(GPU_CAPABILITIES, gpus=[DEVICES[GPU]])
    cell = one.cell(one.context(CallSpec.parse(on_gpu())))
    first, *others = kernels = [v.kernel_id for v in ranked(one, on_gpu()) if v.is_accepted]
    for rank, kernel_id in enumerate(kernels):
        for _ in range(3):
            one.note_time(kernel_id, cell, 15_000 + 5_000 * rank, 0.0, is_clean=True)
    assert [v.kernel_id for v in ranked(one, on_gpu()) if v.is_accepted] == kernels
    before = one.epoch
    one.note_staying(first, cell)
    assert one.epoch > before
    found = [v for v in ranked(one, on_gpu()) if v.is_accepted]
    assert [v.kernel_id for v in found] == [*others, first]
    assert "is not lifted: 300 us more" in "; ".join(found[-1].notes)
    for kernel_id in others:
        one.note_staying(kernel_id, cell)
    assert [v.kernel_id for v in ranked(one, on_gpu()) if v.is_accepted] == kernels, "nobody is lifted: all pay"
