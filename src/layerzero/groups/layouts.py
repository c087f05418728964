"""Where the numbers of a value lie over the ranks of a group, and how steps of a plan may be split for it: the terms
that split rules are written in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

from layerzero.client.plans.recording import Step, Use

COLUMN, ROW = "by column", "by row"


@dataclass(frozen=True)
class Layout:
    """Each rank has all of it (`dim` None), its part along a dimension, or a summand of it. `origins`: the steps whose
    weights were split by column for that."""

    dim: int | None = None
    is_summand: bool = False
    origins: frozenset[int] = frozenset()

    @property
    def is_whole(self) -> bool:
        return self.dim is None and not self.is_summand


WHOLE = Layout()


@dataclass(frozen=True)
class Applied:
    """What a rule makes of a step. By place in the step's arguments: `parts` are those of which a rank takes its part
    along a dimension, counted in so many blocks, and `first_alone` those that rank 0 alone adds. `args`: in place of
    the step's own. `how`: what was done with its weight."""

    makes: tuple[Layout, ...]
    parts: tuple[tuple[int, int, int], ...] = ()  # place, dimension, blocks
    first_alone: tuple[int, ...] = ()
    args: tuple[Any, ...] | None = None
    how: str = ""


class CannotSplit(Exception):
    """Of a step: why not. `origins`: the steps that would have to stay whole; none where it has no rule at all."""

    def __init__(self, why: str, origins: Iterable[int] = ()) -> None:
        super().__init__(why)
        self.origins = frozenset(origins)


@dataclass(frozen=True)
class Look:
    """What a rule sees of a step. `layouts`, `shapes`: of what it takes and makes, by value; `constants`: values that
    are the function's own; `whole`: steps that are to stay whole, and why."""

    step: Step
    size: int
    layouts: dict[int, Layout]
    shape_of: Callable[[int], tuple[int, ...]]
    constants: frozenset[int]
    whole: dict[int, str]
    is_torch: bool = False

    def layout(self, arg: Any) -> Layout:
        return self.layouts.get(arg.value, WHOLE) if isinstance(arg, Use) else WHOLE

    def shape(self, arg: Any) -> tuple[int, ...]:
        return self.shape_of(arg.value) if isinstance(arg, Use) else ()

    def made(self) -> tuple[int, ...]:
        """The shape of its result, or of the first one."""
        return self.shape_of(self.step.made[0])

    def uses(self) -> list[tuple[int, Use]]:
        """Its arrays, by place."""
        return [(place, arg) for place, arg in enumerate(self.step.args) if isinstance(arg, Use)]

    def split(self) -> list[tuple[int, Use]]:
        """Those that are in parts."""
        return [(place, arg) for place, arg in self.uses() if self.layout(arg).dim is not None]

    def is_constant(self, arg: Any) -> bool:
        return isinstance(arg, Use) and arg.value in self.constants

    def origins(self) -> frozenset[int]:
        return frozenset().union(*(self.layout(arg).origins for _, arg in self.uses()))

    def refuse(self, why: str) -> NoReturn:
        raise CannotSplit(why, self.origins())

    def demand_even(self, extent: int, what: str) -> None:
        if extent % self.size:
            self.refuse(f"{self.size} ranks do not divide {what}, {extent}")


Rule = Callable[[Look], Applied]


def of_each(look: Look) -> tuple[Layout, ...]:
    """Of results that are split as their step's one argument is."""
    layout = next((look.layout(arg) for _, arg in look.split()), WHOLE)
    return tuple(Layout(layout.dim, origins=look.origins()) for _ in look.step.made)


def moved(shape: Sequence[int], dim: int, other: Sequence[int], size: int) -> int | None:
    """Where a dimension that is in parts is after a reshape: the parts stay what they are in memory. None: nowhere."""
    before = prod(shape[:dim])
    found = [n for n, extent in enumerate(other) if prod(other[:n]) == before and extent % size == 0 and extent > 1]
    return found[0] if found else None
