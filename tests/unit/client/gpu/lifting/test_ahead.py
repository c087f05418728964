"""Calls that are held before they are made, since those before them grew by the same: Lifts, Growth and Prefetch."""

from __future__ import annotations

from typing import Any

import pytest
from tests.soft_gpu import soft_cupy
from tests.soft_gpu.soft_lifts import at, kernel, lifted_silu
from tests.unit.client.gpu.lifting.rig import ORDINARY, Rig, close, randn, silu, wait_until

from layerzero.client.connection.call import Route
from layerzero.client.gpu.lifting.growth import WINDOW
from layerzero.ipc.errors import BackendError
from layerzero.ipc.vocabulary.tensors import TensorSpec


def further(specs: Any, grows: Any, n: int) -> list[TensorSpec]:
    return [
        TensorSpec(spec.dtype, *(tuple(a + n * b for a, b in zip(part, by, strict=True)) for part, by in parts))
        for spec, more in zip(specs, grows, strict=True)
        for parts in [zip((spec.shape, spec.strides), more, strict=True)]
    ]


def offer_ahead(rig: Rig, make: Any = lifted_silu) -> None:
    """All that silu's calls grow into is lifted, too, as `make` has it."""

    def answer(route: Route, grows: Any, first: int, count: int) -> Any:
        specs = [further(route.plan.inputs, grows[:1], n)[0] for n in range(first, first + count)]
        return {"calls": [rig.broker.ready(make(spec), rig.page.lift_epoch) for spec in specs]}

    rig.offer_silu()
    rig.broker.ahead = answer


def grow(rig: Rig) -> None:
    """Calls of 20, 21, 22 and 23 numbers, after which the next are held."""
    for n in range(20, 24):
        x, values = randn(n)
        close(rig.settle(lambda x=x: rig.silu(x)), silu(values))
    wait_until(lambda: held_ahead(rig) >= WINDOW - 2)


def held_ahead(rig: Rig) -> int:
    return sum(getattr(site, "is_ahead", False) for site in list(rig.lifts.known.values()))


def is_held_ahead(rig: Rig, shape: tuple[int, ...]) -> bool:
    sites = [site for site in list(rig.lifts.known.values()) if getattr(site, "is_ahead", False)]
    return any(site.asked.route.plan.inputs[0].shape == shape for site in sites)  # type: ignore[union-attr]


@pytest.mark.parametrize("into", ["a new array", "out"])
def test_calls_that_follow_are_held_before_they_are_made(rig: Rig, into: str) -> None:
    """From the fourth on nobody is asked for them, however far they go."""
    offer_ahead(rig)

    def run(n: int) -> Any:
        x, values = randn(3, n)
        result = rig.silu(x, soft_cupy.empty((3, n)) if into == "out" else None)
        if result is not ORDINARY:
            close(result, silu(values))
        return result

    for n in range(20, 24):
        rig.settle(lambda n=n: run(n))
    wait_until(lambda: held_ahead(rig) >= WINDOW - 2)
    asked = rig.broker.count()
    for n in range(24, 24 + 3 * WINDOW):
        wait_until(lambda n=n: is_held_ahead(rig, (3, n)))  # later windows are held by turns with this one
        assert run(n) is not ORDINARY, n
    assert rig.broker.count() == asked
    assert rig.report().path == "lifted"


def test_leave_that_was_given_ahead_ends_like_any_other(rig: Rig) -> None:
    offer_ahead(rig)
    grow(rig)
    rig.bump()
    for n in (24, 30):
        x, values = randn(n)
        assert rig.silu(x) is ORDINARY
        close(rig.settle(lambda x=x: rig.silu(x)), silu(values))


def test_a_call_held_ahead_that_is_not_launched_is_asked_for_like_any_other(rig: Rig) -> None:
    refuse = kernel("refuse", at("output"), at("input"), 24)
    offer_ahead(rig, lambda spec: lifted_silu(spec, refuse) if spec.numel == 24 else lifted_silu(spec))
    grow(rig)
    asked = rig.broker.count()
    x, values = randn(24)
    with pytest.raises(BackendError, match="was not launched"):
        rig.silu(x)
    close(rig.settle(lambda: rig.silu(x)), silu(values))
    assert rig.broker.count() == asked + 1


def test_what_does_not_follow_from_the_last_calls_is_not_held(rig: Rig) -> None:
    """A broker that answers for other tensors than those that come next."""
    offer_ahead(rig, lambda spec: lifted_silu(TensorSpec.contiguous("float32", (spec.numel + 1,))))
    for n in range(20, 30):
        x, values = randn(n)
        close(rig.settle(lambda x=x: rig.silu(x)), silu(values))
    assert held_ahead(rig) == 0
