"""ipc/functions/surface.py: what a class shows, and what a worker may say that one does."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest

from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.functions.surface import CALLABLE, OF_CLASS, PROPERTY, STREAM, Surface, surface_of


class Base:
    SIZE = 3
    hidden_later = 1

    def add(self) -> None: ...

    def __len__(self) -> int:
        return 0

    def __getitem__(self, key: int) -> int:
        return key


class Shown(Base):
    __getitem__ = None  # type: ignore[assignment]
    Inner = Base

    @property
    def double(self) -> int:
        raise AssertionError("nothing of the class runs")

    @classmethod
    def made(cls) -> None: ...

    @staticmethod
    def count() -> Iterator[int]:
        yield 1

    half = functools.partialmethod(Base.add)

    def hidden_later(self) -> None:  # type: ignore[override]
        ...

    def _private(self) -> None: ...

    def __enter__(self) -> None: ...


def test_a_class_shows_its_public_names_and_its_bases() -> None:
    assert surface_of(Shown).names == {
        "Inner": 0,
        "SIZE": 0,
        "add": CALLABLE,
        "count": CALLABLE | OF_CLASS | STREAM,
        "double": PROPERTY,
        "half": CALLABLE,
        "hidden_later": CALLABLE,
        "made": CALLABLE | OF_CLASS,
    }
    assert surface_of(Shown).special == {"__len__", "__enter__"}
    assert Surface.from_tree(surface_of(Shown).to_tree()) == surface_of(Shown)


@pytest.mark.parametrize(
    "tree",
    [
        None,
        [{}],
        [{"a": 32}, []],
        [{"a": True}, []],
        [{"_a": 1}, []],
        [{"a b": 1}, []],
        [{1: 1}, []],
        [{}, ["__init__"]],
        [{}, [[]]],
        [{}, ["__len__"] * 99],
        [{f"a{n}": 1 for n in range(5000)}, []],
    ],
)
def test_what_a_worker_may_not_say_is_refused(tree: Any) -> None:
    with pytest.raises(ProtocolError, match="no names of a class"):
        Surface.from_tree(tree)
