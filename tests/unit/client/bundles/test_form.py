"""The file of a bundle: what is written is read, and whatever else lies there is refused with what to do."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerzero.client.bundles import form
from layerzero.client.bundles.form import Content, Home, Step, Tensor
from layerzero.ipc.errors import InvalidArgument, VersionMismatch
from layerzero.ipc.transport.plain import pack_body, unpack_body
from layerzero.ipc.vocabulary.tensors import TensorSpec

SPEC = TensorSpec.contiguous("float32", (2, 3))


def step(op: str, arguments: tuple[int | None, ...], made: int, **params: Any) -> Step:
    """A call whose canonical form has the same tensors."""
    ran = f"alpha.{op}", False, 5.0, "m.py:3"
    return Step(op, arguments, (made,), (made,), {}, "alpha", *ran, op, arguments, params)


HOMES = (Home("input", 0, 24), Home("slot", 0, 24), Home("constant", 64, 36), Home("output", 0, 24))
TENSORS = (
    Tensor(0, 0, SPEC),
    Tensor(1, 0, SPEC),
    Tensor(2, 0, TensorSpec.contiguous("float32", (3, 3))),
    Tensor(3, 0, SPEC),
)
STEPS = step("silu", (0,), 1), step("matmul", (1, 2), 3)
CONTENT = Content(HOMES, TENSORS, STEPS, (("x", 0),), (("result", 3),), {"output": 0}, 64, 100)
CONSTANTS = bytes(range(100))
ENVS = {"alpha": ("id", "a==1\n")}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A bundle of two calls."""
    file = tmp_path / "a.lzb"
    form.write(file, "f", "1.0", 7.0, CONTENT, ENVS, [memoryview(CONSTANTS)])
    return file


def test_what_was_written_is_read(path: Path) -> None:
    """All of it, and nothing else is left in the folder."""
    found = form.verify(path)
    assert (found.content, found.locks, found.manifest.name, found.manifest.made_s) == (
        CONTENT,
        {"alpha": "a==1\n"},
        "f",
        7.0,
    )
    assert [(one.backend, one.env) for one in found.manifest.environments] == [("alpha", "id")]
    room = memoryview(bytearray(100))
    found.constants(room)
    assert bytes(room) == CONSTANTS
    assert [part.offset % 64 for part in found.manifest.parts] == [0, 0, 0]
    assert os.listdir(path.parent) == ["a.lzb"]


def test_each_part_is_compared(path: Path) -> None:
    """A byte of each that is another one is told by the part's name."""
    raw = path.read_bytes()
    parts = form.read(path).manifest.parts
    for name, at in (("its manifest", 60), *((part.name, part.offset + part.nbytes - 1) for part in parts)):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        with pytest.raises(InvalidArgument, match=f"is damaged: {name} has other bytes than its SHA-256 says"):
            form.verify(path)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda raw: b"", "is no bundle"),
        (lambda raw: b"PK" + raw[2:], "is no bundle"),
        (lambda raw: raw[:40], "is no bundle"),
        (lambda raw: raw[:80], "its manifest has other bytes"),
        (lambda raw: raw[:12] + b"\xff\xff\xff\xff" + raw[16:], "its manifest has other bytes"),
        (lambda raw: raw[:-1], "constants passes the file's end"),
        (lambda raw: raw + b"\0", "bytes behind its last part"),
    ],
)
def test_other_files_are_refused(path: Path, change: Callable[[bytes], bytes], why: str) -> None:
    """Cut, longer, or of another kind."""
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(InvalidArgument, match=why):
        form.verify(path)


def test_no_file_and_no_regular_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name in ("nothing", "fifo", "."):
        with pytest.raises(InvalidArgument, match="name a file that"):
            form.read(tmp_path / name)


def test_another_format_is_a_version(path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[:8] + b"\2\0\0\0" + raw[12:])
    with pytest.raises(VersionMismatch, match="has format 2, this version reads 1"):
        form.read(path)


WRONG: dict[str, Content] = {
    "outside of what there is": replace(CONTENT, homes=(Home("slot", 64, 24), *HOMES[1:])),
    "kind slot": replace(CONTENT, slot_bytes=23),
    "kind constant": replace(CONTENT, constant_bytes=99),
    "lies outside of its memory": replace(CONTENT, tensors=(*TENSORS[:3], Tensor(3, 4, SPEC))),
    "input 0 is not its memory": replace(CONTENT, inputs=(("x", 1),)),
    "output 0 is not its memory": replace(CONTENT, outputs=(("y", 0),)),
    "reads what nothing has written": replace(CONTENT, steps=STEPS[::-1]),
    "writes to what is not its own": replace(CONTENT, steps=(STEPS[0], step("matmul", (1, 2), 0))),
    "an output that nothing has written": replace(CONTENT, steps=STEPS[:1]),
    "no op is called 'sillu'": replace(CONTENT, steps=(replace(STEPS[0], op="sillu"), STEPS[1])),
    "attributes of silu": replace(CONTENT, steps=(replace(STEPS[0], attrs={"a": [1]}), STEPS[1])),
    "index out of range": replace(CONTENT, steps=(STEPS[0], step("matmul", (1, 9), 3))),
    "silu is asked for otherwise": replace(CONTENT, steps=(step("silu", (0, None), 1), STEPS[1])),
    "too many steps or tensors, or none": replace(CONTENT, steps=()),
    "is no time": replace(CONTENT, steps=(replace(STEPS[0], us=float("nan")), STEPS[1])),
}


@pytest.mark.parametrize("why", WRONG)
def test_plans_that_would_leave_their_memory_are_refused(tmp_path: Path, why: str) -> None:
    """By who writes them, and by who reads them."""
    with pytest.raises(InvalidArgument, match=f"its plan: .*{why}"):
        form.write(tmp_path / "a.lzb", "f", "1.0", 7.0, WRONG[why], ENVS, [])
    with pytest.raises(InvalidArgument, match=f"its plan: .*{why}"):
        form.content_of_wire(unpack_body(pack_body(form.content_to_wire(WRONG[why]))))


@given(st.data())
def test_changed_plans_are_read_or_refused(data: st.DataObject) -> None:
    """Nothing else comes of any value in the place of any other."""
    value: Any = unpack_body(pack_body(form.content_to_wire(CONTENT)))
    at = value
    while True:
        key = data.draw(st.sampled_from([*at] if isinstance(at, dict) else range(len(at))))
        if not isinstance(at[key], (dict, list)) or not at[key] or data.draw(st.booleans()):
            break
        at = at[key]
    others = [None, True, -1, 0, 1, 3, 1 << 46, 1 << 62, 0.5, "", "silu", b"", [], [[]], {}]
    at[key] = data.draw(st.sampled_from(others))
    with contextlib.suppress(InvalidArgument):
        form.content_of_wire(value)


def test_manifests_are_checked(path: Path) -> None:
    """Of a manifest whose hash is right."""
    raw = path.read_bytes()
    nbytes = int.from_bytes(raw[12:16], "little")
    value = unpack_body(raw[48 : 48 + nbytes])
    for change in (
        {"kind": "other"},
        {"parts": value["parts"][1:]},
        {"parts": [*value["parts"], value["parts"][0]]},
        {"parts": []},
        {"parts": [["plan", 64, 1, b"short"]]},
        {"name": 5},
        {"made_s": -1.0},
        {"environments": [["alpha"]]},
    ):
        packed = pack_body({**value, **change})
        path.write_bytes(form.head_of(packed) + packed + raw[48 + nbytes :])
        with pytest.raises(InvalidArgument, match="is damaged: its manifest: "):
            form.read(path)
