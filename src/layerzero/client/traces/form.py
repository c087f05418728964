"""A trace's file: a zip of trace.json, of calls.jsonl and scopes.jsonl with a JSON object a line, and of the bytes that
calls have kept, each piece as memory/SHA256.bin (docs/traces.md, "The file"). One may come from anywhere: all that is
read from it is checked."""

from __future__ import annotations

import hashlib
import json
import math
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from layerzero.client.capsules.form import arguments_of, arguments_to_dict
from layerzero.client.connection.report import Attempt
from layerzero.client.traces.calls import KINDS, KeptTensors, RecordedCall, ScopeRecord, Source, Tensor
from layerzero.client.traces.contents import TraceContents
from layerzero.client.traces.scopes import ThreadName
from layerzero.ipc.errors import InvalidArgument, LayerZeroError
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec

SCHEMA = 1
HEAD, CALLS, SCOPES, MEMORY = "trace.json", "calls.jsonl", "scopes.jsonl", "memory/"
MAX_HEAD_BYTES = 4 << 20
MAX_LINES_BYTES = 1 << 30  # of all calls, and of all scopes
MAX_LINE_BYTES = 1 << 20
MAX_MEMORY_BYTES = 16 << 30
MAX_TEXT, MAX_LIST = 1 << 16, 4096  # characters of a text; items of a list in a call
MAX_NS = 1 << 63
_Scalar = (str, int, float, bool, type(None))
T = TypeVar("T")


# --- writing


def save(contents: TraceContents, path: Path) -> None:
    """Raises OSError. What is there is replaced when the new file is whole; a folder that is not there is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with (
            os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as raw,
            zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as packed,
        ):
            head = {
                "schema": SCHEMA,
                "calls": len(contents.calls),
                "dropped": contents.dropped,
                "clock": {"unix_ns": contents.clock[0], "clock_ns": contents.clock[1]},
                "threads": {str(number): name for number, name in contents.threads.items()},
                "facts": dict(contents.facts),
            }
            packed.writestr(HEAD, json.dumps(head, indent=1))
            with packed.open(CALLS, "w", force_zip64=True) as lines:
                for call in contents.calls:
                    lines.write(f"{json.dumps(call_to_dict(call))}\n".encode())
            with packed.open(SCOPES, "w", force_zip64=True) as lines:
                for scope in contents.scopes:
                    lines.write(f"{json.dumps(vars(scope))}\n".encode())
            used = {digest for call in contents.calls if call.kept is not None for digest in call.kept.digests}
            for digest in sorted(used):
                packed.writestr(f"{MEMORY}{digest}.bin", contents.memory[digest], zipfile.ZIP_STORED)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def call_to_dict(call: RecordedCall) -> dict[str, Any]:
    """Plain values, for JSON. What is as it is by default is left out."""
    value: dict[str, Any] = {}
    for name, default in _DEFAULTS.items():
        found = getattr(call, name)
        if found != default:
            value[name] = found
    for name in ("inputs", "outputs"):
        if name in value:
            value[name] = [[one.name, *one.spec.to_wire()] for one in value[name]]
    if "params" in value:
        value["params"] = {name: _told(one) for name, one in value["params"].items()}
    if "attempts" in value:
        value["attempts"] = [vars(one) for one in value["attempts"]]
    if call.kept is not None:
        results = [[name, spec.to_wire(), digest] for name, spec, digest in call.kept.results]
        value["kept"] = {**arguments_to_dict(call.kept.arguments, call.kept.segments), "results": results}
    return value


_DEFAULTS = {
    name: getattr(RecordedCall(-1, "", "", -1, -1), name)
    for name in RecordedCall.__dataclass_fields__
    if name != "kept"
}


def _told(value: Any) -> Any:
    """JSON has no numbers that are not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return [_told(one) for one in value] if isinstance(value, list) else value


# --- reading


