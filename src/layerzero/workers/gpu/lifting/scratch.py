"""Memory that a kernel's steps use between them: which of the worker's own, and how much of it a caller must give."""

from __future__ import annotations

from dataclasses import dataclass, replace

from layerzero.ipc.cuda.nodes import Allocation
from layerzero.ipc.lifting.form import MAX_SCRATCH, Address, Copy, Fill, Patch, Step
from layerzero.ipc.lifting.reasons import LiftReason
from layerzero.workers.gpu.lifting.refusal import CannotLift

MAX_BYTES = 256 << 20  # of a piece: a caller has it once for each stream. Gradients of attention to 8,192 tokens
_STEP = 512  # what allocators align to


@dataclass
class _Use:
    """An allocation of so many bytes, and the first of them that is used."""

    nbytes: int
    lowest: int


def trimmed(allocated: int, lowest: int) -> tuple[int, int]:
    """Where a piece starts in its allocation, and its bytes. Nobody tells how far a kernel goes from an address that it
    is given, so it may go to the end; before the first address there is nothing of it. Raises CannotLift."""
    start = lowest // _STEP * _STEP
    nbytes = allocated - start
    if nbytes > MAX_BYTES:
        text = f"it may use {nbytes:,} bytes of memory of its own; allowed: {MAX_BYTES:,}"
        raise CannotLift(LiftReason.TOO_LARGE, text)
    return start, nbytes


class Scratch:
    """Allocations of the worker that are used, numbered as they come."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}  # by base
        self._uses: list[_Use] = []
        self._starts: list[int] = []

    def address(self, allocation: Allocation, word: int, nbytes: int) -> Address:
        """Of a word that leads into it, and uses at least so much. From the start of the allocation, until `settle`.
        Raises CannotLift."""
        offset = word - allocation.base
        if offset + nbytes > allocation.nbytes:
            raise CannotLift(LiftReason.ADDRESS_UNKNOWN, f"{nbytes} bytes run over the end of the worker's memory")
        number = self._numbers.setdefault(allocation.base, len(self._uses))
        if number == len(self._uses):
            if number >= MAX_SCRATCH:
                raise CannotLift(LiftReason.TOO_LARGE, f"it uses more than {MAX_SCRATCH} allocations of its own")
            self._uses.append(_Use(allocation.nbytes, offset))
        use = self._uses[number]
        use.lowest = min(use.lowest, offset)
        return Address("scratch", number, offset)

    def settle(self) -> tuple[int, ...]:
        """The bytes of each piece. Raises CannotLift."""
        pieces = [trimmed(use.nbytes, use.lowest) for use in self._uses]
        self._starts = [start for start, _ in pieces]
        return tuple(nbytes for _, nbytes in pieces)

    def settled(self, step: Step) -> Step:
        """The step with addresses from the start of each piece."""
        if isinstance(step, Fill):
            return replace(step, target=self._moved(step.target))
        if isinstance(step, Copy):
            return replace(step, source=self._moved(step.source), target=self._moved(step.target))
        return replace(step, patches=tuple(Patch(at, self._moved(address)) for at, address in step.patches))

    def _moved(self, address: Address) -> Address:
        if address.kind != "scratch":
            return address
        return address._replace(offset=address.offset - self._starts[address.number])
