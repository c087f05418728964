"""Calls of functions that come again as the same bytes, beside the same memory: what reading them has come to is kept.

Each such call makes its arrays anew, since a function may do with them what it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from layerzero.ipc.errors import InvalidArgument, ProtocolError
from layerzero.ipc.functions import frames, values
from layerzero.ipc.functions.frames import Code
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.workers.functions.objects import demand_use

LIBRARIES = ("numpy", "torch")
START_BYTES = frames.HEAD_AT + frames.MAX_KNOWN_BYTES  # of a frame, in which the whole of such a call lies
NO_KWARGS = [values.DICT]
OTHERWISE = ("__iter__", "__enter__", "__exit__")  # methods that are not just called (objects.py)


class Openers(Protocol):
    """The array libraries of this environment."""

    def opener(self, library: str, spec: TensorSpec, memory: memoryview) -> Callable[[], Any]:
        """What gives a new read-only array on memory each time. Raises InvalidArgument where there is no such
        library."""


@dataclass(frozen=True)
class Again:
    """A call that came twice. `head`: the first bytes of its frame; `given`: its arguments, of which those at these
    places are arrays to be opened. `reference`, `name`: of a method, its object and its name."""

    head: bytes
    code: Code
    label: str
    level: int
    given: list[Any]
    arrays: list[tuple[int, Callable[[], Any]]]
    reference: Any = None
    name: str = ""

    def arguments(self) -> list[Any]:
        """Those of one call."""
        given = self.given.copy()
        for place, opened in self.arrays:
            given[place] = opened()
        return given


def again_of(
    start: bytes,
    frame: memoryview,
    lent: Sequence[Any],
    known: Callable[[Any], Code],
    openers: Openers,
    held: Callable[[Any], Code | None],
) -> Again | None:
    """Of a call whose frame has these first bytes; None for one that is to be read each time. `known`: what a tree
    names; `held`: what an object is of, by its reference."""
    try:
        size, tree = frames.head_of(start)
        plain = demand_plain(tree, known, held)
        if plain is None:
            return None
        memories, given, arrays = [frame[frames.aligned(size) :], *lent], [], []
        for place, one in enumerate(plain.items):
            if type(one) is not list:
                given.append(one)
            elif type(one[0]) is int and one[0] == values.ARRAY:
                arrays.append((place, openers.opener(*frames.read_array(one[1:], memories, LIBRARIES))))
                given.append(None)
            else:
                return None
    except (ProtocolError, InvalidArgument, IndexError):
        return None
    return Again(start[:size], plain.code, plain.label, plain.level, given, arrays, plain.reference, plain.name)


class Plain(NamedTuple):
    """A call by its place in a list alone, of a function or of a method of an object. As of Again."""

    code: Code
    label: str
    level: int
    items: list[Any]
    reference: Any
    name: str


def demand_plain(tree: list[Any], known: Callable[[Any], Code], held: Callable[[Any], Code | None]) -> Plain | None:
    """What a call is of; None for one that is to be read each time. Raises ProtocolError, InvalidArgument."""
    reference, name = None, ""
    match tree:
        case [frames.USE, reference, frames.METHOD, str(name), [values.LIST, *items], kwargs, int(level)] if (
            kwargs == NO_KWARGS and name not in OTHERWISE
        ):
            found = held(reference)
            if found is None:
                return None
            code = found
            demand_use(frames.METHOD, name, len(items))
        case [frames.CALL, code_tree, [values.LIST, *items], kwargs, int(level)] if kwargs == NO_KWARGS:
            code = known(code_tree)
        case _:
            return None
    if code.is_model and reference is None:
        return None
    return Plain(code, f"{code.label}.{name}" if name else code.label, level, items, reference, name)
