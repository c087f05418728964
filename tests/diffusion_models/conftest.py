"""Tests of applications that use Diffusers. They run in the environment that has it, started by
tests/envs/test_diffusers.py, against a broker that another interpreter runs: two environments, one broker."""

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

    torch.set_num_threads(1)  # threads of tiny models wait for each other, where others keep the cores busy
    lz.connect()
    yield
    lz.disconnect()


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """Each test counts its own calls, and leaves Diffusers' default backend as it was: a model that is given a backend
    changes it for all."""
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    import layerzero.diffusers

    layerzero.diffusers.clear()
    yield
    layerzero.diffusers.register()
    _AttentionBackendRegistry.set_active_backend(AttentionBackendName.NATIVE)
