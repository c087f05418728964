"""lz.plan against a real broker: what is recorded, what is frozen, what runs as one, and what never may."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.backends.toy import COUNT, RAISE, fault
from tests.process.harness import Site, wait_until
from tests.process.planned import W, X, agree, block, expected, settled, silu, some, two_ready

import layerzero as lz
from layerzero.client.connection.arena import pool
from layerzero.client.plans.segments import Segment


@pytest.fixture
def site(new_site: Callable[..., Site]) -> Site:
    return two_ready(new_site)


# --- its life


def test_a_plan_is_recorded_laid_out_and_then_runs_as_one(site: Site) -> None:
    """Each phase gives the function's own result, for other numbers each time."""
    runs = []

    def function(x: Any) -> Any:
        runs.append(1)
        return block(x)

    plan = lz.plan(function)
    assert plan.phase == "COLD"
    for seed, phase in enumerate(("WARM", "FROZEN", "FROZEN", "FROZEN")):
        agree(plan(some(seed)), expected(some(seed)))
        assert plan.phase == phase
    assert len(runs) == 2
    settled(plan, X)
    for seed in range(20):
        agree(plan(some(seed)), expected(some(seed)))
    assert [(t.name, t.how, t.kernel_id) for t in plan.timings()] == [
        ("silu", "chain", "alpha.silu"),
        ("matmul", "chain", "alpha.matmul"),
        ("silu", "chain", "alpha.silu"),
    ]
    assert len(runs) == 2
    counters = plan.counters()
    assert counters["replays"] == counters["runs"] - 2
    assert counters["misses"] == {"recorded": 2}


