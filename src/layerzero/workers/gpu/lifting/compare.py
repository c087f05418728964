"""What is an address in the parameters of a kernel, found by comparing captures of one call on different memory.

A word that lies in the same tensor, at the same offset, in every capture is that tensor's address. One that lies in
other memory of the process in every capture is scratch. What differs and is no address was never written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from layerzero.ipc.cuda.nodes import Allocation, CopyNode, FillNode, KernelNode, Node, OtherNode
from layerzero.ipc.lifting.form import MAX_STEPS, Address, Copy, Fill, Kernel, Kind, Patch, Span, Step
from layerzero.ipc.lifting.reasons import LiftReason
from layerzero.workers.gpu.lifting.refusal import CannotLift
from layerzero.workers.gpu.lifting.scratch import Scratch

_WORD = 8


class Extent(NamedTuple):
    """Where a tensor lies."""

    address: int
    nbytes: int


@dataclass(frozen=True)
class Capture:
    """`inputs`: None for one that is left out; `outputs`: None for one that is an input. `memory`: the allocation that
    all of them lie in, with nothing else."""

    nodes: tuple[Node, ...]
    inputs: tuple[Extent | None, ...]
    outputs: tuple[Extent | None, ...]
    memory: Allocation


class _Stray(Enum):
    """Where a word leads that is no tensor's address and not into scratch."""

    NOWHERE = "to nothing that CUDA knows"
    HOST = "into memory of the host"
    BESIDE = "beside the tensors of the call"


_Spot = Address | Allocation | _Stray


def compare(
    captures: Sequence[Capture],
    find: Callable[[int], Allocation | None],
    code_of: Callable[[KernelNode], str],
) -> tuple[tuple[Step, ...], tuple[int, ...]]:
    """The steps of a lifted call, and the bytes of each piece of its scratch.

    `find`: what is allocated around an address, for as long as the captures' memory is. `code_of`: the digest of the
    module that has a kernel. Raises CannotLift.
    """
    return _Comparison(captures, find, code_of).result()


