"""From what a process printed and how it ended to the kind of conflict."""

from __future__ import annotations

from typing import Any

import pytest

from layerzero.envs.matrix.resolver import Refused
from layerzero.envs.matrix.verdict import MEANING, Kind, Verdict, classify, judge

IMPORT = {"step": "import", "subject": "a", "again": False}
OP = {"step": "op", "subject": "a", "again": False}
LATER = {"step": "op", "subject": "b", "again": True}
DONE: dict[str, Any] = {"ok": True, "seconds": 0.1}
END = {"step": "end"}


def failed(kind: str, message: str) -> dict[str, Any]:
    return {"ok": False, "error": {"type": kind, "message": message, "traceback": "Traceback ..."}}


def verdict(*lines: dict[str, Any], death: str = "", timeout_s: float | None = None, err: str = "") -> Verdict:
    return judge(lines, death=death, timeout_s=timeout_s, err=err)


@pytest.mark.parametrize(
    ("kind", "message", "expected", "missing"),
    [
        ("ValueError", "numpy.dtype size changed, may indicate binary incompatibility", Kind.STRUCT, "numpy.dtype"),
        ("ImportError", "numpy.core.umath failed to import", Kind.SYMBOL, "numpy.core.umath"),
        ("AttributeError", "module 'numpy' has no attribute 'trapz'", Kind.SYMBOL, "trapz"),
        ("ImportError", "x.so: undefined symbol: _ZN3c105Error", Kind.SYMBOL, "_ZN3c105Error"),
        ("OSError", "libcudart.so.12: cannot open shared object file: No such file", Kind.SYMBOL, "libcudart.so.12"),
        ("ModuleNotFoundError", "No module named 'triton'", Kind.SYMBOL, "triton"),
        ("ImportError", "cannot import name 'foo' from 'bar'", Kind.SYMBOL, "foo"),
        ("TypeError", "Descriptors cannot be created directly.\nIf this call came from", Kind.VERSION, ""),
        ("ImportError", "zentorch is only compatible with 2.14.x", Kind.VERSION, ""),
        ("value", "1 of 4 values are wrong", Kind.WRONG, ""),
        ("wrote", "3 of the 4 values of its input 'right'", Kind.WRONG, ""),
        ("RuntimeError", "something else", Kind.ERROR, ""),
    ],
)
def test_each_error_has_its_kind(kind: str, message: str, expected: Kind, missing: str) -> None:
    """The messages are those of real libraries; what is missing is named where they name it."""
    assert classify({"type": kind, "message": message}) == (expected, missing)


def test_a_run_to_the_end_is_ok() -> None:
    """The only way to be ok is to say so at the end."""
    assert verdict(IMPORT, DONE, OP, DONE, END).ok


def test_a_signal_names_the_step_in_which_it_struck() -> None:
    """The last line that was printed tells; the evidence is stderr, where Python's stacks are."""
    found = verdict(IMPORT, DONE, OP, death="SIGSEGV", err="Fatal Python error")
    assert found == Verdict(Kind.CRASH, "died of SIGSEGV in the first op of a", "a", "SIGSEGV", "Fatal Python error")


def test_the_first_failure_counts() -> None:
    """What comes after it may be a consequence, a crash included."""
    wrote, value = failed("wrote", "3 of the 4 values"), failed("value", "4 of 4 values are wrong")
    found = verdict(IMPORT, DONE, OP, wrote, LATER, value, LATER, death="SIGABRT", err="")
    assert (found.kind, found.subject, found.summary) == (
        Kind.WRONG,
        "a",
        "in the first op of a: it wrote to 3 of the 4 values",
    )
    assert found.evidence.splitlines()[1:] == [
        "then in a later op of b: 4 of 4 values are wrong",
        "then died of SIGABRT in a later op of b",
    ]


def test_a_death_after_all_steps_is_a_crash() -> None:
    """Libraries that clash in their destructors die at exit."""
    assert verdict(IMPORT, DONE, OP, DONE, END, death="SIGABRT").summary == "died of SIGABRT at exit"


def test_no_end_in_time_is_a_hang() -> None:
    """The limit is named, since another may do."""
    assert verdict(IMPORT, timeout_s=60.0) == Verdict(Kind.HANG, "no end within 60 s at import of a", "a")


def test_an_end_without_a_word_is_no_success() -> None:
    """os._exit(0) in a library must not look like a pass."""
    assert verdict(IMPORT, DONE, OP).kind is Kind.ERROR
    assert verdict().summary == "the process ended before the first import"


def test_verdicts_survive_being_kept() -> None:
    """A kept cell is shown as a new one."""
    found = Verdict(Kind.CRASH, "died", "a", "SIGSEGV", "stack", ({"order": ["a"], "kind": "crash"},), {"numpy": "2"})
    assert Verdict.from_json(found.to_json()).to_json() == found.to_json()


def test_every_kind_has_a_meaning() -> None:
    """The legend must not lack one."""
    assert set(MEANING) == set(Kind)


def test_a_refusal_in_one_line() -> None:
    """uv draws arrows and wraps lines; the conclusion is what a cell shows."""
    cross = "\N{MULTIPLICATION SIGN}"
    said = (
        f"  {cross} No solution found when resolving dependencies:\n  ╰─▶ Because you require a==1 and\n      a==2, no."
    )
    assert Refused(said).summary == "Because you require a==1 and a==2, no."
