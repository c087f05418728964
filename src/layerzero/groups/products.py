"""Products that are added up over all ranks of GPUs, each made where its sum wants it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from layerzero.client.facade import default_session
from layerzero.client.facade.running import perform
from layerzero.client.plans.graph_steps import NotCapturable, Served, served_by
from layerzero.client.plans.recording import Use
from layerzero.groups.joint import Captured, Collectives
from layerzero.groups.layouts import ROW
from layerzero.groups.splitting import Collective, LocalStep, Split, Stretch, dtype_of, shape_of
from layerzero.groups.stretches import LocalStretch, Weights
from layerzero.ipc.errors import LayerZeroError

_OPS = ("matmul", "linear")


class Summed(NamedTuple):
    """A step and the sum of its result, which follows at once."""

    step: LocalStep
    collective: Collective


def with_products(split: Split) -> list[Stretch | Collective | Summed]:
    """The items, with products apart from the stretches that they are in."""
    items: list[Stretch | Collective | Summed] = []
    for item in split.items:
        last = items[-1] if items else None
        if isinstance(item, Collective) and isinstance(last, Stretch):
            step = _summed(last, item)
            if step is not None:
                items[-1] = _without(split, last, step)
                items.append(Summed(step, item))
                continue
        items.append(item)
    return [item for item in items if not isinstance(item, Stretch) or item.steps]


def _summed(stretch: Stretch, collective: Collective) -> LocalStep | None:
    """The product that makes what is added up, if it is one, of which nobody else takes it before."""
    if collective.dim is not None or len(collective.values) != 1:
        return None
    for one in stretch.steps:
        request = one.step.request
        if one.step.made == collective.values and request is not None and request.op in _OPS:
            is_alone = not any(collective.values[0] in other.step.reads for other in stretch.steps)
            is_plain = one.applied.how == ROW and one.applied.args is None and isinstance(one.step.args[0], Use)
            return one if is_alone and is_plain else None
    return None


def _without(split: Split, stretch: Stretch, one: LocalStep) -> Stretch:
    steps = tuple(other for other in stretch.steps if other is not one)
    made = {number for other in steps for number in other.step.made}
    read = dict.fromkeys(number for other in steps for number in other.step.reads)
    takes = tuple(number for number in read if number not in made and number not in split.constants)
    makes = [number for number in stretch.makes if number in made]
    makes += [number for number in dict.fromkeys(one.step.reads) if number in made and number not in makes]
    return Stretch(steps, takes, tuple(makes))


class Product:
    """As a part of a run on this rank."""

    def __init__(self, split: Split, summed: Summed, weights: Weights, rank: int) -> None:
        self._one, self.collective = summed
        (self.value,) = self.collective.values
        value = split.recording.values[self.value]
        self._shape, self._dtype = shape_of(value), dtype_of(value)
        takes = tuple(number for number in self._one.step.reads if number not in split.constants)
        self._local = LocalStretch(Stretch((self._one,), takes, (self.value,)), weights, rank)
        self._name = f"{self._one.step.number} {self._one.step.name}"
        self.served: Served | None = None  # the call of the last run

    @property
    def runs_here(self) -> bool:
        """The call of the last run asked no worker."""
        return self.served is not None and self.served.is_here

    def __str__(self) -> str:
        if self.served is None:
            return f"{self._name}: not run yet"
        told = ", ".join(filter(None, (self.served.kernel_id, self.served.path, self.served.note, self.served.why)))
        return f"{self._name}: {told}"

    def __call__(self, known: dict[int, Any], ranks: Collectives) -> list[tuple[str, str]]:
        """As of a Part."""
        args, request = self._local.arguments(self._one, known), self._one.step.request
        assert request is not None
        place = ranks.place(self._dtype, self._shape) if isinstance(ranks, Captured) else None
        made = _new(args[0], self._dtype, self._shape) if place is None else place
        try:
            perform(replace(request, args=tuple(args), out=made))
        except LayerZeroError as exc:
            if not isinstance(ranks, Captured):
                raise
            raise NotCapturable(
                f"{self._name}: no CUDA graph can hold it: {exc.message.splitlines()[0][:300]}"
            ) from exc
        self.served = served_by(default_session.session().last_record)
        if isinstance(ranks, Captured) and not self.served.is_here:
            raise NotCapturable(f"{self._name}: a worker makes it")
        known[self.value] = ranks.all_reduce(made, out=made if place is None else None)
        return [(request.op, self.served.kernel_id)]


def _new(like: Any, dtype: str, shape: Sequence[int]) -> Any:
    """A tensor on the same GPU; contents undefined."""
    torch = sys.modules["torch"]
    return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=like.device)
