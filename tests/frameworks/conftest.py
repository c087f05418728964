"""Tests of applications that bring their own framework. They run in the environment that has all of them, started by
tests/envs/test_frameworks.py, against a broker that another interpreter runs: two environments, one broker."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

if "LZ_TEST_FRAMEWORKS" not in os.environ:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def _session() -> Iterator[None]:
    import torch

    import layerzero as lz

    torch.set_num_threads(1)  # threads of tiny tensors wait for each other, where others keep the cores busy
    lz.connect()
    yield
    lz.disconnect()
