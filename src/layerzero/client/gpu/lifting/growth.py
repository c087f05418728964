"""Calls whose tensors grow by the same from one to the next, as those of a decoder do: the broker is asked to lift the
next ones before they come.

Only calls with a new key are noted, so this costs the others nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from layerzero.client.gpu.lifting.sites import Asked
from layerzero.ipc.vocabulary.tensors import TensorSpec

WINDOW = 64  # calls that are asked for at once
MARGIN = 3 * WINDOW // 4  # so many before the last of them, the next are asked for
STEADY = 2  # so often the same must have been added
MAX_FAMILIES = 256

Step = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]  # what is added to shape and strides of each tensor


class Ahead(NamedTuple):
    """What to ask the broker for: calls number `first` and the next after that of `base`. `grows`: what each adds to
    shape and strides of each tensor. `reached`: the number of the newest that was made; None once the calls grow no
    longer like this."""

    base: Asked
    grows: list[list[list[int]] | None]
    first: int
    reached: Callable[[], int | None]

    def name(self, n: int) -> Hashable:
        """Of call number `n`, as `name_of` has it."""
        specs = [
            None if spec is None or more is None else _further(spec, more, n)
            for spec, more in zip(_specs(self.base), self.grows, strict=True)
        ]
        return _name(self.base), tuple(specs)


@dataclass(eq=False)
class _Family:
    """Calls that differ in extents alone. Places are counted from where the present step began."""

    specs: tuple[TensorSpec | None, ...]
    step: Step = ()
    place: int = 0  # of the newest call
    base: Asked | None = None  # one that is lifted
    base_place: int = 0
    asked_to: int = 0


class Growth:
    """Of one connection. Threads may share it."""

    def __init__(self) -> None:
        self._families: dict[Hashable, _Family] = {}
        self._places: dict[int, int] = {}  # of routes, in their families
        self._lock = threading.Lock()

    def note(self, asked: Asked) -> None:
        """A call that is new."""
        specs = _specs(asked)
        with self._lock:
            name = _name(asked)
            family = self._families.get(name)
            if family is None:
                if len(self._families) >= MAX_FAMILIES:
                    self._families.clear()
                    self._places.clear()
                self._families[name] = _Family(specs)
                return
            step = _difference(family.specs, specs)
            if step != family.step:
                self._families[name] = family = _Family(specs, step)
            family.specs = specs
            family.place += 1
            if len(self._places) > MAX_FAMILIES * WINDOW:
                self._places.clear()
            self._places[asked.route.number] = family.place

    def note_lifted(self, asked: Asked) -> None:
        """The broker lets this process launch it."""
        with self._lock:
            family, place = self._families.get(_name(asked)), self._places.get(asked.route.number)
            if family is None or place is None or place > family.place or not _is_reached(family, asked, place):
                return
            family.base, family.base_place = asked, place

    def due(self, asked: Asked) -> Ahead | None:
        """The next calls of this call's family, if it grows and they were not asked for yet."""
        with self._lock:
            family = self._families.get(_name(asked))
            if family is None or family.base is None or family.place < STEADY or not any(map(any, _flat(family.step))):
                return None
            if family.place + MARGIN <= family.asked_to:
                return None
            first = max(family.place, family.asked_to) + 1
            family.asked_to = first + WINDOW - 1
            grows = [
                None if spec is None else [list(part) for part in more]
                for spec, more in zip(family.specs, family.step, strict=True)
            ]
            reached = partial(self._reached, _name(asked), family, family.base_place)
            return Ahead(family.base, grows, first - family.base_place, reached)

    def _reached(self, name: Hashable, family: _Family, base_place: int) -> int | None:
        return family.place - base_place if self._families.get(name) is family else None


def name_of(asked: Asked) -> Hashable:
    """Equal for calls that one lifted call serves."""
    return _name(asked), _specs(asked)


def _further(spec: TensorSpec, more: list[list[int]], n: int) -> TensorSpec:
    shape, strides = (
        tuple(a + n * d for a, d in zip(part, step, strict=True))
        for part, step in zip((spec.shape, spec.strides), more, strict=True)
    )
    return TensorSpec(spec.dtype, shape, strides)


def _specs(asked: Asked) -> tuple[TensorSpec | None, ...]:
    plan = asked.route.plan
    return (*plan.inputs, *plan.outputs)


def _name(asked: Asked) -> Hashable:
    """Equal for calls that differ in extents alone."""
    plan, route = asked.route.plan, asked.route
    kinds = tuple(None if spec is None else (spec.dtype, spec.ndim) for spec in _specs(asked))
    attrs = tuple(sorted((name, repr(value)) for name, value in plan.attrs.items()))
    return plan.op, kinds, attrs, tuple(asked.alignments), asked.gpu.uuid, asked.has_out, route.overlay, asked.pinned


def _difference(before: Sequence[TensorSpec | None], after: Sequence[TensorSpec | None]) -> Step:
    return tuple(
        ((), ())
        if old is None or new is None
        else (
            tuple(b - a for a, b in zip(old.shape, new.shape, strict=True)),
            tuple(b - a for a, b in zip(old.strides, new.strides, strict=True)),
        )
        for old, new in zip(before, after, strict=True)
    )


def _flat(step: Step) -> list[tuple[int, ...]]:
    return [part for more in step for part in more]


def _is_reached(family: _Family, asked: Asked, place: int) -> bool:
    """Whether the family's newest call is as many steps further as the places say."""
    count = family.place - place
    return all(
        old is None
        or new is None
        or (
            tuple(a + count * d for a, d in zip(old.shape, more[0], strict=True)) == new.shape
            and tuple(a + count * d for a, d in zip(old.strides, more[1], strict=True)) == new.strides
        )
        for old, new, more in zip(_specs(asked), family.specs, family.step, strict=True)
    )
