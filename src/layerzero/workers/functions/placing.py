"""Results that are made in the memory of their answer, so that nothing copies them."""

from __future__ import annotations

import ctypes

from layerzero.ipc.functions.frames import PLACED_AT, Payload, Write, aligned


class Placing:
    """The memory that the answer of the present call goes into. What was taken of it is that call's alone."""

    def __init__(self) -> None:
        self._memory: memoryview | None = None
        self._address = self._end = 0

    @property
    def is_used(self) -> bool:
        """Whether any of it was taken."""
        return self._end > PLACED_AT

    @property
    def room(self) -> int:
        """Bytes of the whole answer."""
        return 0 if self._memory is None else len(self._memory)

    def begin(self, memory: memoryview) -> None:
        """A call, whose answer has this memory."""
        self._memory, self._end = memory, PLACED_AT

    def end(self) -> None:
        """Its answer is written, or kept: nothing more is taken."""
        self._memory, self._end = None, 0

    def take(self, nbytes: int) -> memoryview | None:
        """Memory for a result; None where there is too little of it, or where a result does not go at once."""
        start = self._end
        if self._memory is None or not nbytes or start + nbytes > len(self._memory):
            return None
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._end = aligned(start + nbytes)
        return self._memory[start : start + nbytes]

    def forget(self) -> None:
        """What was taken is not wanted."""
        self._end = PLACED_AT if self._memory is not None else 0

    def payload(self) -> Placed:
        """Of an answer whose arrays may lie here."""
        return Placed(self._address, self._end)


class Placed(Payload):
    """Parts of an answer by their offsets in it: those that were made there, and others behind them."""

    def __init__(self, address: int, end: int) -> None:
        super().__init__()
        self._address, self._end = address, end
        self.nbytes = end
        self.places: list[int] = []

    def place_of(self, address: int, nbytes: int) -> int | None:
        """As Payload."""
        offset = address - self._address
        if offset < PLACED_AT or offset + nbytes > self._end or not nbytes:
            return None
        self.places.append(offset)
        return offset


class Copied(Payload):
    """Parts that are copied at once: they lie where the answer will be written."""

    def add(self, nbytes: int, write: Write) -> int:
        """As Payload."""
        copy = bytearray(nbytes)
        write(memoryview(copy))

        def again(target: memoryview) -> None:
            target[:] = copy

        return super().add(nbytes, again)


placing = Placing()
"""Of this worker, which runs one call at a time."""
