"""What a rank has of a split function: its parts of the weights, and its steps as functions of arrays."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np

from layerzero.client.arrays.recognition import CPU
from layerzero.client.facade.memory import share
from layerzero.client.facade.running import perform
from layerzero.client.plans.recording import Recording, Use
from layerzero.client.plans.traced import map_leaves
from layerzero.groups.splitting import LocalStep, Stretch


class Weights:
    """This rank's parts of a function's own arrays, in shared memory or on its GPU, and the others as they are."""

    def __init__(self, recording: Recording, rank: int, size: int) -> None:
        self._recording, self._rank, self._size = recording, rank, size
        self._parts: dict[tuple[int, int, int], Any] = {}

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts.values())

    def whole(self, number: int) -> Any:
        return self._recording.values[number].obj

    def part(self, number: int, dim: int, blocks: int) -> Any:
        key = (number, dim, blocks)
        if key not in self._parts:
            array = self.whole(number)
            array = array.detach() if hasattr(array, "detach") else array
            part = joined([self.cut(one, dim) for one in _blocks(array, dim, blocks)], dim)
            self._parts[key] = part if self._recording.device not in (None, CPU) else share(part)
        return self._parts[key]

    def cut(self, array: Any, dim: int) -> Any:
        """This rank's part of an array."""
        count = array.shape[dim] // self._size
        return array[(slice(None),) * dim + (slice(self._rank * count, (self._rank + 1) * count),)]


def _blocks(array: Any, dim: int, blocks: int) -> list[Any]:
    count = array.shape[dim] // blocks
    return [array[(slice(None),) * dim + (slice(n * count, (n + 1) * count),)] for n in range(blocks)]


def joined(arrays: list[Any], dim: int) -> Any:
    """Side by side, as an array of the same library."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(arrays[0], torch.Tensor):
        return torch.cat(arrays, dim)
    return np.concatenate(arrays, dim)


class LocalStretch:
    """A stretch as a function of arrays, which may be planned like any other."""

    def __init__(self, stretch: Stretch, weights: Weights, rank: int) -> None:
        self._stretch, self._weights, self._rank = stretch, weights, rank
        self.__qualname__ = f"steps {stretch.steps[0].step.number} to {stretch.steps[-1].step.number}"

    @property
    def has_calls(self) -> bool:
        return any(one.step.request is not None for one in self._stretch.steps)

    def __call__(self, *arrays: Any) -> tuple[Any, ...]:
        known = dict(zip(self._stretch.takes, arrays, strict=True))
        for one in self._stretch.steps:
            result = self._run(one, known)
            _keep(one.step.result, result, known)
        return tuple(known[number] for number in self._stretch.makes)

    def arguments(self, one: LocalStep, known: dict[int, Any]) -> list[Any]:
        """Of a step, as this rank gives them."""
        step, applied = one.step, one.applied
        parts = {place: (dim, blocks) for place, dim, blocks in applied.parts}
        return [
            self._argument(arg, known, parts.get(place), place in applied.first_alone)
            for place, arg in enumerate(step.args if applied.args is None else applied.args)
        ]

    def _run(self, one: LocalStep, known: dict[int, Any]) -> Any:
        step, args = one.step, self.arguments(one, known)
        if step.request is not None:
            return perform(replace(step.request, args=tuple(args)))
        assert step.function is not None
        return step.function(*args, **map_leaves(step.kwargs, lambda leaf: self._array(leaf, known)))

    def _argument(self, arg: Any, known: dict[int, Any], part: tuple[int, int] | None, is_first_alone: bool) -> Any:
        if is_first_alone and self._rank:
            return None
        if part is None or not isinstance(arg, Use):
            return map_leaves(arg, lambda leaf: self._array(leaf, known))
        if arg.value in known:
            return self._weights.cut(known[arg.value], part[0])
        return self._weights.part(arg.value, *part)

    def _array(self, leaf: Any, known: dict[int, Any]) -> Any:
        if not isinstance(leaf, Use):
            return leaf
        return known[leaf.value] if leaf.value in known else self._weights.whole(leaf.value)


def _keep(made: Any, result: Any, known: dict[int, Any]) -> None:
    if isinstance(made, Use):
        known[made.value] = result
    elif isinstance(made, (list, tuple)):
        for one, part in zip(made, result, strict=True):
            _keep(one, part, known)
    elif isinstance(made, dict):
        for name, one in made.items():
            _keep(one, result[name], known)
