"""A broker whose functions have the GPU of threads, and calls of theirs that have come to a worker's ring."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.process import forks
from tests.process import gpu_functions as fn
from tests.process.function_site import serving
from tests.process.gpu_site import SOFT, soft
from tests.process.harness import Site, wait_until

import layerzero as lz
from layerzero.functions.gpu_express import GpuExpressCall

__all__ = ["own", "site", "soft", "store", "there"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def site(soft: None, store: Path) -> Iterator[Site]:
    """A broker with the GPU, whose workers may open others' memory as a driver does."""
    forks.start_server()
    one = new_site(store)
    with serving(one, fn.THERE):
        yield one


def new_site(store: Path, **settings: Any) -> Site:
    one = Site(store, restart_budget=100, backoff_s=0.01, backoff_max_s=0.01, **settings)
    one.environ |= {"LAYERZERO_WORKER_CONFINED": "0", "PYTHONPATH": str(SOFT / "broker")}
    return one


@pytest.fixture(autouse=True)
def there(site: Site) -> int:
    """The worker's pid; it has the GPU."""
    return fn.prepare()


@pytest.fixture
def own(site: Site, store: Path) -> Iterator[Site]:
    """A broker for one test, whose worker dies: what has died is not given a ring for a while."""
    lz.disconnect()
    one = new_site(store, timeout_s=30)
    with serving(one, fn.THERE):
        fn.prepare()
        yield one
    with site.environment():
        site.connect()


def path_of(report: Any) -> str:
    return str(report.selection.path)


def settled(x: Any, *args: Any, function: Any = fn.act) -> int:
    """Until such calls take neither side's long way: the worker's pid."""

    def is_settled() -> bool:
        function(x, *args)
        return isinstance(function._last.call, GpuExpressCall) and path_of(function.last_report()) == "express"

    wait_until(is_settled)
    assert is_settled()
    return int(function.last_report().selection.worker_pid)


def check(result: Any, expected: Any) -> None:
    np.testing.assert_allclose(result.get(), expected, rtol=1e-6)
