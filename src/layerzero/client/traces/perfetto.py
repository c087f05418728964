"""A trace as TrackEvents of Perfetto: the protobuf that ui.perfetto.dev and its trace processor read, written by hand,
since four kinds of fields are all there is to it.

Source of the field numbers: google/perfetto, protos/perfetto/trace/trace_packet.proto, clock_snapshot.proto and
track_event/{track_event,track_descriptor,process_descriptor,thread_descriptor,debug_annotation}.proto, as of its Python
package 0.59.1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from layerzero.client.traces.contents import TraceContents
from layerzero.client.traces.timeline import Row, Slice, rows_of

TRACE_PACKET = 1
CLOCK_SNAPSHOT, TIMESTAMP, SEQUENCE, TRACK_EVENT, TIMESTAMP_CLOCK, TRACK_DESCRIPTOR = 6, 8, 10, 11, 58, 60
CLOCKS, PRIMARY_CLOCK, CLOCK_ID, CLOCK_TIMESTAMP = 1, 2, 1, 2
REALTIME, MONOTONIC = 1, 3
UUID, NAME, PROCESS, THREAD, PARENT = 1, 2, 3, 4, 5  # of a track
PID, PROCESS_NAME, TID, THREAD_NAME = 1, 6, 2, 5
ANNOTATION, TYPE, TRACK, CATEGORY, EVENT_NAME, FLOW, LAST_FLOW = 4, 9, 11, 22, 23, 47, 48
INT_VALUE, DOUBLE_VALUE, STRING_VALUE, ANNOTATION_NAME = 4, 5, 6, 10
BEGIN, END = 1, 2
_SEQUENCE = 1  # of all packets: they have one writer
_VARINT, _FIXED64, _BYTES = 0, 1, 2


def to_perfetto(contents: TraceContents) -> bytes:
    """The whole file. Times are on CLOCK_MONOTONIC; a clock snapshot relates them to Unix time."""
    return b"".join(_message(TRACE_PACKET, packet) for packet in _packets(contents))


def _packets(contents: TraceContents) -> Iterator[bytes]:
    unix_ns, clock_ns = contents.clock
    clocks = [_number(CLOCK_ID, clock) + _number(CLOCK_TIMESTAMP, ns) for clock, ns in _clocks(unix_ns, clock_ns)]
    snapshot = b"".join(_message(CLOCKS, clock) for clock in clocks) + _number(PRIMARY_CLOCK, MONOTONIC)
    yield _number(SEQUENCE, _SEQUENCE) + _message(CLOCK_SNAPSHOT, snapshot)
    processes: dict[int, int] = {}
    tracks = iter(range(1, 1 << 62))
    for row in rows_of(contents):
        if row.pid not in processes:
            processes[row.pid] = next(tracks)
            process = _number(PID, row.pid) + _text(PROCESS_NAME, row.process)
            yield _descriptor(_number(UUID, processes[row.pid]) + _message(PROCESS, process))
        track = next(tracks)
        yield _descriptor(_number(UUID, track) + _track(row, processes[row.pid]))
        yield from _events(row, track)


def _clocks(unix_ns: int, clock_ns: int) -> Iterator[tuple[int, int]]:
    yield MONOTONIC, clock_ns
    yield REALTIME, unix_ns


def _descriptor(track: bytes) -> bytes:
    return _number(SEQUENCE, _SEQUENCE) + _message(TRACK_DESCRIPTOR, track)


def _track(row: Row, process: int) -> bytes:
    """A thread's own, or one that belongs to its process."""
    if row.tid:
        return _message(THREAD, _number(PID, row.pid) + _number(TID, row.tid) + _text(THREAD_NAME, row.name))
    return _number(PARENT, process) + _text(NAME, row.name)


def _events(row: Row, track: int) -> Iterator[bytes]:
    """Beginnings and ends in their order: what lies in another ends before it."""
    still_open: list[int] = []  # their ends
    for one in row.slices:
        while still_open and still_open[-1] <= one.start_ns:
            yield _end(track, still_open.pop())
        yield _begin(one, track)
        still_open.append(one.end_ns)
    while still_open:
        yield _end(track, still_open.pop())


def _begin(one: Slice, track: int) -> bytes:
    event = [_number(TYPE, BEGIN), _number(TRACK, track), _text(CATEGORY, one.category), _text(EVENT_NAME, one.name)]
    event += [_message(ANNOTATION, _annotation(name, value)) for name, value in one.facts.items()]
    event += [_fixed64(FLOW, arrow) for arrow in one.sends]
    event += [_fixed64(LAST_FLOW, arrow) for arrow in one.takes]
    return _at(one.start_ns) + _message(TRACK_EVENT, b"".join(event))


def _end(track: int, end_ns: int) -> bytes:
    return _at(end_ns) + _message(TRACK_EVENT, _number(TYPE, END) + _number(TRACK, track))


def _at(ns: int) -> bytes:
    return _number(TIMESTAMP, ns) + _number(TIMESTAMP_CLOCK, MONOTONIC) + _number(SEQUENCE, _SEQUENCE)


def _annotation(name: str, value: Any) -> bytes:
    named = _text(ANNOTATION_NAME, name)
    if isinstance(value, float):
        return named + _double(DOUBLE_VALUE, value)
    return named + (_number(INT_VALUE, value) if isinstance(value, int) else _text(STRING_VALUE, str(value)))


# --- protobuf's encoding: a key of the field's number and its wire type, then the value


def _varint(value: int) -> bytes:
    """Of 64 bits at most; negative ones as their two's complement."""
    value &= (1 << 64) - 1
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(value)


def _fixed64(field: int, value: int) -> bytes:
    return _varint(field << 3 | _FIXED64) + value.to_bytes(8, "little")


def _double(field: int, value: float) -> bytes:
    from array import array

    return _varint(field << 3 | _FIXED64) + array("d", [value]).tobytes()


def _message(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | _BYTES) + _varint(len(value)) + value


def _text(field: int, value: str) -> bytes:
    return _message(field, value.encode(errors="replace"))
