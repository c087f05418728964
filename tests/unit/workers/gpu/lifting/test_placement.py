"""Memory in which a kernel is tried: no tensor lies better than it was asked for."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.ipc.fake_cuda import UUID, FakeDriver, FakeGpu

from layerzero.ipc.cuda.driver import Context
from layerzero.ipc.lifting.form import ALIGNMENTS, alignment_class
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.workers.gpu.lifting.placement import GAP_BYTES, TrialMemory, offsets, room_for
from layerzero.workers.provider import Call

X = TensorSpec.contiguous("float16", (3, 5))
CACHE = TensorSpec.contiguous("float16", (4, 2, 1, 8))


@given(st.lists(st.tuples(st.integers(0, 10000), st.sampled_from(ALIGNMENTS)), min_size=1, max_size=8), st.booleans())
def test_every_tensor_has_its_class_and_its_own_place(pairs: list[tuple[int, int]], is_reversed: bool) -> None:
    sizes, classes = zip(*pairs, strict=True)
    places, nbytes = offsets(sizes, classes, is_reversed=is_reversed)
    base = 512
    for size, alignment, place in zip(sizes, classes, places, strict=True):
        assert alignment_class(base + place) == alignment
        assert (base + place) % (2 * alignment) == alignment
        assert place + size + GAP_BYTES <= nbytes
    ordered = sorted(zip(places, sizes, strict=True))
    for (one, size), (other, _) in pairwise(ordered):
        assert one + size + GAP_BYTES <= other


def test_two_sets_have_no_distance_between_tensors_in_common() -> None:
    """A parameter that holds one would pass for a number."""
    sizes, classes = (100, 2000, 30), (256, 16, 2)
    first, second = (offsets(sizes, classes, is_reversed=flag)[0] for flag in (False, True))
    pairs = [(a, b) for a in range(3) for b in range(a)]
    assert not {first[a] - first[b] for a, b in pairs} & {second[a] - second[b] for a, b in pairs}
    for one, other, alignment in zip(first, second, classes, strict=True):
        assert alignment == 256 or one % 256 != other % 256


@pytest.mark.parametrize("is_reversed", [False, True])
def test_an_output_that_is_an_input_has_its_block(is_reversed: bool) -> None:
    driver = FakeDriver(FakeGpu())
    context = Context(driver, UUID)  # type: ignore[arg-type]
    rows, slots = TensorSpec.contiguous("float16", (3, 1, 8)), TensorSpec.contiguous("int64", (3,))
    call = Call("append_kv", "k", (rows, rows, CACHE, CACHE, slots), (CACHE, CACHE))
    alignments = (2, 16, 256, 256, 8, 256, 256)
    with context:
        memory = TrialMemory.make(context, call, alignments, is_reversed=is_reversed)
    assert memory.outputs == memory.inputs[2:4]
    assert memory.output_extents == (None, None)
    assert memory.nbytes == driver.mapped[memory.base][1]
    assert abs(memory.nbytes - room_for(call, alignments)) < GAP_BYTES
    for extent, alignment in zip(memory.input_extents, alignments, strict=False):
        assert extent is not None
        assert alignment_class(extent.address) == alignment
        assert memory.base <= extent.address
        assert extent.address + extent.nbytes <= memory.base + memory.nbytes


def test_an_input_that_is_left_out_has_no_place() -> None:
    context = Context(FakeDriver(FakeGpu()), UUID)  # type: ignore[arg-type]
    call = Call("rms_norm", "k", (X, None), (X,), {"ndim": 1, "eps": 1e-5})
    with context:
        memory = TrialMemory.make(context, call, (2, 0, 4))
    assert memory.inputs[1] is None
    assert memory.input_extents[1] is None
    assert alignment_class(memory.outputs[0].device.pointer) == 4
