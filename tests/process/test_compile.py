"""lz.dry_run and lz.compile against a real broker."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from tests.process.harness import Site

import layerzero as lz
from layerzero.client.connection.overlay import Overlay, Scope
from layerzero.client.tools.dry_run import find_attention
from layerzero.client.tools.trace import imagine

X = np.linspace(-2, 2, 24, dtype=np.float32).reshape(4, 6)
W = np.ones((6, 6), np.float32)


def block(x: Any, w: Any = W) -> Any:
    return lz.silu(lz.matmul(lz.silu(x), w))


def expected(x: Any) -> Any:
    def silu(a: Any) -> Any:
        return a / (1 + np.exp(-a))

    return silu(silu(x) @ W)


def answered() -> int:
    return sum(backend["answered"] for backend in lz.status()["backends"])


def served(kernel_id: str) -> bool:
    report = lz.last_report()
    return report is not None and report.kernel_id == kernel_id


def test_a_dry_run_shows_the_calls_and_executes_none(connected: Site) -> None:
    """Shapes, links and kernels as they would be; a worker that got a call would count it."""
    seen = []

    def function(x: Any) -> Any:
        seen.append(block(x.T.copy().T[:, :6]))
        return seen[0]

    before = answered()
    plan = lz.dry_run(function, X)
    assert answered() == before
    assert (type(seen[0]), seen[0].shape, seen[0].dtype) == (np.ndarray, (4, 6), np.float32)
    assert [(call.op, call.sources) for call in plan.calls] == [("silu", ()), ("matmul", (0,)), ("silu", (1,))]
    assert [call.kernel_id for call in plan.calls] == ["alpha.silu", "alpha.matmul", "alpha.silu"]
    assert (plan.problem, plan.is_exact, plan.transforms) == ("", True, ())
    assert "matmul(float32[4, 6], float32[6, 6])" in str(plan)
    assert plan.to_dict()["calls"][1]["report"]["candidates"][0]["kernel_id"] == "alpha.matmul"


def test_a_dry_run_takes_submitted_calls_and_out_arrays(connected: Site) -> None:
    """What a function does besides plain calls must not reach a worker either."""
    out = np.full((4, 6), 7, np.float32)

    def function() -> Any:
        future = lz.submit("silu", X)
        assert future.done()
        return lz.silu(future.result(), out=out)

    before = answered()
    plan = lz.dry_run(function)
    assert [call.sources for call in plan.calls] == [(), (0,)]
    assert answered() == before
    assert (out == 7).all()


def test_a_dry_run_names_a_call_without_a_kernel(connected: Site) -> None:
    """That is what one runs it for; the other calls are still shown."""
    plan = lz.dry_run(lambda: lz.softmax(lz.silu(X), -1))
    assert plan.problem == "no kernel for 1 softmax(float32[4, 6])"
    assert [call.kernel_id for call in plan.calls] == ["alpha.silu", None]
    assert plan.cost_us is None
    assert "no kernel" in str(plan)


def test_the_joint_plan_goes_by_measured_times(connected: Site) -> None:
    """And says what it costs."""
    lz.tune("silu", X, budget_s=2)
    with Scope(Overlay.of({"origin": "test", "values": {"weights": {"perfdb": 1000.0}}})):
        plan = lz.dry_run(lambda: lz.silu(lz.silu(X)))
        chosen = lz.explain("silu", X)
    measured = {c.kernel_id: c.measured_us for c in chosen.candidates}
    us = measured[chosen.kernel_id or ""]
    assert us is not None
    assert [call.kernel_id for call in plan.calls] == [chosen.kernel_id] * 2
    assert plan.unmeasured == ()
    assert plan.cost_us == plan.alone_us == pytest.approx(2 * us)
    assert plan.runner_up_us is not None
    assert plan.runner_up_us >= plan.cost_us


def test_the_joint_plan_keeps_to_fixed_priorities(connected: Site) -> None:
    """Where policy gives measured times no weight, as it does for this broker, a plan must not bring them back."""
    lz.tune("silu", X, budget_s=2)
    assert [call.kernel_id for call in lz.dry_run(lz.silu, X).calls] == ["alpha.silu"]


def test_a_dry_run_without_calls_is_refused(connected: Site) -> None:
    """An empty plan would look like success."""
    with pytest.raises(lz.InvalidArgument, match="makes no lz call"):
        lz.dry_run(lambda: 3)


def test_attention_written_out_is_found(connected: Site) -> None:
    """softmax(q k) v where nothing else reads the scores is one attention call; where something does, it is not."""
    q = np.zeros((1, 2, 8, 4), np.float32)

    def attention(*, reads_scores: bool) -> Any:
        weights = lz.softmax(lz.matmul(q, q.swapaxes(2, 3)), -1)
        if reads_scores:
            lz.silu(weights)
        return lz.matmul(weights, q)

    session = lz.session()
    plain = imagine(session, attention, (), {"reads_scores": False})
    assert [found.calls for found in find_attention(session, plain)] == [(0, 1, 2)]
    assert find_attention(session, imagine(session, attention, (), {"reads_scores": True})) == []


def test_a_compiled_function_keeps_to_its_plan(connected: Site) -> None:
    """What was chosen at first stays, whatever selection would say of a single call now."""
    compiled = lz.compile(block)
    with lz.prefer("beta"):
        np.testing.assert_allclose(compiled(X), expected(X), rtol=1e-5)
    for _ in range(3):
        np.testing.assert_allclose(compiled(X), expected(X), rtol=1e-5)
        assert served("beta.silu")
    block(X)
    assert served("alpha.silu")
    report = compiled.report()
    assert (report.runs, report.planned_calls, report.unplanned, len(report.plans)) == (4, 9, {}, 1)
    assert compiled.__name__ == "block"


def test_a_wish_of_the_caller_goes_before_the_plan(connected: Site) -> None:
    """lz.prefer is said by a person, now."""
    compiled = lz.compile(block)
    with lz.prefer("beta"):
        compiled(X)
    with lz.prefer("gamma"):
        compiled(X)
        assert served("gamma.silu")


def test_a_baked_kernel_that_fails_is_replaced(connected: Site) -> None:
    """Preferred, not required."""
    from tests.backends.toy import RAISE, fault

    compiled = lz.compile(lz.silu)
    with lz.prefer("beta"):
        compiled(X)
    bad = X.copy()
    bad[0, 0] = fault(RAISE, "beta")
    compiled(bad)
    report = lz.last_report()
    assert report is not None
    assert (report.attempts[0].kernel_id, report.attempts[0].outcome) == ("beta.silu", "BACKEND_ERROR")
    assert report.kernel_id == "alpha.silu"


def test_shapes_of_a_bucket_share_a_plan_and_others_get_their_own(connected: Site) -> None:
    """Sequence lengths vary with every request: a plan for each would never be used twice."""
    compiled = lz.compile(lz.silu)
    for rows in (5, 6, 7, 8, 9):
        compiled(np.ones((rows, 6), np.float32))
    report = compiled.report()
    assert (report.runs, len(report.plans), report.planned_calls) == (5, 2, 3)


def test_calls_outside_of_the_plan_run_and_are_counted(connected: Site) -> None:
    """A branch that the first run did not take."""

    class Model:
        depth = 1

        def __call__(self, x: Any) -> Any:
            for _ in range(self.depth):
                x = lz.silu(x)
            return x

    model = Model()
    compiled = lz.compile(model)
    compiled(X)
    model.depth = 3
    result = compiled(X)
    assert result.shape == X.shape
    report = compiled.report()
    assert (report.planned_calls, report.unplanned) == (1, {"silu(float32[4, 6])": 2})
    assert "2 calls in no plan: silu(float32[4, 6])" in str(report)
    compiled.reset()
    compiled(X)
    compiled(X)
    assert compiled.report().planned_calls == 4


def test_the_first_run_has_its_effects_once(connected: Site) -> None:
    """A cache that grew twice, once with zeros, would be wrong for ever."""
    cache = []

    def function(x: Any) -> Any:
        cache.append(lz.silu(x))
        return cache[-1]

    compiled = lz.compile(function)
    result = compiled(X)
    assert len(cache) == 1
    assert np.abs(result).max() > 0


def test_baking_needs_no_run(connected: Site) -> None:
    """Before traffic comes."""
    compiled, before = lz.compile(block), answered()
    with lz.prefer("beta"):
        plan = compiled.bake(X)
    assert [call.kernel_id for call in plan.calls] == ["beta.silu", "beta.matmul", "beta.silu"]
    assert answered() == before
    compiled(X)
    assert served("beta.silu")
    assert compiled.report().planned_calls == 3
    with pytest.raises(lz.InvalidArgument, match="no kernel for 0 softmax"):
        lz.compile(lz.softmax).bake(X, -1)


def test_a_pinned_call_stays_pinned(connected: Site) -> None:
    """A pin is part of the call."""
    compiled = lz.compile(lambda: lz.silu(X, backend="gamma"))
    for _ in range(2):
        compiled()
        assert served("gamma.silu")


def test_calls_of_other_threads_keep_to_the_plan_when_the_context_goes_along(connected: Site) -> None:
    """asyncio.to_thread takes it along; the counts must be right there too."""

    def function(x: Any) -> Any:
        async def both() -> Any:
            return await asyncio.gather(*(asyncio.to_thread(lz.silu, x) for _ in range(4)))

        return asyncio.run(both())

    compiled = lz.compile(function)
    compiled(X)
    compiled(X)
    assert compiled.report().planned_calls == 4


def test_what_cannot_be_compiled_is_refused(connected: Site) -> None:
    """At once, not at the first call."""

    async def coroutine() -> None: ...

    with pytest.raises(lz.InvalidArgument, match="not a int"):
        lz.compile(3)  # type: ignore[arg-type]
    with pytest.raises(lz.InvalidArgument, match="coroutine is a coroutine function"):
        lz.compile(coroutine)


def test_the_broker_refuses_what_is_no_plan_request(connected: Site) -> None:
    """Any client may send anything."""
    ask = lz.session().ask
    for params in ({}, {"routes": [], "calls": [0], "links": [], "rewrites": []}, {"routes": 3}):
        with pytest.raises(lz.InvalidArgument, match="plan takes routes, calls, links and rewrites"):
            ask("plan", **params)
    with pytest.raises(lz.InvalidArgument, match="1 to 1024 calls, not 0"):
        ask("plan", routes=[], calls=[], links=[], rewrites=[])
