"""docs/protocol.md by example: tests/samples/protocol_vectors.json, for this implementation and for any other.

Bytes are hex. In fields, bytes are {"hex": "..."}; references are [arena, flags, offset, nbytes]. A shared page is
zeros but for [offset, bytes].
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgpack
import pytest

from layerzero.ipc.errors import BY_CODE, ProtocolError, from_wire
from layerzero.ipc.shm import lane, memory
from layerzero.ipc.shm.counter_page import PAGE_BYTES, CounterPage
from layerzero.ipc.shm.counter_words import Label
from layerzero.ipc.shm.timeline_words import TimelinePoint
from layerzero.ipc.transport import chains, wire
from layerzero.ipc.transport.messages import MESSAGES, decode, encode

PATH = Path(__file__).parents[2] / "samples" / "protocol_vectors.json"
VECTORS: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))


def plain(value: Any) -> Any:
    """JSON to what msgpack holds."""
    match value:
        case {"hex": str(text)} if len(value) == 1:
            return bytes.fromhex(text)
        case dict():
            return {key: plain(item) for key, item in value.items()}
        case list():
            return [plain(item) for item in value]
    return value


def names(vectors: list[dict[str, Any]]) -> list[str]:
    return [vector["name"] for vector in vectors]


@pytest.mark.parametrize("vector", VECTORS["messages"], ids=names(VECTORS["messages"]))
def test_message_vector_holds_both_ways(vector: dict[str, Any]) -> None:
    """Other implementations are written from these."""
    cls = MESSAGES[vector["kind"]]
    message = cls(**plain(vector["fields"]))
    assert decode(bytes.fromhex(vector["hex"]), cls) == message
    assert encode(message).hex() == vector["hex"]


@pytest.mark.parametrize("vector", VECTORS["frames"], ids=names(VECTORS["frames"]))
def test_frame_vector_holds_both_ways(vector: dict[str, Any]) -> None:
    """The header's fields, and a body of the sort that the kind says."""
    frame, header = bytes.fromhex(vector["hex"]), vector["header"]
    assert wire.unpack(frame) == wire.Header(wire.PROTOCOL, **header)
    assert wire.Kind[vector["kind"]] == header["kind"]
    body = frame[wire.HEADER_BYTES :]
    match vector["body"]:
        case {"refs": refs, **rest}:
            packed = wire.pack_refs([wire.Ref(*ref) for ref in refs])
            point = TimelinePoint(*rest["point"]) if "point" in rest else None
            graph_slot, binding = rest.get("graph_slot", (None, 0))
            call = (packed, point, graph_slot, binding, bytes.fromhex(str(rest.get("digest", ""))))
            flags, made = wire.pack_call(*call)
            assert flags == header["flags"] & wire.HAS_TAIL or header["kind"] not in (wire.Kind.EXECUTE, wire.Kind.RUN)
            assert wire.unpack_call(flags, body) == call
            assert [list(ref) for ref in wire.unpack_refs(body, len(refs))] == refs
        case {"message": kind, "fields": given}:
            message = MESSAGES[kind](**plain(given))
            made = encode(message)
            assert decode(body, MESSAGES[kind]) == message
        case {"msgpack": value}:
            made = msgpack.packb(plain(value))
            assert msgpack.unpackb(body) == plain(value)
        case {"hex": text}:
            made = bytes.fromhex(text)
        case other:
            pytest.fail(f"a body of no known sort: {other}")
    assert wire.pack(**header, body=made) == frame


@pytest.mark.parametrize("vector", VECTORS["errors"], ids=lambda vector: vector["code"])
def test_error_vector_holds_both_ways(vector: dict[str, Any]) -> None:
    """Code, message and facts are what another language sees of an error."""
    error = from_wire(msgpack.unpackb(bytes.fromhex(vector["hex"])))
    assert (type(error), error.retry) == (BY_CODE[vector["code"]], vector["retry"])
    assert (error.message, error.facts) == (vector["message"], plain(vector["facts"]))
    assert msgpack.packb(error.to_wire()).hex() == vector["hex"]


@pytest.mark.parametrize("vector", VECTORS["chains"], ids=names(VECTORS["chains"]))
def test_chain_vector_holds_both_ways(vector: dict[str, Any]) -> None:
    """A table, and the call on a lane that names it."""
    steps = [
        chains.ChainStep(step["plan"], tuple(wire.Ref(*ref) for ref in step["refs"]), plain(step["values"]))
        for step in vector["steps"]
    ]
    table = bytes.fromhex(vector["table"])
    assert chains.pack_table(steps) == table
    assert chains.unpack_table(table) == steps
    at, variables = wire.Ref(*vector["at"]), tuple(wire.Ref(*ref) for ref in vector["variables"])
    call = bytes.fromhex(vector["call"])
    assert chains.pack_chain_call(at, chains.digest_of(table), variables) == call
    assert chains.unpack_chain_call(call) == (at, chains.digest_of(table), variables)


