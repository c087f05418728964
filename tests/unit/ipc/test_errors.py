"""Errors keep their class, code and facts on their way through processes."""

from __future__ import annotations

import contextlib

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerzero.ipc import errors
from layerzero.ipc.errors import BY_CODE, NEVER, OTHER_BACKEND, SAME, LayerZeroError, ProtocolError, from_wire


@pytest.mark.parametrize("cls", BY_CODE.values(), ids=BY_CODE)
def test_error_survives_the_wire(cls: type[LayerZeroError]) -> None:
    """Who catches BackendError must get one, wherever it was raised."""
    error = cls("it broke: x", backend="torch", exit_code=-11, needed=[1, 2], nested={"a": None, "b": 0.5})
    again = from_wire(msgpack.unpackb(msgpack.packb(error.to_wire())))
    assert type(again) is cls
    assert (again.message, again.facts, str(again)) == (error.message, error.facts, "it broke: x")
    assert again.retry in (NEVER, SAME, OTHER_BACKEND)


def test_codes_are_unique() -> None:
    """Two classes of one code could not be told apart after the wire."""
    classes = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, LayerZeroError)]
    assert sorted(cls.code for cls in classes) == sorted(BY_CODE)


def test_unknown_code_becomes_the_root_class() -> None:
    """A newer peer may know more; its error must not be lost for that."""
    error = from_wire({"code": "QUANTUM", "message": "m", "facts": {"a": 1}, "more": 1})
    assert (type(error), error.message, error.facts) == (LayerZeroError, "m", {"a": 1})


def test_classes_fit_pythons_own() -> None:
    """`except ValueError` around a call with wrong arguments should work."""
    assert issubclass(BY_CODE["INVALID_ARGUMENT"], ValueError)
    assert issubclass(BY_CODE["DEADLINE"], BY_CODE["BACKEND_ERROR"])


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        "boom",
        {"code": "X", "message": "m"},
        {"code": 1, "message": "m", "facts": {}},
        {"code": "X", "message": b"m", "facts": {}},
        {"code": "X", "message": "m", "facts": []},
        {"code": "X", "message": "m", "facts": {1: 2}},
    ],
)
def test_what_is_no_error_is_refused(value: object) -> None:
    """A worker's word is checked like everything else it says."""
    with pytest.raises(ProtocolError, match="not an error on the wire"):
        from_wire(value)


@given(st.recursive(st.none() | st.text() | st.integers(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)))
def test_any_value_is_an_error_or_refused(value: object) -> None:
    """Nothing else may come out of it."""
    with contextlib.suppress(ProtocolError):
        assert isinstance(from_wire(value), LayerZeroError)


def test_what_an_error_quotes_does_not_travel_in_full() -> None:
    """An answer of 514 MiB was one error's text."""
    error = errors.InvalidArgument("x" * 10_000_000, problems=["p" * 10_000] * 10_000, cause="c" * 10_000, limit=5)
    wire = error.to_wire()
    assert len(wire["message"]) == 4096
    assert [len(problem) for problem in wire["facts"]["problems"]] == [4096] * 64
    assert (len(wire["facts"]["cause"]), wire["facts"]["limit"]) == (4096, 5)
    assert len(error.message) == 10_000_000
