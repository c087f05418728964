"""What a plan chose for the whole, kept on disk: reused by the next process, and by nobody whom it does not fit."""

from __future__ import annotations

import os
import signal
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.process.harness import Site, wait_until
from tests.process.planned import X, agree, block, expected, settled, some, two_ready
from tests.process.test_cli import data
from tests.process.test_cli import lz as lz_command

import layerzero as lz

ANOTHER = """
import sys
from tests.process.planned import X, block
lz.connect(runtime_dir=sys.argv[1])
plan = lz.plan(block)
for _ in range(3):
    plan(X)
told = plan.explain()
print(plan.phase, plan.counters()["choices"], told.choice, sep="|")
print(*told.notes, sep="|")
"""


@pytest.fixture
def site(new_site: Callable[..., Site]) -> Site:
    """Each call's own best crosses to another worker three times here."""
    made = two_ready(new_site)
    made.set_policy("rules:\n- prefer: [beta.matmul]\n  bonus: 100\n")
    wait_until(lambda: lz.explain(lz.matmul, X, X.T.copy()).backend == "beta")
    return made


def folder(site: Site) -> Path:
    return Path(site.environ["LAYERZERO_PERF_DB"]).with_suffix(".plans")


def chosen(plan: lz.ExecutionPlan) -> lz.ExecutionPlan:
    """Run until a backend is chosen for the whole."""

    def is_chosen() -> bool:
        agree(plan(X), expected(X))
        return " for all (" in plan.explain().choice

    wait_until(is_chosen)
    return plan


def another(site: Site) -> list[str]:
    with site.python(ANOTHER) as child:
        assert child.stdout is not None
        shown = child.stdout.read().splitlines()
    assert child.returncode == 0
    return shown


def test_the_next_process_times_nothing(site: Site) -> None:
    """It is FROZEN after its two recordings, with the choice and the times of the process before."""
    first = chosen(lz.plan(block))
    assert first.counters()["choices"] == {"kept": 1}
    assert "kept for later processes" in str(first.explain())
    shown, notes = another(site)
    assert shown == f"FROZEN|{{'reused': 1}}|{first.explain().choice}"
    assert "the choice was made and kept 0.0 hours ago" in notes
    again = lz.plan(block)
    for seed in range(4):
        agree(again(some(seed)), expected(some(seed)))
    assert again.explain().choice == first.explain().choice
    messages = 1 if "each call its own best for all" not in again.explain().choice else 3
    settled(again, X, messages=messages)
    assert lz.plan(block, keep_choice=False).counters()["choices"] == {}


def test_a_plan_that_keeps_none_finds_none(site: Site) -> None:
    """Nor does another function, another shape, or another policy find it."""
    chosen(lz.plan(block, keep_choice=False))
    assert not folder(site).exists()
    chosen(lz.plan(block))
    (kept,) = folder(site).iterdir()

    def is_found(function: Callable[..., Any], x: Any) -> bool:
        plan = lz.plan(function)
        plan(x)
        plan(x)
        return "reused" in plan.counters()["choices"]

    assert is_found(block, X)
    assert not is_found(lambda x: block(x) + 0, X)
    assert not is_found(block, some(0, 5, 6))
    with lz.prefer("gamma"):
        assert not is_found(block, X)
    site.set_policy("rules:\n- prefer: [beta.matmul]\n  bonus: 101\n")
    wait_until(lambda: not is_found(block, X))
    assert kept.exists()


def test_a_file_that_is_damaged_is_ignored_said_and_replaced(site: Site) -> None:
    chosen(lz.plan(block))
    (kept,) = folder(site).iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    plan = chosen(lz.plan(block))
    assert plan.counters()["choices"] == {"ignored": 1, "kept": 1}
    assert "ignored: its bytes are not those that were written" in str(plan.explain())
    assert another(site)[0].startswith("FROZEN|{'reused': 1}|")
    kept.chmod(0o666)
    assert "another user can have written it" in another(site)[1]


def test_a_function_of_no_file_keeps_nothing_and_says_so(site: Site) -> None:
    typed = types.FunctionType(block.__code__.replace(co_filename="<typed>"), block.__globals__)
    plan = chosen(lz.plan(typed))
    assert "the choice is not kept: the function's source is in no file that can be read" in str(plan.explain())
    assert not folder(site).exists()


def test_a_broker_that_dies_while_candidates_are_timed_costs_no_more_than_that(site: Site) -> None:
    """The runs go on with the next broker, which is told."""
    plan = lz.plan(block)
    for seed in range(3):
        agree(plan(some(seed)), expected(some(seed)))
    pid = site.broker_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)

    def is_said() -> bool:
        try:
            plan(X)
        except lz.BrokerLost:
            return True
        return False

    wait_until(is_said)
    site.connect()
    chosen(plan)
    assert plan.counters()["choices"] == {"kept": 1}


def test_a_choice_that_the_broker_cannot_be_told_is_said(site: Site) -> None:
    """The policy is another one by then."""
    plan = lz.plan(block)
    for seed in range(3):
        agree(plan(some(seed)), expected(some(seed)))
    before = lz.policy()["hash"]
    site.set_policy("rules:\n- prefer: [beta.matmul]\n  bonus: 101\n")
    wait_until(lambda: lz.policy()["hash"] != before)
    chosen(plan)
    assert "the choice is not kept: the policy has changed since" in str(plan.explain())
    assert not folder(site).exists()


def test_lz_cache_lists_and_clears_them(site: Site) -> None:
    first = chosen(lz.plan(block))
    told = data(lz_command(site, "cache", "list", "--json"))["plan_choices"]
    (row,) = told["plans"]
    assert told["folder"] == str(folder(site))
    assert row["what"] == "block(float32[4, 6])"
    assert row["us"].keys() == {"", "alpha", "beta"}
    assert f"backend: {row['chosen'] or 'each call its own best'} for all" in first.explain().choice
    shown = lz_command(site, "cache", "list").stdout
    assert f"block(float32[4, 6]): {row['chosen'] or 'each call its own best'}" in shown
    assert lz_command(site, "cache", "clear", "--yes").stdout == "removed 0 calls and 1 choice of plans\n"
    assert another(site)[0].startswith("FROZEN|{}|")
