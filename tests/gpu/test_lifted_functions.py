"""Calls of isolated functions that this process launches itself, on a real GPU: kernels of another torch, proved, and
what they cost. tests/process/test_lifted_functions.py has what needs none.

    LZ_TEST_LIFT_INTERPRETER=/old/venv/bin/python python -m pytest -s tests/gpu/test_lifted_functions.py

The functions' environment is that interpreter, which has a torch of any version; left out, a venv of the test's own,
beside which lies what this one has. Its torch's CUPTI is the one that is used.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from tests.gpu.function_sites import interpreter
from tests.process.harness import Site, wait_until

import layerzero as lz

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch sees no NVIDIA GPU", allow_module_level=True)
WARM = 50  # calls, between two looks
VARIABLE = "LZ_TEST_LIFT_INTERPRETER"


@pytest.fixture(scope="module")
def fn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The functions, and a broker that serves them."""
    path = os.environ.get(VARIABLE) or str(interpreter(tmp_path_factory.mktemp("venv") / "v"))
    site = Site(tmp_path_factory.mktemp("store"), restart_budget=1000, backoff_s=0.01, backoff_max_s=0.01)
    with mock.patch.dict(os.environ, {VARIABLE: path}):
        sys.modules.pop("tests.gpu.lifted_function_calls", None)
        functions = importlib.import_module("tests.gpu.lifted_function_calls")
    try:
        with site.environment():
            functions.THERE.build(quiet=True)
            site.start().connect()
            found, _ = functions.version()
            print(f"\nthere torch {found}, here {torch.__version__}")
            yield functions
            lz.disconnect()
    finally:
        site.stop()


def randn(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(*shape, device="cuda").to(dtype)


def path_of(function: Any) -> str:
    return str(function.last_report().selection.path)


def decided(function: Any, *args: Any) -> str:
    """Call it until this process launches its kernels, or it is said why not: that, or nothing."""
    told = "NOT_YET"

    def is_decided() -> bool:
        nonlocal told
        for _ in range(WARM):
            function(*args)
            told = function.last_report().not_lifted
            if not told.startswith("NOT_YET"):
                return True
        torch.cuda.synchronize()
        return False

    wait_until(is_decided)
    assert (path_of(function) == "lifted") == (not told)
    return told


def lift(function: Any, *args: Any) -> Any:
    told = decided(function, *args)
    assert not told, f"{function}: {told}"
    result = function(*args)
    assert path_of(function) == "lifted"
    return result


def calls(fn: ModuleType, dtype: Any) -> dict[str, tuple[Any, tuple[Any, ...], Callable[[], Any]]]:
    """Of each kind: the function, its arguments, and what it is by this process's torch."""
    x, w = randn(256, 1024, dtype=dtype), randn(1024, 512, dtype=dtype)
    table, index = randn(1000, 64, dtype=dtype), torch.randint(0, 1000, (300,), device="cuda")
    return {
        "elementwise": (fn.elementwise, (x,), lambda: torch.nn.functional.silu(x) * 2.0 + 1),
        "with a number": (fn.elementwise, (x, 0.5), lambda: torch.nn.functional.silu(x) * 0.5 + 1),
        "reduction": (fn.reduction, (x,), lambda: x.sum(-1)),
        "product": (fn.product, (x, w), lambda: x @ w),
        "allocates": (fn.allocates, (x,), lambda: x * 4),
        "into": (fn.into, (x,), lambda: x * 3),
        "taken": (fn.taken, (table, index), lambda: table[index]),
        "of a view": (fn.elementwise, (x[3:77, ::2],), lambda: torch.nn.functional.silu(x[3:77, ::2]) * 2.0 + 1),
    }


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_it_is_launched_by_this_process(fn: ModuleType, dtype: str) -> None:
    """And gives bit for bit what its worker gives."""
    near = {"rtol": 2e-2, "atol": 2e-2}
    for name, (function, args, right) in calls(fn, getattr(torch, dtype)).items():
        theirs = function.options(lift=False, trial=None)(*args)
        result = lift(function, *args)
        assert torch.equal(result, theirs), name
        torch.testing.assert_close(result, right(), **near, msg=name)
        report = function.last_report()
        assert (report.served_by, report.selection.worker_pid, report.copies) == (fn.THERE.backend, 0, ()), name
    args[0].fill_(0.25)
    assert torch.equal(function(*args), function.options(lift=False, trial=None)(*args))


@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        ("branching", ("NOT_CAPTURABLE",)),
        ("drawn", ("NOT_CAPTURABLE", "NOT_DETERMINISTIC")),
        ("counted", ("NOT_DETERMINISTIC",)),
        ("summed", ("NOT_DETERMINISTIC",)),
        ("weighted", ("PROOF_DIFFERS",)),
    ],
)
def test_what_must_not_be_lifted_stays_in_its_worker(fn: ModuleType, name: str, reasons: tuple[str, ...]) -> None:
    """Which is well, and serves others, whose kernels are lifted."""
    x, (_, pid) = randn(64, 96), fn.version()
    told = decided(getattr(fn, name), x)
    print(f"{name}: {told}")
    assert told.partition(":")[0] in reasons
    if name == "branching":
        assert torch.equal(fn.branching(x.abs()), x.abs() * 2)
        assert torch.equal(fn.branching(-x.abs()), -x.abs() * 3)
    y = randn(63, 97)
    torch.testing.assert_close(lift(fn.into, y), y * 3)
    assert fn.version()[1] == pid


def test_a_graph_of_the_application_holds_it(fn: ModuleType) -> None:
    """Its worker may die then."""
    x = randn(65, 1024)
    lift(fn.allocates, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fn.allocates(x)
    os.kill(fn.version()[1], signal.SIGKILL)
    for seed in range(3):
        x.copy_(torch.full_like(x, seed + 0.5))
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(y, x * 4)


def test_its_order_is_that_of_the_callers_stream(fn: ModuleType) -> None:
    x = torch.zeros(1 << 20, device="cuda")
    lift(fn.into, x)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for number in range(50):
                x.fill_(number)
                result = fn.into(x)
                x.fill_(-1)
                assert float(result.max()) == float(result.min()) == 3 * number


def test_what_it_costs(fn: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the caller's CPU, and in a captured graph, beside the same by this process's torch."""
    with capsys.disabled():
        print(f"\n{'function':<14}{'lifted us':>10}{'here us':>10}{'worker us':>11}{'in a graph':>12}{'here':>8}")
        for name, (function, args, right) in calls(fn, torch.float16).items():
            lift(function, *args)
            its = function.options(lift=False, trial=None)
            for _ in range(WARM):
                its(*args)
            found = [host_us(lambda: function(*args)), host_us(right), host_us(lambda: its(*args))]  # noqa: B023
            found += [graph_us(lambda: function(*args)), graph_us(right)]  # noqa: B023
            print(f"{name:<14}{found[0]:>10.1f}{found[1]:>10.1f}{found[2]:>11.1f}{found[3]:>12.1f}{found[4]:>8.1f}")


def host_us(call: Callable[[], Any], count: int = 200) -> float:
    for _ in range(10):
        call()
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    for _ in range(count):
        call()
    took_s = time.perf_counter() - start_s
    torch.cuda.synchronize()
    return took_s / count * 1e6


def graph_us(call: Callable[[], Any], count: int = 20) -> float:
    """Of each of so many calls in one graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for _ in range(count)]
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    del kept
    return (time.perf_counter() - start_s) / 20 / count * 1e6
