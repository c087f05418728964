"""A broker whose clients keep capsules, calls that its workers die of, and what is kept of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.backends.toy import SEGV, fault
from tests.process.harness import Site, wait_until

import layerzero as lz_
from layerzero.client.capsules import form, store

__all__ = ["Sites", "capsules", "crash", "deadly", "hashed", "kept", "new", "only"]

Sites = Callable[..., Site]


@pytest.fixture
def capsules(tmp_path: Path) -> Path:
    """The folder that they are kept in."""
    return tmp_path / "capsules"


@pytest.fixture
def new(new_site: Sites, capsules: Path) -> Sites:
    def make(mode: str = "full", **settings: Any) -> Site:
        site = new_site(standby=0, **settings)
        site.environ["LAYERZERO_CAPSULES"] = mode
        site.environ["LAYERZERO_CAPSULE_DIR"] = str(capsules)
        return site

    return make


def crash(x: Any, **options: Any) -> Any:
    """A silu of which one worker dies. Its result, which another one gives."""
    result = lz_.silu(x, **options)
    assert np.allclose(result, x / (1 + np.exp(-x)), rtol=1e-5)
    return result


def only(folder: Path) -> form.Capsule:
    (name,) = store.names(folder)
    return hashed(folder / name)


def hashed(folder: Path) -> form.Capsule:
    """A capsule once its bytes are."""

    def read() -> form.Capsule | None:
        capsule = form.read(folder)
        return None if capsule.has_data and not all(one.sha256 for one in capsule.segments) else capsule

    capsule = wait_until(read)
    assert capsule is not None
    return capsule


def deadly(action: int, *shape: int, backend: str = "alpha") -> np.ndarray:
    x = np.linspace(-2, 2, int(np.prod(shape)), dtype=np.float32).reshape(shape)
    x.flat[0] = fault(action, backend)
    return x


@pytest.fixture
def kept(new: Sites, capsules: Path) -> tuple[Site, form.Capsule]:
    site = new()
    site.connect()
    crash(deadly(SEGV, 3, 5))
    lz_.disconnect()
    return site, only(capsules)
