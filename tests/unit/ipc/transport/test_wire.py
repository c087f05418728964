"""Frames as the two sides pack and read them, beyond what the vectors of docs/protocol.md show."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.shm.timeline_words import TimelinePoint
from layerzero.ipc.transport import wire
from layerzero.ipc.transport.wire import Header, Kind, Ref

BYTE, SHORT, WORD = (st.integers(0, (1 << bits) - 1) for bits in (8, 32, 64))
REFS = st.lists(st.builds(Ref, SHORT, SHORT, WORD, WORD), max_size=4).map(wire.pack_refs)
DIGEST = bytes(range(wire.DIGEST_BYTES))
ENDS = [
    (wire.HAS_POINT, 8, "a point"),
    (wire.HAS_GRAPH_SLOT, 8, "a graph slot"),
    (wire.HAS_DIGEST, 16, "a digest"),
]


@given(BYTE, SHORT, WORD, SHORT, SHORT, st.binary(max_size=40))
def test_a_run_has_its_numbers_where_its_worker_looks(
    flags: int, plan: int, dispatch: int, attempt: int, client: int, body: bytes
) -> None:
    frame = wire.pack_run(flags, plan, dispatch, attempt, client, body)
    assert wire.unpack(frame) == Header(wire.PROTOCOL, Kind.RUN, flags, plan, dispatch, attempt, client, 0)
    assert frame[wire.HEADER_BYTES :] == body


@given(BYTE, SHORT, WORD, st.binary(max_size=40), WORD)
def test_an_execute_has_its_numbers_where_the_broker_looks(
    flags: int, route: int, seq: int, body: bytes, timeout_us: int
) -> None:
    frame = wire.pack_execute(flags, route, seq, body, timeout_us)
    assert wire.unpack(frame) == Header(wire.PROTOCOL, Kind.EXECUTE, flags, route, seq, 0, 0, timeout_us)
    assert frame[wire.HEADER_BYTES :] == body


@given(BYTE, st.integers(1, (1 << 32) - 1), SHORT)
def test_an_execute_says_where_on_a_lane_it_was_and_keeps_its_flags(flags: int, lane: int, call: int) -> None:
    header = wire.unpack(wire.pack_execute(flags, 1, 2, b"", after_lane=lane, after_call=call))
    assert (header.flags, header.aux, header.attempt) == (flags | wire.AFTER_LANE, lane, call)


def test_what_is_not_said_is_zero() -> None:
    """A flag that nobody set would be read as a promise."""
    assert wire.unpack(wire.pack(Kind.STOP)) == Header(wire.PROTOCOL, Kind.STOP, 0, 0, 0, 0, 0, 0)
    assert wire.unpack(wire.pack_execute(0, 3, 4, b"")) == Header(wire.PROTOCOL, Kind.EXECUTE, 0, 3, 4, 0, 0, 0)
    assert len(wire.pack(Kind.STOP)) == wire.HEADER_BYTES
    assert wire.pack_call(b"refs") == (0, b"refs")
    assert wire.pack_call(b"", graph_slot=5) == (wire.HAS_GRAPH_SLOT, bytes([5, 0, 0, 0, 0, 0, 0, 0]))


@given(
    REFS,
    st.none() | st.builds(TimelinePoint, SHORT, SHORT),
    st.just((None, 0)) | st.tuples(SHORT, SHORT),
    st.sampled_from([b"", DIGEST]),
)
def test_a_call_is_read_as_it_was_packed(
    refs: bytes, point: TimelinePoint | None, slot: tuple[int | None, int], digest: bytes
) -> None:
    """Whatever of the rest is there."""
    flags, body = wire.pack_call(refs, point, *slot, digest)
    assert wire.unpack_call(flags, body) == (refs, point, *slot, digest)


@pytest.mark.parametrize(("flag", "size", "name"), ENDS, ids=[name for _, _, name in ENDS])
def test_a_body_that_lacks_what_its_flags_promise_is_refused(flag: int, size: int, name: str) -> None:
    """What is short of it by a byte is refused with its length; what is nothing else has no references."""
    with pytest.raises(ProtocolError, match=f"a body of {size - 1} bytes is too short for {name}"):
        wire.unpack_call(flag, bytes(size - 1))
    assert wire.unpack_call(flag, bytes(size))[0] == b""


@given(st.lists(st.sampled_from([0, 1, 7, wire.NO_ARENA - 1, wire.NO_ARENA])))
def test_arenas_of_references_are_those_that_they_name(arenas: list[int]) -> None:
    """An argument that was left out has none."""
    refs = wire.pack_refs([Ref(arena, 0, 0, 0) for arena in arenas])
    assert wire.arenas_of(refs) == set(arenas) - {wire.NO_ARENA}


def test_references_that_are_not_there_are_refused_with_both_counts() -> None:
    body = wire.pack_refs([Ref(1, 2, 3, 4)])
    assert wire.unpack_refs(body, 1) == [Ref(1, 2, 3, 4)]
    with pytest.raises(ProtocolError, match=f"body of {len(body)} bytes is too short for 2 references"):
        wire.unpack_refs(body, 2)


def test_a_frame_that_is_no_frame_is_refused_with_what_it_has() -> None:
    with pytest.raises(ProtocolError, match=r"frame of 31 bytes is shorter than a header \(32\)"):
        wire.unpack(wire.pack(Kind.STOP)[:31])
    with pytest.raises(ProtocolError, match=f"frame has protocol 259; this side speaks {wire.PROTOCOL}"):
        wire.unpack(b"\3\1" + wire.pack(Kind.STOP)[2:])
