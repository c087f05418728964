"""Machine code in a worker of functions: nobody looks at it before there is a function that may be lifted."""

from __future__ import annotations

from typing import Any

import pytest

from layerzero.workers.functions import stand_in, watching
from layerzero.workers.gpu.lifting import modules


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Libraries of CUPTI that were loaded: there is one, which takes a subscriber."""
    found: list[str] = []

    class Cupti:
        def __getattr__(self, name: str) -> Any:
            found.append(name)
            return lambda *_: 0

    monkeypatch.setattr(watching, "_known", [])
    monkeypatch.setattr(modules, "find", lambda *_: ["/libcupti.so"])
    monkeypatch.setattr(modules.watch, "__defaults__", ({}, None, lambda _: Cupti(), None))
    return found


def function() -> None: ...


def test_it_is_watched_from_the_first_such_function_on(loaded: list[str]) -> None:
    seen = watching.modules()
    assert (seen.problem, loaded) == (watching.NOT_BEGUN, [])
    assert stand_in.isolated("env", timeout_s=3, lift=False)(function) is function
    assert (seen.problem, loaded) == (watching.NOT_BEGUN, [])
    assert stand_in.isolated("env", lift=True)(function) is function
    assert (watching.modules(), seen.problem) == (seen, "")
    assert loaded.count("cuptiSubscribe") == 1
    stand_in.isolated("env", lift=True)(function)
    assert loaded.count("cuptiSubscribe") == 1


def test_a_worker_without_cupti_says_so(loaded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "find", lambda *_: [])
    stand_in.isolated("env", lift=True)(function)
    assert watching.modules().problem.startswith("no libcupti: ")