def shared(nbytes: int, runs: Sequence[Sequence[Any]] = ()) -> int:
    """A sealed file with these bytes."""
    fd = memory.create_memfd("vector", nbytes)
    for at, text in runs:
        os.pwrite(fd, bytes.fromhex(text), at)
    return fd


def content(fd: int, nbytes: int) -> list[list[Any]]:
    """Words that are not zero, in runs."""
    data = os.pread(fd, nbytes, 0)
    words = [data[at : at + 8] for at in range(0, nbytes, 8)]
    found: list[list[Any]] = []
    for is_empty, run in itertools.groupby(range(len(words)), lambda at: not any(words[at])):
        if not is_empty:
            first, *_ = taken = list(run)
            found.append([8 * first, b"".join(words[at] for at in taken).hex()])
    return found


@pytest.mark.parametrize("vector", VECTORS["lanes"], ids=names(VECTORS["lanes"]))
def test_lane_vector_holds_both_ways(vector: dict[str, Any]) -> None:
    """What a client, or a worker, writes to a lane's page, and what the other one reads there."""
    empty, given = shared(lane.PAGE_BYTES), shared(lane.PAGE_BYTES, vector["page"])
    page, there = lane.Page(empty), lane.Page(given)
    call, plan = vector["call"], vector["plan"]
    if vector["what"] == "call":
        refs = bytes.fromhex(vector["refs"])
        page.put_call(call, plan, refs, waits=False)
        assert there.get_call(call) == (plan, refs)
        assert there.calls == call
    else:
        status, kernel_ns, said = vector["status"], vector["kernel_ns"], bytes.fromhex(vector["said"])
        page.put_end(call, status, plan, kernel_ns, said)
        assert there.get_end(call) == (status, kernel_ns, said)
        assert there.last_time() == (call, plan if status == lane.OK else 0, kernel_ns)
    assert content(empty, lane.PAGE_BYTES) == vector["page"]
    for opened in (page, there):
        opened.close()
    for fd in (empty, given):
        os.close(fd)


@pytest.mark.parametrize("vector", VECTORS["lanes_refused"], ids=names(VECTORS["lanes_refused"]))
def test_end_on_a_lane_that_makes_no_sense_is_refused(vector: dict[str, Any]) -> None:
    """Its worker cannot be trusted with memory."""
    fd = shared(lane.PAGE_BYTES, vector["page"])
    page = lane.Page(fd)
    with pytest.raises(ProtocolError):
        page.get_end(vector["call"])
    page.close()
    os.close(fd)


@pytest.mark.parametrize("vector", VECTORS["counters"], ids=names(VECTORS["counters"]))
def test_counters_vector_holds_both_ways(vector: dict[str, Any]) -> None:
    """What a client writes to its page of counters, and what the broker reads there."""
    empty, given = shared(PAGE_BYTES), shared(PAGE_BYTES, vector["page"])
    page, there = CounterPage(empty, writable=True), CounterPage(given, writable=False)
    for label in vector["labels"]:
        page.open_row(Label(*label))
    for what, row, *more in vector["notes"]:
        {"count": page.count, "copied": page.note_copied, "fallback": page.note_fallback}[what](row, *more)
    assert content(empty, PAGE_BYTES) == vector["page"]
    found = {growth.label: growth for growth in there.grown()}
    assert set(found) <= {Label(*label) for label in vector["labels"]}
    for row, label in enumerate(vector["labels"], start=1):
        counted = [note for note in vector["notes"] if note[0] == "count" and note[1] == row]
        assert sum(found[Label(*label)].buckets) == len(counted)
    for opened in (page, there):
        opened.close()
    for fd in (empty, given):
        os.close(fd)


@pytest.mark.parametrize("vector", VECTORS["refused"], ids=names(VECTORS["refused"]))
def test_refused_vector_is_refused(vector: dict[str, Any]) -> None:
    """Every implementation must refuse the same things."""
    expected = () if vector["as"] == "frame" else (MESSAGES[vector["as"]],)
    read = decode if expected else wire.unpack
    with pytest.raises(ProtocolError):
        read(bytes.fromhex(vector["hex"]), *expected)


def test_vectors_cover_the_whole_protocol() -> None:
    """A kind without a vector is a kind that others must guess."""
    assert VECTORS["protocol"] == wire.PROTOCOL
    assert {vector["kind"] for vector in VECTORS["messages"]} == set(MESSAGES)
    assert {vector["kind"] for vector in VECTORS["frames"]} == {kind.name for kind in wire.Kind}
    assert {vector["code"] for vector in VECTORS["errors"]} == set(BY_CODE)


def test_document_names_the_whole_protocol() -> None:
    """docs/protocol.md is the authority; what it does not name is not in the protocol."""
    text = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text(encoding="utf-8")
    for kind in wire.Kind:
        assert f"| {kind.value} | {kind.name} |" in text
    for name, cls in MESSAGES.items():
        assert f"`{name}`" in text
        for field in fields(cls):
            assert f"`{field.name}`" in text, f"{name}.{field.name}"
    for code, error in BY_CODE.items():
        assert f"| {code} | {error.retry} |" in text
