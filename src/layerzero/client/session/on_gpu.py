"""Kernels of a GPU that run in this process: enqueued on the caller's stream by their provider, as in a worker, and not
waited for."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from layerzero.client.session.in_process import MAX_BOUND, thread
from layerzero.ipc.cuda.abi import CAPTURE_RELAXED
from layerzero.ipc.cuda.driver import Context
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.workers.gpu.plan import Clock
from layerzero.workers.provider import Bind, Block, Bound, Call, DeviceMemory, Loaded


class GpuRunner:
    """Runs the calls of one signature on one GPU, whose context is current then. Threads may share it."""

    def __init__(self, call: Call, bind: Bind, lock: threading.Lock, loaded: Loaded, context: Context) -> None:
        assert loaded.on_stream is not None
        self._call, self._bind, self._lock, self._on_stream = call, bind, lock, loaded.on_stream
        self._context, self._driver = context, context.driver
        self._bound: OrderedDict[tuple[int, ...], Bound] = OrderedDict()
        self._clock = Clock()
        self._side = 0  # a stream that nobody captures
        self.versions = dict(loaded.versions)
        self.has_run = False

    def run(self, memory: Sequence[int], stream: int) -> int:
        """Enqueue a call. `memory`: the addresses of inputs, then outputs, 0 for one that is left out. Returns the
        GPU's time of an earlier run in ns, 0 if none is new. Raises what the kernel raises."""
        key, driver = (stream, *memory), self._driver
        with self._lock:
            with _alone(), self._on_stream(stream):
                bound = self._bound.get(key)
                if bound is None:
                    bound = self._bound[key] = self._bind(self._call, *self._blocks(memory))
                    if len(self._bound) > MAX_BOUND:
                        self._bound.popitem(last=False)
                is_timed = self.has_run and self._clock.start(driver, stream, is_warming_up=False)
                _refuse_result(bound())
                if is_timed:
                    self._clock.stop(driver, stream)
            self.has_run = True
            return self._read_ns() if self._clock.is_open else 0

    def capture(self, memory: Sequence[int], stream: int) -> Bound:
        """As `run`, into the graph that the stream is captured into, after a run outside of a capture. The graph is
        good for as long as what is returned is kept."""
        driver = self._driver
        with self._lock, _alone():
            before = driver.exchange_capture_mode(CAPTURE_RELAXED)  # binding is no work of the graph
            try:
                self._side = self._side or driver.create_stream()
                with self._on_stream(self._side):
                    bound = self._bind(self._call, *self._blocks(memory))
                driver.synchronize_stream(self._side)
            finally:
                driver.exchange_capture_mode(before)
            with self._on_stream(stream):
                _refuse_result(bound())
        return bound

    def _read_ns(self) -> int:
        before = self._driver.exchange_capture_mode(CAPTURE_RELAXED)  # another thread may be capturing
        try:
            return self._clock.read_ns(self._driver)
        finally:
            self._driver.exchange_capture_mode(before)

    def _blocks(self, memory: Sequence[int]) -> tuple[list[Block | None], list[Block]]:
        call = self._call
        inputs = [
            None if spec is None else self._block(at, spec) for at, spec in zip(memory, call.inputs, strict=False)
        ]
        outputs = [self._block(at, spec) for at, spec in zip(memory[len(inputs) :], call.outputs, strict=True)]
        return inputs, outputs

    def _block(self, address: int, spec: TensorSpec) -> Block:
        return Block(DeviceMemory(address, spec.span_bytes, self._context.ordinal), spec)


def _refuse_result(result: Any) -> None:
    if result is not None:
        raise TypeError(f"it returns a {type(result).__name__}, for which the caller would have to wait")


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """What the application has said of its own calls of torch (autocast, gradients, what is taken over) is not said of
    a kernel's."""
    torch, was_running = sys.modules.get("torch"), thread.is_running
    thread.is_running = True
    try:
        if torch is None:
            yield
            return
        has_grad = torch.is_grad_enabled()
        cast = torch.autocast("cuda", enabled=False) if torch.is_autocast_enabled() else contextlib.nullcontext()
        torch.set_grad_enabled(False)
        try:
            with cast:
                yield
        finally:
            torch.set_grad_enabled(has_grad)
    finally:
        thread.is_running = was_running
