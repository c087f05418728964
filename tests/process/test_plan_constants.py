"""Constants of execution plans: which are read at each run, and that no caller's writes reach what a plan has made."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.process.harness import Site
from tests.process.planned import W, X, agree, settled, silu, some, two_ready

import layerzero as lz


@pytest.fixture
def site(new_site: Callable[..., Site]) -> Site:
    return two_ready(new_site)


def test_an_array_that_was_only_made_read_only_can_still_be_written(site: Site) -> None:
    """By who makes it writable again, and through views that were made before: its numbers are read at each run."""
    again, viewed = W.copy(), W.copy()
    view = viewed[:]
    for array in (again, viewed):
        array.flags.writeable = False
    plan = settled(lz.plan(lambda x: lz.matmul(x, lz.silu(again)) + lz.matmul(lz.silu(x), viewed)), X)
    again.flags.writeable = True
    again *= 3
    again.flags.writeable = False
    view *= 5
    agree(plan(X), X @ silu(again) + silu(X) @ viewed)


def test_a_result_of_constants_alone_is_new_at_each_run(site: Site) -> None:
    """What its caller does to it is nobody else's: neither the recorded one nor a later one is the plan's own."""
    fixed = np.frombuffer(W.tobytes(), np.float32).reshape(W.shape)
    plan = lz.plan(lambda x: (lz.silu(fixed), lz.matmul(x, lz.silu(fixed))))
    for seed in range(6):
        own, product = plan(some(seed))
        agree(own, silu(W))
        agree(product, some(seed) @ silu(W))
        own[...] = 7
    settled(plan, X)
    own, _ = plan(X)
    own[...] = 7
    agree(plan(X)[0], silu(W))
    agree(plan(X)[1], X @ silu(W))


def test_a_baked_array_that_is_a_result_is_new_at_each_run(site: Site) -> None:
    """The one that was recorded was its caller's, too."""
    plan = lz.plan(lambda x: (np.tril(np.ones((4, 4), np.float32)), lz.silu(x)), bake_constants=True)
    for seed in range(6):
        mask, own = plan(some(seed))
        agree(mask, np.tril(np.ones((4, 4))))
        agree(own, silu(some(seed)))
        if plan.phase == "FROZEN":  # before, it would be other numbers in the next recording
            mask[...] = 7
    assert plan.phase == "FROZEN", plan.explain()
