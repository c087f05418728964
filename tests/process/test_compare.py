"""lz.compare and `lz compare` with two versions of a toy backend, of which one is wrong, raises or dies where asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.backends.versions import DIES, FAULTY, RAISES, WRONG
from tests.process.harness import Site, wait_until
from tests.process.test_cli import data
from tests.process.test_cli import lz as command

import layerzero as lz
from layerzero.client.tools.compare import difference
from layerzero.client.tools.compare_report import Compared, CompareReport
from layerzero.ipc.errors import InvalidArgument

NEW = "alpha@2.1"


@pytest.fixture(scope="module")
def site(store: Path) -> Iterator[Site]:
    one = Site(store, restart_budget=1000, backoff_s=0.01, backoff_max_s=0.01)
    one.add_backend("alpha@2.0")
    one.add_backend(NEW, provider=FAULTY)
    one.add_backend("alpha@1.10")
    one.start()
    yield one
    one.stop()


@pytest.fixture
def client(site: Site) -> Iterator[Site]:
    site.connect().ask("reset")
    yield site
    lz.disconnect()


def of(first: float) -> Any:
    return np.full((4, 8), first, np.float32)


def only(report: CompareReport) -> Compared:
    (row,) = report.rows
    return row


def test_a_version_that_is_right_is_within_what_is_allowed(client: Site) -> None:
    report = lz.compare("silu", of(1.0), backends=["alpha", NEW], budget_s=0.2)
    row = only(report)
    assert (row.baseline, row.backend, row.kernel_id, row.calls) == ("alpha", NEW, f"{NEW}.silu", 1)
    assert row.error is not None
    assert row.error <= row.allowed
    assert row.speedup is not None
    assert report.is_equal
    assert "alpha@2.1 beside alpha" in str(report)


def test_a_version_that_is_wrong_on_these_very_arrays_is_found(client: Site) -> None:
    """Random arrays of the same shapes would not have told."""
    report = lz.compare(lz.silu, of(WRONG), backends=["alpha", NEW, "beta"], budget_s=0.2)
    rows = {row.backend: row for row in report.rows}
    silu = WRONG / (1 + np.exp(-WRONG))
    assert rows[NEW].error == pytest.approx(0.25 * silu, rel=1e-3)
    assert (rows[NEW].is_beyond, rows["beta"].is_beyond, report.is_equal) == (True, False, False)
    assert "1 of 2 rows beyond what is allowed" in report.headline


@pytest.mark.parametrize(("first", "code"), [(RAISES, "BACKEND_ERROR"), (DIES, "BACKEND_ERROR")])
def test_a_version_that_fails_is_a_row_that_says_so(client: Site, first: float, code: str) -> None:
    row = only(report := lz.compare("silu", of(first), backends=["alpha", NEW], budget_s=0.2))
    assert row.calls == 0
    assert [NEW in text and code in text for text in row.failures] == [True]
    assert not report.is_equal


def test_one_backend_is_compared_with_what_would_serve(client: Site) -> None:
    assert only(lz.compare("silu", of(1.0), backends=[NEW], budget_s=0.2)).baseline == "alpha"


def test_a_series_is_its_newest_version(client: Site) -> None:
    """By numbers: 1.10 is before 2.0."""
    rows = lz.compare("silu", of(1.0), backends=["beta", "alpha@2", "alpha@1"], budget_s=0.1).rows
    assert [row.backend for row in rows] == [NEW, "alpha@1.10"]


def test_an_op_that_a_version_has_not_is_a_row_that_says_so(client: Site) -> None:
    row = only(lz.compare("matmul", of(1.0), of(1.0).T, backends=["alpha", NEW], budget_s=0.1))
    assert any("OP_UNSUPPORTED" in text for text in row.failures)


def test_a_function_is_run_on_each_backend_alone(client: Site) -> None:
    def program(x: Any) -> Any:
        return {"y": lz.silu(x), "count": 3, "more": (lz.silu(x + 1),)}

    good = lz.compare(program, of(1.0), backends=["alpha", NEW], budget_s=0.1)
    assert (only(good).op, good.is_equal) == ("program", True)
    assert only(lz.compare(program, of(WRONG), backends=["alpha", NEW], budget_s=0.1)).is_beyond


# --- a program that is watched


def test_calls_of_a_running_program_are_compared_as_they_come(client: Site) -> None:
    """What the program gets is what it would get without; a wrong version is seen, and a right one is not accused."""
    with lz.compare(NEW, "beta") as watched:
        for first in (1.0, WRONG, 2.0):
            result = lz.silu(of(first))
            np.testing.assert_allclose(result, first / (1 + np.exp(-first)), rtol=1e-5)
            assert (report := lz.last_report()) is not None
            assert report.backend == "alpha"
    found = watched.report()
    rows = {row.backend: row for row in found.rows}
    assert (rows[NEW].calls, rows["beta"].calls) == (3, 3)
    assert rows[NEW].error == pytest.approx(0.25 * WRONG / (1 + np.exp(-WRONG)), rel=1e-3)
    assert not rows["beta"].is_beyond
    assert rows[NEW].us is not None
    assert (found.is_complete, found.missed) == (True, {})
    # Nobody has lost a certificate by it: it was not the one that served.
    assert [one.accepted for one in lz.explain("silu", of(1.0), backend=NEW).candidates if one.backend == NEW] == [True]


def test_after_the_block_nothing_is_watched(client: Site) -> None:
    with lz.compare(NEW) as watched:
        lz.silu(of(1.0))
    lz.silu(of(2.0))
    lz.silu(of(2.0))
    assert only(watched.report()).calls == 1
    assert not lz.session().shadow.is_on


def test_a_version_that_dies_disturbs_no_call_of_the_program(client: Site) -> None:
    """On a busy machine it may still be on its way back when the next call comes, which is then not compared."""

    def call(first: float) -> None:
        np.testing.assert_allclose(lz.silu(of(first)), first / (1 + np.exp(-first)), rtol=1e-5)

    def failures() -> str:
        return "; ".join(what for row in watched.report().rows for what in row.failures)

    def is_refused() -> bool:
        call(RAISES)
        return "the new version refuses this" in failures()

    def is_compared() -> bool:
        call(1.0)
        return sum(row.calls for row in watched.report().rows) >= 1  # two may end between looks

    with lz.compare(NEW) as watched:
        call(DIES)
        wait_until(is_refused)
        wait_until(is_compared)
    assert "worker died (signal 9)" in failures()


def test_what_cannot_be_watched_is_counted(client: Site) -> None:
    caches = [lz.share(np.zeros((4, 8, 2, 4), np.float32)) for _ in range(2)]
    rows = lz.share(np.ones((1, 2, 4), np.float32))
    with lz.compare(NEW) as watched:
        lz.append_kv(rows, rows, *caches, np.zeros(1, np.int32))
    assert list(watched.report().missed) == [
        "several results, results of unknown size and ops in place are not watched"
    ]


# --- bad input


@pytest.mark.parametrize(
    ("given", "named", "said"),
    [
        (("alpha@3",), {}, "no backend is called 'alpha@3'"),
        (("alpha",), {"rate": 0}, "rate is 0; allowed: a share"),
        (("alpha",), {"dim": 1}, "not dim"),
        (("silu", of(1.0)), {"backends": []}, "backends is missing"),
        (("silu", of(1.0)), {}, "backends is missing"),
        (("silu", of(1.0)), {"backends": ["alpha"]}, "alpha would serve it itself"),
        (("silu", of(1.0)), {"backends": ["alpha", "bete"]}, "did you mean 'beta'"),
        (("silu", of(1.0)), {"backends": ["alpha", "beta"], "budget_s": 0}, "budget_s is 0"),
        ((len, [1]), {"backends": ["alpha"]}, "two backends or more"),
    ],
)
def test_bad_input_says_what_to_do(client: Site, given: Any, named: Any, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        lz.compare(*given, **named)


def test_results_of_any_form_are_compared() -> None:
    one, other = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(6, dtype=np.float32).reshape(2, 3)
    assert difference((one, {"k": [1, "a"]}), (other, {"k": [1, "a"]}))[0] == 0.0
    assert difference(one[:, ::-1], other)[0] > 0
    assert difference(one, other.astype(np.float64))[0] == np.inf
    assert difference(one, other[:1])[0] == np.inf
    assert difference([one], [other, other])[0] == np.inf
    assert difference({"a": 1}, {"a": 2})[0] == np.inf
    assert difference(np.zeros(0), np.zeros(0))[0] == 0.0


# --- the command


def test_the_command_prints_rows_and_its_exit_code_tells(client: Site) -> None:
    """For a pipeline: 0 where all agree, 1 where a backend cannot or differs."""
    same = data(command(client, "compare", "silu", "4x8:f32", "-b", f"alpha,{NEW}", "--budget", "0.2", "--json"))
    assert [(row["backend"], row["is_beyond"]) for row in same["rows"]] == [(NEW, False)]
    differs = command(
        client, "compare", "matmul", "4x8:f32", "8x4:f32", "--backends", f"alpha,{NEW}", "--budget", "0.1"
    )
    assert differs.returncode == 1
    assert "OP_UNSUPPORTED" in differs.stdout.replace("\n", "")
    assert command(client, "compare", "silu", "4x8:f32").returncode == 2
