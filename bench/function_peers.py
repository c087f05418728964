"""Peers of functions in other environments, as far as they are installed: how each calls a function that returns what
it is given. None of them has another environment here."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Call = Callable[[Any], Any]


def same(value: Any = None) -> Any:
    return value


def _loky(stack: contextlib.ExitStack) -> Call:
    from loky import get_reusable_executor

    executor = get_reusable_executor(max_workers=1)
    stack.callback(executor.shutdown)
    return lambda value: executor.submit(same, value).result()


def _rpyc(stack: contextlib.ExitStack) -> Call:
    """Its proxies give an array by reference; here its bytes go there and back, as with the others."""
    from rpyc.utils import classic

    connection = classic.connect_multiprocess()
    stack.callback(connection.close)
    connection.execute("def same(value=None): return value")
    remote = connection.namespace["same"]
    return lambda value: remote(None) if value is None else classic.obtain(remote(classic.deliver(connection, value)))


def _executorlib(stack: contextlib.ExitStack) -> Call:
    from executorlib import SingleNodeExecutor

    executor = stack.enter_context(SingleNodeExecutor(max_workers=1, block_allocation=True))
    return lambda value: executor.submit(lambda one: one, value).result()  # by value: its worker has no bench/


def _appose(stack: contextlib.ExitStack) -> Call:
    """A task of no lines. Arrays are put into shared memory by hand, once, and sent by name."""
    import appose

    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # its workers need it as well
    service = stack.enter_context(appose.system().python())
    given: dict[int, Any] = {}

    def run(value: Any) -> Any:
        if value is None:
            return service.task("None").wait_for()
        if id(value) not in given:
            shared = stack.enter_context(appose.NDArray(str(value.dtype), list(value.shape)))
            shared.ndarray()[:] = value
            given[id(value)] = shared
        return service.task("None", {"value": given[id(value)]}).wait_for()

    return run


def _ray(stack: contextlib.ExitStack) -> Call:
    import ray

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
    stack.callback(ray.shutdown)

    class Actor:
        def same(self, value: Any = None) -> Any:
            return value

    actor = ray.remote(Actor).remote()
    return lambda value: ray.get(actor.same.remote(value))


_PEERS = {"loky": _loky, "rpyc": _rpyc, "executorlib": _executorlib, "appose": _appose, "ray": _ray}


@contextlib.contextmanager
def peers(*, is_quick: bool) -> Iterator[dict[str, Call]]:
    """Those that are installed, by name; without Ray, whose start takes long, where it is to be quick."""
    with contextlib.ExitStack() as stack:
        names = [name for name in _PEERS if find_spec(name) is not None and not (is_quick and name == "ray")]
        yield {name: _PEERS[name](stack) for name in names}
