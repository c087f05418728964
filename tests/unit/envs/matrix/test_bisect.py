"""The search for the version that broke a test, with versions that cannot be installed in its way."""

from __future__ import annotations

import random

import pytest

from layerzero.envs.matrix.bisect import Found, Outcome, Range, Tried, parse_range, search
from layerzero.envs.matrix.target import is_for_pytest
from layerzero.ipc.errors import ConfigError

LETTERS = {"p": Outcome.PASSED, "f": Outcome.FAILED, "s": Outcome.SKIPPED}


def found_in(outcomes: str) -> tuple[Found, list[int]]:
    """Search versions "0", "1", ... that pass, fail or cannot be installed; with the indices in the order of trying."""
    asked: list[int] = []

    def run(version: str) -> Tried:
        asked.append(int(version))
        return Tried(version, LETTERS[outcomes[int(version)]], "")

    return search([str(index) for index in range(len(outcomes))], run), asked


@pytest.mark.parametrize(
    ("outcomes", "answer", "before", "at", "between"),
    [
        ("pppff", "broken", "2", "3", ()),
        ("pf", "broken", "0", "1", ()),
        ("ffffp", "mended", "3", "4", ()),
        ("ppppp", "passes", "", "", ()),
        ("fffff", "fails", "", "", ()),
        ("p", "passes", "", "", ()),
        ("f", "fails", "", "", ()),
        ("sss", "nothing", "", "", ()),
        ("ppsff", "broken", "1", "3", ("2",)),
        ("sppffs", "broken", "2", "3", ()),
        ("psssf", "broken", "0", "4", ("1", "2", "3")),
        ("sfs", "fails", "", "", ()),
    ],
)
def test_where_it_changes(outcomes: str, answer: str, before: str, at: str, between: tuple[str, ...]) -> None:
    """Neither ends that agree nor versions that cannot be installed may lead to a wrong culprit."""
    found, _ = found_in(outcomes)
    assert (found.answer, found.before, found.at, found.between) == (answer, before, at, between)


@pytest.mark.parametrize("seed", range(30))
def test_each_version_is_tried_once_and_few_are(seed: int) -> None:
    """A try is an installation; of n versions about log2 n need one."""
    rng = random.Random(seed)
    count, culprit = rng.randint(2, 200), 0
    culprit = rng.randint(1, count - 1)
    found, asked = found_in("p" * culprit + "f" * (count - culprit))
    assert (found.answer, found.at) == ("broken", str(culprit))
    assert len(asked) == len(set(asked))
    assert len(asked) <= count.bit_length() + 2


def test_a_range_as_a_user_types_it() -> None:
    """The name as the index has it; the bounds as they are."""
    assert parse_range("onnxruntime 1.16..1.19") == Range("onnxruntime", "1.16", "1.19")
    assert parse_range(" ML_dtypes  0.3.1 .. 0.5 ") == Range("ml-dtypes", "0.3.1", "0.5")


@pytest.mark.parametrize("text", ["onnxruntime", "onnxruntime 1.19", "a b..c", "..", ""])
def test_what_is_no_range_is_refused(text: str) -> None:
    """With the form that is meant."""
    with pytest.raises(ConfigError, match=r"NAME FROM\.\.TO"):
        parse_range(text)


def test_a_range_the_wrong_way_round_is_told_so() -> None:
    with pytest.raises(ConfigError, match=r"name the lower version first: onnxruntime 1\.16\.\.1\.19"):
        parse_range("onnxruntime 1.19..1.16")


@pytest.mark.parametrize(
    ("test", "expected"), [("t.py", False), ("test_x.py", True), ("a/x_test.py", True), ("x.py::test_a", True)]
)
def test_which_files_pytest_runs(test: str, expected: bool) -> None:
    """By pytest's own rule for names; a node needs it in any case."""
    assert is_for_pytest(test) is expected
