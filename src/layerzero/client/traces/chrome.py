"""A trace in Chrome's trace event format, which Perfetto, chrome://tracing and torch's tools read; also together with
what torch.profiler wrote.

Source: "Trace Event Format" (Google's document CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU): ts and dur in
microseconds, ph X a slice, s and f the ends of an arrow, bound to the slices that enclose them, M names."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from layerzero.client.traces.contents import TraceContents
from layerzero.client.traces.timeline import Row, Slice, rows_of
from layerzero.ipc import files
from layerzero.ipc.errors import InvalidArgument

MAX_TORCH_BYTES = 4 << 30
_FIRST_TID = 1 << 30  # of rows that are no threads of the system, whose numbers are below 2**22


def to_chrome(contents: TraceContents) -> dict[str, Any]:
    """The JSON object. Times are on the calls' clock, CLOCK_MONOTONIC; `baseTimeNanoseconds` added to them is Unix
    time, as of torch.profiler."""
    unix_ns, clock_ns = contents.clock
    return {
        "traceEvents": list(_events(rows_of(contents), 0)),
        "displayTimeUnit": "ns",
        "baseTimeNanoseconds": unix_ns - clock_ns,
        "otherData": {name: str(value) for name, value in contents.facts.items()},
    }


def merged(contents: TraceContents, torch: Path) -> dict[str, Any]:
    """What torch.profiler has exported, .json or .json.gz, with the trace's rows beside its own, on its clock. Raises
    InvalidArgument for another file."""
    value = _read(torch)
    base_ns = value.get("baseTimeNanoseconds", 0)  # before torch 2.3 times are Unix time as they are
    unix_ns, clock_ns = contents.clock
    if type(base_ns) is not int:
        raise InvalidArgument(f"{torch}: baseTimeNanoseconds is {base_ns!r:.40}; pass what export_chrome_trace wrote")
    events = [*value["traceEvents"], *_events(rows_of(contents), unix_ns - clock_ns - base_ns)]
    return {**value, "traceEvents": events}


def _read(path: Path) -> dict[str, Any]:
    try:
        data = files.read(path, MAX_TORCH_BYTES)
        if data[:2] == b"\x1f\x8b":
            data = _unpacked(data)
        value = json.loads(data)
    except OSError as exc:
        raise InvalidArgument(f"{path}: {exc.strerror or exc}") from exc
    except (ValueError, RecursionError, EOFError, zlib.error) as exc:
        raise InvalidArgument(f"{path} is no JSON, or gzip of it: {exc!s:.200}") from exc
    if not isinstance(value, dict) or not isinstance(value.get("traceEvents"), list):
        raise InvalidArgument(f"{path} has no traceEvents; pass what torch.profiler's export_chrome_trace wrote")
    return value


def _unpacked(data: bytes) -> bytes:
    import io

    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        found = file.read(MAX_TORCH_BYTES + 1)
    if len(found) > MAX_TORCH_BYTES:
        raise ValueError(f"it unpacks to more than {MAX_TORCH_BYTES:,} bytes")
    return found


def _events(rows: list[Row], ahead_ns: int) -> Iterator[dict[str, Any]]:
    """`ahead_ns`: so much the times are to be later."""
    named = set[int]()
    for number, row in enumerate(rows):
        tid = _FIRST_TID + number  # never a thread's own row: what another tool drew there may begin a moment later
        if row.pid not in named:
            named.add(row.pid)
            yield _name("process_name", row.pid, 0, row.process)
        yield _name("thread_name", row.pid, tid, f"layerzero: {row.name}")
        yield {"ph": "M", "name": "thread_sort_index", "pid": row.pid, "tid": tid, "args": {"sort_index": number}}
        for one in row.slices:
            yield from _slice(one, row.pid, tid, ahead_ns)


def _slice(one: Slice, pid: int, tid: int, ahead_ns: int) -> Iterator[dict[str, Any]]:
    at: dict[str, Any] = {"pid": pid, "tid": tid, "ts": (one.start_ns + ahead_ns) / 1e3}
    elapsed_us = one.elapsed_ns / 1e3
    yield {"ph": "X", "name": one.name, "cat": one.category, "dur": elapsed_us, "args": one.facts, **at}
    for arrow in one.sends:
        yield {"ph": "s", "name": "call", "cat": "layerzero", "id": arrow, **at}
    for arrow in one.takes:
        yield {"ph": "f", "bp": "e", "name": "call", "cat": "layerzero", "id": arrow, **at}


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}
