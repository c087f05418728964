"""The digest that a GPU makes of its memory, against the same sums by NumPy."""

from __future__ import annotations

import ctypes
import time

import numpy as np
import pytest

from layerzero.ipc.cuda import driver as cuda
from layerzero.ipc.lifting.gpu_digest import LEAST_BYTES, MIX, PREFIX, GpuDigest
from layerzero.ipc.lifting.results import read_digest

GOLDEN, ONE, TWO, THREE = (np.uint64(value) for value in MIX)


def shift(values: np.ndarray, bits: int) -> np.ndarray:
    return values ^ (values >> np.uint64(bits))


def reference(data: np.ndarray) -> str:
    """Of bytes: two sums modulo 2^64."""
    with np.errstate(over="ignore"):
        x = (np.arange(data.size, dtype=np.uint64) << np.uint64(8) | data.astype(np.uint64)) + GOLDEN
        x = shift(shift(shift(x, 30) * ONE, 27) * TWO, 31)
        y = shift(shift(x * THREE, 32) * THREE, 29)
        sums = np.array([x.sum(dtype=np.uint64), y.sum(dtype=np.uint64)], "<u8")
    return PREFIX + sums.tobytes().hex()


@pytest.mark.parametrize("nbytes", [1, 7, 4096, LEAST_BYTES, LEAST_BYTES + 3, (16 << 20) + 1])
@pytest.mark.parametrize("shifted", [0, 1, 5])
def test_digest_is_what_numpy_sums(context: cuda.Context, nbytes: int, shifted: int) -> None:
    """At any address and of any length; of the same bytes the same twice, of others another."""
    data = np.frombuffer(np.random.default_rng(nbytes).bytes(nbytes), np.uint8).copy()
    with context:
        driver = context.driver
        stream, base = driver.create_stream(), driver.allocate(nbytes + 16)
        try:
            digests = GpuDigest(driver)
            driver.copy_to_device(base + shifted, data.ctypes.data, nbytes, stream)
            found = digests.of(base + shifted, nbytes, stream)
            assert found == reference(data) == digests.of(base + shifted, nbytes, stream)
            byte = ctypes.c_uint8(data[-1] ^ 1)
            driver.copy_to_device(base + shifted + nbytes - 1, ctypes.addressof(byte), 1, stream)
            assert digests.of(base + shifted, nbytes, stream) != found
        finally:
            driver.synchronize_stream(stream)
            driver.destroy_stream(stream)
            driver.free(base)


def test_large_results_are_not_read_back(context: cuda.Context) -> None:
    """Reading 256 MiB back, with BLAKE2b of it, takes some 0.3 s and more."""
    nbytes = 256 << 20
    with context:
        driver = context.driver
        stream, base = driver.create_stream(), driver.allocate(nbytes)
        try:
            driver.clear(base, nbytes, stream)
            digests = GpuDigest(driver)
            digests.of(base, 1, stream)
            start_s = time.perf_counter()
            found = read_digest(driver, base, nbytes, stream, digests)
            by_gpu_s = time.perf_counter() - start_s
            start_s = time.perf_counter()
            assert len(read_digest(driver, base, nbytes, stream)) == 40
            print(f"256 MiB: {by_gpu_s * 1e3:.2f} ms by the GPU, {(time.perf_counter() - start_s) * 1e3:.0f} ms read")
            assert found.startswith(PREFIX)
        finally:
            driver.synchronize_stream(stream)
            driver.destroy_stream(stream)
            driver.free(base)
