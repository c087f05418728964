"""Memory that a call lends beside its frame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from layerzero.client.arrays.recognition import Array
from layerzero.client.connection.arena import Arena
from layerzero.ipc.functions import frames
from layerzero.ipc.vocabulary.ops import FUNCTION_INPUTS

MAX_LENT = len(FUNCTION_INPUTS) - 1
Place: TypeAlias = tuple[Any, int, int]
"""Arena, offset and bytes."""


class Ranges:
    """Of each arena, the range that a call's arrays lie in."""

    def __init__(self) -> None:
        self.arrays: list[Array] = []
        self._ranges: list[tuple[Arena, int, int]] = []
        self._nodes: list[tuple[list[Any], int, int]] = []  # of arrays, to be told where in the range they are

    def add(self, library: str, array: Array, arena: Arena, offset: int) -> list[Any] | None:
        """None where there is no room for one more arena."""
        end = offset + array.spec.span_bytes
        for position, (known, low, high) in enumerate(self._ranges):
            if known is arena:
                self._ranges[position] = (arena, min(low, offset), max(high, end))
                break
        else:
            position = len(self._ranges)
            if position == MAX_LENT:
                return None
            self._ranges.append((arena, offset, end))
        node = frames.array_node(library, array.spec, position, 0)
        self.arrays.append(array)
        self._nodes.append((node, position, offset))
        return node

    def close(self) -> Sequence[Place]:
        """What to lend. Each range begins at a multiple of the alignment."""
        if not self._ranges:
            return ()
        starts = [low // frames.ALIGNMENT * frames.ALIGNMENT for _, low, _ in self._ranges]
        for node, position, offset in self._nodes:
            node[-1] = offset - starts[position]
        return [(arena, start, high - start) for start, (arena, _, high) in zip(starts, self._ranges, strict=True)]
