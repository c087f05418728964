"""Which results a GPU makes the digest of, and what happens where its driver does not take that kernel."""

from __future__ import annotations

import pytest
from tests.unit.ipc.fake_cuda import UUID, FakeDriver, FakeGpu, error

from layerzero.ipc.cuda.driver import Context
from layerzero.ipc.errors import CudaError
from layerzero.ipc.lifting.gpu_digest import LEAST_BYTES, PREFIX, GpuDigest
from layerzero.ipc.lifting.results import is_like, read_digest
from layerzero.ipc.vocabulary.tensors import TensorSpec

NO_BINARY, LOST = 209, 700


class Driver(FakeDriver):
    """One that takes no PTX."""

    failure = error("cuModuleLoadData", NO_BINARY)

    def load_module(self, code: bytes) -> int:
        assert code.endswith(b"\0")
        raise self.failure


def test_results_are_read_back_where_the_driver_takes_no_kernel_of_ours() -> None:
    """It is asked once; what another GPU has made cannot be compared there, and that is an error."""
    driver = Driver(FakeGpu())
    with Context(driver, UUID):  # type: ignore[arg-type]
        digests, at = GpuDigest(driver), driver.allocate(LEAST_BYTES)  # type: ignore[arg-type]
        found = read_digest(driver, at, LEAST_BYTES, 0, digests)  # type: ignore[arg-type]
        assert found == read_digest(driver, at, LEAST_BYTES, 0, digests)  # type: ignore[arg-type]
        assert (len(found), driver.calls["load_module"]) == (40, 1)
        spec = TensorSpec.contiguous("uint8", (LEAST_BYTES,))
        assert is_like(driver, at, spec, 0, found, 0, digests)  # type: ignore[arg-type]
        with pytest.raises(CudaError, match="returned 209"):
            is_like(driver, at, spec, 0, PREFIX + 32 * "0", 0, digests)  # type: ignore[arg-type]


def test_small_results_are_read_back() -> None:
    driver = Driver(FakeGpu())
    with Context(driver, UUID):  # type: ignore[arg-type]
        at = driver.allocate(LEAST_BYTES - 1)
        assert len(read_digest(driver, at, LEAST_BYTES - 1, 0, GpuDigest(driver))) == 40  # type: ignore[arg-type]
    assert not driver.calls["load_module"]


def test_lost_gpu_is_said() -> None:
    driver = Driver(FakeGpu())
    driver.failure = error("cuModuleLoadData", LOST, sticky=True)
    with Context(driver, UUID), pytest.raises(CudaError):  # type: ignore[arg-type]
        GpuDigest(driver).is_for(LEAST_BYTES)  # type: ignore[arg-type]
