"""What the engine makes of trials: states of cells, who is served, what is tried; and the lab that trials run in."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from layerzero.envs.build.installers import ToolFailed, Uv
from layerzero.envs.build.interpreters import host
from layerzero.envs.matrix import engine, trial
from layerzero.envs.matrix.engine import Matrix, make
from layerzero.envs.matrix.resolver import Resolved
from layerzero.envs.matrix.subjects import Subject
from layerzero.envs.matrix.trial import Lab, Stopped, attempt
from layerzero.envs.matrix.verdict import Kind, Verdict
from layerzero.ipc.errors import EnvError


class Trials:
    """Stands for trial.attempt: fails for the given groups, and remembers what it was asked."""

    def __init__(self, plain: dict[str, Kind], careful: dict[str, Kind] | None = None) -> None:
        self.fails = {False: plain, True: careful or {}}
        self.asked: list[tuple[str, bool]] = []

    def __call__(self, lab: Lab, subjects: Sequence[Subject], *, with_care: bool) -> Verdict:
        names = "".join(one.name for one in subjects)
        self.asked.append((names, with_care))
        return Verdict(self.fails[with_care].get(names, Kind.OK), subject=subjects[0].name)


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path, Uv(Path("uv-that-is-not-used")), 5.0)


def made(monkeypatch: pytest.MonkeyPatch, lab: Lab, trials: Trials, *subjects: Subject) -> Matrix:
    monkeypatch.setattr(engine, "attempt", trials)
    return make(subjects, lab, jobs=1)


A, B, C = (Subject(name, (name,)) for name in "abc")
NEEDY = Subject("n", ("n",), needs=("numpy<2",))


def test_everything_is_tried_once(monkeypatch: pytest.MonkeyPatch, lab: Lab) -> None:
    """Alone, in pairs, and the set that the cover rests on; nothing with care where nobody needs any."""
    trials = Trials({"ac": Kind.RESOLVER})
    matrix = made(monkeypatch, lab, trials, A, B, C)
    assert trials.asked == [(group, False) for group in ("a", "b", "c", "ab", "ac", "bc")]
    assert sorted(matrix.cover.groups) == [("a", "b"), ("c",)] or sorted(matrix.cover.groups) == [("a",), ("b", "c")]
    assert [cell.subjects for cell in matrix.conflicts] == [("a", "c")]


def test_care_is_tried_where_it_can_help(monkeypatch: pytest.MonkeyPatch, lab: Lab) -> None:
    """After a crash, and not after a refusal: more requirements make no resolver agree."""
    trials = Trials({"n": Kind.CRASH, "an": Kind.CRASH, "bn": Kind.RESOLVER}, {"an": Kind.RESOLVER})
    matrix = made(monkeypatch, lab, trials, A, B, NEEDY)
    assert [group for group, with_care in trials.asked if with_care] == ["n", "an"]
    assert (matrix.alone("n").state, matrix.alone("n").care) == ("care", ("numpy<2",))
    assert (matrix.cells[("a", "n")].state, matrix.cells[("a", "n")].kind) == ("conflict", Kind.CRASH)
    assert matrix.cells[("b", "n")].careful is None
    assert matrix.isolated["n"].ok


class OfNumpy1(Trials):
    """The subject `b` breaks with NumPy 2, and works where somebody asks for an older one."""

    def __call__(self, lab: Lab, subjects: Sequence[Subject], *, with_care: bool) -> Verdict:
        verdict = super().__call__(lab, subjects, with_care=with_care)
        names = [one.name for one in subjects]
        if "b" not in names or (with_care and any("numpy<2" in one.needs for one in subjects)):
            return verdict
        summary = "at import of b: ValueError: numpy.dtype size changed"
        return Verdict(Kind.STRUCT, summary, "b", missing="numpy.dtype", versions={"numpy": "2.4.6"})


def test_an_older_numpy_is_tried_where_numpy_2_is_what_breaks_a_library(
    monkeypatch: pytest.MonkeyPatch, lab: Lab
) -> None:
    """Else the conclusion is that no environment serves it, which is wrong: its metadata lacks a bound."""
    matrix = made(monkeypatch, lab, OfNumpy1({}), A, B)
    assert (matrix.alone("b").state, matrix.alone("b").care) == ("care", ("numpy<2",))
    assert (matrix.cells[("a", "b")].state, matrix.cells[("a", "b")].care) == ("care", ("numpy<2",))
    assert matrix.unserved == ()


def test_who_fails_alone_may_be_served_beside_another(monkeypatch: pytest.MonkeyPatch, lab: Lab) -> None:
    """One whose requirements keep a dependency back; who works nowhere is named and in no environment."""
    matrix = made(monkeypatch, lab, Trials(dict.fromkeys(("a", "c", "ac", "bc"), Kind.CRASH)), A, B, C)
    assert matrix.cover.groups == (("a", "b"),)
    assert matrix.unserved == ("c",)
    assert not matrix.isolated["c"].ok


def test_a_fault_of_the_machine_is_no_verdict(monkeypatch: pytest.MonkeyPatch, lab: Lab) -> None:
    """Without a network every pair would look like a conflict."""

    def fail(lab: Lab, subjects: Sequence[Subject], *, with_care: bool) -> Verdict:
        raise EnvError("no network", env="", cause="no network", repair="")

    monkeypatch.setattr(engine, "attempt", fail)
    with pytest.raises(EnvError, match="no network"):
        make([A, B], lab)


def test_different_pythons_share_nothing(lab: Lab) -> None:
    """Known before anything is resolved."""
    other = Subject("old", ("old",), python="3.10")
    verdict = attempt(lab, [A, other], with_care=False)
    assert (verdict.kind, verdict.summary) == (Kind.PYTHON, "a needs Python 3.11; old needs Python 3.10")


def test_a_lab_removes_what_a_killed_one_left(lab: Lab, tmp_path: Path) -> None:
    """Nobody holds its lock any more."""
    left = tmp_path / "matrix" / "work" / "1-2"
    (left / "lib").mkdir(parents=True)
    with lab:
        assert not left.exists()
        assert lab.folder.exists()
    assert [path.name for path in (tmp_path / "matrix" / "work").rglob("*")] == [".locks"]


def test_a_stopped_lab_starts_nothing(lab: Lab) -> None:
    """Ctrl-C between two steps of a trial."""
    with lab:
        lab.stop()
        with pytest.raises(Stopped):
            lab.run([sys.executable, "-c", "pass"], {})


def test_a_process_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    """With a time limit a hang is a verdict."""
    with Lab(tmp_path, Uv(Path("uv-that-is-not-used")), 0.5) as lab:
        ended = lab.run([sys.executable, "-c", "import threading; threading.Event().wait()"], {})
    assert ended.code is None


def test_what_may_be_the_machines_fault_is_tried_again(monkeypatch: pytest.MonkeyPatch, lab: Lab) -> None:
    """A download that failed once would be a conflict for ever."""
    hung = {"order": ["a"], "kind": "hang", "summary": ""}
    passing = [
        Verdict(Kind.INSTALL, "no route to host"),
        Verdict(Kind.HANG),
        Verdict(Kind.CRASH, missing="SIGKILL"),  # as of the kernel, when memory is short
        Verdict(Kind.FILES, orders=[hung]),
    ]
    verdicts = [*passing, Verdict(Kind.CRASH, missing="SIGSEGV"), Verdict(Kind.OK)]
    monkeypatch.setattr(trial, "resolve", lambda tool, requirements, python: Resolved("a==1"))
    monkeypatch.setattr(trial, "_try", lambda *_: verdicts.pop(0))
    kinds = [attempt(lab, [A], with_care=False).kind for _ in range(6)]
    assert kinds == [*(one.kind for one in passing), Kind.CRASH, Kind.CRASH]


def test_a_stopped_lab_ends_installers(tmp_path: Path) -> None:
    """Of torch it takes minutes, and SIGTERM reaches us alone."""
    pipe, hung = tmp_path / "pipe", tmp_path / "uv"
    os.mkfifo(pipe)
    hung.write_text(f"#!/bin/sh\necho started > {pipe}\nexec sleep 600\n")
    hung.chmod(0o700)

    def install() -> None:
        with lab.environment(Resolved("a==1"), host()):
            pass

    with Lab(tmp_path / "store", Uv(hung), 5.0) as lab, ThreadPoolExecutor(1) as pool:
        trying = pool.submit(install)
        assert pipe.read_text() == "started\n"
        lab.stop()
        with pytest.raises(ToolFailed):
            trying.result(60)
