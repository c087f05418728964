"""What is told from two captures: which words of parameters are addresses, of what, and what nobody wrote."""

from __future__ import annotations

import random
import struct
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.workers.gpu.lifting.captures import BASE, CODE, GAP, Bench, at, kernel, touched, word

from layerzero.ipc.cuda.nodes import CopyNode, FillNode, OtherNode
from layerzero.ipc.lifting.form import MAX_SCRATCH, MAX_STEPS, Kernel, Patch, Span
from layerzero.ipc.lifting.reasons import LiftReason
from layerzero.workers.gpu.lifting.refusal import CannotLift
from layerzero.workers.gpu.lifting.scratch import MAX_BYTES, trimmed


@pytest.fixture
def bench() -> Bench:
    return Bench()


def only(bench: Bench) -> Kernel:
    (step,), _ = bench.compare()
    assert isinstance(step, Kernel)
    return step


def refused(bench: Bench) -> CannotLift:
    with pytest.raises(CannotLift) as caught:
        bench.compare()
    return caught.value


def test_pointers_become_tensors_and_numbers_stay(bench: Bench) -> None:
    """A number that both captures have is the call's own."""
    for n in range(2):
        bench.nodes[n].append(
            kernel(word(bench.input(n, 0)), word(bench.output(n, 0, 16)), struct.pack("<iq", 7, -1)[:4], word(4096))
        )
    step = only(bench)
    assert step.patches == (Patch(0, at("input", 0)), Patch(8, at("output", 0, 16)))
    assert step.params == word(0) + word(0) + struct.pack("<i4x", 7) + word(4096)
    assert step.layout == (Span(0, 8), Span(8, 8), Span(16, 4), Span(24, 8))
    assert (step.padding, step.code, step.name, step.grid) == ((), CODE, "k", (1, 2, 3))


def test_addresses_within_structs_are_found(bench: Bench) -> None:
    """Torch hands over arrays of pointers; each is behind counts and strides."""
    for n in range(2):
        struct_ = struct.pack("<iiQQd", 3, 4, bench.input(n, 1, 8), bench.output(n, 0), 0.5)
        bench.nodes[n].append(kernel(struct.pack("<i", 1), struct_))
    assert only(bench).patches == (Patch(16, at("input", 1, 8)), Patch(24, at("output", 0)))


def test_the_address_of_a_tensor_map_is_its_first_word(bench: Bench) -> None:
    """128 bytes at a multiple of 64, of which the rest is the same on every address."""
    for n in range(2):
        bench.nodes[n].append(kernel(word(1), word(bench.input(n, 0)) + b"\x07" * 120, align=64))
    step = only(bench)
    assert step.patches == (Patch(64, at("input", 0)),)
    assert step.params[72:192] == b"\x07" * 120


def test_bytes_that_nobody_wrote_are_padding(bench: Bench) -> None:
    """Between members of a struct there is what lay there before. As little as differs is taken for that."""
    for n, rest in enumerate((b"\x11\x22\x33", b"\x44\x22\x55")):
        bench.nodes[n].append(kernel(b"\x01" + rest, b"\x02" * 8 + rest + b"\x03" * 5))
    step = only(bench)
    assert step.padding == (Span(1, 1), Span(3, 1), Span(16, 1), Span(18, 1))
    assert step.params == b"\x01\0\x22\0" + bytes(4) + b"\x02" * 8 + b"\0\x22\0" + b"\x03" * 5


def test_an_old_pointer_in_a_struct_is_padding(bench: Bench) -> None:
    """What it points to is something else each time, or nothing that CUDA knows any more."""
    other = bench.process.allocate(4096)
    for n, old in enumerate((bench.input(0, 0), other)):
        bench.nodes[n].append(kernel(word(5) + word(old), word(6) + word(bench.input(0, 1))))
    step = only(bench)
    assert step.patches == ()
    assert step.padding == (Span(8, 8), Span(24, 8))


