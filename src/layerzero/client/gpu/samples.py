"""Calls on a GPU that are sampled, for shadow checks and background tuning: what they read and wrote is copied on the
GPU, in the order of their stream, for a thread that looks at it later. Nobody waits in the caller's time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from layerzero.client.arrays.recognition import Array
from layerzero.client.connection.call import Request, Route
from layerzero.client.connection.report import Copy
from layerzero.client.gpu.device import Gpu
from layerzero.client.gpu.outcomes import Sent
from layerzero.client.gpu.own_arrays import GpuArray
from layerzero.ipc.errors import OutOfMemory
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec

MAX_SAMPLE_BYTES = 64 << 20  # of inputs and output of a call; larger ones are not sampled
REASON = "sampled shadow check"


class Sampler(Protocol):
    """What decides which calls are sampled, and looks at them; client/session/shadow.py has it."""

    @property
    def is_on(self) -> bool:
        """Whether any calls are sampled."""

    def draw_on_gpu(self, route: Route) -> bool | None:
        """Whether this call is to be compared (True) or is for tuning and watchers alone (False); None: it is not
        sampled."""

    def count(self, what: str) -> None:
        """Say what became of a sample."""

    def put(self, sample: GpuSample) -> None:
        """Look at it later."""


@dataclass(eq=False)
class GpuSample:
    """A call and its arrays as they were. `done`: an event of the GPU, after which `inputs` and `output` are there."""

    request: Request
    route: Route
    gpu: Gpu
    is_checked: bool
    inputs: list[GpuArray | None] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    output: GpuArray | None = None
    done: int = 0
    sent: Sent | None = None

    def take_inputs(self, arrays: Sequence[Array | None], stream: int) -> None:
        """Before the call is enqueued: it may write its result over an input. Raises OutOfMemory."""
        for name, array in zip(OPS[self.request.op].inputs, arrays, strict=True):
            copy = None if array is None else self._copy(name, array.spec, array.address, array.device, stream)
            self.inputs.append(copy)

    def take_output(self, address: int, ordinal: int, stream: int) -> None:
        """After it: the stream waits for the result first. Raises OutOfMemory."""
        spec = self.route.plan.results[0]
        self.output = self._copy("out", spec, address, ordinal, stream)
        driver = self.gpu.memory.context.driver
        self.done = driver.create_event()
        driver.record_event(self.done, stream)

    def _copy(self, name: str, spec: TensorSpec, address: int, ordinal: int, stream: int) -> GpuArray:
        made = GpuArray(ordinal, spec, stream)
        if spec.span_bytes:
            self.gpu.memory.context.driver.copy_on_device(made.address, address, spec.span_bytes, stream)
            self.copies.append(Copy(name, spec.span_bytes, "client", REASON))
        return made

    def settle(self) -> None:
        """Let this thread's work on the arrays come after their copies. To be called once."""
        context, event = self.gpu.memory.context, self.done
        with context:
            context.driver.wait_event(self.gpu.memory.own_stream(), event)
            context.driver.destroy_event(event)
        self.done = 0


def sampled(
    sampler: Sampler, request: Request, arrays: Sequence[Array | None], route: Route, gpu: Gpu, stream: int
) -> GpuSample | None:
    """The call as a sample, if it is one, with copies of its inputs. Needs the GPU's context to be current."""
    if request.is_apart or not sampler.is_on:
        return None
    is_checked = sampler.draw_on_gpu(route)
    if is_checked is None:
        return None
    results = route.plan.results
    if OPS[request.op].in_place or len(results) != 1 or not results[0].numel:
        return None
    given = sum(array.spec.span_bytes for array in arrays if array is not None)
    if given + results[0].span_bytes > MAX_SAMPLE_BYTES:
        sampler.count("too_large")
        return None
    sample = GpuSample(request, route, gpu, is_checked)
    try:
        sample.take_inputs(arrays, stream)
    except OutOfMemory:
        sampler.count("no_memory")
        return None
    return sample


def complete(sampler: Sampler, sample: GpuSample, sent: Sent, address: int, ordinal: int, stream: int) -> None:
    """The sampled call is enqueued; its result is at this address."""
    try:
        sample.take_output(address, ordinal, stream)
    except OutOfMemory:
        sampler.count("no_memory")
        return
    sample.sent = sent
    sent.copies = (*sent.copies, *sample.copies)
    sampler.put(sample)