def test_policy_that_changes_while_a_plan_is_linked_is_not_the_plans(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another thread does there: the plan was made for the policy of before."""
    link = Segment._link

    def lock(name: str) -> None:
        lz.configure(locks={op: f"{name}.{op}" for op in ("silu", "matmul")})

    def change_first(segment: Segment) -> None:
        lock("beta")
        link(segment)

    try:
        for name in ("beta", "alpha"):  # both have leases
            lock(name)
            settled(lz.plan(block), X)
        monkeypatch.setattr(Segment, "_link", change_first)
        plan = lz.plan(block)
        for seed in range(8):
            lock("alpha")
            agree(plan(some(seed)), expected(some(seed)))
        lock("alpha")
        plan(X)
        assert plan.explain().messages == 1
        assert {t.kernel_id for t in plan.timings()} == {"alpha.silu", "alpha.matmul"}
    finally:
        lz.configure(locks=None)


def test_results_are_the_callers_own(site: Site) -> None:
    """A later run must not write to what an earlier one gave."""
    plan = settled(lz.plan(block), X)
    kept = [plan(some(seed)) for seed in range(50)]
    for result in kept:
        result[...] = result + 1
    gc.collect()
    for seed, result in enumerate(kept):
        agree(result, expected(some(seed)) + 1)


def test_each_shape_and_dtype_has_a_plan_of_its_own(site: Site) -> None:
    """Guards: nothing of one plan fits another's arrays."""
    plan = settled(lz.plan(lambda x: lz.silu(lz.silu(x))), X)
    for x in (some(1, 2, 3), some(1).astype(np.float64), some(2), some(3, 5), np.asfortranarray(some(4))):
        for _ in range(4):
            agree(plan(x), silu(silu(x)))
            assert plan(x).dtype == x.dtype
    assert plan.counters()["plans"] == 5


def test_plain_arguments_are_part_of_what_a_plan_is_for(site: Site) -> None:
    """True, 1 and 1.0 are equal, and not the same."""
    plan = lz.plan(lambda x, scale, names: lz.silu(x) * scale if names["on"] else lz.silu(x))
    for _ in range(4):
        for scale in (1, 1.0, True, 3.0):
            agree(plan(X, scale, {"on": True}), silu(X) * scale)
        agree(plan(X, 3.0, {"on": False}), silu(X))
    assert plan.counters()["plans"] == 5


def test_what_a_function_computes_itself_is_part_of_its_plan(site: Site) -> None:
    """Operators, methods, functions of NumPy, indices, writes in place; steps of lz stay what they are."""

    def function(x: Any, y: Any) -> Any:
        a = lz.silu(x)
        a += y
        b = lz.silu(a.reshape(6, 4).T)
        b[0] = 7.0
        c = np.concatenate([b, np.sqrt(np.abs(b))], axis=1)
        d = lz.silu(c[:, ::2]) - 1.0 / (2.0 + c[:, 1::2] ** 2)
        return {"all": d, "mean": d.mean(axis=0), "part": d[1:3]}

    def reference(x: Any, y: Any) -> Any:
        a = silu(x) + y
        b = silu(a.reshape(6, 4).T)
        b[0] = 7.0
        c = np.concatenate([b, np.sqrt(np.abs(b))], axis=1)
        d = silu(c[:, ::2]) - 1.0 / (2.0 + c[:, 1::2] ** 2)
        return {"all": d, "mean": d.mean(axis=0), "part": d[1:3]}

    plan = lz.plan(function)
    for seed in range(30):
        x, y = some(seed), some(100 + seed)
        before = x.copy(), y.copy()
        got, wanted = plan(x, y), reference(x, y)
        assert got.keys() == wanted.keys()
        for name in wanted:
            agree(got[name], wanted[name])
        assert np.array_equal(x, before[0])
        assert np.array_equal(y, before[1])
    assert plan.phase in ("WARM", "FROZEN"), plan.explain()
    assert got["part"].base is not None or np.shares_memory(got["part"], got["all"])


def test_scalars_and_empty_arrays_are_part_of_a_plan(site: Site) -> None:
    """They have no memory of their own that a worker could be told of."""

    def function(x: Any, t: Any) -> Any:
        total, none = lz.silu(x.sum()), lz.silu(x[:0])
        return lz.silu(x * total), lz.silu(t) + np.float32(1) * total, none, lz.silu(x.max() * lz.silu(x[0]))

    plan = lz.plan(function)
    for seed in range(12):
        x, t = some(seed) / 8, np.float32(seed)
        got = plan(x, t)
        total = silu(x.sum())
        for one, other in zip(got, (silu(x * total), silu(t) + total, x[:0], silu(x.max() * silu(x[0]))), strict=True):
            agree(one, other)
            assert one.shape == other.shape
    assert plan.phase == "FROZEN", plan.explain()


def test_in_place_changes_of_weights_are_seen(site: Site) -> None:
    """A plan holds the array, not the numbers that it had."""
    w, shared = W.copy(), lz.share(W.copy())
    plan = settled(lz.plan(lambda x: lz.matmul(lz.matmul(x, w), shared)), X)
    w *= 2
    agree(plan(X), X @ w @ shared)
    shared[...] = np.eye(6)
    agree(plan(X), X @ w)
    assert "lz.share avoids this" in str(plan.explain())


def test_replaced_weights_are_seen_after_a_reset(site: Site) -> None:
    """Which array a function has of its own is settled when it is recorded, as the docstring says."""
    weights = {"w": W}
    plan = settled(lz.plan(lambda x: lz.matmul(lz.silu(x), weights["w"])), X)
    weights["w"] = 2 * W
    with pytest.raises(lz.InvalidArgument, match="differ by"):
        plan.verify(X)
    plan.reset()
    assert plan.verify(X) == 0.0
    agree(plan(X), silu(X) @ weights["w"])


# --- what is no plan


def branches(x: Any) -> Any:
    return lz.silu(x) if x.sum() > 0 else lz.silu(-x)


def prints(x: Any) -> Any:
    return f"{lz.silu(x)}" and lz.silu(x)


def takes_out(x: Any) -> Any:
    y = np.asarray(lz.silu(x))
    return lz.silu(np.exp(y))


def clips_what_it_took(x: Any) -> Any:
    y = np.asarray(lz.silu(x))
    return np.clip(y, -1e9, 1e9, out=y)  # changes nothing, with these numbers


STATE = np.zeros((4, 6), np.float32)


def keeps_state(x: Any) -> Any:
    y = lz.matmul(STATE, W) + lz.silu(x)
    STATE[0] = y[0]
    return y


def counts(x: Any, calls: list[int] = []) -> Any:  # noqa: B006  # that is the point
    calls.append(1)
    return lz.silu(x) * len(calls)


def draws(x: Any) -> Any:
    return lz.silu(x) + np.random.default_rng().standard_normal(x.shape).astype(np.float32)


def makes_a_mask(x: Any) -> Any:
    return lz.silu(x) * np.tri(4, 6, dtype=np.float32)


def has_no_call(x: Any) -> Any:
    return x + 1


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (branches, "takes its bool"),
        (prints, "takes its str"),
        (takes_out, "uses another array after that"),
        (clips_what_it_took, "output array is read-only"),
        (keeps_state, "does not return it"),
        (counts, "its arguments were others"),
        (draws, "other numbers at each run"),
        (makes_a_mask, "makes a float32[4, 6] anew at each run"),
        (has_no_call, "makes no lz call"),
    ],
)
def test_a_function_that_cannot_be_a_plan_runs_as_ever_and_says_why(
    site: Site, function: Callable[[Any], Any], why: str
) -> None:
    """Wrong numbers must not come of what was recorded; file and line are named."""
    plan = lz.plan(function)
    for _ in range(4):
        plan(X)
    assert plan.phase == "CALLS"
    assert why in plan.explain().problem
    if function is branches:
        assert "test_plans.py:" in plan.explain().problem
        for x in (X + 5, X - 5):
            agree(plan(x), silu(x) if x.sum() > 0 else silu(-x))