def load(path: Path) -> TraceContents:
    """Raises InvalidArgument for what is no trace."""
    try:
        with zipfile.ZipFile(path) as packed:
            return _read(packed)
    except OSError as exc:
        raise InvalidArgument(f"{path} is no trace that can be read: {exc.strerror or exc}") from exc
    except LayerZeroError as exc:
        raise InvalidArgument(f"{path} is a damaged trace: {exc.message:.300}") from exc
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as exc:
        raise InvalidArgument(
            f"{path} is no trace, which is a zip file that a trace's save wrote: {exc!s:.200}"
        ) from exc
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as exc:
        raise InvalidArgument(f"{path} is a damaged trace: {type(exc).__name__}: {exc!s:.200}") from exc


def _read(packed: zipfile.ZipFile) -> TraceContents:
    members = {one.filename: one for one in packed.infolist()}
    if len(members) != len(packed.infolist()):
        raise ValueError("two of its files have one name")
    if HEAD not in members:
        raise zipfile.BadZipFile(f"it has no {HEAD}")
    head = json.loads(_bytes(packed, members[HEAD], MAX_HEAD_BYTES))
    if head["schema"] != SCHEMA:
        raise ValueError(f"schema {head['schema']!r:.20}; this version reads {SCHEMA}")
    scopes = tuple(_lines(packed, members[SCOPES], _scope))
    known = {scope.number for scope in scopes}
    calls = tuple(_lines(packed, members[CALLS], call_of))
    for number, call in enumerate(calls):
        if call.number != number or any(not 0 <= source.call < number for source in call.sources):
            raise ValueError(f"call {call.number!r:.20} in place {number} has a number or a source that cannot be")
        if call.scope is not None and call.scope not in known:
            raise ValueError(f"call {number} belongs to a scope that is not there")
    clock, threads = head["clock"], head["threads"]
    return TraceContents(
        calls,
        scopes,
        _count(head["dropped"]),
        (_count(clock["unix_ns"]), _count(clock["clock_ns"])),
        {int(number): ThreadName(_text(name), _count(tid)) for number, (name, tid) in threads.items()},
        _memory(packed, members, calls),
        {_text(name): _scalar(value) for name, value in head["facts"].items()},
    )


def _bytes(packed: zipfile.ZipFile, member: zipfile.ZipInfo, most: int) -> bytes:
    """What a member claims of its size need not be so."""
    with packed.open(member) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{member.filename:.80} has more than {most:,} bytes")
    return data


def _lines(packed: zipfile.ZipFile, member: zipfile.ZipInfo, make: Callable[[Any], T]) -> Iterator[T]:
    with packed.open(member) as file:
        total = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            total += len(line)
            if len(line) > MAX_LINE_BYTES or total > MAX_LINES_BYTES:
                raise ValueError(f"{member.filename:.80} has a line, or is, longer than is allowed")
            yield make(json.loads(line))


def _memory(
    packed: zipfile.ZipFile, members: dict[str, zipfile.ZipInfo], calls: tuple[RecordedCall, ...]
) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    left = MAX_MEMORY_BYTES
    for call in calls:
        sizes = {} if call.kept is None else {one.sha256: one.nbytes for one in call.kept.segments}
        sizes |= {} if call.kept is None else {digest: spec.span_bytes for _, spec, digest in call.kept.results}
        for digest, nbytes in sizes.items():
            if digest in found:
                data = found[digest]
            else:
                data = _bytes(packed, members[f"{MEMORY}{digest}.bin"], min(nbytes, left))
                left -= len(data)
            if len(data) != nbytes or (digest not in found and hashlib.sha256(data).hexdigest() != digest):
                raise ValueError(f"{MEMORY}{digest:.64}.bin is not what was kept")
            found[digest] = data
    return found


