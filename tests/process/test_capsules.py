"""Calls whose worker died or hung are kept: what is in a capsule, who can read it, and that none costs a call anything
else. tests/process/test_capsule_commands.py has what is done with one."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import stat
from pathlib import Path

import numpy as np
import pytest
from tests.backends.toy import EXIT0, HANG, RAISE, SEGV
from tests.process.capsule_site import Sites, capsules, crash, deadly, kept, new, only
from tests.process.harness import Site, made_on, wait_until
from tests.process.test_cli import FAILED, data, lz

import layerzero as lz_
from layerzero.client.capsules import form, store, taking
from layerzero.client.tools import replay

__all__ = ["capsules", "kept", "new"]

# --- what is kept


def test_a_crash_is_kept_with_its_arguments_and_named_in_the_report(new: Sites, capsules: Path) -> None:
    site = new()
    site.connect()
    x = deadly(SEGV, 3, 5)
    crash(x)
    capsule = only(capsules)
    (note,) = [one for one in lz_.last_report().notes if "capsule" in one]
    assert note.endswith(f"capsule of the failure: lz replay {capsule.name}")
    assert (capsule.op, capsule.failed.backend, capsule.failed.exit_signal) == ("silu", "alpha", signal.SIGSEGV)
    assert "SIGSEGV" in capsule.name
    assert capsule.served_by == lz_.last_report().kernel_id
    (memory,) = form.memory(capsules / capsule.name, capsule)
    assert memory == x.tobytes()
    assert capsule.facts["versions"] == {"toy": "1.0"}
    for path in [capsules, capsules / capsule.name]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_the_traceback_of_a_call_that_failed_names_its_capsule(new: Sites, capsules: Path) -> None:
    """The error itself says that a worker died, and not what one may do now."""
    new().connect()
    with pytest.raises(lz_.BackendError, match="worker died") as caught:
        lz_.silu(deadly(SEGV, 3, 5), backend="alpha")
    assert caught.value.__notes__ == [f"capsule of the failure: lz replay {only(capsules).name}"]


@pytest.mark.parametrize(
    ("mode", "rows", "has_data"), [("shapes", 3, False), ("small", 3, True), ("small", 9000, False)]
)
def test_what_is_kept_is_what_was_asked_for(new: Sites, capsules: Path, mode: str, rows: int, has_data: bool) -> None:
    """No byte of an argument is on disk unless somebody wanted it there."""
    site = new(mode)
    site.connect()
    crash(deadly(SEGV, rows, 64))
    capsule = only(capsules)
    assert capsule.has_data == has_data
    assert any(path.suffix == ".bin" for path in (capsules / capsule.name).iterdir()) == has_data
    assert capsule.arguments[0].spec.shape == (rows, 64)


def test_by_default_shapes_are_kept_and_off_keeps_nothing(new: Sites, capsules: Path) -> None:
    site = new()
    del site.environ["LAYERZERO_CAPSULES"]
    site.connect()
    crash(deadly(SEGV, 4, 4))
    assert not only(capsules).has_data
    lz_.disconnect()
    site.environ["LAYERZERO_CAPSULES"] = "off"
    site.connect()
    crash(deadly(EXIT0, 4, 4))
    assert len(store.names(capsules)) == 1


def test_a_misspelt_mode_is_refused_with_those_that_there_are(new: Sites) -> None:
    with pytest.raises(lz_.ConfigError, match="LAYERZERO_CAPSULES: 'ful'; allowed: off, shapes, small, full"):
        new("ful").connect()


def test_an_exception_of_a_kernel_needs_no_capsule(new: Sites, capsules: Path) -> None:
    """It tells all by itself, and its worker lives."""
    site = new()
    site.connect()
    crash(deadly(RAISE, 4, 4))
    assert store.names(capsules) == []


def test_a_call_that_nobody_can_serve_is_kept_and_its_error_names_it(new: Sites, capsules: Path) -> None:
    site = new()
    site.connect()
    with pytest.raises(lz_.BackendError) as error:
        lz_.silu(deadly(SEGV, 4, 4), backend="alpha")
    capsule = only(capsules)
    assert capsule.served_by == ""
    assert capsule.name in str(error.value.report)  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", ["broker", "express"])
def test_a_call_that_hangs_is_kept_with_the_stacks_of_its_worker(
    new: Sites, capsules: Path, tmp_path: Path, path: str
) -> None:
    """By a py-spy that the broker finds; they are taken before the deadline, and nobody waits for them."""
    spy = tmp_path / "bin" / "py-spy"
    spy.parent.mkdir()
    spy.write_text('#!/bin/sh\necho "spied: $*"\n')
    spy.chmod(0o755)
    site = new(timeout_s=0.5, stacks_after_s=0.1, express=path == "express")
    site.environ["PATH"] = f"{spy.parent}{os.pathsep}{os.environ['PATH']}"
    site.connect()
    site.wait_ready("alpha", "beta")
    x = deadly(HANG, 4, 4)
    made_on(path, lambda: lz_.silu(np.zeros_like(x), backend="alpha"))
    with pytest.raises(lz_.DeadlineExceeded):
        lz_.silu(x, backend="alpha")
    capsule = only(capsules)
    assert capsule.failed.kernel_id.startswith("alpha.")
    assert (capsule.failed.what, "deadline" in capsule.name) == (
        "deadline",
        True,
    )  # not the signal that it was killed by
    said = (capsules / capsule.name / form.LOG).read_text()
    assert re.search(
        r"its last call had taken 0\.\d s; stacks of its Python threads then, by py-spy:\nspied: dump", said
    )


def test_a_failure_like_one_of_before_is_kept_once(new: Sites, capsules: Path) -> None:
    """A crash loop must not fill the disk; other shapes and other ends are others."""
    site = new(restart_budget=1000, backoff_s=0.01, backoff_max_s=0.01)
    site.connect()
    for x in (*[deadly(SEGV, 4, 4)] * 3, deadly(SEGV, 4, 5), deadly(EXIT0, 4, 4)):
        with pytest.raises(lz_.BackendError):
            lz_.silu(x, backend="alpha")
    assert len(store.names(capsules)) == 3


def test_a_folder_that_cannot_be_written_costs_no_call_and_is_said(new: Sites, capsules: Path) -> None:
    site = new()
    site.connect()
    capsules.write_text("in the way")
    crash(deadly(SEGV, 4, 4))
    assert any("no capsule of the failure was kept: " in one for one in lz_.last_report().notes)


def test_memory_is_kept_as_kernels_met_it(new: Sites, capsules: Path) -> None:
    """Strides of a view in shared memory; a dense copy of one that was copied for them."""
    site = new()
    site.connect()
    shared = lz_.empty((6, 8), "float32")
    shared[...] = deadly(SEGV, 6, 8)
    crash(shared[:, ::2])
    first = only(capsules)
    assert first.arguments[0].spec.strides == (8, 2)
    store.remove(capsules / first.name)
    with pytest.raises(lz_.BackendError):
        lz_.silu(
            deadly(EXIT0, 6, 8, backend="beta")[:, ::2], backend="beta" if first.failed.backend == "alpha" else "alpha"
        )
    second = only(capsules)
    assert second.arguments[0].spec.is_contiguous
    (memory,) = form.memory(capsules / second.name, second)
    assert memory == np.ascontiguousarray(deadly(EXIT0, 6, 8, backend="beta")[:, ::2]).tobytes()


@pytest.mark.parametrize("is_shared", [True, False])
def test_bytes_are_those_of_the_call_whatever_the_program_writes_then(
    new: Sites, capsules: Path, *, is_shared: bool
) -> None:
    """They are in their file before the answer; what they are in a hash is said later."""
    site = new()
    site.connect()
    x = lz_.share(deadly(SEGV, 512, 512)) if is_shared else deadly(SEGV, 512, 512)
    before = x.tobytes()
    crash(x)
    x[...] = 0
    (name,) = store.names(capsules)
    assert form.memory(capsules / name, form.read(capsules / name)) == [before]
    capsule = only(capsules)
    assert [one.sha256 for one in capsule.segments] == [hashlib.sha256(before).hexdigest()]
    assert form.memory(capsules / name, capsule) == [before]


def test_a_capsule_whose_program_was_killed_before_it_was_hashed_is_whole(
    kept: tuple[Site, form.Capsule], capsules: Path
) -> None:
    site, capsule = kept
    path = capsules / capsule.name / form.CALL
    bare = [{**vars(one), "sha256": ""} for one in capsule.segments]
    path.write_text(json.dumps({**json.loads(path.read_text()), "segments": bare}))
    rows = data(lz(site, "replay", capsule.name, "--json"), FAILED)["backends"]
    assert rows[0]["runs"] == {f"signal {int(signal.SIGSEGV)}": 1}


def test_two_arguments_of_the_same_memory_are_pieces_of_their_own_where_kernels_met_copies(
    new: Sites, capsules: Path
) -> None:
    site = new()
    site.connect()
    site.wait_ready("alpha")
    square = np.arange(16, dtype=np.float32).reshape(4, 4)
    os.kill(site.backend("alpha")["pid"], signal.SIGSTOP)
    with pytest.raises(lz_.DeadlineExceeded):
        lz_.matmul(square, square[1:3].T, backend="alpha", timeout_s=0.3)
    capsule = only(capsules)
    assert [(a.segment, a.start) for a in capsule.arguments] in ([(0, 0), (1, 0)], [(1, 0), (0, 0)])
    found = form.memory(capsules / capsule.name, capsule)
    kept = [found[a.segment] for a in capsule.arguments]
    assert kept == [square.tobytes(), np.ascontiguousarray(square[1:3].T).tobytes()]


def last_calls(capsule: form.Capsule) -> list[str]:
    """Without times."""
    found = capsule.facts[form.LAST_CALLS]
    assert isinstance(found, list), found
    assert all(" s before: " in line for line in found)
    return [line.partition(" s before: ")[2].partition(" in ")[0] for line in found]


@pytest.mark.parametrize("is_compiled", [True, False])
def test_the_last_calls_of_its_worker_are_told(new: Sites, capsules: Path, *, is_compiled: bool) -> None:
    """By the broker and on a lane, with other extents, in a plan, and one that raised: op, shapes, dtypes, how each
    ended; of a worker with what is compiled, and without. No number of an argument, nor a text."""
    site = new("shapes")
    if not is_compiled:
        site.environ["LAYERZERO_NO_C"] = "1"
    site.connect()
    site.wait_ready("alpha", "beta")
    x = np.ones(100, np.float32)
    made_on("express", lambda: lz_.silu(x, backend="alpha"))
    lz_.silu(x[:77].copy(), backend="alpha")
    assert lz_.last_report().path == "express", "as a neighbour"
    with pytest.raises(lz_.BackendError):
        lz_.silu(deadly(RAISE, 100), backend="alpha")
    plan = lz_.plan(lambda x: lz_.silu(lz_.silu(x, backend="alpha"), backend="alpha"))
    wait_until(lambda: plan(x) is not None and [run.how for run in plan.timings()] == ["chain", "chain"])
    lz_.null(backend="alpha")
    crash(deadly(SEGV, 5, 2))
    found = last_calls(only(capsules))
    assert 8 <= len(found) <= 64
    silu = "silu(100:float32) -> 100:float32, alpha.silu"
    assert found[-1] == "silu(5x2:float32) -> 5x2:float32, alpha.silu: had not ended"
    assert found[-2] == "null(), alpha.null: ok"
    assert f"{silu}: ok" in found
    assert f"{silu}: raised" in found
    assert "silu(77:float32) -> 77:float32, alpha.silu: ok" in found
    assert sum(", in a plan" in line for line in only(capsules).facts[form.LAST_CALLS]) >= 2
    shown = lz(site, "capsule", "show", only(capsules).name)
    assert f"its worker's last calls, before its end, 12 of {len(found)}; --json has all:" in shown.stdout
    assert f"{found[-1]}\n" in shown.stdout


def test_a_call_that_was_not_its_workers_first_is_told_of_a_worker_that_was_killed(new: Sites, capsules: Path) -> None:
    site = new("shapes")
    site.connect()
    site.wait_ready("alpha")
    lz_.null(backend="alpha")
    os.kill(site.backend("alpha")["pid"], signal.SIGSTOP)
    with pytest.raises(lz_.DeadlineExceeded):
        lz_.silu(np.ones((2, 2), np.float32), backend="alpha", timeout_s=0.3)
    assert last_calls(only(capsules))[-1:] == ["null(), alpha.null: ok"]


def test_the_oldest_go_when_there_are_too_many(tmp_path: Path) -> None:
    for number in range(store.MOST + 3):
        (tmp_path / f"2026{number:04}").mkdir()
        (tmp_path / f"2026{number:04}" / "x").write_bytes(bytes(10))
    store.keep_within(tmp_path, 1 << 20)
    assert store.names(tmp_path)[0] == "20260003"
    store.keep_within(tmp_path, 35)
    assert store.names(tmp_path) == [f"2026{number:04}" for number in range(store.MOST, store.MOST + 3)]


def test_what_is_half_removed_or_half_made_goes_with_the_next_one(tmp_path: Path) -> None:
    """By whoever was interrupted; not what may still be written. Two may remove the same one."""
    for name in (".2026.gone", ".2027", ".2028", "2029"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "memory-0.bin").write_bytes(bytes(10))
        if name != ".2028":
            os.utime(tmp_path / name, (0, 0))
    store.keep_within(tmp_path, 1 << 20)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".2028", "2029"]
    for _ in range(2):
        store.remove(tmp_path / "2029")
    assert store.names(tmp_path) == []


def test_modes_are_read_as_they_are_written() -> None:
    assert taking.mode_of({}) == "shapes"
    assert taking.mode_of({"LAYERZERO_CAPSULES": " FULL "}) == "full"


def test_arguments_are_as_the_caller_gave_them(new: Sites, capsules: Path) -> None:
    """Kernels get them in another form, as this vector as a matrix; the call that is made again is the caller's."""
    site = new()
    site.connect()
    site.wait_ready("alpha")
    vector, matrix = np.arange(3, dtype=np.float32), np.ones((3, 2), np.float32)
    lz_.matmul(vector, matrix, backend="alpha")
    os.kill(site.backend("alpha")["pid"], signal.SIGSTOP)
    with pytest.raises(lz_.DeadlineExceeded):
        lz_.matmul(vector, lz_.share(matrix).T.copy().T, backend="alpha", timeout_s=0.3)
    kept = only(capsules)
    assert [(a.name, a.spec.shape) for a in kept.arguments] == [("a", (3,)), ("b", (3, 2))]
    again = replay.request_of(kept.op, kept.params, replay.lay_out(kept.op, kept.arguments, kept.segments,
                              form.memory(capsules / kept.name, kept), 0), None, None)  # fmt: skip
    np.testing.assert_array_equal(again.args[0], vector)
    np.testing.assert_array_equal(again.args[1], matrix)
