"""What a provider is: the module that adapts one kernel library to our ops. Runs in the library's own env.

A provider is a module with `load() -> Loaded`. It imports its library inside `load()` and nowhere else.
See docs/adding-a-backend.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from layerzero.ipc.vocabulary.tensors import TensorSpec


@dataclass(frozen=True)
class Call:
    """One call signature: everything about a call but the data.

    `inputs` has one entry per tensor argument of the op (docs/ops.md), None where an optional one was left
    out. Scalars are in `attrs`. Shapes, strides and dtypes are canonical (attention is always BHSD views).
    """

    op: str
    kernel_id: str
    inputs: tuple[TensorSpec | None, ...]
    outputs: tuple[TensorSpec, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a GPU: an address in this process, and the GPU's CUDA ordinal there."""

    pointer: int
    nbytes: int
    device: int


@dataclass(frozen=True)
class Block:
    """A tensor in client memory. `memory` starts at the first element and covers the strided span, or is
    longer; it is read-only for inputs. Write through it only for outputs."""

    memory: memoryview | DeviceMemory
    spec: TensorSpec

    @property
    def host(self) -> memoryview:
        """The memory of a call on the CPU. Raises TypeError for a GPU's."""
        if isinstance(self.memory, DeviceMemory):
            raise TypeError(f"{self.spec} lies on GPU {self.memory.device}; this kernel computes on the CPU")
        return self.memory

    @property
    def device(self) -> DeviceMemory:
        """The memory of a call on a GPU. Raises TypeError for host memory."""
        if not isinstance(self.memory, DeviceMemory):
            raise TypeError(f"{self.spec} lies in host memory; this kernel computes on a GPU")
        return self.memory


Bound = Callable[[], Any]
"""Runs the kernel once: reads the bound inputs as they are now, writes every bound output in full, or of one that is
an input as well (ipc/vocabulary/ops.py) the parts that the op says; the input's block is the same memory then, not to
be written. Returns None, or a msgpack-able value for ops with a data-dependent result."""


@runtime_checkable
class CaptureResource(Protocol):
    """A Bound that keeps memory for the CUDA graphs that it was captured into."""

    def __call__(self) -> Any: ...

    def release(self) -> None:
        """Let go of it: none of these graphs is left. The Bound may be captured again later."""


Bind = Callable[[Call, Sequence["Block | None"], Sequence[Block]], Bound]
"""Prepare a kernel for one signature and one set of blocks. Called once per set; `Bound` is then called many
times. It may view the blocks' memory but must not read it yet."""


class PerClient(Protocol):
    """Kernels that keep something for their clients between calls."""

    def bind_of(self, client: int) -> Bind:
        """For the calls of one client, by its number, which is never given to another one."""

    def forget(self, client: int) -> None:
        """It has left: no call of it will come."""

    def begin(self, note_kept: Callable[[int], None], endpoint: str) -> None:
        """Before the first call. `note_kept` is to be called with how much is kept whenever that has changed;
        `endpoint`: the ZeroMQ address of the broker, beside whose socket debuggers of users' code are found."""


@dataclass(frozen=True)
class Loaded:
    """What `load()` returns: versions of the libraries at work, and a Bind per kernel id of the descriptor.

    `on_stream` is given where the kernels are CUDA's, whose blocks have DeviceMemory: `with on_stream(handle): bound()`
    enqueues the kernel's work on that stream, in order, and does not wait for it. A kernel whose descriptor says
    is_cuda_graph_safe may be called so while the stream is captured, after a Bound of that signature has run once
    uncaptured, this one or one on other blocks; the graph is then good for as long as its Bound is kept.
    """

    versions: Mapping[str, str]
    kernels: Mapping[str, Bind]
    on_stream: Callable[[int], AbstractContextManager[None]] | None = None
    per_client: PerClient | None = None  # binds in place of `kernels`
    modules: Callable[[], Any] | None = (
        None  # a Modules (gpu/lifting/modules.py), of one that watches machine code itself
    )
    on_change: Callable[[Callable[[str], object]], None] | None = None  # takes what tells the broker of lifts


class Provider(Protocol):
    """A provider module. `load()` imports the library; an exception here makes the env unusable, with its
    message as the cause."""

    def load(self) -> Loaded: ...
