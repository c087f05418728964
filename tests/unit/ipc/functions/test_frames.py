"""Frames of function calls: what is written can be read, and nothing is read outside of what was lent."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from layerzero.ipc.errors import InvalidArgument, ProtocolError
from layerzero.ipc.functions import frames
from layerzero.ipc.functions.frames import Code, Frame, Payload
from layerzero.ipc.vocabulary.tensors import TensorSpec

SPEC = TensorSpec.contiguous("int16", (3,))
CODE = Code("a.b", "f", "/x/a/b.py", "0" * 64, "/x", is_main=False)


def test_parts_lie_aligned_behind_the_head() -> None:
    payload, sizes = Payload(), (1, 70, 0, 6)
    offsets = [payload.add(n, functools.partial(_fill, n)) for n in sizes]
    memory = memoryview(bytes(Frame([7, "x" * 90], payload)))
    head, found = frames.read(memory)
    assert head == [7, "x" * 90]
    assert offsets == [0, 64, 192, 192]
    assert (len(memory) - len(found)) % frames.ALIGNMENT == 0
    assert [bytes(found[at : at + n]) for at, n in zip(offsets, sizes, strict=True)] == [bytes([n]) * n for n in sizes]


def test_the_same_call_is_the_same_bytes_whatever_lay_there() -> None:
    """Poison knows a call by them: bytes of an earlier one in the gaps would make it another."""
    payload = Payload()
    for size in (1, 70, 0, 6):
        payload.add(size, functools.partial(_fill, size))
    frame = Frame([7, "x" * 90], payload)
    used = bytearray(b"\xff" * frame.nbytes)
    frame.write(memoryview(used))
    assert bytes(used) == bytes(frame)


def test_what_was_made_in_an_answer_stays_as_it_is() -> None:
    """Its gaps are memory that a result of the function may have taken."""
    payload = Payload()
    payload.nbytes = frames.PLACED_AT + 64
    at = [payload.add(size, functools.partial(_fill, size)) for size in (70, 6)]
    payload.nbytes += 64
    frame = Frame([7], payload, is_placed=True)
    used = bytearray(b"\xff" * frame.nbytes)
    frame.write(memoryview(used))
    written = {*range(len(bytes(Frame([7])))), *range(at[0], at[0] + 70), *range(at[1], at[1] + 6)}
    assert {n for n, byte in enumerate(used) if byte != 0xFF} == written


def _fill(size: int, target: memoryview) -> None:
    target[:] = bytes([size]) * size


@pytest.mark.parametrize(
    "data",
    [b"", b"ZLF", b"\0" * 64, bytes(Frame([1]))[:8], bytes(Frame([1, "abc"]))[:-1], bytes(Frame([]))],
)
def test_bytes_that_are_no_frame_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        frames.read(memoryview(data))


@pytest.mark.parametrize(
    ("position", "offset"), [(-1, 60), (-1, -2), (-1, 1), (0, 4), (1, 0), (2, 0), (-2, 0), (0, True), (None, 0)]
)
def test_no_array_lies_outside_of_its_memory(position: Any, offset: Any) -> None:
    memories = [memoryview(bytes(64)), memoryview(bytes(8)), None]
    with pytest.raises(ProtocolError):
        frames.read_array(frames.array_node("numpy", SPEC, position, offset), memories, ("numpy",))


def test_arrays_are_found_where_they_are() -> None:
    memories: list[memoryview | None] = [memoryview(bytes(64)), memoryview(bytes(range(8)))]
    _, spec, memory = frames.read_array(frames.array_node("torch", SPEC, 0, 2), memories, ("torch",))
    assert (spec, bytes(memory)) == (SPEC, bytes(range(2, 8)))
    with pytest.raises(ProtocolError):
        frames.read_array(frames.array_node("torch", SPEC, 0, 2), memories, ("numpy",))
    with pytest.raises(InvalidArgument):
        frames.read_array(["numpy", "int16", [-1], [1], 0, 0], memories, ("numpy",))


@pytest.mark.parametrize("tree", [None, [], CODE.to_tree()[:5], [*CODE.to_tree()[:5], 1], [1, *CODE.to_tree()[1:]]])
def test_references_are_checked(tree: Any) -> None:
    assert Code.from_tree(CODE.to_tree()) == CODE
    with pytest.raises(ProtocolError):
        Code.from_tree(tree)