def call_of(value: Any) -> RecordedCall:
    """Raises what is wrong with it, as arguments_of."""
    unknown = value.keys() - {*_DEFAULTS, "kept"}
    if unknown:
        raise ValueError(f"a call has no field {min(unknown)!r:.40}")
    given = {**_DEFAULTS, **value}
    if given["kind"] not in KINDS:
        raise ValueError(f"kind {given['kind']!r:.40}; known: {', '.join(KINDS)}")
    gpu_ns = given["gpu_ns"]
    return RecordedCall(
        _count(given["number"]),
        given["kind"],
        _text(given["name"]),
        _count(given["start_ns"]),
        _count(given["elapsed_ns"]),
        _count(given["thread"]),
        None if given["scope"] is None else _count(given["scope"]),
        tuple(map(_text, _list(given["scopes"]))),
        _text(given["kernel_id"]),
        _text(given["backend"]),
        _text(given["path"]),
        _text(given["device"]),
        _count(given["worker_pid"]),
        _count(given["kernel_ns"]),
        None if gpu_ns is None else (_count(gpu_ns[0]), _count(gpu_ns[1])),
        tuple(map(_tensor, _list(given["inputs"]))),
        tuple(map(_tensor, _list(given["outputs"]))),
        {_text(name): _param(one) for name, one in given["params"].items()},
        None if given["asked_backend"] is None else _text(given["asked_backend"]),
        tuple(map(_attempt, _list(given["attempts"]))),
        _text(given["error"]),
        _count(given["copied_bytes"]),
        tuple(map(_text, _list(given["notes"]))),
        tuple(Source(_text(a), _count(n), _text(b), _count(at)) for a, n, b, at in _list(given["sources"])),
        None if value.get("kept") is None else _kept(given["name"], value["kept"]),
        _text(given["why_not_kept"]),
    )


def _kept(op: str, value: Any) -> KeptTensors:
    if op not in OPS:
        raise ValueError(f"no op is called {op!r:.40}")
    arguments, segments = arguments_of(op, value)
    results = tuple(
        (_text(name), TensorSpec.from_wire(spec), _digest(digest)) for name, spec, digest in _list(value["results"])
    )
    for segment in segments:
        _digest(segment.sha256)
    return KeptTensors(arguments, segments, results)


def _digest(value: Any) -> str:
    if not isinstance(value, str) or len(value) != 64 or not set(value) <= set("0123456789abcdef"):
        raise ValueError(f"{value!r:.80} is no SHA-256")
    return value


def _tensor(value: Any) -> Tensor:
    name, *spec = value
    return Tensor(_text(name), TensorSpec.from_wire(spec))


def _attempt(value: Any) -> Attempt:
    signal, code = value["exit_signal"], value["exit_code"]
    return Attempt(
        _text(value["backend"]),
        _text(value["kernel_id"]),
        None if value["outcome"] is None else _text(value["outcome"]),
        _text(value["detail"]),
        None if signal is None else int(signal),
        None if code is None else int(code),
        _text(value["phase"]),
        _count(value["worker_pid"]),
    )


def _scope(value: Any) -> ScopeRecord:
    elapsed_ns, parent = value["elapsed_ns"], value["parent"]
    return ScopeRecord(
        _count(value["number"]),
        _text(value["name"]),
        None if parent is None else _count(parent),
        _count(value["thread"]),
        _count(value["start_ns"]),
        None if elapsed_ns is None else _count(elapsed_ns),
    )


def _param(value: Any) -> Any:
    if isinstance(value, list):
        return [_param(one) for one in _list(value) if not isinstance(one, list)]
    if isinstance(value, dict):
        return float(_text(value["float"]))
    return _scalar(value)


def _scalar(value: Any) -> Any:
    if not isinstance(value, _Scalar) or (isinstance(value, str) and len(value) > MAX_TEXT):
        raise ValueError(f"{value!r:.40} is no plain value")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise ValueError(f"{value!r:.40} is no text of at most {MAX_TEXT:,} characters")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, (list, tuple)) or len(value) > MAX_LIST:
        raise ValueError(f"{value!r:.40} is no list of at most {MAX_LIST:,} items")
    return list(value)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < MAX_NS:
        raise ValueError(f"{value!r:.40} is no number of 0 or more")
    return value
