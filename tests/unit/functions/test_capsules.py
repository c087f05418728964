"""Making a capsule costs no call its result or its error: what fails is a note."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from layerzero.client.capsules import form, store
from layerzero.client.capsules.form import Failure
from layerzero.client.capsules.of_function import CALL
from layerzero.client.capsules.taking import Capsules
from layerzero.functions import capsules as function_capsules
from layerzero.functions.calling import Arguments
from layerzero.functions.calls import Call
from layerzero.functions.capsules import Asked, Told
from layerzero.functions.options import Options
from layerzero.functions.use import Use
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.functions import frames

FAILURE = Failure("one.fn", "one.fn", "BACKEND", "died", 11, None)


def capsules_in(folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str = "small") -> Capsules:
    monkeypatch.setenv("LAYERZERO_CAPSULE_DIR", str(folder))
    monkeypatch.setenv("LAYERZERO_CAPSULES", mode)
    return Capsules(lambda *_, **__: {"backends": [], "calls": [], "why": "of a test"}, lambda _: folder / "none.log")


class Closed:
    """As a proxy is when its object was closed."""

    def __getattr__(self, name: str) -> Any:
        raise InvalidArgument("make a new one: it is closed")


def use_of(capsules: Any, maker: tuple[Any, ...] | None, kwargs: Mapping[str, Any]) -> Use:
    """A method's call whose worker has died."""
    use: Use = object.__new__(Use)
    places = SimpleNamespace(candidates=[SimpleNamespace(code=SimpleNamespace(is_model=False))], backends=("one.fn",))
    use.owner = SimpleNamespace(_places=places, _options=Options())  # type: ignore[assignment]
    use._session = SimpleNamespace(capsules=capsules)  # type: ignore[assignment]
    use.given, use.label, use._capsule = Arguments((), kwargs, ("one.fn",)), "Counter.add", ""
    use.options = SimpleNamespace(tolerance=0.0)  # type: ignore[assignment]
    use._how, use._name, use._stays = frames.METHOD, "add", frames.NOTHING
    use._stay = SimpleNamespace(maker=maker and (use.owner, *maker))  # type: ignore[assignment]
    return use


def test_what_made_an_object_and_cannot_cross_any_more_is_a_problem_of_the_capsule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use = use_of(capsules_in(tmp_path, monkeypatch), ((object(),), {}), {"by": 3})
    told = use._told()
    assert told is not None
    assert "what made its object cannot cross any more: " in told.problem
    assert [one.kind for one in told.asked] == ["method"]


def test_nothing_is_made_where_capsules_are_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use = use_of(capsules_in(tmp_path, monkeypatch, "off"), ((object(),), {}), {})
    monkeypatch.setattr(Use, "_asked", lambda _: pytest.fail("asked"))
    assert use._told() is None


def test_what_fails_before_a_capsule_is_described_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use = use_of(capsules_in(tmp_path, monkeypatch), None, {})
    use._stay = Closed()  # type: ignore[assignment]
    report = SimpleNamespace(attempts=[SimpleNamespace(**vars(FAILURE), phase="running")], backend="", notes=())
    Call._keep(use, report)  # type: ignore[arg-type]
    assert use._capsule == "no capsule of the failure was kept: make a new one: it is closed"


def test_bytes_by_place_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = Arguments((b"hush", [b"hush"]), {}, ("one.fn",))
    where = SimpleNamespace(
        env=SimpleNamespace(backend="one.fn", locked=lambda: []),
        code=frames.Code.installed("package", "function"),
    )
    told = Told("package.function", [where], [Asked(CALL, "", frames.NOTHING, given)], "", 0.0)  # type: ignore[list-item]
    note = function_capsules.take(capsules_in(tmp_path, monkeypatch), told, [FAILURE], "")
    (name,) = store.names(tmp_path)
    assert note == f"capsule of the failure: lz replay {name}"
    assert form.read(tmp_path / name).label == "package.function(bytes of 4, [bytes of 4])"


@pytest.mark.parametrize("fails", [MemoryError(), ValueError("no such array"), OSError(28, "No space left on device")])
def test_keep_raises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: Exception) -> None:
    def describe() -> Any:
        raise fails

    capsules = capsules_in(tmp_path, monkeypatch)
    said = capsules.keep(FAILURE, None, describe)
    assert said.startswith("no capsule of the failure was kept: ")
    assert said.endswith(("MemoryError", "no such array", "No space left on device"))
    other = capsules.keep(FAILURE, [], describe)
    assert other.startswith("no capsule of the failure was kept: ")
