"""Functions that stay in their worker although lift=True was asked for: why, and what has them tried again."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.process import lifted_functions as fn
from tests.process.gpu_site import close, randn, silu
from tests.process.harness import Site, wait_ended, wait_until
from tests.process.lifted_function_site import kernels, lift, path_of, refused, rows, site, soft, way
from tests.process.test_cli import lz as lz_command
from tests.soft_gpu import soft_cupy

import layerzero as lz

__all__ = ["kernels", "site", "soft", "way"]


@pytest.mark.parametrize(
    ("function", "reason", "detail"),
    [
        (fn.branching, "NOT_CAPTURABLE", "cuStreamQuery"),
        (fn.counted, "NOT_DETERMINISTIC", "two runs on the same inputs"),
        (fn.summed, "NOT_DETERMINISTIC", "two runs on the same inputs"),
        (fn.weighted, "PROOF_DIFFERS", "out is not what the library gave"),
        (fn.on_host, "NODE_UNSUPPORTED", "a function on the host"),
        (fn.otherwise, "NOT_CAPTURABLE", "allowed: one array on the GPU, which is what shapes= tells"),
        (fn.slow, "TOO_SLOW", "allowed: 1, as others' calls wait meanwhile"),
        (fn.exits, "NOT_CAPTURABLE", "SystemExit"),
    ],
)
def test_a_function_that_must_not_be_lifted_stays_in_its_worker(
    site: Site, function: Any, reason: str, detail: str
) -> None:
    """And says why, in the words that kernels have. Its calls go on, and so do those of others, which are lifted."""
    x, values = randn(16, 24)
    pid = fn.prepare()
    told = refused(function, x)
    assert told.startswith(f"{reason}: ")
    assert detail in told
    assert [row[1:] for row in rows()] == [("refused", reason)]
    close(lift(fn.silu, x), silu(values))
    assert fn.prepare() == pid


def test_several_results_and_functions_that_nobody_wants_lifted_stay(site: Site) -> None:
    x, values = randn(16, 24)
    assert refused(fn.two, x) == "ARRAYS_UNSUPPORTED: 2 results; allowed: 1"
    for _ in range(20):
        close(fn.never(x), silu(values))
    assert (path_of(fn.never), fn.never.last_report().not_lifted) == ("express", "")
    assert rows() == []


def test_calls_that_do_not_come_again_are_not_tried(site: Site) -> None:
    """Such as those with a count among their arguments: each trial runs the function ten times. Those that do, are."""
    x, values = randn(16, 24)
    for number in range(400):
        close(fn.numbered(x, number), silu(values))
        close(fn.numbered(x, -number), silu(values))
    assert path_of(fn.numbered) == "express"
    assert fn.numbered.last_report().not_lifted == "NOT_YET: calls like it come too rarely; needed: 3"
    assert rows() == []
    close(lift(fn.numbered, x, 7), silu(values))
    assert [row[1:] for row in rows()] == [("lifted", "")]


def test_one_whose_worker_ends_when_it_is_captured_is_tried_once(site: Site, tmp_path: Path) -> None:
    """Else it would end the next ones; and once more when somebody has restarted that."""
    (x, values), note = randn(16, 24), tmp_path / "note"
    told = ""

    def is_told() -> bool:
        nonlocal told
        with suppress(lz.LayerZeroError):  # until the worker that follows has the GPU
            fn.prepare()
            close(fn.leaves(x, str(note)), silu(values))
            told = fn.leaves.last_report().not_lifted
        return told.startswith(f"WORKER_FAILED: {fn.__name__}.leaves: its worker ended")

    wait_until(is_told)
    for _ in range(100):
        close(fn.leaves(x, str(note)), silu(values))
    assert note.read_text() == "left\n"
    close(lift(fn.silu, x), silu(values))
    assert lz_command(site, "restart", fn.THERE.backend).returncode == 0

    def has_left_again() -> bool:
        with suppress(lz.LayerZeroError):
            fn.prepare()
            close(fn.leaves(x, str(note)), silu(values))
        return note.read_text() == "left\n" * 2

    wait_until(has_left_again)


def why_it_hangs(site: Site, note: Path, **options: Any) -> str:
    """Call it until its report says why it stays in its worker, where it hung when it was tried; that. `options`: of
    all calls; without, none of those that wait meanwhile may fail that the next worker can serve."""
    function, prepare = fn.hangs.options(**options), fn.prepare.options(**options)
    (x, values), told = randn(16, 24), ""

    def is_told() -> bool:
        nonlocal told
        try:
            close(function(x, str(note)), silu(values))
            told = function.last_report().not_lifted
        except lz.LayerZeroError:  # the next worker got the call before the GPU: one that follows may have it
            with suppress(*[lz.DeadlineExceeded] if options else ()):
                pid = prepare()
                os.kill(pid, signal.SIGKILL)
                wait_ended(pid)
        with suppress(*[lz.DeadlineExceeded] if options else ()):
            prepare()
        return not told.startswith("NOT_YET")

    wait_until(is_told)
    for _ in range(100):
        close(function(x, str(note)), silu(values))
    assert note.read_text() == "hung\n"
    close(lift(fn.silu, x), silu(values))
    return told


@pytest.fixture
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LZ_SOFT_TRIAL_S", "2")


@pytest.mark.usefixtures("short_trials")
def test_one_whose_trial_does_not_end_is_ended_and_tried_once(site: Site, tmp_path: Path) -> None:
    """With its worker, by the broker."""
    pid = fn.prepare()
    told = why_it_hangs(site, tmp_path / "note")
    assert told.startswith(f"TOO_SLOW: {fn.__name__}.hangs: its trial had not ended after 2 s, which ended its worker;")
    assert fn.prepare() != pid


def test_one_whose_trial_ends_by_a_calls_deadline_is_tried_once(site: Site, tmp_path: Path) -> None:
    """Else each of its workers would end so."""
    told = why_it_hangs(site, tmp_path / "note", timeout_s=2.0)
    assert told.startswith(f"TOO_SLOW: {fn.__name__}.hangs: its trial had not ended by the deadline of a call that ")


def test_one_that_was_refused_is_tried_again_after_a_restart(site: Site, tmp_path: Path) -> None:
    """Of its worker, as what says why it was refused tells; without one it is not."""
    (x, values), path = randn(16, 24), tmp_path / "what"
    path.write_text("counted")
    told = refused(fn.mended, x, str(path))
    label = f"NOT_DETERMINISTIC: {fn.__name__}.mended: two runs on the same inputs"
    command = f"lz restart {fn.THERE.backend}"
    assert told.startswith(label)
    assert told.endswith(f"; it is tried again once its file has changed, or after {command}")
    assert f"  not lifted: {told}" in str(fn.mended.explain(x, str(path)))
    assert f"  not lifted: {told}" in str(fn.mended.last_report())
    path.write_text("")
    for _ in range(100):
        fn.mended(x, str(path))
    assert fn.mended.last_report().not_lifted == told
    assert lz_command(site, *command.split()[1:]).returncode == 0
    fn.prepare()
    wait_until(lambda: fn.mended(x, str(path)) is not None and path_of(fn.mended) == "lifted")
    close(fn.mended(x, str(path)), silu(values))
    assert "not lifted" not in str(fn.mended.explain(x, str(path)))


def test_one_that_was_refused_is_tried_again_once_its_file_has_changed(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the program that has imported it anew, in the same worker."""
    (x, _), file = randn(16, 24), tmp_path / "edited_functions.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    text = """
