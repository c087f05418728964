"""Choices of execution plans on disk: what is kept, and what is not believed."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from layerzero.broker.storage import plan_choices
from layerzero.broker.storage.plan_choices import PlanChoice, PlanChoices
from layerzero.ipc import kept_files
from layerzero.ipc.transport.plain import pack_body, unpack_body

KEY = "k" * 64
NOW = {"alpha": "1", "beta": "2", "gamma": "3"}


def choice(**changes: object) -> PlanChoice:
    made = PlanChoice("beta", {"": 30.0, "alpha": 20.5, "beta": 10.0}, {"alpha": "1", "beta": "2"}, "f", time.time())
    return replace(made, **changes)  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path) -> PlanChoices:
    return PlanChoices(tmp_path / "perf.plans")


def test_what_was_added_is_found_by_another_process(store: PlanChoices) -> None:
    made = choice()
    assert store.add(KEY, made) == ""
    other = PlanChoices(store.folder)
    assert other.find(KEY, NOW) == (made, "")
    assert other.find("l" * 64, NOW) == (None, "")
    assert list(other.entries()) == [(KEY, made, "")]
    assert store.folder.stat().st_mode & 0o777 == 0o700
    assert (store.folder / KEY).stat().st_mode & 0o777 == 0o600
    assert other.clear() == 1
    assert other.find(KEY, NOW) == (None, "")


def test_a_choice_among_backends_that_have_changed_is_ignored(store: PlanChoices) -> None:
    store.add(KEY, choice())
    assert store.find(KEY, {**NOW, "gamma": "4"})[0] is not None
    for identities in ({**NOW, "beta": "3"}, {"alpha": "1"}):
        found, why = store.find(KEY, identities)
        assert found is None
        assert why == "the environment, device or version of beta is another one now"


@pytest.mark.parametrize("days", [-40, 40])
def test_a_choice_is_not_for_ever(store: PlanChoices, days: int) -> None:
    """Nor is one of a clock that was wrong."""
    store.add(KEY, choice(made_s=time.time() + days * 86400))
    assert store.find(KEY, NOW) == (None, "it is older than 30 days")


@pytest.mark.parametrize("at", [0, 10, -1])
def test_a_damaged_file_is_ignored_and_written_anew(store: PlanChoices, at: int) -> None:
    store.add(KEY, choice())
    data = bytearray((store.folder / KEY).read_bytes())
    data[at] ^= 1
    (store.folder / KEY).write_bytes(data)
    assert store.find(KEY, NOW) == (None, "its bytes are not those that were written")
    assert [why for *_, why in store.entries()] == ["its bytes are not those that were written"]
    store.add(KEY, choice())
    assert store.find(KEY, NOW)[0] is not None


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"chosen": "gamma"},
        {"us": {"": 1.0, "beta": -1.0, "alpha": 1.0}},
        {"us": {"": 1.0, "beta": float("nan"), "alpha": 1.0}},
        {"us": [1.0]},
        {"identities": {"alpha": "1"}},
        {"identities": {"alpha": 1, "beta": "2"}},
        {"what": "x" * 1000},
        {"made_s": "now"},
        None,
    ],
)
def test_what_nobody_can_have_chosen_is_ignored(store: PlanChoices, change: dict[str, object] | None) -> None:
    """Also where its hash is right."""
    store.add(KEY, choice())
    value = unpack_body(kept_files.unseal((store.folder / KEY).read_bytes()))
    (store.folder / KEY).write_bytes(kept_files.seal(pack_body(None if change is None else {**value, **change})))
    found, why = store.find(KEY, NOW)
    assert found is None
    assert why


def test_a_file_that_others_can_write_is_ignored(store: PlanChoices, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is one of another user, and what is no regular file."""
    store.add(KEY, choice())
    (store.folder / KEY).chmod(0o666)
    assert "another user can have written it" in store.find(KEY, NOW)[1]
    (store.folder / KEY).chmod(0o600)
    with monkeypatch.context() as patched:
        patched.setattr(os, "getuid", lambda: 12345)
        assert "another user can have written it" in store.find(KEY, NOW)[1]
    assert store.find(KEY, NOW)[0] is not None
    (store.folder / KEY).unlink()
    os.mkfifo(store.folder / KEY)
    assert "no regular file" in store.find(KEY, NOW)[1]


def test_the_oldest_go_and_what_is_in_use_stays(store: PlanChoices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_choices, "MAX_ENTRIES", 3)
    for n in range(3):
        store.add(f"k{n}", choice())
        os.utime(store.folder / f"k{n}", (n, n))
    assert store.find("k0", NOW)[0] is not None
    store.add("k3", choice())
    assert [n for n in range(4) if store.find(f"k{n}", NOW)[0] is not None] == [0, 2, 3]


def test_a_folder_that_cannot_be_written_is_a_problem_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "perf.plans").write_text("a file")
    store = PlanChoices(tmp_path / "perf.plans")
    assert store.add(KEY, choice())
    assert "choices of plans are not kept" in store.problem
    assert store.find(KEY, NOW)[0] is None
    assert list(store.entries()) == []
