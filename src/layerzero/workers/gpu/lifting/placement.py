"""Memory of the worker's own in which a kernel is tried: every tensor at an address of the alignment asked for, and of
no better one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from layerzero.ipc.cuda.driver import Context
from layerzero.ipc.cuda.nodes import Allocation
from layerzero.ipc.lifting.form import ALIGNMENTS
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.workers.gpu.lifting.compare import Extent
from layerzero.workers.provider import Block, Call, DeviceMemory

_STEP = 2 * ALIGNMENTS[-1]
GAP_BYTES = 4096  # between tensors: an address behind the end of one is in no other


def offsets(sizes: Sequence[int], alignments: Sequence[int], *, is_reversed: bool = False) -> tuple[list[int], int]:
    """Where tensors start, from an address that is a multiple of _STEP, and the bytes of all. `is_reversed`: the last
    tensor lies first, and the low bits of addresses are others, so that neither a distance between two tensors nor a
    number with a part of an old address above it is the same by chance."""
    places, end, odd = [0] * len(sizes), 0, 3 if is_reversed else 1
    order = range(len(sizes))
    for n in reversed(order) if is_reversed else order:
        start = -(-end // _STEP) * _STEP + odd * alignments[n]  # a multiple of it, and not of twice as much
        places[n] = start
        end = start + sizes[n] + GAP_BYTES
    return places, end + _STEP


def room_for(call: Call, alignments: Sequence[int]) -> int:
    """Bytes of a TrialMemory."""
    sizes, classes, _ = _own(call, alignments)
    return offsets(sizes, classes)[1]


def aliases(call: Call) -> dict[int, int]:
    """As Lifted.aliases."""
    op = OPS[call.op]
    return {n: op.inputs.index(name) for n, name in enumerate(op.outputs) if name in op.inputs}


def _own(call: Call, alignments: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Sizes and alignments of the tensors that have memory of their own, and which these are among all."""
    shared = {len(call.inputs) + n for n in aliases(call)}
    found = [
        (spec.span_bytes, alignments[n], n)
        for n, spec in enumerate((*call.inputs, *call.outputs))
        if spec is not None and n not in shared
    ]
    return [one[0] for one in found], [one[1] for one in found], [one[2] for one in found]


@dataclass(frozen=True)
class TrialMemory:
    """One allocation with all tensors of a call. An output that is an input has its block."""

    base: int
    nbytes: int
    inputs: tuple[Block | None, ...]
    outputs: tuple[Block, ...]

    @classmethod
    def make(cls, context: Context, call: Call, alignments: Sequence[int], *, is_reversed: bool = False) -> TrialMemory:
        """Needs the context to be current. Raises CudaError."""
        sizes, classes, which = _own(call, alignments)
        places, nbytes = offsets(sizes, classes, is_reversed=is_reversed)
        base = context.driver.allocate(nbytes)
        start = -(-base // _STEP) * _STEP
        blocks: list[Block | None] = [None] * (len(call.inputs) + len(call.outputs))
        specs = (*call.inputs, *call.outputs)
        for n, place, size in zip(which, places, sizes, strict=True):
            spec = specs[n]
            assert spec is not None
            blocks[n] = Block(DeviceMemory(start + place, max(size, 1), context.ordinal), spec)
        for output, given in aliases(call).items():
            blocks[len(call.inputs) + output] = blocks[given]
        outputs = tuple(block for block in blocks[len(call.inputs) :] if block is not None)
        return cls(base, nbytes, tuple(blocks[: len(call.inputs)]), outputs)

    @property
    def allocation(self) -> Allocation:
        return Allocation(self.base, self.nbytes)

    @property
    def input_extents(self) -> tuple[Extent | None, ...]:
        return tuple(None if block is None else _extent(block) for block in self.inputs)

    @property
    def output_extents(self) -> tuple[Extent | None, ...]:
        """None for an output that is an input."""
        own = {id(block) for block in self.inputs}
        return tuple(None if id(block) in own else _extent(block) for block in self.outputs)


def _extent(block: Block) -> Extent:
    return Extent(block.device.pointer, block.spec.span_bytes)
