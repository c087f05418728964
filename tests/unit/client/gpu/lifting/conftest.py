"""A client of the GPU of tests/soft_gpu that lifts calls: by what is compiled, and by the Python that does the same."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from tests.soft_gpu import soft_cupy, soft_kernels
from tests.soft_gpu.soft_gpu import driver
from tests.unit.client.gpu.lifting.rig import Rig

from layerzero.client.gpu import memory
from layerzero.client.gpu.lifting import lifted_library, loaded
from layerzero.ipc.cuda import driver as cuda


@pytest.fixture(params=["compiled", "python"])
def is_compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "compiled":
        if lifted_library.lifted is None:
            pytest.skip(lifted_library.why_not)
    else:
        monkeypatch.setattr(lifted_library, "lifted", None)
    return bool(request.param == "compiled")


@pytest.fixture
def kernels() -> Iterator[Any]:
    """This process has the GPU, and CuPy for it."""
    cupy, real = sys.modules.get("cupy"), cuda.Driver
    soft_cupy.install()
    yield soft_kernels.install()
    driver.is_lost = False
    driver.synchronize()  # what is under way uses the memory that goes
    del sys.modules["cupy"]
    if cupy is not None:
        sys.modules["cupy"] = cupy
    cuda.Driver = real  # type: ignore[misc]
    for cache in (cuda.load, memory.uuid_of, memory.memory_of):
        cache.cache_clear()
    loaded.forget()
    driver.reset()
    soft_cupy.reset()


@pytest.fixture
def rig(is_compiled: bool, kernels: Any) -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()
