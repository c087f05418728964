"""The backend of tests of a bare worker (tests/gpu/backends/driver_toy.py), on the soft GPU."""

from __future__ import annotations

from tests.gpu.backends import driver_toy
from tests.soft_gpu import soft_gpu

from layerzero.workers.provider import Loaded


def load() -> Loaded:
    soft_gpu.install()
    return driver_toy.load()