class _Comparison:
    def __init__(
        self,
        captures: Sequence[Capture],
        find: Callable[[int], Allocation | None],
        code_of: Callable[[KernelNode], str],
    ) -> None:
        self._captures, self._find, self._code_of = captures, find, code_of
        self._memory = {capture.memory.base for capture in captures}
        self._scratch = Scratch()

    def result(self) -> tuple[tuple[Step, ...], tuple[int, ...]]:
        counts = {len(capture.nodes) for capture in self._captures}
        if len(counts) > 1:
            raise CannotLift(LiftReason.CAPTURES_DIFFER, f"captures of {sorted(counts)} steps")
        steps: list[Step] = []
        for number, nodes in enumerate(zip(*(capture.nodes for capture in self._captures), strict=True)):
            steps += self._step(number, nodes)
            if len(steps) > MAX_STEPS:
                raise CannotLift(LiftReason.NODE_UNSUPPORTED, f"more than {MAX_STEPS} steps")
        sizes = self._scratch.settle()
        return tuple(map(self._scratch.settled, steps)), sizes

    def _step(self, number: int, nodes: Sequence[Node]) -> list[Step]:
        first = nodes[0]
        what = f"step {number}"
        if isinstance(first, OtherNode):
            raise CannotLift(LiftReason.NODE_UNSUPPORTED, f"{what} is {first.what}")
        if isinstance(first, KernelNode):
            kernels = [node for node in nodes if isinstance(node, KernelNode)]
            self._demand(what, [_shape(node) for node in kernels], nodes)
            return [self._kernel(f"{what}, kernel {first.name:.200}", kernels)]
        if isinstance(first, FillNode):
            fills = [node for node in nodes if isinstance(node, FillNode)]
            self._demand(what, [(n.value, n.itemsize, n.count, n.rows, n.pitch) for n in fills], nodes)
            return self._fills(what, fills)
        copies = [node for node in nodes if isinstance(node, CopyNode)]
        self._demand(what, [(n.nbytes, n.rows, n.source_pitch, n.target_pitch) for n in copies], nodes)
        return self._copies(what, copies)

    @staticmethod
    def _demand(what: str, shapes: Sequence[tuple[object, ...]], nodes: Sequence[Node]) -> None:
        """The same of every capture."""
        if len(shapes) < len(nodes):
            kinds = " and ".join(type(node).__name__ for node in nodes)
            raise CannotLift(LiftReason.CAPTURES_DIFFER, f"{what} is {kinds}")
        if any(shape != shapes[0] for shape in shapes):
            differs = next(pair for pair in zip(*shapes, strict=True) if len(set(pair)) > 1)
            raise CannotLift(LiftReason.CAPTURES_DIFFER, f"{what}: {' and '.join(map(str, differs))}"[:500])

    def _fills(self, what: str, nodes: Sequence[FillNode]) -> list[Step]:
        first, steps = nodes[0], list[Step]()
        for row in range(min(first.rows, MAX_STEPS + 1)):
            nbytes = first.itemsize * first.count
            target = self._address(f"{what}, a fill", [node.target + row * node.pitch for node in nodes], nbytes)
            steps.append(Fill(target, first.value, first.itemsize, first.count))
        return steps

    def _copies(self, what: str, nodes: Sequence[CopyNode]) -> list[Step]:
        first, steps = nodes[0], list[Step]()
        for row in range(min(first.rows, MAX_STEPS + 1)):
            source, target = (
                self._address(f"{what}, a copy", words, first.nbytes)
                for words in (
                    [node.source + row * node.source_pitch for node in nodes],
                    [node.target + row * node.target_pitch for node in nodes],
                )
            )
            steps.append(Copy(source, target, first.nbytes))
        return steps

    def _kernel(self, what: str, nodes: Sequence[KernelNode]) -> Kernel:
        first = nodes[0]
        blocks = [node.params for node in nodes if node.params is not None]
        if len(blocks) < len(nodes):
            raise CannotLift(LiftReason.PARAMETERS_HIDDEN, f"{what}: the driver does not tell its parameters")
        params, patches, padding = bytearray(blocks[0]), list[Patch](), set[int]()
        for index, (offset, nbytes) in enumerate(first.layout):
            where = f"{what}, parameter {index} of {nbytes} bytes"
            end = offset + nbytes
            words = range(-(-offset // _WORD) * _WORD, end - _WORD + 1, _WORD)
            for at in words:
                address = self._word(where, at, nbytes, blocks, padding)
                if address is not None:
                    patches.append(Patch(at, address))
                    params[at : at + _WORD] = bytes(_WORD)
            covered = {at + n for at in words for n in range(_WORD)}
            padding |= {at for at in range(offset, end) if at not in covered and _differs(blocks, at)}
        for at in padding:
            params[at] = 0
        return Kernel(
            code=self._code_of(first),
            name=first.name,
            grid=first.grid,
            block=first.block,
            shared_bytes=first.shared_bytes,
            params=bytes(params),
            layout=tuple(Span(*one) for one in first.layout),
            patches=tuple(patches),
            padding=_spans(padding),
            attributes=first.attributes,
            max_shared_bytes=first.max_shared_bytes,
            is_cluster_size_free=first.is_cluster_size_free,
        )

    def _word(self, where: str, at: int, nbytes: int, blocks: Sequence[bytes], padding: set[int]) -> Address | None:
        """The address that a word is; notes bytes that nobody wrote."""
        words = [int.from_bytes(block[at : at + _WORD], "little") for block in blocks]
        spots = [self._spot(capture, word) for capture, word in zip(self._captures, words, strict=True)]
        if all(spot is _Stray.NOWHERE for spot in spots):
            if any(word != words[0] for word in words):
                padding |= {at + n for n in range(_WORD) if _differs(blocks, at + n)}
            return None
        address = self._agreed(spots, words, 0)
        if address is not None:
            return address
        # Between the members of a struct there are bytes that keep what lay there before: an old address, say, which
        # means something else each time. A parameter of eight bytes is written in full.
        if nbytes == _WORD or all(spot is spots[0] for spot in spots):
            raise CannotLift(LiftReason.ADDRESS_UNKNOWN, f"{where}, word at {at}: leads {_told(spots)}"[:1000])
        padding |= set(range(at, at + _WORD))
        return None

    def _address(self, what: str, words: Sequence[int], nbytes: int) -> Address:
        """Of memory that a step that is no kernel uses."""
        spots = [self._spot(capture, word) for capture, word in zip(self._captures, words, strict=True)]
        address = self._agreed(spots, words, nbytes)
        if address is None:
            raise CannotLift(LiftReason.ADDRESS_UNKNOWN, f"{what}: leads {_told(spots)}"[:1000])
        return address

    def _agreed(self, spots: Sequence[_Spot], words: Sequence[int], nbytes: int) -> Address | None:
        """What a word means in all captures; None where it means different things, or nothing that a caller has."""
        first = spots[0]
        if isinstance(first, Address):
            return first if all(spot == first for spot in spots) else None
        if isinstance(first, Allocation) and all(isinstance(spot, Allocation) for spot in spots):
            # As it lies in the first capture, where it was right: allocators place it anew each time.
            return self._scratch.address(first, words[0], nbytes)
        return None

    def _spot(self, capture: Capture, word: int) -> _Spot:
        kinds: tuple[tuple[Kind, Sequence[Extent | None]], ...] = (
            ("input", capture.inputs),
            ("output", capture.outputs),
        )
        for kind, extents in kinds:
            for number, extent in enumerate(extents):
                # The end is an address, too: of what comes after the last element.
                if extent is not None and extent.address <= word <= extent.address + extent.nbytes:
                    return Address(kind, number, word - extent.address)
        found = self._find(word) if word else None
        if found is None:
            return _Stray.NOWHERE
        if not found.is_device or not found.nbytes:
            return _Stray.HOST
        return _Stray.BESIDE if found.base in self._memory else found


def _shape(node: KernelNode) -> tuple[object, ...]:
    return (
        node.name,
        node.grid,
        node.block,
        node.shared_bytes,
        node.layout,
        node.attributes,
        node.max_shared_bytes,
        node.is_cluster_size_free,
    )


def _differs(blocks: Sequence[bytes], at: int) -> bool:
    return any(block[at] != blocks[0][at] for block in blocks)


def _told(spots: Sequence[_Spot]) -> str:
    texts = [
        spot.value
        if isinstance(spot, _Stray)
        else f"to byte {spot.offset} of {spot.kind} {spot.number}"
        if isinstance(spot, Address)
        else "into other memory of the worker"
        for spot in spots
    ]
    return ", in another capture ".join(dict.fromkeys(texts))


def _spans(places: set[int]) -> tuple[Span, ...]:
    """Bytes as stretches without gaps."""
    found: list[Span] = []
    for at in sorted(places):
        if found and found[-1].offset + found[-1].nbytes == at:
            found[-1] = Span(found[-1].offset, found[-1].nbytes + 1)
        else:
            found.append(Span(at, 1))
    return tuple(found)