def test_arrays_that_a_function_makes_itself_are_kept_when_that_is_wanted(site: Site) -> None:
    """What they are made of is its maker's word; a result that is one of them is new each time."""
    plan = settled(lz.plan(lambda x: (makes_a_mask(x), np.ones(3)), bake_constants=True), X)
    for seed in range(5):
        got, ones = plan(some(seed))
        agree(got, silu(some(seed)) * np.tri(4, 6))
        agree(ones, np.ones(3))
        ones += 1


def test_an_argument_that_shares_memory_with_another_makes_no_plan(site: Site) -> None:
    """Which of them a step reads cannot be told; in a later run they may be apart."""
    plan = lz.plan(lambda x, y: lz.matmul(lz.silu(x), y))
    square = some(0, 6, 6)
    for _ in range(3):
        agree(plan(square, square), silu(square) @ square)
    assert "share memory" in plan.explain().problem


def test_errors_of_a_function_are_its_own(site: Site) -> None:
    """What its calls raise names the step; what it raises itself comes as it is."""

    def fails(x: Any) -> Any:
        raise KeyError(lz.silu(x).shape)

    with pytest.raises(KeyError):
        lz.plan(fails)(X)
    plan = settled(lz.plan(lambda x: lz.silu(lz.silu(x, backend="alpha"), backend="alpha")), X)
    wrong = X.copy()
    wrong.flat[0] = fault(RAISE)
    with pytest.raises(lz.BackendError) as caught:
        plan(wrong)
    assert any("in step 0 of a plan, silu at test_plans.py:" in note for note in caught.value.__notes__)
    agree(plan(X), silu(silu(X)))
    with pytest.raises(lz.InvalidArgument, match="takes a function"):
        lz.plan(3)  # type: ignore[arg-type]
    with pytest.raises(lz.InvalidArgument, match="warmup"):
        lz.plan(block, warmup=0)


def test_what_was_written_is_not_written_twice(site: Site) -> None:
    """A function that fails while it is recorded is run as it is, but for one that has changed its argument by then."""

    def adds(x: Any) -> Any:
        x += 1
        y = lz.silu(x)
        if not isinstance(y, np.ndarray):
            raise TypeError("this takes arrays of NumPy")
        return y

    x = np.zeros(4, np.float32)
    with pytest.raises(TypeError, match="takes arrays") as caught:
        lz.plan(adds)(x)
    assert "call it without lz.plan" in caught.value.__notes__[0]
    assert np.array_equal(x, np.ones(4))
    plan = lz.plan(lambda x: adds(x.copy()))
    agree(plan(x), silu(x + 1))
    assert "this takes arrays of NumPy" in plan.explain().problem


def test_a_plan_keeps_no_arrays_of_the_runs_that_were_recorded(site: Site) -> None:
    """Twenty results of a megabyte would lie beside the two slots that the plan needs."""

    def deep(x: Any) -> Any:
        for _ in range(20):
            x = lz.silu(x)
        return x

    gc.collect()
    lz.session().repeats.clear()
    before = pool.stats()
    plan = settled(lz.plan(deep), np.ones((256, 1024), np.float32))
    gc.collect()
    lz.session().repeats.clear()
    after = pool.stats()
    lives = [stats["bytes"] - stats["idle_bytes"] for stats in (before, after)]
    assert lives[1] - lives[0] < 6 << 20, plan.explain()
    agree(plan(np.full((256, 1024), 2, np.float32)), deep(np.full((256, 1024), 2, np.float32)))


# --- passes


def test_equal_and_unused_calls_are_made_once_or_not_at_all(site: Site) -> None:
    """The explanation names what was left out; the numbers are the same."""
    asked = X.copy()
    asked.flat[0] = fault(COUNT)  # each call of the worker gives another number

    def function(x: Any) -> Any:
        lz.silu(lz.silu(x))  # nobody takes it
        return lz.matmul(lz.silu(x), W) - lz.matmul(lz.silu(x), W)

    plan = settled(lz.plan(function), X)
    assert np.array_equal(plan(X), np.zeros((4, 6), np.float32))
    assert plan.explain().steps == 2
    text = str(plan.explain())
    assert "common subexpressions: 3" in text or "common subexpressions: 2" in text
    assert "dead results" in text


