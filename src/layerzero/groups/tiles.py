"""A product whose sum over all ranks is made in tiles, of rows: one is added up while the next is multiplied."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from layerzero.client.facade import default_session
from layerzero.client.facade.running import perform
from layerzero.client.plans.graph_steps import NotCapturable, served_by
from layerzero.client.plans.recording import Use
from layerzero.groups.joint import Captured, Collectives
from layerzero.groups.layouts import ROW
from layerzero.groups.splitting import Collective, LocalStep, Split, Stretch, dtype_of, nbytes_of, shape_of
from layerzero.groups.stretches import LocalStretch, Weights

TILE_BYTES = 16 << 20  # of a sum, at least: the calls of smaller ones take longer than what they hide
COUNTS = (4, 2)
_OPS = ("matmul", "linear")


class Tiled(NamedTuple):
    """A step, the sum of its result, and in how many tiles both are made."""

    step: LocalStep
    collective: Collective
    tiles: int


def tiled(split: Split) -> list[Stretch | Collective | Tiled]:
    """The items, with large sums of products in tiles. The same on all ranks that have split it alike."""
    items: list[Stretch | Collective | Tiled] = []
    at = -1  # of the last stretch
    for item in split.items:
        if isinstance(item, Stretch):
            at = len(items)
        elif at >= 0 and isinstance(stretch := items[at], Stretch):
            step = _summed(stretch, item)
            count = 0 if step is None else _count(split, step)
            if step is not None and count:
                items[at] = _without(split, stretch, step)
                items.append(Tiled(step, item, count))
                continue
        items.append(item)
    return [item for item in items if not isinstance(item, Stretch) or item.steps]


def _summed(stretch: Stretch, collective: Collective) -> LocalStep | None:
    """The product that makes what is added up, if it is one."""
    if collective.dim is not None or len(collective.values) != 1:
        return None
    for one in stretch.steps:
        if one.step.made == collective.values:
            request = one.step.request
            is_product = request is not None and request.op in _OPS and one.applied.how == ROW
            return one if is_product and one.applied.args is None and isinstance(one.step.args[0], Use) else None
    return None


def _count(split: Split, one: LocalStep) -> int:
    """0: not in tiles."""
    made = split.recording.values[one.step.made[0]]
    rows = _dim_of(shape_of(made))
    if rows is None:
        return 0
    extent = shape_of(made)[rows]
    return next((n for n in COUNTS if nbytes_of(made) >= n * TILE_BYTES and extent % n == 0), 0)


def _dim_of(shape: Sequence[int]) -> int | None:
    """The first dimension but the last with more than one row: along it tiles are contiguous."""
    return next((dim for dim, extent in enumerate(shape[:-1]) if extent > 1), None)


def _without(split: Split, stretch: Stretch, one: LocalStep) -> Stretch:
    steps = tuple(other for other in stretch.steps if other is not one)
    made = {number for other in steps for number in other.step.made}
    read = dict.fromkeys(number for other in steps for number in other.step.reads)
    takes = tuple(number for number in read if number not in made and number not in split.constants)
    makes = [number for number in stretch.makes if number in made]
    makes += [number for number in dict.fromkeys(one.step.reads) if number in made and number not in makes]
    return Stretch(steps, takes, tuple(makes))


class TiledSum:
    """As a part of a run on this rank."""

    def __init__(self, split: Split, tile: Tiled, weights: Weights, rank: int) -> None:
        self._one, self.collective, self.tiles = tile
        (self.value,) = self.collective.values
        value = split.recording.values[self.value]
        self._shape, self._dtype = shape_of(value), dtype_of(value)
        dim = _dim_of(self._shape)
        assert dim is not None
        self._dim, self._rows = dim, self._shape[dim] // self.tiles
        takes = tuple(number for number in self._one.step.reads if number not in split.constants)
        self._local = LocalStretch(Stretch((self._one,), takes, (self.value,)), weights, rank)
        self.runs_here = False  # no call of the last run asked a worker

    def __call__(self, known: dict[int, Any], ranks: Collectives) -> list[tuple[str, str]]:
        """As of a Part."""
        if isinstance(ranks, Captured):
            sums: list[Any] = []
            made, kernels = self.product(known, lambda rows: sums.append(ranks.begin_sum(rows)))
            for one in sums:
                one.wait()
            if not self.runs_here:
                raise NotCapturable(f"{self._one.step.name}: a worker makes a tile of it")
            known[self.value] = made
        else:
            made, kernels = self.product(known)
            known[self.value] = ranks.all_reduce(made, out=made)
        return kernels

    def product(
        self, known: dict[int, Any], then: Callable[[Any], None] = lambda _: None
    ) -> tuple[Any, list[tuple[str, str]]]:
        """This rank's summand, and op and kernel of each call; `then` gets each tile behind its call."""
        x, *others = self._local.arguments(self._one, known)
        request, made, served = self._one.step.request, _new(x, self._shape, self._dtype), []
        assert request is not None
        for n in range(self.tiles):
            at = (slice(None),) * self._dim + (slice(n * self._rows, (n + 1) * self._rows),)
            perform(replace(request, args=(x[at], *others), out=made[at]))
            served.append(served_by(default_session.session().last_record))
            then(made[at])
        self.runs_here = all(one.is_here for one in served)
        return made, [(request.op, one.kernel_id) for one in served]


def _new(like: Any, shape: Sequence[int], dtype: str) -> Any:
    """An array of the same library, in the same place; contents undefined."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=like.device)
    return np.empty(shape, dtype)
