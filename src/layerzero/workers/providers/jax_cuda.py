"""JAX on an NVIDIA GPU: attention by cuDNN. Inputs are viewed; results are copied, since JAX owns what it makes.

JAX works on streams of its own. They wait for the caller's through an event, and the caller's for the result; the host
waits for nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from layerzero.ipc.cuda import driver as cuda
from layerzero.workers.provider import Block, Bound, Call, DeviceMemory, Loaded
from layerzero.workers.providers import _dlpack
from layerzero.workers.providers._torch_ops import any_scale

ALIGNMENT_BYTES = 256  # of buffers that XLA makes itself; compiled code counts on some of it
LEGACY_STREAM = 1  # the default stream to DLPack, which allows no 0


def load() -> Loaded:
    import jax
    import jaxlib

    try:
        jax.devices("cuda")
    except RuntimeError as exc:
        raise RuntimeError(f"JAX {jax.__version__} has no CUDA device: {exc}") from exc
    caller = _Caller(cuda.load())

    @cache
    def compiled(is_causal: bool, scale: float) -> Callable[..., Any]:
        """XLA compiles it once for each set of shapes and dtype."""
        numpy = jax.numpy

        def attention(q: Any, k: Any, v: Any) -> Any:
            wide = v.shape[3]
            missing = [max(q.shape[3], wide) - t.shape[3] for t in (q, k, v)]
            q, k, v = (numpy.pad(t, ((0, 0),) * 3 + ((0, n),)) for t, n in zip((q, k, v), missing, strict=True))
            if k.shape[2] == 1:  # which cuDNN refuses; the same key a second time changes no result
                k, v = numpy.repeat(k, 2, axis=2), numpy.repeat(v, 2, axis=2)
            q, k, v = (t.transpose(0, 2, 1, 3) for t in (q, k, v))
            rule: dict[str, Any] = {"is_causal": is_causal, "implementation": "cudnn"}
            out = any_scale(jax.nn.dot_product_attention)(q, k, v, scale=scale, **rule)
            return out[..., :wide].transpose(0, 2, 1, 3)

        jitted: Callable[..., Any] = jax.jit(attention)
        return jitted

    def bind(call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        out = outputs[0]
        if out.spec.numel == 0:
            return lambda: None
        given = [_Input(caller, block) for block in inputs if block is not None]
        compute = compiled(bool(call.attrs["is_causal"]), float(call.attrs["scale"]))

        def bound() -> None:
            caller.copy_out(compute(*(jax.dlpack.from_dlpack(one) for one in given)), out)

        return bound

    return Loaded(
        versions={"jax": jax.__version__, "jaxlib": jaxlib.__version__},
        kernels={"jax-cuda.attention": bind},
        on_stream=caller.on_stream,
    )


class _Caller:
    """The stream that results are wanted on."""

    def __init__(self, driver: cuda.Driver) -> None:
        self.driver = driver
        self.stream = 0
        self.copying: deque[tuple[int, object]] = deque()  # events, and the results that are copied until then

    @contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def holds(self, stream: int) -> None:
        """Make a stream of JAX's wait for what the caller has enqueued so far."""
        event = self.driver.create_event()
        self.driver.record_event(event, self.stream)
        self.driver.wait_event(stream, event)
        self.driver.destroy_event(event)  # only once it is done, says the driver

    def copy_out(self, result: Any, out: Block) -> None:
        """Copy a result into the caller's memory once it is there, in the order of the caller's stream."""
        while self.copying and self.driver.is_event_done(self.copying[0][0]):
            self.driver.destroy_event(self.copying.popleft()[0])
        capsule = result.__dlpack__(stream=self.stream or LEGACY_STREAM)  # which waits for the result
        source, event = _dlpack.address(capsule), self.driver.create_event()
        self.driver.copy_on_device(out.device.pointer, source, out.spec.span_bytes, self.stream)
        self.driver.record_event(event, self.stream)
        self.copying.append((event, (capsule, result)))


class _Input:
    """A block that JAX may import, again for each run: an array of JAX's stands for what is there at that time."""

    def __init__(self, caller: _Caller, block: Block) -> None:
        self._caller = caller
        self._block = block
        self._memory = memory = block.device
        self._is_copied = memory.pointer % ALIGNMENT_BYTES != 0
        if self._is_copied:
            self._memory = DeviceMemory(caller.driver.allocate(memory.nbytes), memory.nbytes, memory.device)

    def __del__(self) -> None:
        if self._is_copied:
            self._caller.driver.free(self._memory.pointer)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _dlpack.CUDA, self._memory.device

    def __dlpack__(self, *, stream: int, **_: object) -> Any:
        if self._is_copied:
            source = self._block.device.pointer
            self._caller.driver.copy_on_device(
                self._memory.pointer, source, self._block.spec.span_bytes, self._caller.stream
            )
        self._caller.holds(stream)
        return _dlpack.capsule(self._memory, self._block.spec)
