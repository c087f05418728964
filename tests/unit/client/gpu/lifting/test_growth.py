"""Which calls will come next, told from those that came."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from layerzero.client.gpu.lifting.growth import MARGIN, WINDOW, Growth
from layerzero.ipc.vocabulary.tensors import TensorSpec


def decode(keys: int, number: int | None = None, *, heads: int = 8, strided: bool = False, **other: Any) -> Any:
    """Attention of one query over so many keys; its route has the number of the keys."""
    q = TensorSpec.contiguous("float16", (1, heads, 1, 64))
    held = TensorSpec.contiguous("float16", (1, heads, keys, 64))
    if strided:  # of a cache of a fixed size
        held = TensorSpec("float16", held.shape, (heads * 4096 * 64, 4096 * 64, 64, 1))
    attrs = {"is_causal": False, "scale": None, "causal_alignment": "top_left", "layout": "BHSD"}
    plan = SimpleNamespace(op="attention", inputs=(q, held, held, None, None, None), outputs=(q,), attrs=attrs)
    route = SimpleNamespace(number=keys if number is None else number, plan=plan, overlay="", beside={})
    asked = {"route": route, "alignments": [256, 256, 256, 0, 256], "gpu": SimpleNamespace(uuid="GPU-1")}
    return SimpleNamespace(**{**asked, "has_out": False, "pinned": None, "place": 0, "is_lifted": False, **other})


def grown(spec: TensorSpec, more: Any, n: int) -> TensorSpec:
    parts = zip((spec.shape, spec.strides), more, strict=True)
    shape, strides = ([a + n * b for a, b in zip(part, by, strict=True)] for part, by in parts)
    return TensorSpec(spec.dtype, tuple(shape), tuple(strides))


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("by", [1, 16])
def test_the_next_calls_follow_from_the_last_ones(by: int, strided: bool) -> None:
    growth = Growth()
    calls = [decode(100 + by * n, strided=strided) for n in range(10)]
    for call in calls:
        growth.note(call)
        assert growth.due(call) is None, "none of them is lifted"
    growth.note_lifted(calls[4])
    ahead = growth.due(calls[4])
    assert ahead is not None
    assert (ahead.base, ahead.first) == (calls[4], 6), "what came meanwhile is not asked for"
    base = calls[4].route.plan.inputs[1]
    wanted = decode(100 + by * 10, strided=strided).route.plan.inputs[1]
    assert grown(base, ahead.grows[1], ahead.first) == wanted
    assert ahead.grows[3] is None, "it is left out"
    assert ahead.grows[0] == [[0] * 4, [0] * 4]
    assert growth.due(calls[4]) is None, "once is enough"


def test_what_was_lifted_before_the_growth_began_is_its_base() -> None:
    """A program that has called with one length for long: two more are enough."""
    growth = Growth()
    first, second, third = (decode(n) for n in (100, 101, 102))
    growth.note(first)
    growth.note_lifted(first)
    growth.note(second)
    assert growth.due(second) is None
    growth.note(third)
    ahead = growth.due(third)
    assert ahead is not None
    assert (ahead.base, ahead.first) == (first, 3)


def test_more_is_asked_for_before_the_last_was_used() -> None:
    growth = Growth()
    calls = [decode(n) for n in range(1, 3 * WINDOW)]
    asked = []
    for n, call in enumerate(calls):
        growth.note(call)
        growth.note_lifted(call)
        ahead = growth.due(call)
        if ahead is not None:
            start = ahead.base.route.number + ahead.first
            asked.append((n, start, start + WINDOW))
    covered = {length for _, start, stop in asked for length in range(start, stop)}
    assert covered >= set(range(10, calls[-1].route.number + MARGIN))
    assert len(covered) == sum(stop - start for _, start, stop in asked), "nothing twice"


def test_calls_that_only_differ_do_not_grow() -> None:
    growth = Growth()
    for n in (5, 9, 4, 100, 7, 8, 100, 3):
        call = decode(n)
        growth.note(call)
        growth.note_lifted(call)
        assert growth.due(call) is None


def test_a_new_start_is_a_new_family() -> None:
    """The next sequence begins at its own length."""
    growth = Growth()
    for start in (100, 50):
        found = None
        for n in range(start, start + 6):
            call = decode(n)
            growth.note(call)
            growth.note_lifted(call)
            found = growth.due(call) or found
        assert found is not None
        assert start < found.base.route.number <= start + 6


@pytest.mark.parametrize(
    "other", [{"alignments": [16] * 5}, {"pinned": "torch"}, {"has_out": True}, {"gpu": SimpleNamespace(uuid="GPU-2")}]
)
def test_calls_of_another_kind_are_no_steps_of_these(other: dict[str, Any]) -> None:
    growth = Growth()
    for n in range(10, 20):
        call = decode(n, **(other if n % 2 else {}))
        growth.note(call)
        growth.note_lifted(call)
    ahead = growth.due(decode(18))
    assert ahead is None or ahead.grows[1][0][2] == 2, "each of the two kinds grows by two"


def test_what_was_lifted_before_the_step_changed_is_no_base() -> None:
    growth = Growth()
    first = [decode(n) for n in range(10, 14)]
    for call in first:
        growth.note(call)
    second = [decode(n) for n in range(20, 30, 2)]
    for call in second:
        growth.note(call)
    growth.note_lifted(first[2])
    assert growth.due(first[2]) is None
    growth.note_lifted(second[-2])
    ahead = growth.due(second[-2])
    assert ahead is not None
    assert ahead.base is second[-2]