@pytest.mark.parametrize("where", ["elsewhere", "host", "beside", "nowhere"])
def test_a_pointer_to_what_a_caller_does_not_have_is_refused(bench: Bench, where: str) -> None:
    """A parameter of eight bytes is written in full."""
    pinned = bench.process.allocate(0, is_device=False)
    words = {
        "elsewhere": [bench.input(0, 0), bench.input(1, 1)],
        "host": [pinned, pinned],
        "beside": [bench.input(n, 0, 1024 + GAP // 2) for n in range(2)],
        "nowhere": [bench.input(0, 0), 5],
    }[where]
    for n, value in enumerate(words):
        bench.nodes[n].append(kernel(word(1), word(value)))
    error = refused(bench)
    assert error.reason is LiftReason.ADDRESS_UNKNOWN
    assert "parameter 1 of 8 bytes" in error.detail


def test_the_end_of_a_tensor_is_an_address_of_it(bench: Bench) -> None:
    """Of its last element plus one, and of an empty tensor the only one."""
    bench = Bench(inputs=(0, 64))
    for n in range(2):
        bench.nodes[n].append(kernel(word(bench.input(n, 0)), word(bench.input(n, 1, 64))))
    assert only(bench).patches == (Patch(0, at("input", 0)), Patch(8, at("input", 1, 64)))


def test_an_output_that_is_an_input_is_the_input() -> None:
    """A caller has one tensor there."""
    bench = Bench(inputs=(64, 1024), outputs=(None,))
    for n in range(2):
        bench.nodes[n].append(kernel(word(bench.input(n, 1, 512))))
    assert only(bench).patches == (Patch(0, at("input", 1, 512)),)


def test_an_input_that_is_left_out_is_null(bench: Bench) -> None:
    bench = Bench(inputs=(64, None))
    for n in range(2):
        bench.nodes[n].append(kernel(word(bench.input(n, 0)), word(0)))
    assert only(bench).params == bytes(16)


def test_scratch_is_one_piece_for_each_allocation_of_the_worker(bench: Bench) -> None:
    """Between steps it is the same; how it lies is as in the first capture, whatever the second did."""
    one, other = (bench.process.allocate(8192) for _ in range(2))
    third, fourth = (bench.process.allocate(1 << 20) for _ in range(2))
    for n, (a, b) in enumerate(((one, third), (other, fourth))):
        bench.nodes[n].append(kernel(word(a + 1024), word(b)))
        bench.nodes[n].append(kernel(word(b + 600 * n), word(a + 4096)))
    steps, scratch = bench.compare()
    assert scratch == (8192 - 1024, 1 << 20)
    assert touched(steps) == [
        ("kernel", (0, at("scratch", 0)), (8, at("scratch", 1))),
        ("kernel", (0, at("scratch", 1)), (8, at("scratch", 0, 3072))),
    ]


def test_memory_that_a_library_keeps_is_scratch(bench: Bench) -> None:
    """Whether something had to be in it, the proof finds out."""
    kept = bench.process.allocate(2048)
    for n in range(2):
        bench.nodes[n].append(kernel(word(kept + 520)))
    steps, scratch = bench.compare()
    assert (touched(steps), scratch) == ([("kernel", (0, at("scratch", 0, 8)))], (2048 - 512,))


def test_a_piece_goes_from_its_first_use_to_its_end() -> None:
    assert trimmed(4096, 0) == (0, 4096)
    assert trimmed(4096, 1030) == (1024, 3072)
    assert trimmed(1 << 40, (1 << 40) - MAX_BYTES) == ((1 << 40) - MAX_BYTES, MAX_BYTES)


def test_more_scratch_than_a_caller_is_asked_for_is_refused(bench: Bench) -> None:
    """An arena of a whole GPU, say, of which nobody knows how much is used."""
    huge = bench.process.allocate(1 << 36)
    for n in range(2):
        bench.nodes[n].append(kernel(word(huge)))
    assert refused(bench).reason is LiftReason.TOO_LARGE
    bench = Bench()
    pieces = [bench.process.allocate(512) for _ in range(MAX_SCRATCH + 1)]
    for n in range(2):
        bench.nodes[n].append(kernel(*map(word, pieces)))
    assert refused(bench).reason is LiftReason.TOO_LARGE


def test_fills_and_copies_are_relocated(bench: Bench) -> None:
    scratch = bench.process.allocate(4096)
    for n in range(2):
        bench.nodes[n].append(FillNode(scratch + 64, 0xAB, 1, 32))
        bench.nodes[n].append(CopyNode(bench.input(n, 0), bench.output(n, 0, 24), 1000))
        bench.nodes[n].append(FillNode(bench.output(n, 0), 1, 4, 2, rows=2, pitch=16))
        bench.nodes[n].append(CopyNode(bench.input(n, 0), scratch, 4, 3, 8, 16))
    steps, _ = bench.compare()
    assert touched(steps) == [
        ("fill", at("scratch", 0, 64)),
        ("copy", at("input", 0), at("output", 0, 24)),
        ("fill", at("output", 0)),
        ("fill", at("output", 0, 16)),
        ("copy", at("input", 0), at("scratch", 0)),
        ("copy", at("input", 0, 8), at("scratch", 0, 16)),
        ("copy", at("input", 0, 16), at("scratch", 0, 32)),
    ]


def test_a_fill_or_copy_of_other_memory_is_refused(bench: Bench) -> None:
    for n in range(2):
        bench.nodes[n].append(CopyNode(BASE - 8, bench.output(n, 0), 8))
    assert refused(bench).reason is LiftReason.ADDRESS_UNKNOWN
    bench = Bench()
    end = bench.process.allocate(64) + 60
    for n in range(2):
        bench.nodes[n].append(FillNode(end, 0, 4, 2))
    assert refused(bench).reason is LiftReason.ADDRESS_UNKNOWN


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "other"},
        {"grid": (2, 2, 3)},
        {"block": (64, 1, 1)},
        {"shared_bytes": 1},
        {"attributes": ((2, bytes(64)),)},
        {"max_shared_bytes": 1},
    ],
)
def test_captures_of_other_launches_differ(bench: Bench, changes: dict[str, object]) -> None:
    """A library that chooses by address, or at random: nobody knows which one a caller's tensors would get."""
    node = kernel(word(1))
    bench.add(node, replace(node, **changes))  # type: ignore[arg-type]
    assert refused(bench).reason is LiftReason.CAPTURES_DIFFER


