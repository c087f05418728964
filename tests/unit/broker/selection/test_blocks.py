"""broker/selection/blocks.py: what verdicts become in a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from layerzero.broker.selection import planner
from layerzero.broker.selection.blocks import COPY_BYTES_PER_US, Link, Ranked, block_of
from layerzero.broker.selection.signature import CallSpec, Verdict
from layerzero.capabilities.descriptor import KernelCapability
from layerzero.capabilities.match import Rejection
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.tensors import TensorSpec

X = TensorSpec.contiguous("float32", (1000, 25))
COPY_US = 100_000 / COPY_BYTES_PER_US
Q = TensorSpec.contiguous("float32", (1, 1, 1000, 25))


WEIGHT = 1000.0


def scored(verdicts: tuple[Verdict, ...]) -> tuple[Verdict, ...]:
    """With the term of the measured time, as the engine gives it."""
    fastest_us = min((v.measured_us for v in verdicts if v.is_accepted and v.measured_us), default=None)
    if fastest_us is None:
        return verdicts
    return tuple(
        replace(v, terms={**v.terms, "perfdb": WEIGHT * fastest_us / (v.measured_us or fastest_us)}) for v in verdicts
    )


def silu(*verdicts: Verdict) -> Ranked:
    return Ranked(CallSpec("silu", (X,), (X,), {}, ""), scored(verdicts), WEIGHT)


def attention(*verdicts: Verdict) -> Ranked:
    return Ranked(CallSpec("attention", (Q, Q, Q, None, None, None), (Q,), {}, ""), scored(verdicts), WEIGHT)


def verdict(kernel_id: str, us: float | None = None, *reasons: Rejection, **facts: Any) -> Verdict:
    return Verdict(kernel_id, kernel_id.partition(".")[0], reasons, measured_us=us, **facts)


def kernel(**fields: Any) -> KernelCapability:
    return KernelCapability(kernel_id="k", priority=1, source="test", deterministic=True, **fields)


def kernels(calls: list[Ranked], links: list[Link]) -> list[str]:
    return [step.kernel_id for step in planner.plan(block_of(calls, links)).steps]


def test_a_plan_chooses_among_accepted_kernels_only() -> None:
    """The fastest is of no use where it may not serve."""
    refused = Rejection(Reason.NOT_INSTALLED, "not built")
    assert kernels([silu(verdict("b.k", 2.0), verdict("a.k", 1.0, refused))], []) == ["b.k"]


def test_what_somebody_asked_for_goes_before_time() -> None:
    """A preference or a dispatch table is not a matter of microseconds."""
    wanted = verdict("a.k", 9.0, terms={"policy": 10_000.0})
    solved = verdict("b.k", 5.0, terms={"table": 2_000.0})
    assert kernels([silu(wanted, solved, verdict("c.k", 1.0))], []) == ["a.k"]
    assert kernels([silu(solved, verdict("c.k", 1.0))], []) == ["b.k"]


def test_without_other_terms_costs_are_the_measured_times() -> None:
    """A plan speaks of microseconds."""
    call = silu(verdict("a.k", 3.0), verdict("b.k", 12.0), verdict("c.k", 4.5))
    assert call.costs_us == pytest.approx({"a.k": 3.0, "b.k": 12.0, "c.k": 4.5})


def test_points_count_as_the_time_they_stand_for() -> None:
    """Alone, a call gets the kernel that the engine would choose, by how much it is ahead."""
    steady, flaky = verdict("a.k", 10.0), verdict("b.k", 9.9, terms={"reliability": -50.0})
    call = silu(steady, flaky)
    assert kernels([call], []) == ["a.k"]
    assert 10.0 < call.costs_us["b.k"] < 11.0
    by_priority = Ranked(call.spec, (verdict("a.k", 9.0, terms={"priority": 60.0}), verdict("b.k", 1.0)), 0.0)
    assert by_priority.costs_us == {"a.k": 9.0}


def test_a_kernel_that_keeps_failing_is_the_last_choice() -> None:
    """It is chosen where there is no other."""
    failing = verdict("a.k", 1.0, is_last_resort=True)
    assert kernels([silu(verdict("b.k", 5.0), failing)], []) == ["b.k"]
    assert kernels([silu(failing)], []) == ["a.k"]


def test_a_kernel_that_was_never_measured_counts_as_fast_as_the_fastest() -> None:
    """As for the engine, whose order decides then."""
    calls = [silu(verdict("new.k"), verdict("a.k", 3.0), verdict("b.k", 4.0))]
    assert planner.plan(block_of(calls, [])).cost_us == 3.0
    assert kernels(calls, []) == ["new.k"]
    assert not calls[0].is_measured


def test_a_copy_that_a_kernel_needs_is_paid_where_it_happens() -> None:
    """On the edge when another call returned the tensor, with the kernel itself when the caller did."""
    first = silu(verdict("a.k", 10.0))
    needy = silu(verdict("b.k", 10.0, transforms=("contiguous x",)), verdict("c.k", 10.0 + COPY_US / 2))
    for links in ([Link(0, 1, "x")], []):
        assert kernels([first, needy], links) == ["a.k", "c.k"]
    alone = planner.fixed_plan(block_of([first, needy], [Link(0, 1, "x")]), ["a.k", "b.k"])
    assert alone.transforms == (planner.Transform(0, 1, COPY_US),)
    assert alone.cost_us == 20.0 + COPY_US


def test_a_copy_on_a_gpu_costs_what_it_takes_there() -> None:
    """At a core's pace no kernel of a GPU that needs one was ever worth it."""
    first, needy, other = (
        verdict("a.k", 10.0),
        verdict("b.k", 10.0, transforms=("contiguous x",)),
        verdict("c.k", 12.0),
    )
    on_gpu = [replace(call, spec=replace(call.spec, device="GPU-1")) for call in (silu(first), silu(needy, other))]
    assert kernels([silu(first), silu(needy, other)], [Link(0, 1, "x")]) == ["a.k", "c.k"]
    assert kernels(on_gpu, [Link(0, 1, "x")]) == ["a.k", "b.k"]


