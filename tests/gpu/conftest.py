"""Fixtures of the tests that need an NVIDIA GPU; without one they are skipped, with the driver's reason.

They need pytest, msgpack and numpy, and nothing else of the development environment:

    PYTHONPATH=src:. python -m pytest -c /dev/null --rootdir . --confcutdir tests/gpu --import-mode importlib tests/gpu
"""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from tests.gpu.peer import PATIENCE_S, Peer

from layerzero.ipc.cuda import driver as cuda
from layerzero.ipc.errors import CudaError

os.environ.setdefault("LZ_TEST_FORKS", "0")  # a process that others fork from has no GPU
_never = threading.Event()


@pytest.fixture(scope="module", autouse=True)
def gradients() -> Iterator[None]:
    """As they were: what loads a provider in this process switches them off."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_grad_enabled(True)


@pytest.fixture(scope="session")
def driver() -> cuda.Driver:
    try:
        found = cuda.load()
        if not found.gpus():
            pytest.skip("the NVIDIA driver sees no GPU")
    except (OSError, CudaError) as exc:
        pytest.skip(f"no NVIDIA GPU: {exc}")
    return found


@pytest.fixture(scope="session")
def context(driver: cuda.Driver) -> cuda.Context:
    """Of the last GPU: where there are several, its ordinal is not the one that a worker gives it."""
    return cuda.Context(driver, driver.gpus()[-1].uuid)


@pytest.fixture
def current(context: cuda.Context) -> Iterator[cuda.Context]:
    """The context, current in the test's thread."""
    with context:
        yield context


@pytest.fixture
def start(context: cuda.Context) -> Iterator[Callable[..., Peer]]:
    """Start other processes, with changes to their environment, or by another command."""
    peers: list[Peer] = []

    def make(*prefix: str, **environment: str) -> Peer:
        peers.append(Peer(*prefix, **environment))
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()


@pytest.fixture
def worker(start: Callable[..., Peer]) -> Peer:
    return start()


@pytest.fixture
def numbers() -> itertools.count[int]:
    """Where arena numbers come from."""
    return itertools.count(1)


def finish(driver: cuda.Driver, stream: int) -> None:
    """Wait for a stream, but not for ever: a wait that nobody ends is what these tests look for."""
    until(lambda: driver.is_stream_idle(stream))


def until(is_true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < deadline_s, f"not true for {PATIENCE_S:g} s"
        _never.wait(0.001)


def store(driver: cuda.Driver, address: int, data: bytes, stream: int) -> None:
    """Bytes to the GPU, in the order of the stream. From pageable memory: they are taken before this returns."""
    source = (ctypes.c_char * len(data)).from_buffer_copy(data)
    driver.copy_to_device(address, ctypes.addressof(source), len(data), stream)


def load(driver: cuda.Driver, address: int, nbytes: int, stream: int) -> bytes:
    """Bytes from the GPU, after what the stream did so far."""
    finish(driver, stream)
    target = (ctypes.c_char * nbytes)()
    driver.copy_to_host(ctypes.addressof(target), address, nbytes, stream)
    finish(driver, stream)
    return bytes(target)
