"""What every test of memory and descriptors keeps to."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest


def shared_memory() -> list[str]:
    names = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(entry))
    return sorted(name for name in names if name.startswith("/memfd:"))


@pytest.fixture(autouse=True)
def no_memory_stays() -> Iterator[None]:
    """Shared memory that a test leaves open is counted against whichever test comes next in this process."""
    before = shared_memory()
    yield
    if shared_memory() != before:
        gc.collect()
        assert shared_memory() == before
