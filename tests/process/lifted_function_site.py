"""A broker with the GPU of threads, whose worker has functions that this process may launch itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.process import forks
from tests.process import lifted_functions as fn
from tests.process.function_site import serving
from tests.process.gpu_site import SOFT, soft
from tests.process.harness import Site, wait_until
from tests.process.lifted_site import kernels, rows

from layerzero.client.gpu.lifting import lifted_library

__all__ = ["kernels", "lift", "path_of", "refused", "rows", "site", "soft", "way"]


@pytest.fixture
def site(kernels: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A broker with the GPU, whose worker has machine code that can be seen."""
    forks.start_server()
    store = tmp_path_factory.getbasetemp() / "store of lifted functions"
    one = Site(store, restart_budget=100, backoff_s=0.01, backoff_max_s=0.01)
    one.environ |= {"LAYERZERO_WORKER_CONFINED": "0", "PYTHONPATH": str(SOFT / "broker")}
    one.environ["LAYERZERO_CUPTI"] = "/no/libcupti.so"
    with serving(one, fn.THERE):
        fn.prepare()
        yield one


@pytest.fixture(params=["compiled", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of launching: by what is compiled, and by the Python."""
    if request.param == "python":
        monkeypatch.setattr(lifted_library, "lifted", None)
    elif lifted_library.lifted is None:
        pytest.skip(lifted_library.why_not)


def path_of(function: Any) -> str:
    return str(function.last_report().selection.path)


def lift(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call it until this process launches its kernels; the result of that."""
    result = None

    def is_lifted() -> bool:
        nonlocal result
        result = function(*args, **kwargs)
        told = function.last_report().not_lifted
        assert told.startswith("NOT_YET: ") or not told, told
        return path_of(function) == "lifted"

    wait_until(is_lifted)
    return result


def refused(function: Any, *args: Any) -> str:
    """Call it until its report says why it stays in its worker; that."""
    told = ""

    def is_told() -> bool:
        nonlocal told
        function(*args)
        assert path_of(function) != "lifted"
        told = function.last_report().not_lifted
        return not told.startswith("NOT_YET")

    wait_until(is_told)
    return told
