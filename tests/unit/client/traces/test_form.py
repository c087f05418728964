"""Traces as files: whatever is in one that was not written by a trace is an error that says so, never a surprise."""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from layerzero.client.capsules.form import Argument, Segment
from layerzero.client.connection.report import Attempt
from layerzero.client.traces import form
from layerzero.client.traces.calls import KeptTensors, RecordedCall, ScopeRecord, Source, Tensor
from layerzero.client.traces.contents import TraceContents
from layerzero.client.traces.scopes import ThreadName
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.tensors import TensorSpec

SPEC = TensorSpec.contiguous("float32", (2,))
BYTES = b"\0" * 8
DIGEST = "af5570f5a1810b7af78caf4bc70a660f0df51e42baf91d4de5b2328de0e83dfc"


def whole() -> TraceContents:
    """With something in every field."""
    kept = KeptTensors((Argument("x", SPEC, 0, 0),), (Segment(8, 64, DIGEST),), (("out", SPEC, DIGEST),))
    attempt = Attempt("alpha", "alpha.silu", "WORKER_CRASHED", "it\ndied", 11, None, "run", 7)
    first = RecordedCall(
        0, "op", "silu", 10, 20, 1, 5, ("outer",), "beta.silu", "beta", "express", "cuda:0", 9, 3, (11, 12),
        (Tensor("x", SPEC),), (Tensor("out", SPEC),), {"scale": math.inf, "none": None, "list": [1, 2.5, "a"]}, "beta",
        (attempt,), "", 8, ("a note",), (), kept, "",
    )  # fmt: skip
    second = RecordedCall(1, "function", "f", 30, 1, sources=(Source("0", 0, "out"),), error="CODE: no")
    scopes = (ScopeRecord(5, "outer", None, 1, 1, 50), ScopeRecord(6, "open", 5, 1, 2, None))
    return TraceContents(
        (first, second),
        scopes,
        3,
        (100, 1),
        {0: ThreadName("Main", 10), 1: ThreadName("b", 11)},
        {DIGEST: BYTES},
        {"pid": 1},
    )


def same(one: TraceContents, other: TraceContents) -> bool:
    names = ("calls", "scopes", "dropped", "clock", "threads", "memory", "facts")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def parts(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as packed:
        return {name: packed.read(name) for name in packed.namelist()}


def write(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as packed:
        for name, value in members.items():
            packed.writestr(name, value)
    return path


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    whole().save(tmp_path / "trace")
    return tmp_path / "trace"


def test_what_was_saved_is_loaded(saved: Path) -> None:
    assert same(form.load(saved), whole())
    assert json.loads(parts(saved)["calls.jsonl"].splitlines()[0])["params"]["scale"] == {"float": "inf"}


def changed(at: int, **fields: Any) -> Callable[[dict[str, bytes]], None]:
    def change(members: dict[str, bytes]) -> None:
        lines = [json.loads(line) for line in members["calls.jsonl"].splitlines()]
        lines[at].update(fields)
        members["calls.jsonl"] = b"".join(json.dumps(line).encode() + b"\n" for line in lines)

    return change


def head(**fields: Any) -> Callable[[dict[str, bytes]], None]:
    def change(members: dict[str, bytes]) -> None:
        members["trace.json"] = json.dumps({**json.loads(members["trace.json"]), **fields}).encode()

    return change


KEPT = {"arguments": [], "segments": [], "results": []}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: m.pop("trace.json"), "it has no trace.json"),
        (lambda m: m.pop("calls.jsonl"), "KeyError: 'calls.jsonl'"),
        (lambda m: m.pop(f"memory/{DIGEST}.bin"), "KeyError"),
        (lambda m: m.update({f"memory/{DIGEST}.bin": b"\1" * 8}), "is not what was kept"),
        (lambda m: m.update({f"memory/{DIGEST}.bin": b"\0" * 9}), "has more than 8 bytes"),
        (lambda m: m.update({"calls.jsonl": b"{"}), "JSONDecodeError"),
        (lambda m: m.update({"calls.jsonl": b"[" * 100_000}), "damaged trace"),
        (lambda m: m.update({"calls.jsonl": b" " * (1 << 21)}), "longer than is allowed"),
        (head(schema=2), "schema 2; this version reads 1"),
        (head(clock={"unix_ns": -1, "clock_ns": 0}), "-1 is no number of 0 or more"),
        (head(facts={"a": [1]}), r"\[1\] is no plain value"),
        (head(threads={"x": "y"}), "ValueError"),
        (changed(0, number=1), "call 1 in place 0"),
        (changed(1, sources=[["0", 1, "out", 0]]), "a source that cannot be"),
        (changed(0, scope=77), "a scope that is not there"),
        (changed(0, kind="other"), "kind 'other'"),
        (changed(0, start_ns=1.5), "1.5 is no number"),
        (changed(0, elapsed_ns=1 << 63), "is no number"),
        (changed(0, name="x" * 100_000), "is no text of at most 65,536"),
        (changed(0, surprise=1), "a call has no field 'surprise'"),
        (changed(0, inputs=[["x", "float32", [-1], [1]]]), "tensor shape must be"),
        (changed(0, inputs=[["x", "float32", [1 << 45], [1 << 45]]]), "above the limit"),
        (changed(0, params=[1]), "AttributeError"),
        (changed(0, params={"a": {"float": "b"}}), "ValueError"),
        (changed(0, attempts=[{}]), "KeyError"),
        (changed(0, gpu_ns=[1]), "IndexError"),
        (changed(0, kept={**KEPT, "results": [["out", ["float32", [2], [1]], "../../etc/passwd"]]}), "is no SHA-256"),
        (changed(0, kept={**KEPT, "arguments": [{"name": "x", "spec": SPEC.to_wire(), "segment": 0, "start": 0}]}),
         "lies outside of its memory"),
        (changed(1, kept=KEPT), "no op is called 'f'"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_what_it_seems_is_refused(
    saved: Path, change: Callable[[dict[str, bytes]], None], why: str
) -> None:
    members = parts(saved)
    change(members)
    with pytest.raises(InvalidArgument, match=why):
        form.load(write(saved, members))


def test_other_files_are_no_traces(tmp_path: Path) -> None:
    """Nothing, text, a folder, and a zip whose bytes were changed at random, which may load if it is still the same."""
    for name, content in (("empty", b""), ("text", b"not a zip")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InvalidArgument, match="is no trace, which is a zip file"):
            form.load(tmp_path / name)
    with pytest.raises(InvalidArgument, match="is no trace that can be read"):
        form.load(tmp_path)
    with pytest.raises(InvalidArgument, match="No such file"):
        form.load(tmp_path / "nowhere")
    packed, rng = io.BytesIO(), random.Random(0)
    whole().save(tmp_path / "trace")
    packed.write((tmp_path / "trace").read_bytes())
    for _ in range(300):
        data = bytearray(packed.getvalue())
        for _ in range(rng.choice((1, 3, 20))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        (tmp_path / "trace").write_bytes(data[: rng.choice((len(data), rng.randrange(len(data))))])
        with contextlib.suppress(InvalidArgument):  # and nothing else
            form.load(tmp_path / "trace")


def test_what_a_terminal_would_obey_is_not_printed() -> None:
    call = RecordedCall(0, "function", "\x1b[2J evil", 0, 1, error="X: \x1b]0;title\x07")
    assert "\x1b" not in TraceContents((call,)).text()
