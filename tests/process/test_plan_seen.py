"""What is seen of a plan: pictures, counters, events by category and level, and each step beside another backend's."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.backends.toy import COUNT, KILL, fault
from tests.process.harness import Site, wait_until
from tests.process.planned import W, X, agree, block, expected, settled, silu, two_ready

import layerzero as lz


@pytest.fixture
def site(new_site: Callable[..., Site]) -> Site:
    return two_ready(new_site)


def own(x: Any) -> Any:
    y = lz.matmul(lz.silu(x), W)
    y += x
    return lz.silu(y)


def test_a_plan_is_shown_in_a_terminal_and_as_a_page(site: Site) -> None:
    """Both have each step with its message, kernel, sources and slot; the page needs no other file, and escapes."""
    plan = lz.plan(own)
    with pytest.raises(lz.InvalidArgument, match="run the plan first"):
        plan.show("text")
    plan(X)
    assert plan.show("text") == "WARM: float32[4, 6]"
    settled(plan, X, messages=2)
    text, page = plan.show("text"), plan.show("html")
    lines = text.splitlines()
    assert lines[0] == "FROZEN: float32[4, 6]"
    assert lines[1].split()[:3] == ["message", "step", "what"]
    assert [line.split("  ")[0] for line in lines[2:]] == ["one message", "", "here", "one message"]
    assert "argument 0" in lines[2]
    assert "alpha.silu" in lines[2]
    assert "test_plan_seen.py:" in lines[3]
    assert "own code" in lines[4]
    assert page.startswith("<!doctype html>")
    assert page.count("alpha.silu") >= 2
    assert page.count("<tr") == 1 + 4 + 1 + len(plan.slots())
    assert not {"http", "<script", "src="} & {word for word in ("http", "<script", "src=") if word in page}
    assert plan.show() == plan.show("mermaid")
    with pytest.raises(lz.InvalidArgument, match="allowed: mermaid, text, html"):
        plan.show("png")
    named = lz.plan(lambda x, name: lz.silu(x))
    named(X, "<b>&[red]")
    assert "&lt;b&gt;&amp;[red]" in named.show("html")
    assert "<b>&[red]" in named.show("text")


def test_counters_have_times_misses_and_fallbacks(site: Site) -> None:
    """A step that leaves its chain since the worker died there is one."""
    plan = settled(lz.plan(block), X)
    counters = plan.counters()
    assert counters["fallbacks"] == 0
    assert 0 < counters["average_us"] < 60e6
    wrong = X.copy()
    wrong.flat[0] = fault(KILL, "alpha")
    plan(wrong)
    assert plan.counters()["fallbacks"] == 1
    assert plan.counters()["misses"] == {"recorded": 2}


def test_events_come_by_category_and_level(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """Kept, logged under the category's name, and given as JSON; "off" has none."""
    caplog.set_level(logging.DEBUG, "layerzero.plan")
    quiet, some, full = (lz.plan(block, diagnostics=level) for level in ("off", "summary", {"runs": "full"}))
    for plan in (quiet, some, full):
        settled(plan, X)
    assert quiet.diagnostics() == []
    assert [event.message for event in some.diagnostics("phase")] == ["recorded", "recorded", "laid out"]
    assert {event.category for event in some.diagnostics()} == {"phase"}
    runs = full.diagnostics("runs")
    assert len(runs) == full.counters()["replays"]
    assert all(event.facts["us"] > 0 for event in runs)
    detailed = settled(lz.plan(own, diagnostics="detailed"), X, messages=2)
    assert detailed.diagnostics("memory")[0].facts["peak_bytes"] == detailed.explain().peak_bytes
    assert detailed.diagnostics("links")[-1].facts["kernels"] in (["alpha.silu"], ["alpha.silu", "alpha.matmul"])
    wrong = X.copy()
    wrong.flat[0] = fault(KILL, "alpha")
    caplog.clear()
    some(wrong)
    (event,) = some.diagnostics("fallback")
    assert "step 0, silu at planned.py:" in event.message
    assert event.facts["attempts"] == 1
    (record,) = [one for one in caplog.records if one.name == "layerzero.plan.fallback"]
    assert record.levelno == logging.WARNING
    assert record.facts == event.facts  # type: ignore[attr-defined]
    lines = [json.loads(line) for line in some.diagnostics_json().splitlines()]
    assert [line["category"] for line in lines] == ["phase", "phase", "phase", "fallback"]
    for wrongly, why in (
        ("loud", "is 'loud'"),
        ({"phase": 3}, "has 'phase': 3"),
        ({"x": "full"}, "has 'x'"),
        (3, "is 3"),
    ):
        with pytest.raises(lz.InvalidArgument, match=why):
            lz.plan(block, diagnostics=wrongly)  # type: ignore[arg-type]
    with pytest.raises(lz.InvalidArgument, match="category is 'x'"):
        some.diagnostics("x")


def test_the_debugger_compares_each_step_with_another_backend(site: Site) -> None:
    """Its kernel and how far off it is; why there is nothing to compare, where there is not."""
    plan = settled(lz.plan(own), X, messages=2)
    seen = list(plan.debug(X, compare="beta"))
    assert [step.name for step, _, _ in seen] == ["silu", "matmul", "iadd", "silu"]
    agree(seen[0][1][0], silu(X))
    assert [other.kernel_id for *_, other in seen] == ["beta.silu", "beta.matmul", "", "beta.silu"]
    assert [other.problem for *_, other in seen] == ["", "", "a step of own code", ""]
    assert all(other.difference < 1e-6 for *_, other in seen)
    assert all(other.us > 0 for *_, other in seen if other.kernel_id)
    (_, _, other), *_ = plan.debug(X, compare="nobody")
    assert other.problem
    counting = X.copy()
    counting.flat[0] = fault(COUNT)  # each call of a worker gives another number
    for _ in range(3):
        plan(counting)
    (_, _, other), *_ = plan.debug(counting, compare="beta")
    assert "differ by" in other.problem
    with pytest.raises(lz.InvalidArgument, match="the name of a backend"):
        list(plan.debug(X, compare=3))  # type: ignore[arg-type]
    agree(plan(X), silu(expected_sum()))


def expected_sum() -> Any:
    return silu(X) @ W + X


def test_a_plan_that_never_gets_leases_does_not_wait_for_them_for_ever(site: Site) -> None:
    """Candidates that cannot cross as one are passed over, also when none was compared before."""
    site.set_policy("shadow_rate: 1.0\nrules:\n- prefer: [beta.matmul]\n  bonus: 100\n")
    wait_until(lambda: lz.explain(lz.matmul, X, W).backend == "beta")
    plan = lz.plan(block)
    for seed in range(3 * 64 + 12):
        x = np.random.default_rng(seed).standard_normal((4, 6)).astype(np.float32)
        agree(plan(x), expected(x))
    assert plan.explain().messages == 0
    assert "each call its own best for all" in plan.explain().choice
