"""What the benches of calls on a GPU share: rows of the table, inputs, and how long calls take."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from common import backend_versions, own_broker

import layerzero as lz
from layerzero.ipc.cuda import driver

try:
    import torch as torch  # the benches have it of here
except ImportError:
    sys.exit("this bench needs torch")
F = torch.nn.functional


class Row(NamedTuple):
    figure: str
    ours: str
    floor: str
    ratio: str


@contextlib.contextmanager
def connected(*, with_toys: bool) -> Iterator[None]:
    """To a broker of this bench alone, which processes that it starts find, too; with the tests' backend of torch for
    those that were built."""
    if not with_toys:
        with own_broker():
            yield
        return
    from tests.gpu.gpu_site import gpu_site

    with tempfile.TemporaryDirectory(prefix="lz-bench-") as folder:
        site = gpu_site(Path(folder), "one", isolation="lifted")
        site.start()
        os.environ["LAYERZERO_RUNTIME_DIR"] = str(site.folder)
        site.connect()
        try:
            yield
        finally:
            lz.disconnect()
            site.stop()


def versions() -> dict[str, Mapping[str, str]]:
    """Of the backends that have run, the GPU and the framework here."""
    gpu = torch.cuda.get_device_properties(0)
    return {**backend_versions(), "client": {"GPU": gpu.name, "torch here": torch.__version__}}


def qkv(batch: int, heads: int, length: int, width: int, keys: int | None = None, kv_heads: int | None = None) -> Any:
    held = (batch, kv_heads or heads, keys or length, width)
    shapes = ((batch, heads, length, width), held, held)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def attention(*tensors: Any, is_causal: bool = True) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The call through the broker, and torch's own in this process."""
    q, k, v = tensors
    options = {"is_causal": is_causal, "enable_gqa": q.shape[1] != k.shape[1]}
    return (
        lambda: lz.attention(q, k, v, **options),
        lambda: F.scaled_dot_product_attention(q, k, v, **options),
    )


def pipelined(call: Callable[[], Any], count: int) -> tuple[float, float]:
    """us a call: the host's, until the last one has returned; and the wall's, until the GPU is through."""
    torch.cuda.synchronize()
    start_ns = time.perf_counter_ns()
    for _ in range(count):
        call()
    host_ns = time.perf_counter_ns() - start_ns
    torch.cuda.synchronize()
    return host_ns / count / 1e3, (time.perf_counter_ns() - start_ns) / count / 1e3


class Authentication:
    """Holds the current stream back until all that is to be timed is enqueued, without work of its own: a kernel of
    this process would make the GPU switch to it and back, which takes 0.15 ms."""

    def __init__(self) -> None:
        self._driver = driver.load()
        self._word = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._number = 0

    def close(self) -> None:
        self._number += 1
        self._driver.wait_value(torch.cuda.current_stream().cuda_stream, self._word.data_ptr(), self._number)

    def open(self) -> None:
        self._word[0] = self._number


def served() -> lz.SelectionReport:
    """The report of the last call."""
    report = lz.last_report()
    assert report is not None
    return report


def kernel() -> str:
    """Which one served the last call."""
    return str(served().kernel_id)


def wait_until(is_so: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Ends the bench when it does not become so."""
    end_s = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > end_s:
            sys.exit(f"waited {timeout_s:g} s in vain until {what}: {lz.status()['backends']}")
        time.sleep(0.005)
