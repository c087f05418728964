"""client/session/shadow.py: which calls are sampled, and how results are compared."""

from __future__ import annotations

import math
import struct
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerzero.client.connection import arena as arenas
from layerzero.client.planning.plans import Plan
from layerzero.client.session.shadow import MAX_COMPARED, NEVER, Shadow, compare, gap
from layerzero.ipc.transport.wire import Ref, pack_refs
from layerzero.ipc.vocabulary.ops import OPS, Op
from layerzero.ipc.vocabulary.tensors import TensorSpec


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.floats(0, 1))
def test_gap_is_at_least_one_call_and_reproducible(seed: int, counter: int, rate: float) -> None:
    """A sample settles the next one; a gap of 0 would sample a call twice."""
    assert 1 <= gap(seed, counter, rate) == gap(seed, counter, rate) <= NEVER


@pytest.mark.parametrize("rate", [0.5, 0.1, 0.01])
def test_samples_come_at_the_rate_that_was_asked_for(rate: float) -> None:
    """Too many cost time, too few find nothing."""
    counter, samples = 0, 2000
    for _ in range(samples):
        counter += gap(1, counter, rate)
    assert samples / counter == pytest.approx(rate, rel=0.1)


def test_rates_of_zero_and_one_are_never_and_always() -> None:
    assert (gap(1, 2, 0.0), gap(1, 2, 1.0)) == (NEVER, 1)


@pytest.mark.parametrize(("output", "is_sampled"), [("out", True), ("x", False)])
def test_what_is_written_in_place_is_not_sampled(
    monkeypatch: pytest.MonkeyPatch, output: str, is_sampled: bool
) -> None:
    """A reference would begin with what the call has left, and disagree."""
    monkeypatch.setitem(OPS, "sample", Op("sample", ("x",), (output,)))
    spec = TensorSpec.contiguous("float32", (4,))
    view, arena, offset = arenas.pool.allocate(spec.span_bytes)
    registry = type("Registry", (dict,), {"arena": lambda self, number: arena})({arena: 1})
    shadow = Shadow(SimpleNamespace(arena_registry=registry), rate=1.0)  # type: ignore[arg-type]
    shadow.next_seq = 1
    submitted: Any = SimpleNamespace(
        link=SimpleNamespace(welcome=SimpleNamespace(number=1)),
        route=SimpleNamespace(overlay="", plan=Plan("sample", (spec,), {}, (spec,), (spec,))),
        refs=pack_refs([Ref(1, 0, offset, spec.span_bytes)] * 2),
        copies=[],
    )
    assert (shadow.take(submitted, 1) is not None) == is_sampled
    del view


def floats(*values: float) -> memoryview:
    return memoryview(bytearray(struct.pack(f"{len(values)}f", *values)))


def test_results_are_compared_where_their_elements_are() -> None:
    """What lies between the elements of a strided out= is the caller's."""
    spec = TensorSpec("float32", (2, 2), (3, 1))
    expected = floats(1, 2, 99, 3, 4)
    assert compare(floats(1, 2, -99, 3, 4), expected, spec, 0) == 0.0
    assert compare(floats(1, 2, 99, 3, 5), expected, spec, 0) == 0.25
    assert compare(floats(1, 2, 99, 3, math.nan), expected, spec, 0) == math.inf


def test_large_results_are_compared_in_turns() -> None:
    """Each check looks at a part of them, and the checks together at all."""
    n = 3 * MAX_COMPARED
    spec, expected = TensorSpec.contiguous("uint8", (n,)), memoryview(bytearray(n))
    wrong = bytearray(n)
    wrong[4] = 1
    assert [compare(memoryview(wrong), expected, spec, turn) for turn in range(3)] == [0.0, math.inf, 0.0]
