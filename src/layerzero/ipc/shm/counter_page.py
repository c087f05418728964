"""The page of counters of one client: calls that pass the broker by, counted by who makes them. docs/protocol.md,
section 18, has the layout.

Rows of words, one for each op, kernel and path; the client alone writes, and words only grow. The broker reads them
when somebody asks, and once more when the client has gone, so that nothing is lost with it.
"""

from __future__ import annotations

import ctypes

from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.shm import memory
from layerzero.ipc.shm.counter_words import BUCKETS, CODES, MAX_CODES, PATHS, REST, Growth, Label, bucket_of

ROWS, ROW_BYTES = 128, 1024  # the first row is the head
PAGE_BYTES = ROWS * ROW_BYTES
_LABEL, _LABEL_BYTES, _WORDS = 8, 248, 256  # of a row, in bytes: its label behind the label's length; its words
BUCKETS_AT = _WORDS
SUM_AT = BUCKETS_AT + 8 * BUCKETS  # ns of all of them
COPIED_AT = SUM_AT + 8  # bytes that the client copied for them
ERRORS_AT = COPIED_AT + 8  # calls that ended in an error in the client, by code
FALLBACKS_AT = ERRORS_AT + 8 * MAX_CODES  # attempts that failed there, after which the call went on elsewhere
LAYOUT = (ROW_BYTES, BUCKETS_AT, BUCKETS, SUM_AT, COPIED_AT)
"""For the C of the client."""
_COUNT = (ROW_BYTES - _WORDS) // 8
MAX_CALLS = 1 << 40  # that a word may have grown by between two looks
MAX_SUM = 1 << 62  # as above, of sums of ns and of bytes
_SUMS = ((SUM_AT - _WORDS) // 8, (COPIED_AT - _WORDS) // 8)
assert len(CODES) <= MAX_CODES
assert FALLBACKS_AT + 8 * MAX_CODES <= ROW_BYTES


class CounterPage:
    """The mapped page. `fd` may be closed afterwards. Raises OSError."""

    def __init__(self, fd: int, *, writable: bool) -> None:
        # A forked child may count here before it has seen that it is one.
        self._bytes = memory.map_guarded(fd, PAGE_BYTES, writable=writable, is_inherited=writable)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._bytes)) if writable else 0
        self._words = self._bytes.cast("Q")
        self._seen: dict[int, tuple[Label, list[int]]] = {}  # of the reader, by row

    # --- the client's, one thread at a time

    def open_row(self, label: Label) -> int:
        """The number of a new row; that of the last one, which is of all others, when there are no more."""
        row = self._words[0] + 1
        if row >= ROWS:
            return ROWS - 1
        text = b"" if row == ROWS - 1 else "\n".join(label).encode()
        if len(text) > _LABEL_BYTES:
            text = b""
        at = row * ROW_BYTES
        self._bytes[at + _LABEL : at + _LABEL + len(text)] = text
        self._words[at // 8] = len(text)
        self._words[0] = row
        return row

    def count(self, row: int, ns: int, copied_bytes: int, times: int = 1) -> None:
        """Calls that ended well, after so many ns each."""
        words, at = self._words, row * ROW_BYTES
        words[(at + BUCKETS_AT) // 8 + bucket_of(ns)] += times
        words[(at + SUM_AT) // 8] += ns * times
        if copied_bytes:
            words[(at + COPIED_AT) // 8] += copied_bytes

    def note_copied(self, row: int, nbytes: int) -> None:
        """For a call that is counted elsewhere."""
        self._words[(row * ROW_BYTES + COPIED_AT) // 8] += nbytes

    def note_error(self, row: int, code: str) -> None:
        self._words[(row * ROW_BYTES + ERRORS_AT) // 8 + _place(code)] += 1

    def note_fallback(self, row: int, code: str) -> None:
        self._words[(row * ROW_BYTES + FALLBACKS_AT) // 8 + _place(code)] += 1

    # --- whoever reads

    def grown(self) -> list[Growth]:
        """What has grown since the last time. Raises ProtocolError for words that make no sense; what was read before
        stays right."""
        rows = self._words[0]
        if rows < len(self._seen) or rows >= ROWS:
            raise ProtocolError(f"a page of counters has {rows} rows; it had {len(self._seen)}, of {ROWS - 1} at most")
        found = []
        for row in range(1, rows + 1):
            at = (row * ROW_BYTES + _WORDS) // 8
            now = self._words[at : at + _COUNT].tolist()
            label, before = self._seen.get(row) or (self._label(row), [0] * _COUNT)
            if now != before:
                found.append((row, label, now, [new - old for new, old in zip(now, before, strict=True)]))
            self._seen.setdefault(row, (label, before))
        for row, label, _, more in found:
            for place, grown in enumerate(more):
                if not 0 <= grown <= (MAX_SUM if place in _SUMS else MAX_CALLS):
                    raise ProtocolError(f"word {place} of row {row} of a page of counters ({label}) grew by {grown}")
        for row, label, now, _ in found:
            self._seen[row] = (label, now)
        return [_growth(label, more) for _, label, _, more in found]

    def _label(self, row: int) -> Label:
        nbytes = self._words[row * ROW_BYTES // 8]
        if nbytes > _LABEL_BYTES:
            raise ProtocolError(f"the label of row {row} of a page of counters has {nbytes} bytes")
        at = row * ROW_BYTES + _LABEL
        try:
            parts = bytes(self._bytes[at : at + nbytes]).decode().split("\n")
        except UnicodeDecodeError as exc:
            raise ProtocolError(f"the label of row {row} of a page of counters is no text") from exc
        if parts == [""]:
            return REST
        if len(parts) != len(Label._fields) or parts[-1] not in PATHS:
            raise ProtocolError(f"the label of row {row} of a page of counters is {parts!r:.80}")
        return Label(*parts)

    def close(self) -> None:
        self._words.release()
        self._bytes.release()


def _place(code: str) -> int:
    return CODES.index(code) if code in CODES else 0


def _growth(label: Label, more: list[int]) -> Growth:
    errors, fallbacks = (ERRORS_AT - _WORDS) // 8, (FALLBACKS_AT - _WORDS) // 8
    return Growth(
        label,
        more[:BUCKETS],
        more[_SUMS[0]],
        more[_SUMS[1]],
        _by_code(more[errors : errors + MAX_CODES]),
        _by_code(more[fallbacks : fallbacks + MAX_CODES]),
    )


def _by_code(counts: list[int]) -> dict[str, int]:
    named = [(CODES[n] if n < len(CODES) else CODES[0], count) for n, count in enumerate(counts) if count]
    return {code: sum(count for one, count in named if one == code) for code, _ in named}
