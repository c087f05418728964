"""Frames and messages: what is sent arrives, and what is not ours ends in ProtocolError and nothing else."""

from __future__ import annotations

import contextlib
from dataclasses import MISSING, fields
from typing import Any, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.transport import messages, wire
from layerzero.ipc.transport.messages import MESSAGES, Message, Outcome, RetireArena, Route, decode, encode
from layerzero.ipc.transport.plain import MAX_DEPTH, unpack_body

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=9)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
BY_TYPE: dict[type, st.SearchStrategy[Any]] = {
    str: st.text(max_size=20),
    bytes: st.binary(max_size=20),
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    list: st.lists(plain, max_size=3),
    dict: st.dictionaries(st.text(max_size=5), plain, max_size=3),
}


def type_of(cls: type[Message], name: str) -> type:
    hint = get_type_hints(cls)[name]
    plain_type: type = get_origin(hint) or hint
    return plain_type


@st.composite
def any_message(draw: st.DrawFn) -> Message:
    cls = draw(st.sampled_from(list(MESSAGES.values())))
    return cls(**{f.name: draw(BY_TYPE[type_of(cls, f.name)]) for f in fields(cls)})


@given(any_message())
def test_message_survives_a_round_trip(message: Message) -> None:
    """Every field of every kind."""
    assert decode(encode(message), type(message)) == message


@given(st.binary(max_size=200))
def test_random_bytes_raise_protocol_error_only(data: bytes) -> None:
    """A peer's bytes must not be able to end the broker."""
    for read in (
        lambda: decode(data, *MESSAGES.values()),
        lambda: wire.unpack(data),
        lambda: wire.unpack_refs(data, 2),
    ):
        with contextlib.suppress(ProtocolError):
            read()


@given(st.dictionaries(st.text(max_size=10) | st.sampled_from(["kind", "op", "arena"]), plain, max_size=8))
def test_random_maps_raise_protocol_error_only(value: dict[str, Any]) -> None:
    """So with well-formed msgpack of the wrong shape."""
    for cls in MESSAGES.values():
        with contextlib.suppress(ProtocolError):
            decode(msgpack.packb({**value, "kind": cls.kind}), cls)


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 600, 1020])
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a"])
def test_deep_value_is_refused(opening: bytes, depth: int) -> None:
    """msgpack reads 1024 levels; repr() ends in a RecursionError there and packb() refuses half: no broker may show or
    pass on what a peer sent, and end by it."""
    with pytest.raises(ProtocolError, match="nested more than 32 deep"):
        unpack_body(opening * depth + b"\xc0")


def test_value_as_deep_as_allowed_is_read() -> None:
    """The limit is on nesting, not on size."""
    value: Any = []
    for _ in range(MAX_DEPTH - 1):
        value = [value]
    assert unpack_body(msgpack.packb(value)) == value


@pytest.mark.parametrize("value", [msgpack.Timestamp(1), msgpack.ExtType(5, b"x"), {b"key": 1}, [{"a": {b"": 0}}]])
def test_value_that_json_does_not_know_is_refused(value: object) -> None:
    """Policies of callers are hashed as JSON, whose keys are text."""
    with pytest.raises(ProtocolError):
        unpack_body(msgpack.packb(value))


@pytest.mark.parametrize("cls", MESSAGES.values(), ids=MESSAGES)
def test_missing_field_is_named(cls: type[Message]) -> None:
    """Fields without a default must be there."""
    for name in [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]:
        value = {f.name: type_of(cls, f.name)() for f in fields(cls) if f.name != name}
        with pytest.raises(ProtocolError, match=name):
            decode(msgpack.packb({**value, "kind": cls.kind}), cls)


@pytest.mark.parametrize("cls", MESSAGES.values(), ids=MESSAGES)
def test_wrong_type_is_named(cls: type[Message]) -> None:
    """`1` is not `True`, and text is not bytes."""
    for field in fields(cls):
        wanted = type_of(cls, field.name)
        value = {f.name: type_of(cls, f.name)() for f in fields(cls)}
        examples: list[Any] = ["text", b"bytes", 1, 1.5, True, None, [], {}]
        for wrong in examples:
            if type(wrong) is wanted or (wanted is float and type(wrong) is int):
                continue
            with pytest.raises(ProtocolError, match=f"{cls.kind}.{field.name} must be {wanted.__name__}, got"):
                decode(msgpack.packb({**value, "kind": cls.kind, field.name: wrong}), cls)


