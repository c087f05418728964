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

from layerzero.client.connection.call import Route
from layerzero.client.gpu.lifting.keys import further
from layerzero.client.gpu.lifting.sites import Asked
from layerzero.ipc.errors import LayerZeroError
from layerzero.ipc.vocabulary.tensors import TensorSpec

WINDOW = 64  # calls that are asked for at once
MARGIN = 3 * WINDOW // 4  # so many before the last of them, the next are asked for
STEADY = 2  # so often the same must have been added
MAX_FAMILIES = 256

Step = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]  # what is added to shape and strides of each tensor


class Ahead(NamedTuple):
    """What to ask the broker for: calls number `first` and the next after that of `base`. `grows`: what each adds to
    shape and strides of each tensor. `reached`: the number of the newest that was made; None once the calls grow no
    longer like this. `last`: the newest when this was made, the one before it, and the number of the newest."""

    base: Asked
    grows: list[list[list[int]] | None]
    first: int
    reached: Callable[[], int | None]
    last: tuple[Asked, Asked, int]

    def call(self, n: int) -> Asked | None:
        """Call number `n`, as its maker will ask for it; None where that does not follow from those that were made."""
        newest, before, at = self.last
        count, its, was = n - at, newest.given, before.given
        if its is None or was is None:
            return None
        try:
            key = further(newest.key, before.key, count, len(its.specs) + 1)
            specs = tuple(map(partial(_further, count), its.specs, was.specs))
            given = its._replace(specs=specs, out=_further(count, its.out, was.out))
            plan = given.plan()
        except (LayerZeroError, ValueError, OverflowError):
            return None
        if key is None or plan.attrs != newest.route.plan.attrs:
            return None
        caller = newest.caller.with_results(plan.results)
        route = Route(0, plan, overlay=newest.route.overlay)
        return Asked(key, route, newest.gpu, caller, newest.has_out, newest.alignments, newest.pinned, given=given)


@dataclass(eq=False)
class _Family:
    """Calls that differ in extents alone. Places are counted from where the present step began."""

    newest: Asked
    before: Asked | None = None
    step: Step = ()
    place: int = 0  # of the newest call
    base: Asked | None = None  # one that is lifted, and whose route the broker knows
    asked_to: int = 0


class Growth:
    """Of one connection. Threads may share it."""

    def __init__(self) -> None:
        self._families: dict[Hashable, _Family] = {}
        self._lock = threading.Lock()

    def note(self, asked: Asked) -> None:
        """A call that is new."""
        if asked.route.beside:  # of a function, whose lengths nobody can tell from those before
            return
        with self._lock:
            name = _name(asked)
            family = self._families.get(name)
            if family is None:
                if len(self._families) >= MAX_FAMILIES:
                    self._families.clear()
                self._families[name] = _Family(asked)
                return
            step = _difference(_specs(family.newest), _specs(asked))
            if step != family.step:
                first = family.newest
                self._families[name] = family = _Family(first, step=step, base=first if first.is_lifted else None)
                first.place = 0
            family.newest, family.before = asked, family.newest
            family.place += 1
            asked.place = family.place

    def note_lifted(self, asked: Asked) -> None:
        """The broker lets this process launch it."""
        with self._lock:
            asked.is_lifted = True
            family = self._families.get(_name(asked))
            if family is not None and family.step and asked.place <= family.place and _is_reached(family, asked):
                family.base = asked

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
                for spec, more in zip(_specs(family.newest), family.step, strict=True)
            ]
            base, before = family.base, family.before
            assert before is not None
            reached = partial(self._reached, _name(asked), family, base.place)
            return Ahead(base, grows, first - base.place, reached, (family.newest, before, family.place - base.place))

    def _reached(self, name: Hashable, family: _Family, base_place: int) -> int | None:
        return family.place - base_place if self._families.get(name) is family else None


def _further(count: int, spec: TensorSpec | None, before: TensorSpec | None) -> TensorSpec | None:
    if spec is None or before is None or spec == before:
        return spec
    shape, strides = (
        tuple(a + count * (a - b) for a, b in zip(part, old, strict=True))
        for part, old in zip((spec.shape, spec.strides), (before.shape, before.strides), strict=True)
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


def _is_reached(family: _Family, asked: Asked) -> bool:
    """Whether the family's newest call is as many steps further as the places say."""
    count = family.place - asked.place
    return all(
        old is None
        or new is None
        or (
            tuple(a + count * d for a, d in zip(old.shape, more[0], strict=True)) == new.shape
            and tuple(a + count * d for a, d in zip(old.strides, more[1], strict=True)) == new.strides
        )
        for old, new, more in zip(_specs(asked), _specs(family.newest), family.step, strict=True)
    )