import sys
import layerzero as lz
@lz.isolated(lz.env("lifted-there", from_interpreter=sys.executable), shapes=lambda x: (x.shape, x.dtype), lift=True)
def edited(x):
    return """

    def why(does: str) -> str:
        file.write_text(text + does)
        importlib.invalidate_caches()
        module = importlib.import_module("edited_functions")
        monkeypatch.delitem(sys.modules, "edited_functions")
        return refused(module.edited, x)

    pid = fn.prepare()
    assert why("x * 2.0").startswith("NODE_UNSUPPORTED: edited_functions.edited: ")
    assert why("x * 2.0 if x.get().any() else x").startswith("NOT_CAPTURABLE: edited_functions.edited: ")
    assert why("x * 2.0").startswith("NODE_UNSUPPORTED: edited_functions.edited: ")
    assert fn.prepare() == pid


def test_without_cupti_it_stays(site: Site) -> None:
    x, values = randn(16, 24)
    assert lz_command(site, "restart", fn.THERE.backend).returncode == 0
    fn.prepare(False)
    assert refused(fn.silu, x).startswith(f"NO_CUPTI: {fn.__name__}.silu: /no/libcupti.so")
    close(fn.silu(x), silu(values))


def test_what_trial_gives_is_checked(site: Site) -> None:
    table, _ = randn(5, 4)
    index = soft_cupy.asarray(np.array([4, 0, 3], np.int64))

    def until_it_is_asked(given: Any) -> None:
        def is_raised() -> bool:
            try:
                wrong(table, index)
            except lz.InvalidArgument as exc:
                return "allowed: ranges of values that arrays of integers can have: index" in exc.message
            return False

        wrong = fn.taken.options(trial=lambda *_: given)
        wait_until(is_raised)

    for given in (
        5,
        {"table": range(5)},
        {"index": 5},
        {"index": range(0)},
        {"index": range(0, 9, 2)},
        {"it": range(5)},
    ):
        until_it_is_asked(given)
