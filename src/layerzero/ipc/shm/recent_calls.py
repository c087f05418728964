"""The newest calls of a worker, in words of its control page: what it died of may have begun before the call that it
died in. The broker reads them when the worker has ended. docs/protocol.md, section 6."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from mmap import mmap
from typing import NamedTuple

MOST = 64
COUNT_AT, CALLS_AT = 24, 1024  # of the control page
CALL_BYTES, TAIL_BYTES = 48, 16
RUNNING, OK, RAISED, DECLINED, ENQUEUED, BOUND = range(6)  # 1 more than what an express lane says, then those of GPUs
IN_CHAIN = 1 << 8
_COUNT = COUNT_AT // 8  # as a word
_CALL = struct.Struct(
    f"<QQQII{TAIL_BYTES}s"
)  # plan; when it began; how long; how it ended; bytes of references, the last
_END = struct.Struct("<QI")
_TOOK_AT = 16
LAYOUT = (COUNT_AT, CALLS_AT, MOST, CALL_BYTES, TAIL_BYTES, RUNNING, OK, RAISED)
"""What workers/_serving.c must agree with."""


class RecentCall(NamedTuple):
    """`begun_ns`: of the clock of time.perf_counter_ns(), 0 where that is not known; `how`: one of the above;
    `body_bytes`: how long its references were, 0 for those of its plan; `tail`: the end of them, where the extents of a
    plan's neighbour are."""

    plan: int
    begun_ns: int
    took_ns: int
    how: int
    body_bytes: int = 0
    tail: bytes = b""
    is_in_chain: bool = False


class RecentCalls:
    """Of the worker that has the page mapped to be written. For one thread."""

    def __init__(self, memory: mmap) -> None:
        self._memory = memoryview(memory)
        self._words = self._memory.cast("Q")

    def begin(self, plan: int, body: bytes = b"") -> int:
        """Its number, for its end."""
        count, now_ns = self._words[_COUNT], time.perf_counter_ns()
        at = CALLS_AT + CALL_BYTES * (count % MOST)
        _CALL.pack_into(self._memory, at, plan, now_ns, 0, RUNNING, len(body), body[-TAIL_BYTES:])
        self._words[_COUNT] = count + 1
        return count

    def end(self, how: int, took_ns: int = 0, number: int | None = None) -> None:
        """How the call of that `number` has ended, None for the one that began last. Others may have begun in it;
        behind MOST of them it is not there any more."""
        count = self._words[_COUNT]
        number = count - 1 if number is None else number
        if count - number <= MOST:
            at = CALLS_AT + CALL_BYTES * (number % MOST)
            _END.pack_into(self._memory, at + _TOOK_AT, took_ns, how)

    def begin_chain(self, calls: ChainRecord) -> None:
        """Its calls, at once: what would be written for each one costs more than many a call."""
        count = self._words[_COUNT]
        self._put(calls.begun, count, time.perf_counter_ns(), 0)
        self._words[_COUNT] = count + calls.count

    def end_chain(self, calls: ChainRecord, took_ns: int, failed_at: int | None = None) -> None:
        """`took_ns`: all together. `failed_at`: the one that raised; those behind it did not begin."""
        first = self._words[_COUNT] - calls.count
        begun_ns = self._words[(CALLS_AT + CALL_BYTES * (first % MOST)) // 8 + 1]
        self._put(calls.ended if failed_at is None else calls.ended_at(failed_at), first, begun_ns, took_ns)

    def _put(self, calls: bytes, first: int, begun_ns: int, took_ns: int) -> None:
        memory, at = self._memory, CALLS_AT + CALL_BYTES * (first % MOST)
        here = min(len(calls), CALLS_AT + CALL_BYTES * MOST - at)
        if here == len(calls):
            memory[at : at + here] = calls
        else:
            memory[at : at + here] = calls[:here]
            memory[CALLS_AT : CALLS_AT + len(calls) - here] = calls[here:]
        self._words[at // 8 + 1], self._words[at // 8 + 2] = begun_ns, took_ns

    def close(self) -> None:
        """The page can be unmapped then."""
        self._words.release()
        self._memory.release()


class ChainRecord:
    """What is written of a chain's calls, plans and references: of the newest MOST."""

    def __init__(self, calls: Sequence[tuple[int, bytes]]) -> None:
        self._calls, self._skipped = calls[-MOST:], max(len(calls) - MOST, 0)
        self.count = len(self._calls)
        self.begun, self.ended = self._packed(RUNNING, self.count), self._packed(OK, self.count)

    def ended_at(self, number: int) -> bytes:
        """Of a chain in which this step raised."""
        done = max(number - self._skipped, 0)
        failed = self._packed(RAISED, self.count)[done * CALL_BYTES : (done + 1) * CALL_BYTES]
        behind = self._packed(DECLINED, self.count)[(done + 1) * CALL_BYTES :]
        return self.ended[: done * CALL_BYTES] + failed + behind

    def _packed(self, how: int, count: int) -> bytes:
        return b"".join(
            _CALL.pack(plan, 0, 0, how | IN_CHAIN, len(body), body[-TAIL_BYTES:]) for plan, body in self._calls[:count]
        )


def read(page: bytes) -> list[RecentCall]:
    """Of a control page that a worker has written, the oldest first; whatever it is."""
    count = int.from_bytes(page[COUNT_AT : COUNT_AT + 8], "little")
    found: list[RecentCall] = []
    for number in range(max(count - MOST, 0), count):
        at = CALLS_AT + CALL_BYTES * (number % MOST)
        plan, begun_ns, took_ns, how, nbytes, tail = _CALL.unpack_from(page, at)
        found.append(
            RecentCall(
                plan, begun_ns, took_ns, how & 0xFF, nbytes, tail[: min(nbytes, TAIL_BYTES)], bool(how & IN_CHAIN)
            )
        )
    return found
