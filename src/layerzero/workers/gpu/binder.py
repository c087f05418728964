"""Kernels bound to GPU memory: a client's, or for a first run the worker's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from layerzero.ipc.cuda import mappings
from layerzero.ipc.cuda.driver import Context
from layerzero.ipc.cuda.handles import STAGED
from layerzero.ipc.errors import LayerZeroError, ProtocolError
from layerzero.ipc.transport.wire import NO_ARENA, Ref, unpack_refs
from layerzero.ipc.vocabulary.ops import FUNCTION
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.workers.arenas import Arena
from layerzero.workers.blocks import Blocks, sized
from layerzero.workers.gpu.plan import Plan, Span, Task
from layerzero.workers.provider import Bind, Block, Bound, DeviceMemory
from layerzero.workers.recording import OnStream

Arenas = Mapping[tuple[int, int], "mappings.Mapping | LayerZeroError"]


class Binder:
    """Binds on a stream that waits for nobody, so that what a provider refuses leaves nothing on a timeline's."""

    def __init__(
        self,
        on_stream: OnStream | None,
        context_of: Callable[[str], Context],
        arenas: Arenas,
        hear: Callable[..., bool],
        blocks: Blocks | None = None,
    ) -> None:
        """`arenas`: by client and number; `hear(waits=True)` takes messages that add some. `blocks`: of the shared
        memory that calls of functions have besides."""
        self._blocks = blocks
        self._on_stream, self._context_of, self._arenas, self._hear = on_stream, context_of, arenas, hear
        self._streams: dict[str, int] = {}  # by GPU
        self._unused: list[Callable[[], None]] = []  # what frees it

    def task(self, plan: Plan, client: int, refs: bytes) -> Task:
        """On a client's memory. Waits for arenas that were announced before. Raises what the provider raises."""
        call = plan.call
        found = unpack_refs(refs, len(call.inputs) + len(call.outputs))
        placed = [self._place(plan, client, spec, ref) for spec, ref in zip(call.inputs, found, strict=False)]
        written = [
            self._place(plan, client, spec, ref, writable=True)
            for spec, ref in zip(call.outputs, found[len(call.inputs) :], strict=True)
        ]
        outputs = [block for block, _ in written if block is not None]
        bind = plan.bind if self._blocks is None else self._blocks.bind_of(plan.bind, client)
        is_function = call.op == FUNCTION  # its results lie in memory that it was lent; binding it does nothing yet
        inputs = [block for block, _ in placed]
        bound = bind(call, inputs, outputs) if is_function else self._bind(plan, bind, inputs, outputs)
        read = _staged(span for _, span in placed)
        return Task(bound, read, read if is_function else _staged(span for _, span in written))

    def rehearse(self, plan: Plan) -> None:
        """Run a kernel in memory of our own: what its library loads and compiles at first would break a capture. On
        zeros: kernels that take lengths and indices find none among them that lead outside.

        Raises what the provider raises, and CudaError. `reap` follows.
        """
        call = plan.call
        inputs = [None if spec is None else self._zeros(plan.gpu, spec) for spec in call.inputs]
        self._bind(plan, plan.bind, inputs, [self._zeros(plan.gpu, spec) for spec in call.outputs], runs=True)

    def has(self, plan: Plan, client: int, arena: int) -> bool:
        """Whether memory of this arena can be had without waiting."""
        return (client, arena) in self._arenas or (client, arena) in self._hosted(plan)

    def _hosted(self, plan: Plan) -> Mapping[tuple[int, int], Arena]:
        """The shared memory that calls of a plan may have besides that of a GPU."""
        return {} if self._blocks is None or plan.call.op != FUNCTION else self._blocks.arenas

    def reap(self) -> None:
        """Free what is no longer used. To be called while no stream waits: the driver waits for all of them."""
        while self._unused:
            self._unused.pop()()

    def free_later(self, free: Callable[[], None]) -> None:
        """`reap` calls it."""
        self._unused.append(free)

    def _bind(
        self, plan: Plan, bind: Bind, inputs: list[Block | None], outputs: list[Block], *, runs: bool = False
    ) -> Bound:
        assert self._on_stream is not None
        with self._context_of(plan.gpu) as context:
            stream = self._stream(context)
            try:
                with self._on_stream(stream):
                    bound = bind(plan.call, inputs, outputs)
                    if runs:
                        bound()
            finally:  # what it made for itself is used on other streams, and what it did uses memory that may go
                context.driver.synchronize_stream(stream)
        return bound

    def _stream(self, context: Context) -> int:
        return self._streams.get(context.gpu) or self._streams.setdefault(context.gpu, context.driver.create_stream())

    def _zeros(self, gpu: str, spec: TensorSpec) -> Block:
        nbytes = max(1, spec.span_bytes)
        with self._context_of(gpu) as context:
            address = context.driver.allocate(nbytes)
            self.free_later(partial(_free, context, address))
            context.driver.clear(address, nbytes, self._stream(context))
        return Block(DeviceMemory(address, nbytes, context.ordinal), spec)

    def _place(
        self, plan: Plan, client: int, spec: TensorSpec | None, ref: Ref, *, writable: bool = False
    ) -> tuple[Block | None, Span | None]:
        if spec is None:
            return None, None
        if ref.arena == NO_ARENA:
            raise ProtocolError("a required tensor has no arena")
        key, blocks, is_function = (client, ref.arena), self._blocks, plan.call.op == FUNCTION
        hosted = self._hosted(plan)
        while key not in self._arenas and key not in hosted:  # its descriptor was sent before this RUN
            self._hear(waits=True)
        if key in hosted and blocks is not None:
            return blocks.of(client, spec, ref, is_sized=True, writable=writable), None
        mapping = self._arenas[key]
        if not isinstance(mapping, mappings.Mapping):
            raise mapping
        if mapping.handle.gpu != plan.gpu:
            raise ProtocolError(f"arena {ref.arena} lies on {mapping.handle.gpu}; the call is on {plan.gpu}")
        spec = sized(spec, ref.nbytes) if is_function else spec
        if spec.span_bytes > ref.nbytes:
            raise ProtocolError(f"{spec} spans {spec.span_bytes} bytes, the reference has {ref.nbytes}")
        memory = DeviceMemory(mapping.at(ref.offset, ref.nbytes), ref.nbytes, mapping.context.ordinal)
        return Block(memory, spec), (mapping, ref.offset, spec.span_bytes)


def _free(context: Context, address: int) -> None:
    with context:
        context.driver.free(address)


def _staged(spans: Iterable[Span | None]) -> tuple[Span, ...]:
    return tuple(span for span in spans if span is not None and span[0].handle.transport in STAGED)