def test_captures_of_other_steps_differ(bench: Bench) -> None:
    bench.add(kernel(word(1)), kernel(word(1), word(2)))
    assert refused(bench).reason is LiftReason.CAPTURES_DIFFER
    bench = Bench()
    bench.add(kernel(), FillNode(bench.output(1, 0), 0, 1, 1))
    assert refused(bench).reason is LiftReason.CAPTURES_DIFFER
    bench = Bench()
    bench.add(*(FillNode(bench.output(n, 0), n, 1, 1) for n in range(2)))
    assert refused(bench).reason is LiftReason.CAPTURES_DIFFER
    bench = Bench()
    bench.nodes[0].append(kernel())
    assert refused(bench).reason is LiftReason.CAPTURES_DIFFER


def test_what_only_its_own_process_can_run_is_refused_by_name(bench: Bench) -> None:
    bench.add(*[OtherNode("a function on the host")] * 2)
    error = refused(bench)
    assert (error.reason, error.detail) == (LiftReason.NODE_UNSUPPORTED, "step 0 is a function on the host")


def test_more_steps_than_a_call_may_have_are_refused(bench: Bench) -> None:
    for n in range(2):
        bench.nodes[n].append(CopyNode(bench.input(n, 0), bench.output(n, 0), 1, MAX_STEPS + 1, 1, 1))
    assert refused(bench).reason is LiftReason.NODE_UNSUPPORTED


def test_a_kernel_whose_parameters_are_not_told_is_refused(bench: Bench) -> None:
    bench.add(*[kernel(word(1), params=None)] * 2)
    assert refused(bench).reason is LiftReason.PARAMETERS_HIDDEN


@given(seed=st.integers(0, 1 << 32), data=st.data())
def test_what_is_read_leads_to_the_same_places_on_other_memory(seed: int, data: st.DataObject) -> None:
    """Launched on the memory of either capture, the parameters are those that the library gave there."""
    rng = random.Random(seed)
    sizes = data.draw(st.lists(st.integers(0, 5000), min_size=1, max_size=4))
    outputs = data.draw(st.lists(st.integers(0, 5000), min_size=1, max_size=2))
    bench = Bench(sizes, outputs)
    scratch = [[bench.process.allocate(size) for _ in range(2)] for size in (4096, 70000)]
    words = data.draw(
        st.lists(
            st.tuples(st.sampled_from(["input", "output", "scratch", "number"]), st.integers(0, 9), st.floats(0, 1)),
            min_size=1,
            max_size=12,
        )
    )
    blocks: list[list[bytes]] = [[], []]
    for kind, number, part in words:
        for n in range(2):
            if kind == "number":
                value = number * 1000
            elif kind == "scratch":
                value = scratch[number % 2][n] + int(part * 4000)
            else:
                tensors = sizes if kind == "input" else outputs
                which = number % len(tensors)
                offset = int(part * tensors[which])
                value = (bench.input if kind == "input" else bench.output)(n, which, offset)
            blocks[n].append(word(value))
    cuts = sorted([*rng.sample(range(1, len(words) + 1), min(3, len(words))), 0, len(words)])
    params = [[b"".join(own[a:b]) for a, b in pairwise(cuts) if a < b] for own in blocks]
    bench.add(*(kernel(*own) for own in params))
    step = only(bench)
    bases = [scratch[number][0] for number in dict.fromkeys(n % 2 for kind, n, _ in words if kind == "scratch")]
    lowest = {
        number: min(p.address.offset for p in step.patches if p.address[:2] == ("scratch", number))
        for number in range(len(bases))
    }
    for n in range(2):
        patched = bytearray(step.params)
        for place, (kind, number, offset) in step.patches:
            if kind == "scratch":
                if n:  # as it lay in the first capture
                    continue
                first = min(
                    int(part * 4000) for k, m, part in words if k == "scratch" and scratch[m % 2][0] == bases[number]
                )
                assert lowest[number] == first % 512
                value = bases[number] + first // 512 * 512 + offset
            else:
                value = (bench.input if kind == "input" else bench.output)(n, number, offset)
            patched[place : place + 8] = word(value)
        expected = b"".join(blocks[n])
        for place, (kind, *_) in step.patches:
            if kind == "scratch" and n:
                patched[place : place + 8] = expected[place : place + 8]
        assert bytes(patched) == expected
