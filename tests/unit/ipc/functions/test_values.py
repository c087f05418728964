"""Values of function calls: what goes over is what came, and what cannot go is refused with its place."""

from __future__ import annotations

import dataclasses
import enum
import os
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerzero.ipc.errors import InvalidArgument, ProtocolError
from layerzero.ipc.functions import values
from layerzero.ipc.transport.plain import pack_tree, unpack_tree


class Colour(enum.Enum):
    RED = 1
    BLUE = ("b", 2)


class Level(enum.IntFlag):
    LOW = 1
    HIGH = 2


@dataclasses.dataclass(frozen=True)
class Point:
    x: Any
    y: Any = dataclasses.field(default=0, compare=False)

    def __post_init__(self) -> None:
        assert self.x is not None, "what crosses is not made anew"


class Array:
    """Stands for an array."""

    def __init__(self, node: list[Any]) -> None:
        self.node = node

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Array) and other.node == self.node

    def __hash__(self) -> int:
        return 0


def put(value: Any) -> list[Any] | None:
    return [*value.node] if isinstance(value, Array) else None


def resolve(module: str, name: str) -> Any:
    return getattr(sys.modules[module], name, None)


def crossed(value: Any) -> Any:
    tree = unpack_tree(pack_tree(values.encode(value, put, "v")))
    return values.decode(tree, Array, resolve, "v")


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.binary()
scalars = scalars | st.text(st.characters(exclude_categories=()))
anything = st.recursive(
    scalars | st.sampled_from([*Colour, Level.LOW | Level.HIGH]) | st.builds(Array, st.just(["numpy", 1])),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(scalars, inner)
        | st.builds(Point, inner.filter(lambda value: value is not None), inner)
    ),
)


@given(anything)
def test_values_cross_with_their_types(value: Any) -> None:
    found = crossed(value)
    assert found == value
    assert type(found) is type(value)


def entry_of(folder: str) -> os.DirEntry[str]:
    with os.scandir(folder) as found:
        return next(found)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({1, 2}, r"^v: set cannot go to another environment; list\(\) of it can; allowed: None, bool"),
        (entry_of("/"), r"^v: posix.DirEntry cannot go to another environment; os.fspath\(\) of it can"),
        (np.finfo(np.float32), r"^v: numpy.finfo cannot go to another environment; allowed: None, bool"),
        ([0, {"a": (1, object())}], r"^v\[1\]\['a'\]\[1\]: object cannot go"),
        (Point(1, [print]), r"^v\.y\[0\]: builtin_function_or_method cannot go"),
        ({(1,): 2}, r"^v: a key is tuple"),
        ([1 << 40_000], r"^v\[0\]: an int of 5001 bytes; allowed: at most 4096"),
        ([[True] * 600_000, [None] * 600_000], r"^v\[1\]: more than 1,000,000 values"),
    ],
)
def test_what_cannot_go_is_named_with_its_place(value: Any, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        values.encode(value, put, "v")


def test_depth_is_bounded() -> None:
    deep: list[Any] = []
    for _ in range(values.MAX_DEPTH - 1):
        deep = [deep]
    assert crossed(deep) == deep
    with pytest.raises(InvalidArgument, match="nested more than 64 deep"):
        values.encode([deep], put, "v")


def test_a_class_that_has_no_place_is_refused() -> None:
    @dataclasses.dataclass
    class Inner:
        x: int = 0

    with pytest.raises(InvalidArgument, match="cannot be found by its name; define the class at the top of a module"):
        values.encode([Inner()], put, "v")


@pytest.mark.parametrize(
    ("tree", "error", "text"),
    [
        ([9, 1], ProtocolError, "no value"),
        ([], ProtocolError, "no value"),
        ({"a": 1}, ProtocolError, "no value"),
        ([values.DICT, 1], ProtocolError, "do not pair"),
        ([values.DICT, [values.LIST], 1], ProtocolError, "do not pair"),
        ([values.INTEGER, "x"], ProtocolError, "no integer"),
        ([values.ENUM, __name__, "Colour", "RED", 7], InvalidArgument, "no member 'RED|no member RED"),
        ([values.ENUM, __name__, "Colour", "BLUE", 1], InvalidArgument, "is called RED here"),
        ([values.ENUM, __name__, "Point", "RED", 1], InvalidArgument, "is no enum here"),
        ([values.DATACLASS, __name__, "Point", ["x"], 1], InvalidArgument, "has the fields"),
        ([values.DATACLASS, __name__, "Point", ["x", "y"], 1], InvalidArgument, "has the fields"),
        ([values.DATACLASS, __name__, "resolve", [], 1], InvalidArgument, "is no dataclass here"),
        ([values.DATACLASS, 1], ProtocolError, "no class is named"),
        ([values.HELD, 1, 2], ProtocolError, "a reference, where none may be"),
    ],
)
def test_trees_that_another_process_made_up_are_refused(tree: Any, error: type[Exception], text: str) -> None:
    """With their place, like values."""
    with pytest.raises(error, match=text) as refused:
        values.decode([values.LIST, 0, tree], Array, resolve, "v")
    assert str(refused.value).startswith("v[1]: ")


class Stands:
    """For an object that stays on the other side."""


def test_objects_that_stay_go_by_reference_and_are_missed_with_their_place() -> None:
    value = {1: Point(Stands(), 2), "b": [Stands()]}
    with pytest.raises(InvalidArgument, match=r"^v\[1\]\.x: .*Stands cannot go .* with keep=True a result stays there"):
        values.encode(value, put, "v")
    tree = values.encode(value, put, "v", lambda one: [7, 8] if type(one) is Stands else None)
    found = values.decode(tree, Array, resolve, "v", tuple)
    assert (found[1].x, found["b"]) == ((7, 8), [(7, 8)])

    def lost(node: list[Any]) -> Any:
        raise values.NotHeld("lost", reference=node)

    for part, place in ((value, "v[1].x"), ({"b": value["b"]}, "v['b'][0]")):
        tree = values.encode(part, put, "v", lambda one: [7, 8] if type(one) is Stands else None)
        with pytest.raises(values.NotHeld) as missed:
            values.decode(tree, Array, resolve, "v", lost)
        assert (missed.value.message, missed.value.facts["reference"]) == (f"{place}: lost", [7, 8])


def test_scalars_of_numpy_cross_as_numbers_of_the_same_value() -> None:
    """Those that Python has no number for, or none of that value, do not; nor do times, whose unit would be lost."""
    given = [np.float64(0.1), np.float32(0.1), np.int8(-3), np.uint64((1 << 64) - 1), np.bool_(True), np.str_("ä")]
    found = crossed([*given, {"x": np.float16("inf")}])
    expected = [0.1, float(np.float32(0.1)), -3, (1 << 64) - 1, True, "ä", {"x": float("inf")}]
    assert (found, [type(one) for one in found]) == (expected, [type(one) for one in expected])
    for other in (np.complex64(1), np.longdouble(1), np.datetime64(1, "ns"), np.void(b"x")):
        with pytest.raises(InvalidArgument, match=r"v\[0\]: numpy\.\w+ cannot go"):
            crossed([other])
