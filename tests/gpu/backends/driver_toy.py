"""A GPU backend for tests of a bare worker: the CUDA driver's own copy as a kernel, and two that fail. No library."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from tests.gpu.peer import launch

from layerzero.ipc.cuda import driver
from layerzero.workers.provider import Bind, Block, Bound, Call, Loaded


def load() -> Loaded:
    current: list[int] = []  # the stream to enqueue on

    @contextlib.contextmanager
    def on_stream(stream: int) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    def copy(call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        x = inputs[0]
        assert x is not None
        source, target, nbytes = x.device.pointer, outputs[0].device.pointer, x.spec.span_bytes
        return lambda: driver.load().copy_on_device(target, source, nbytes, current[-1])

    def after_copy(strike: Callable[[], None]) -> Bind:
        def bind(call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
            run = copy(call, inputs, outputs)

            def bound() -> None:
                run()
                strike()

            return bound

        return bind

    def refuse() -> None:
        raise ValueError("the toy refuses")

    kernels = {
        "toy.copy": copy,
        "toy.raise": after_copy(refuse),
        "toy.synchronize": after_copy(lambda: driver.load().synchronize_stream(current[-1])),
        "toy.illegal": after_copy(lambda: launch(driver.load(), "illegal_address", current[-1])),
    }
    return Loaded(versions={"toy": "1"}, kernels=kernels, on_stream=on_stream)
