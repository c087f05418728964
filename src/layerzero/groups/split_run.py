"""One run of a split function on this rank: its stretches, and what all ranks do together between them, in order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from layerzero.client.arrays.recognition import CPU, describe
from layerzero.client.facade.memory import empty
from layerzero.client.plans.execution_plan import ExecutionPlan
from layerzero.groups.joint import Captured, Collectives
from layerzero.groups.products import Product
from layerzero.groups.splitting import Collective
from layerzero.groups.stretches import LocalStretch, joined


class Part(NamedTuple):
    """A stretch. `takes` and `makes` are values."""

    run: ExecutionPlan | LocalStretch
    takes: tuple[int, ...]
    makes: tuple[int, ...]

    @property
    def runs_here(self) -> bool:
        """Whether it asks no worker."""
        return not isinstance(self.run, ExecutionPlan) or self.run.runs_here

    def __call__(self, known: dict[int, Any], *, is_captured: bool) -> list[tuple[str, str]]:
        """The op and kernel of each call, where a graph is captured: with what it does. Raises NotCapturable there."""
        arrays = [known[number] for number in self.takes]
        kernels: list[tuple[str, str]] = []
        if is_captured and isinstance(self.run, ExecutionPlan):
            graph = self.run.latest().graph
            assert graph is not None
            made, kernels = graph.enqueue(arrays)
        else:
            made = self.run(*arrays)
        known.update(zip(self.makes, made, strict=True))
        return kernels


Item = Part | Product | Collective


def runs_here(items: Sequence[Item]) -> bool:
    return all(isinstance(item, Collective) or item.runs_here for item in items)


def go(items: Sequence[Item], known: dict[int, Any], ranks: Collectives) -> list[tuple[str, str]]:
    """`known`: arrays by value, which gets what is made. What it gives: as of a Part. Raises as calls, plans and the
    group's calls do; NotCapturable where `ranks` are of a graph."""
    kernels: list[tuple[str, str]] = []
    for item in items:
        if isinstance(item, Collective):
            known.update(collect(ranks, item, [known[number] for number in item.values]))
        elif isinstance(item, Product):
            kernels += item(known, ranks)
        else:
            kernels += item(known, is_captured=isinstance(ranks, Captured))
    return kernels


def collect(ranks: Collectives, collective: Collective, arrays: list[Any]) -> dict[int, Any]:
    """Sums, or what ranks have in parts, whole. Raises as the group's calls do."""
    if collective.dim is not None:
        (value,) = arrays
        return {collective.values[0]: joined(list(ranks.all_gather(value[None])), collective.dim)}
    if len(arrays) == 1:
        out = arrays[0] if _may_be_written(arrays[0]) else None
        return {collective.values[0]: ranks.all_reduce(arrays[0], out=out)}
    counts = [math.prod(array.shape) for array in arrays]
    first = describe(arrays[0])
    if first.device != CPU:
        whole = arrays[0].new_empty(sum(counts))
    else:
        whole = empty((sum(counts),), arrays[0].dtype if first.kind == "torch" else first.spec.dtype)
    ends = np.cumsum(counts).tolist()
    rows = [
        whole[end - count : end].reshape(array.shape) for end, count, array in zip(ends, counts, arrays, strict=True)
    ]
    for row, array in zip(rows, arrays, strict=True):
        row[...] = array
    ranks.all_reduce(whole, out=whole)
    return dict(zip(collective.values, rows, strict=True))


def _may_be_written(array: Any) -> bool:
    """What a plan has made is its own: nobody else has it."""
    found = describe(array)
    return found.writable and not found.needs_copy and found.spec.is_contiguous and not found.requires_grad
