"""Traces for viewers: rows that nest, Perfetto's protobuf by a decoder of its own, Chrome's JSON, and that of torch."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layerzero.client.traces.calls import RecordedCall, ScopeRecord, Source
from layerzero.client.traces.chrome import merged, to_chrome
from layerzero.client.traces.contents import TraceContents
from layerzero.client.traces.perfetto import to_perfetto
from layerzero.client.traces.scopes import ThreadName
from layerzero.client.traces.timeline import Slice, nested, rows_of
from layerzero.ipc.errors import InvalidArgument

UNIX_NS, CLOCK_NS = 1_790_000_000_123_456_789, 5_000_000


def contents() -> TraceContents:
    """Two threads, a worker, a GPU, scopes that lie in each other and one that does not, and a call of a function."""
    worker = {"kernel_id": "torch.silu", "backend": "torch", "worker_pid": 200, "kernel_ns": 300}
    calls = (
        RecordedCall(0, "op", "silu", CLOCK_NS + 100, 1000, 0, 1, ("outer",), **worker),
        RecordedCall(1, "op", "silu", CLOCK_NS + 1200, 600, 0, 1, ("outer",), **worker,
                     sources=(Source("x", 0, "out"),)),
        RecordedCall(2, "op", "silu", CLOCK_NS + 1100, 400, 1, **worker),
        RecordedCall(3, "op", "gelu", CLOCK_NS + 3000, 50, 0, device="cuda:0", kernel_id="x.gelu", backend="x",
                     gpu_ns=(CLOCK_NS + 3020, 700), error="CODE: fell \U0001f600"),
        RecordedCall(4, "function", "f", CLOCK_NS + 4000, 10, 0, backend="env-f"),
    )  # fmt: skip
    scopes = (
        ScopeRecord(1, "outer", None, 0, CLOCK_NS + 50, 2000),
        ScopeRecord(2, "another task", None, 0, CLOCK_NS + 1000, 5000),
        ScopeRecord(3, "open", None, 0, CLOCK_NS + 1000, None),
    )
    threads = {0: ThreadName("MainThread", 100), 1: ThreadName("other", 101)}
    return TraceContents(calls, scopes, 0, (UNIX_NS, CLOCK_NS), threads, {}, {"pid": 100, "program": "p.py"})


def test_slices_of_a_row_lie_in_each_other_or_behind_each_other() -> None:
    rng = random.Random(0)
    for _ in range(100):
        slices = [Slice("s", "", rng.randrange(50), rng.randrange(20)) for _ in range(30)]
        rows = nested(slices)
        assert sorted(id(one) for row in rows for one in row) == sorted(map(id, slices))
        for row in rows:
            for n, one in enumerate(row):
                for other in row[n + 1 :]:
                    assert other.start_ns >= one.end_ns or other.end_ns <= one.end_ns
                    assert other.start_ns >= one.start_ns


def test_kernels_of_a_worker_lie_within_their_calls_and_behind_each_other() -> None:
    drawn = {row.name: row for row in rows_of(contents())}
    assert [row.process for row in rows_of(contents())].count("worker torch") == 1
    kernels = drawn["kernels"].slices
    assert [(one.name, one.elapsed_ns) for one in kernels] == [("torch.silu", 300)] * 3
    for one in kernels:
        call = contents().calls[one.facts["call"]]
        assert call.start_ns <= one.start_ns
        assert one.end_ns <= call.end_ns
    assert all(a.end_ns <= b.start_ns for a, b in itertools.pairwise(kernels))
    assert [one.name for one in drawn["MainThread"].slices] == [
        "outer", "silu (torch)", "silu (torch)", "gelu (x)", "f",
    ]  # fmt: skip
    assert [one.name for one in drawn["MainThread (2)"].slices] == ["another task"]
    (on_gpu,) = drawn["cuda:0, by the caller's streams"].slices
    assert (on_gpu.start_ns, on_gpu.elapsed_ns) == (CLOCK_NS + 3020, 700)


# --- protobuf, by what its specification says of the wire format


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    while at < len(data):
        key = varint()
        number, wire = key >> 3, key & 7
        if wire == 0:
            yield number, varint()
        elif wire == 1:
            yield number, data[at : at + 8]
            at += 8
        else:
            assert wire == 2
            length = varint()
            assert at + length <= len(data)
            yield number, data[at : at + length]
            at += length


# Of google/perfetto's .proto files, by message: name, whether it is a message, and how a leaf is read.
TEXT, INT, FIXED, DOUBLE = "text", "int", "fixed", "double"
PROTO: dict[str, dict[int, tuple[str, str]]] = {
    "Trace": {1: ("packet", "TracePacket")},
    "TracePacket": {
        6: ("clock_snapshot", "ClockSnapshot"),
        8: ("timestamp", INT),
        10: ("trusted_packet_sequence_id", INT),
        11: ("track_event", "TrackEvent"),
        58: ("timestamp_clock_id", INT),
        60: ("track_descriptor", "TrackDescriptor"),
    },
    "ClockSnapshot": {1: ("clocks", "Clock"), 2: ("primary_trace_clock", INT)},
    "Clock": {1: ("clock_id", INT), 2: ("timestamp", INT)},
    "TrackDescriptor": {
        1: ("uuid", INT),
        2: ("name", TEXT),
        3: ("process", "ProcessDescriptor"),
        4: ("thread", "ThreadDescriptor"),
        5: ("parent_uuid", INT),
    },
    "ProcessDescriptor": {1: ("pid", INT), 6: ("process_name", TEXT)},
    "ThreadDescriptor": {1: ("pid", INT), 2: ("tid", INT), 5: ("thread_name", TEXT)},
    "TrackEvent": {
        4: ("debug_annotations", "DebugAnnotation"),
        9: ("type", INT),
        11: ("track_uuid", INT),
        22: ("categories", TEXT),
        23: ("name", TEXT),
        47: ("flow_ids", FIXED),
        48: ("terminating_flow_ids", FIXED),
    },
    "DebugAnnotation": {
        4: ("int_value", INT),
        5: ("double_value", DOUBLE),
        6: ("string_value", TEXT),
        10: ("name", TEXT),
    },
}


def decoded(message: str, data: bytes) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for number, value in fields(data):
        name, kind = PROTO[message][number]
        read: Any = value
        if kind == TEXT:
            assert isinstance(value, bytes)
            read = value.decode()
        elif kind in (FIXED, DOUBLE):
            assert isinstance(value, bytes)
            (read,) = struct.unpack("<Q" if kind == FIXED else "<d", value)
        elif kind == INT:
            assert isinstance(value, int)
        else:
            assert isinstance(value, bytes)
            read = decoded(kind, value)
        found.setdefault(name, []).append(read)
    return found


def test_perfettos_file_has_all_slices_on_their_tracks_with_arrows() -> None:
    packets = decoded("Trace", to_perfetto(contents()))["packet"]
    assert all(packet["trusted_packet_sequence_id"] == [1] for packet in packets)
    (snapshot,) = packets[0]["clock_snapshot"]
    clocks = {one["clock_id"][0]: one["timestamp"][0] for one in snapshot["clocks"]}
    assert (clocks, snapshot["primary_trace_clock"]) == ({3: CLOCK_NS, 1: UNIX_NS}, [3])  # MONOTONIC, REALTIME
    tracks = {one["uuid"][0]: one for packet in packets for one in packet.get("track_descriptor", ())}
    processes = {uuid: one["process"][0] for uuid, one in tracks.items() if "process" in one}
    assert {(one["pid"][0], one["process_name"][0]) for one in processes.values()} == {
        (100, "p.py (layerzero)"),
        (200, "worker torch"),
    }
    rows = rows_of(contents())
    assert len(tracks) == len(rows) + len(processes)
    names = {uuid: (one.get("name") or one["thread"][0]["thread_name"])[0] for uuid, one in tracks.items()
             if uuid not in processes}  # fmt: skip
    assert sorted(names.values()) == sorted(row.name for row in rows)
    assert all(one["parent_uuid"][0] in processes for one in tracks.values() if "name" in one)
    drawn, opened = [], dict[int, list[Any]]()
    last = dict[int, int]()
    flows: dict[str, list[int]] = {"flow_ids": [], "terminating_flow_ids": []}
    for packet in packets:
        for event in packet.get("track_event", ()):
            (track,), (at_ns,) = event["track_uuid"], packet["timestamp"]
            assert packet["timestamp_clock_id"] == [3]
            assert last.get(track, 0) <= at_ns
            last[track] = at_ns
            if event["type"] == [1]:
                opened.setdefault(track, []).append((event["name"][0], at_ns))
                for kind in flows:
                    flows[kind] += event.get(kind, [])
            else:
                assert event["type"] == [2]
                name, start_ns = opened[track].pop()
                drawn.append((names[track], name, start_ns, at_ns))
    assert not any(opened.values())
    assert sorted(drawn) == sorted((row.name, s.name, s.start_ns, s.end_ns) for row in rows for s in row.slices)
    assert sorted(flows["flow_ids"]) == sorted(flows["terminating_flow_ids"]) == [1, 2, 3, 4, 5]
    failed = next(e for p in packets for e in p.get("track_event", ()) if e.get("name") == ["gelu (x)"])
    told = {one["name"][0]: next(one[key][0] for key in one if key != "name") for one in failed["debug_annotations"]}
    assert told["error"] == "CODE: fell \U0001f600"
    assert told["call"] == 3


def test_facts_of_a_file_of_others_are_drawn_whatever_they_are() -> None:
    for pid in (None, "x", -5, True, 1.5):
        strange = replace(contents(), facts={"pid": pid, "program": 5})
        assert to_chrome(strange)
        assert decoded("Trace", to_perfetto(strange))


def slices(value: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in value["traceEvents"] if event["ph"] == "X"]


def test_chromes_json_has_all_slices_with_arrows() -> None:
    value = json.loads(json.dumps(to_chrome(contents())))
    rows = rows_of(contents())
    found = sorted((e["name"], e["ts"], e["dur"], e["pid"]) for e in slices(value))
    assert found == sorted((s.name, s.start_ns / 1e3, s.elapsed_ns / 1e3, r.pid) for r in rows for s in r.slices)
    assert value["baseTimeNanoseconds"] == UNIX_NS - CLOCK_NS
    events = value["traceEvents"]
    for ends in ("s", "f"):
        assert sorted(e["id"] for e in events if e["ph"] == ends) == [1, 2, 3, 4, 5]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len(names) == len(rows)
    assert all((e["pid"], e["tid"]) in names for e in slices(value))


@pytest.mark.parametrize("base_ns", [0, 1_789_000_000_000_000_000])
def test_torchs_profile_and_the_trace_are_on_one_clock(tmp_path: Path, base_ns: int) -> None:
    """With the base that its times are told from, and without one, as older torch writes."""
    start_ns = UNIX_NS + 100  # of the first call, by the wall clock
    own: dict[str, Any] = {
        "ph": "X",
        "cat": "cpu_op",
        "name": "aten::x",
        "ts": (start_ns - base_ns) / 1e3,
        "dur": 1,
        "pid": 100,
        "tid": 9,
    }
    value = {"schemaVersion": 1, "traceEvents": [own]} | ({"baseTimeNanoseconds": base_ns} if base_ns else {})
    (tmp_path / "a.json").write_text(json.dumps(value))
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(json.dumps(value).encode()))
    both = merged(contents(), tmp_path / "a.json")
    assert merged(contents(), tmp_path / "a.json.gz") == both
    assert both["traceEvents"][0] == own
    assert both["schemaVersion"] == 1
    first = next(event for event in slices(both) if event.get("args", {}).get("call") == 0)
    assert abs(first["ts"] - own["ts"]) < 0.5  # microseconds; the doubles of Unix time have no more
    assert (first["pid"], first["dur"]) == (100, 1.0)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "is no JSON"),
        (b"[]", "has no traceEvents"),
        (b'{"traceEvents": 1}', "has no traceEvents"),
        (b'{"traceEvents": [], "baseTimeNanoseconds": "x"}', "baseTimeNanoseconds is 'x'"),
        (b"\x1f\x8b no", "is no JSON, or gzip of it"),
        (b"[" * 100_000, "is no JSON"),
    ],
)
def test_other_files_are_no_profiles_of_torch(tmp_path: Path, text: bytes, why: str) -> None:
    (tmp_path / "a.json").write_bytes(text)
    with pytest.raises(InvalidArgument, match=why):
        merged(contents(), tmp_path / "a.json")