@pytest.mark.parametrize(
    ("produces", "requires"),
    [
        ({"produces_layout": "BSHD"}, {"requires_layouts": ("BHSD",)}),
        ({"produces_dtype": "float32"}, {"requires_dtype": "float16", "dtypes": ("float16",)}),
    ],
)
def test_kernels_that_suit_each_other_save_a_conversion(produces: dict[str, Any], requires: dict[str, Any]) -> None:
    """Why kernels are chosen together: the one that is faster alone loses."""
    calls = [
        attention(verdict("fast.k", 10.0, kernel=kernel(**produces)), verdict("suits.k", 12.0, kernel=kernel())),
        attention(verdict("next.k", 10.0, kernel=kernel(**requires))),
    ]
    assert kernels(calls, []) == ["fast.k", "next.k"]
    assert kernels(calls, [Link(0, 1, "q")]) == ["suits.k", "next.k"]


def test_a_rewrite_counts_where_all_times_are_known() -> None:
    """A guess must not win against a measurement."""
    calls, links = [silu(verdict("a.k", 10.0)), silu(verdict("a.k", 10.0))], [Link(0, 1, "x")]
    both = (0, 1)
    faster, unknown = silu(verdict("f.k", 15.0)), silu(verdict("f.k"))
    assert planner.plan(block_of(calls, links, [(both, faster)])).steps == (planner.Step("f.k", both, 15.0),)
    assert len(planner.plan(block_of(calls, links, [(both, unknown)])).steps) == 2
    calls[0] = silu(verdict("a.k", 10.0), verdict("b.k"))
    assert len(planner.plan(block_of(calls, links, [(both, faster)])).steps) == 2


def test_links_that_cannot_be_are_refused() -> None:
    """They come from another process."""
    calls = [silu(verdict("a.k", 1.0))] * 2
    for link, text in (
        (Link(1, 1, "x"), "cannot take"),
        (Link(0, 2, "x"), "cannot take"),
        (Link(0, 1, "y"), "without 'y'"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            block_of(calls, [link])
    with pytest.raises(InvalidArgument, match="no kernel can do it"):
        block_of([silu()], [])
    with pytest.raises(InvalidArgument, match="1 to 1024"):
        block_of([], [])