def test_calls_on_constants_alone_are_not_made_again(site: Site) -> None:
    """Only where nobody can change the constant: else it is read at each run."""
    fixed = np.frombuffer(W.tobytes(), np.float32).reshape(W.shape)
    loose = W.copy()
    plan = settled(lz.plan(lambda x: lz.matmul(x, lz.silu(fixed)) + lz.matmul(x, lz.silu(loose))), X)
    assert "constant folding: 1" in str(plan.explain())
    loose *= 3
    agree(plan(X), X @ silu(fixed) + X @ silu(loose))


def test_what_changes_nothing_is_left_out(site: Site) -> None:
    """Transposes that cancel, copies that nobody writes to, and arithmetic that keeps every bit; -0.0 + 0 does not."""

    def function(x: Any) -> Any:
        y = lz.silu(x * 2.0)
        z = ((y.T.T * 1).copy() - 0) / np.float32(1)
        return lz.silu(z) + 1.0

    plan = settled(lz.plan(function), X)
    assert "identities: " in str(plan.explain())
    assert [t.name for t in plan.timings()] == ["mul", "silu", "silu", "add"]
    agree(plan(X), silu(silu(2 * X)) + 1)

    def keeps(x: Any) -> Any:
        copied = (y := lz.silu(x)).copy()
        copied += y
        zero = lz.silu(x) * -0.0 + 0.0
        return copied, np.signbit(zero), lz.silu(x) * 1

    plan = lz.plan(keeps)
    for seed in range(6):
        copied, signs, own = plan(some(seed))
        agree(copied, 2 * silu(some(seed)))
        assert not signs.any()
        own += 1
    left = lz.plan(function, passes=["unused"])
    agree(settled(left, X, messages=2)(X), silu(silu(2 * X)) + 1)
    assert "identities: " not in str(left.explain()).replace("passes left out", "")
    assert "mul" in [t.name for t in left.timings()][2:]


def test_slots_are_shared_by_what_is_not_needed_at_once(site: Site) -> None:
    """Peak memory is that of what lives at one time, and is in the explanation."""

    def deep(x: Any) -> Any:
        for _ in range(20):
            x = lz.silu(x)
        return x

    plan = settled(lz.plan(deep), some(0, 64, 64))
    told = plan.explain()
    assert told.peak_bytes == 2 * 64 * 64 * 4
    assert told.sum_bytes == 19 * 64 * 64 * 4
    rows = plan.slots()
    for one in rows:
        for other in rows:
            is_apart = one.offset + one.nbytes <= other.offset or other.offset + other.nbytes <= one.offset
            assert one is other or is_apart or one.last < other.first or other.last < one.first
    assert plan.show().startswith("flowchart TD")


def test_steps_of_the_functions_own_write_over_what_they_take(site: Site) -> None:
    """What a worker takes it never writes over: its death would leave nothing to begin with."""

    def function(x: Any) -> Any:
        y = lz.silu(x) * 2
        return lz.silu(np.matmul(lz.silu(y).T, y))

    plan = settled(lz.plan(function), some(0, 64, 64), messages=3)
    told = plan.explain()
    assert (told.peak_bytes, told.sum_bytes, told.in_place) == (2 * 64 * 64 * 4, 4 * 64 * 64 * 4, 2)
    assert plan.counters()["peak_bytes"] >= told.peak_bytes
    assert "2 results in place" in str(told)
    for seed in range(20):
        x = some(seed, 64, 64)
        y = silu(x) * 2
        np.testing.assert_allclose(plan(x), silu(silu(y).T @ y), rtol=1e-3, atol=1e-3)


def test_a_plan_prefers_the_backend_that_is_fastest_for_the_whole(site: Site) -> None:
    """Each call's own best crosses to another worker three times here; every candidate gives the right numbers."""
    site.set_policy("rules:\n- prefer: [beta.matmul]\n  bonus: 100\n")
    wait_until(lambda: lz.explain(lz.matmul, X, W).backend == "beta")
    plan = lz.plan(block)
    seen = set()

    def is_chosen() -> bool:
        agree(plan(X), expected(X))
        seen.add(tuple(t.kernel_id.partition(".")[0] for t in plan.timings() if t.how == "chain"))
        return " for all (" in plan.explain().choice

    wait_until(is_chosen)
    assert seen >= {("alpha", "beta", "alpha"), ("alpha",) * 3, ("beta",) * 3}
    choices = plan._latest.choices  # type: ignore[union-attr]
    own, *others = choices.candidates  # type: ignore[union-attr]
    assert [one.backend for one in (own, *others)] == ["", "alpha", "beta"]
    best = min(others, key=lambda one: one.us)
    assert choices.chosen is (best if best.us < 0.97 * own.us else own)  # type: ignore[union-attr]
    settled(plan, X, messages=1 if choices.chosen is best else 3)  # type: ignore[union-attr]
    agree(plan(some(1)), expected(some(1)))
