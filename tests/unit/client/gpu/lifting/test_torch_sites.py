"""Lifted calls of torch's tensors: on the GPU of tests/soft_gpu, whose memory is the CPU's, with what torch has for the
CPU in place of what it has for GPUs. That knows no streams: tensors stay until the stream is through."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.soft_gpu import soft_gpu, soft_kernels
from tests.soft_gpu.soft_gpu import driver
from tests.soft_gpu.soft_lifts import lifted_silu, lifted_triple
from tests.unit.client.gpu.lifting import rig as rigs
from tests.unit.client.gpu.lifting.rig import ORDINARY, Rig

from layerzero.client.connection import call
from layerzero.client.gpu import memory
from layerzero.client.gpu.lifting import lifted_library, loaded, sites
from layerzero.ipc.cuda import driver as cuda

torch = pytest.importorskip("torch")


@pytest.fixture(params=["compiled", "python"], autouse=True)
def is_compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "compiled":
        if lifted_library.lifted is None:
            pytest.skip(lifted_library.why_not)
    else:
        monkeypatch.setattr(lifted_library, "lifted", None)
    return bool(request.param == "compiled")


class Torch:
    """What of torch's stands for its GPU's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream = 0
        self.made: list[Any] = []
        guards = SimpleNamespace(_empty_strided_cuda=torch._C._dynamo.guards._empty_strided_cpu)
        fakes = {"_cuda_getCurrentRawStream": lambda device: self.stream, "_cuda_getDevice": lambda: 0}
        for name, fake in {**fakes, "_dynamo": SimpleNamespace(guards=guards)}.items():
            monkeypatch.setattr(torch._C, name, fake, raising=False)
        monkeypatch.setattr(sites, "new_like", self.new_like)
        monkeypatch.setattr(rigs, "result_like", lambda like, out, specs: self.new_like(like, specs[0]))
        monkeypatch.setattr(rigs, "describe_all", self.describe_all)

    def new_like(self, array: Any, spec: Any) -> tuple[Any, int]:
        made = torch.empty_strided(spec.shape, spec.strides, dtype=getattr(torch, spec.dtype))
        self.made.append(spec)
        return made, made.data_ptr()

    def describe_all(self, request: Any) -> Any:
        arrays, out = call.describe_all(request)
        for array in arrays:
            array.device = 0
        return arrays, out


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Torch:
    return Torch(monkeypatch)


@pytest.fixture
def rig(fake: Torch) -> Iterator[Rig]:
    real = cuda.Driver
    soft_gpu.install()
    soft_kernels.install()
    made = Rig()
    yield made
    made.close()
    driver.synchronize()
    cuda.Driver = real  # type: ignore[misc]
    for cache in (cuda.load, memory.uuid_of, memory.memory_of):
        cache.cache_clear()
    loaded.forget()
    driver.reset()


def randn(*shape: int) -> Any:
    """At a multiple of 256 bytes, as GPUs' allocators give memory."""
    count = torch.Size(shape).numel()
    room = torch.zeros(count + 64)
    return room[-(room.data_ptr() // 4) % 64 :][:count].view(shape).copy_(torch.randn(shape))


def close(result: Any, expected: Any, stream: int = 0) -> None:
    assert result is not ORDINARY
    driver.synchronize_stream(stream)
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("make", [lifted_silu, lifted_triple])
def test_values_are_those_of_the_kernel(rig: Rig, make: Any) -> None:
    rig.offer_silu(make)
    expected = torch.nn.functional.silu if make is lifted_silu else lambda x: 3 * x
    with torch.no_grad():
        for shape in [(64,), (3, 5), (2, 3, 4)]:
            x = randn(*shape)
            close(rig.settle(lambda: rig.silu(x)), expected(x))  # noqa: B023
            for _ in range(5):
                x = randn(*shape)
                result = rig.silu(x)
                close(result, expected(x))
                assert (result.shape, result.stride(), result.dtype) == (x.shape, x.stride(), x.dtype)


def test_tensors_that_need_gradients_are_looked_at(rig: Rig) -> None:
    rig.offer_silu()
    x = randn(64).requires_grad_()
    with torch.no_grad():
        close(rig.settle(lambda: rig.silu(x)), torch.nn.functional.silu(x))
    assert rig.silu(x) is ORDINARY  # which refuses it


def test_scratch_in_a_graph_is_torchs_own(rig: Rig, fake: Torch) -> None:
    rig.offer_silu(lifted_triple)
    x = randn(64)
    close(rig.settle(lambda: rig.silu(x)), 3 * x)
    fake.stream = driver.create_stream()
    driver.begin_capture(fake.stream)
    fake.made.clear()
    result = rig.silu(x)
    graph = driver.end_capture(fake.stream)
    assert [spec.dtype for spec in fake.made] == ["uint8"]
    assert not rig.lifts._rooms[rig.gpu.uuid]._captured
    assert result is not ORDINARY
    driver.destroy_graph(graph)
