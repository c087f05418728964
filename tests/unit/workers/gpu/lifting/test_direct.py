"""Copies of results that need not be: the same bytes in every output without them, and one launch fewer."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.unit.workers.gpu.lifting.captures import CODE, at

from layerzero.ipc.lifting.form import Address, Copy, Fill, Kernel, Lifted, Patch, Span, Step
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.workers.gpu.lifting.direct import written_directly

SPEC = TensorSpec.contiguous("float32", (64,))
NBYTES = SPEC.span_bytes
PIECE = 4 * NBYTES
X, OUT, TEMP = at("input", 0), at("output", 0), at("scratch", 0)


def writes(target: Address, *sources: Address, nbytes: int = NBYTES) -> Kernel:
    """A kernel that writes so many bytes there, made of as many of each source."""
    params = struct.pack("<q", nbytes) + bytes(8 * (1 + len(sources)))
    patches = tuple(Patch(8 + 8 * n, one) for n, one in enumerate((target, *sources)))
    layout = tuple(Span(8 * n, 8) for n in range(len(params) // 8))
    return Kernel(CODE, "k", (1, 1, 1), (1, 1, 1), 0, params, layout, patches)


def lifted(*steps: Step, alignment: int = 256, op: str = "silu", scratch: Sequence[int] = (PIECE,)) -> Lifted:
    return Lifted(op, "one.silu", (SPEC,), (SPEC,), {}, (256, alignment), tuple(scratch), steps)


class Unwritten(Exception):
    """A step reads scratch that no step has written: what it gives is anybody's guess, and no proof allows it."""


def run(call: Lifted) -> list[bytes]:
    """What is in the outputs. Raises Unwritten."""
    memory = {("input", n): bytearray(hashlib.sha256(b"%d" % n).digest() * (NBYTES // 32)) for n in range(1)}
    memory |= {("output", n): bytearray(b"\xee" * spec.span_bytes) for n, spec in enumerate(call.outputs)}
    memory |= {("scratch", n): bytearray(nbytes) for n, nbytes in enumerate(call.scratch)}
    written: dict[tuple[str, int], set[int]] = {("scratch", n): set() for n in range(len(call.scratch))}

    def read(place: Address, nbytes: int) -> bytes:
        if place.kind == "scratch" and not written[place[:2]].issuperset(range(place.offset, place.offset + nbytes)):
            raise Unwritten
        return bytes(memory[place[:2]][place.offset : place.offset + nbytes])

    def write(place: Address, data: bytes) -> None:
        whole = memory[place[:2]]
        assert place.offset + len(data) <= len(whole)
        whole[place.offset : place.offset + len(data)] = data
        written.setdefault(place[:2], set()).update(range(place.offset, place.offset + len(data)))

    for step in call.steps:
        if isinstance(step, Fill):
            write(step.target, bytes([step.value]) * (step.itemsize * step.count))
        elif isinstance(step, Copy):
            write(step.target, read(step.source, step.nbytes))
        else:
            (nbytes,) = struct.unpack_from("<q", step.params)
            target, *sources = (patch.address for patch in step.patches)
            made = hashlib.shake_256(b"".join(read(one, nbytes) for one in sources)).digest(nbytes)
            write(target, made)
    return [bytes(memory["output", n]) for n in range(len(call.outputs))]


def test_a_result_is_written_where_it_belongs() -> None:
    call = lifted(writes(TEMP, X), Copy(TEMP, OUT, NBYTES))
    direct = written_directly(call)
    assert direct == replace(call, steps=(writes(OUT, X),), scratch=())
    assert run(direct) == run(call)


def test_other_scratch_stays_and_is_counted_anew() -> None:
    """Partial results in a piece of their own, or behind the result."""
    behind, other = at("scratch", 0, NBYTES), at("scratch", 1)
    steps = (writes(other, X), writes(TEMP, X, other), Copy(TEMP, OUT, NBYTES))
    assert written_directly(lifted(*steps, scratch=(PIECE, PIECE))) == lifted(
        writes(TEMP, X), writes(OUT, X, TEMP), scratch=(PIECE,)
    )
    steps = (writes(behind, X), writes(TEMP, X, behind), Copy(TEMP, OUT, NBYTES))
    assert written_directly(lifted(*steps)) == lifted(writes(behind, X), writes(OUT, X, behind))


@pytest.mark.parametrize(
    "call",
    [
        lifted(writes(TEMP, X), Copy(TEMP, OUT, NBYTES), alignment=16),  # kernels are chosen by alignment
        lifted(writes(TEMP, X), Copy(TEMP, OUT, NBYTES // 2)),  # a part
        lifted(writes(OUT, X), writes(TEMP, X), Copy(TEMP, OUT, NBYTES)),  # written before, too
        lifted(writes(TEMP, X), Copy(TEMP, OUT, NBYTES), writes(at("output", 0, 8), X, nbytes=8)),  # or after
        lifted(writes(TEMP, X), Copy(TEMP, OUT, NBYTES), writes(at("scratch", 0, 512), TEMP)),  # read later
        lifted(Fill(TEMP, 0, 1, NBYTES), writes(TEMP, X, TEMP), Copy(TEMP, OUT, NBYTES)),  # made in two steps
        lifted(writes(TEMP, X, nbytes=PIECE), Copy(at("scratch", 0, NBYTES), OUT, NBYTES)),  # a part of more
        lifted(writes(TEMP, X, nbytes=8), writes(at("scratch", 0, 8), X), Copy(TEMP, OUT, NBYTES)),  # in pieces
        lifted(Copy(X, OUT, NBYTES), scratch=()),  # no result of its own
        lifted(writes(OUT, X), scratch=()),
    ],
)
def test_other_calls_stay_as_they_are(call: Lifted) -> None:
    assert written_directly(call) is call


PLACES = st.sampled_from([0, 8, 256, 512, 768])
TARGETS = st.one_of(st.just(OUT), st.builds(at, st.just("scratch"), st.sampled_from([0, 1]), PLACES))
SOURCES = st.one_of(st.just(X), st.builds(at, st.just("scratch"), st.sampled_from([0, 1]), PLACES))
STEPS = st.one_of(
    st.builds(writes, TARGETS, st.just(X), SOURCES, nbytes=st.sampled_from([8, NBYTES])),
    st.builds(Copy, SOURCES, TARGETS, st.sampled_from([8, NBYTES])),
    st.builds(Fill, TARGETS, st.just(1), st.just(1), st.sampled_from([8, NBYTES])),
)


@given(st.lists(STEPS, max_size=4), SOURCES, SOURCES)
def test_outputs_are_the_same(steps: list[Step], source: Address, copied: Address) -> None:
    """Of whatever steps, the last two being such that a copy may go."""
    made = () if copied.kind == "input" else (writes(copied, X, source),)
    call = lifted(*steps, *made, Copy(copied, OUT, NBYTES), scratch=(PIECE, PIECE))
    direct = written_directly(call)
    try:
        wanted = run(call)
    except Unwritten:
        assume(False)
    assert run(direct) == wanted