def test_unknown_field_is_ignored() -> None:
    """A newer peer of the same protocol may say more."""
    data = msgpack.packb({"kind": "retire_arena", "arena": 7, "why": "tidy"})
    assert decode(data, RetireArena) == RetireArena(arena=7)


def test_default_stands_for_a_missing_field() -> None:
    """An older peer of the same protocol may say less."""
    data = msgpack.packb({"kind": "outcome", "error": {"code": "X"}})
    assert decode(data, Outcome) == Outcome(error={"code": "X"})


@pytest.mark.parametrize("kind", ["teleport", "welcome", "", 7, None, b"route", ["route"]])
def test_unexpected_kind_is_refused_by_name(kind: object) -> None:
    """The sender's author must see what was sent and what is allowed here."""
    with pytest.raises(ProtocolError) as caught:
        decode(msgpack.packb({"kind": kind}), RetireArena, Route)
    assert repr(kind) in caught.value.message
    assert caught.value.message.endswith("expected retire_arena or route")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x81\x01\x02",
        b"\x91" * 5000,
        b"\xa1\xff",
        b"\x01\x01",
    ],
    ids=["empty", "reserved", "huge array", "huge string", "integer key", "nested", "not UTF-8", "trailing"],
)
def test_hostile_msgpack_is_refused(data: bytes) -> None:
    """Sizes that are only claimed must cost nothing."""
    with pytest.raises(ProtocolError, match="not msgpack"):
        unpack_body(data)


def test_encoding_is_canonical() -> None:
    """Equal signatures share a route in the broker only when their bytes are equal."""
    one = Route(op="gelu", inputs=[], outputs=[], attrs={"approximate": "none"})
    other = Route(attrs={"approximate": "none"}, outputs=[], inputs=[], op="gelu")
    assert encode(one) == encode(other)


# --- frames --------------------------------------------------------------------------------------------------

u8, u32, u64 = st.integers(0, 2**8 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)


@given(u8, u8, u32, u64, u32, u32, u64, st.binary(max_size=40))
def test_frame_survives_a_round_trip(
    kind: int, flags: int, route: int, seq: int, attempt: int, aux: int, time: int, body: bytes
) -> None:
    """All the bits of all the fields."""
    frame = wire.pack(kind, flags, route, seq, attempt, aux, time, body)
    assert wire.unpack(frame) == wire.Header(wire.PROTOCOL, kind, flags, route, seq, attempt, aux, time)
    assert frame[wire.HEADER_BYTES :] == body


@given(st.lists(st.tuples(u32, u32, u64, u64).map(lambda ref: wire.Ref(*ref)), max_size=5))
def test_references_survive_a_round_trip(refs: list[wire.Ref]) -> None:
    """They say where in the caller's memory a kernel writes."""
    assert wire.unpack_refs(wire.pack_refs(refs), len(refs)) == refs


def test_short_frame_and_short_body_are_refused() -> None:
    """Nothing is read past the end."""
    with pytest.raises(ProtocolError, match="frame of 31 bytes is shorter than a header"):
        wire.unpack(bytes(31))
    with pytest.raises(ProtocolError, match="body of 47 bytes is too short for 2 references"):
        wire.unpack_refs(bytes(47), 2)


@pytest.mark.parametrize("protocol", [0, wire.PROTOCOL - 1, wire.PROTOCOL + 1, 0xFFFF])
def test_frame_of_another_protocol_is_refused(protocol: int) -> None:
    """Its fields may mean anything."""
    frame = wire.HEADER.pack(protocol, wire.Kind.EXECUTE, 0, 1, 1, 0, 0, 0)
    with pytest.raises(ProtocolError, match=f"frame has protocol {protocol}; this side speaks {wire.PROTOCOL}"):
        wire.unpack(frame)


def test_kinds_of_messages_are_unique_and_listed() -> None:
    """A kind that is not in the table cannot be decoded."""
    listed = {cls for cls in vars(messages).values() if isinstance(cls, type) and issubclass(cls, Message)} - {Message}
    assert listed == set(MESSAGES.values())
    assert len(MESSAGES) == len(listed)
