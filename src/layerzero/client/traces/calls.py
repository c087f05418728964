"""What a trace tells of each call: plain values, as they are shown, saved and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from layerzero.client.capsules.form import Argument, Segment
from layerzero.client.connection.report import Attempt
from layerzero.ipc.vocabulary.tensors import TensorSpec

OP, STEP, FUNCTION = "op", "step", "function"
KINDS = (OP, STEP, FUNCTION)


class Tensor(NamedTuple):
    """An argument or a result."""

    name: str
    spec: TensorSpec

    def __str__(self) -> str:
        return f"{self.name} {'x'.join(map(str, self.spec.shape))}:{self.spec.dtype}"


class Source(NamedTuple):
    """An argument that lies in what an earlier call has made: the argument's name, that call's number, the name of its
    result, and how many bytes behind that result's beginning the argument begins."""

    input: str
    call: int
    output: str
    offset: int = 0


@dataclass(frozen=True)
class KeptTensors:
    """The bytes of a call's arguments, as capsules have them, and of its results: name, row-major spec, SHA-256."""

    arguments: tuple[Argument, ...]
    segments: tuple[Segment, ...]
    results: tuple[tuple[str, TensorSpec, str], ...]

    @property
    def digests(self) -> set[str]:
        return {one.sha256 for one in self.segments} | {digest for _, _, digest in self.results}


@dataclass(frozen=True)
class ScopeRecord:
    """One time that a scope was entered. `parent`: the number of the one it lies in. `elapsed_ns`: None for one that
    had not ended. Times as of RecordedCall."""

    number: int
    name: str
    parent: int | None
    thread: int
    start_ns: int
    elapsed_ns: int | None


@dataclass(frozen=True)
class RecordedCall:
    """A call. `kind`: "op", "step" for a call of an op that crossed with others in a plan, or "function".

    `number` grows in the order in which calls ended. `start_ns` is on the clock of time.perf_counter_ns, which is
    CLOCK_MONOTONIC of this machine, as are all of a trace; `elapsed_ns` until the caller had its result, on a GPU until
    it was enqueued. `kernel_ns`: the kernel's own, 0 where it is not known; of a function the time in the worker.
    `gpu_ns`: on a GPU start and duration in the caller's stream, None elsewhere. `device`: "cpu", "cuda:0". `inputs`
    has all arguments that are tensors, `params` the other ones. `attempts`: those that failed. `error`: "CODE: message"
    of a call that failed. `sources`: which arguments are results of earlier calls. `scopes`: the names of those that it
    belongs to, the outermost first; `scope` the innermost one's number. `asked_backend`: that the caller named.
    """

    number: int
    kind: str
    name: str
    start_ns: int
    elapsed_ns: int
    thread: int = 0
    scope: int | None = None
    scopes: tuple[str, ...] = ()
    kernel_id: str = ""
    backend: str = ""
    path: str = ""
    device: str = "cpu"
    worker_pid: int = 0
    kernel_ns: int = 0
    gpu_ns: tuple[int, int] | None = None
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)
    asked_backend: str | None = None
    attempts: tuple[Attempt, ...] = ()
    error: str = ""
    copied_bytes: int = 0
    notes: tuple[str, ...] = ()
    sources: tuple[Source, ...] = ()
    kept: KeptTensors | None = None
    why_not_kept: str = ""

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.elapsed_ns

    @property
    def label(self) -> str:
        """The call in a line."""
        shapes = [f"{'x'.join(map(str, one.spec.shape))}:{one.spec.dtype}" for one in self.inputs]
        params = [f"{name}={value!r:.24}" for name, value in self.params.items() if value is not None]
        return f"{self.name}({', '.join((*shapes, *params))})"
