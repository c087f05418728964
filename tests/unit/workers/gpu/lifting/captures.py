"""Captures that nobody made: a process's memory as a table of allocations, and calls whose tensors lie in some."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from layerzero.ipc.cuda.nodes import Allocation, KernelNode, Node
from layerzero.ipc.lifting.form import Address, Copy, Fill, Step
from layerzero.workers.gpu.lifting.compare import Capture, Extent, compare

BASE = 0x7F00_0000_0000
GAP = 4096
CODE = "c0de" * 16


class Process:
    """Its memory. Addresses are never used twice."""

    def __init__(self) -> None:
        self.allocations: list[Allocation] = []
        self._next = BASE

    def allocate(self, nbytes: int, *, is_device: bool = True) -> int:
        base = self._next
        self._next += (nbytes // 0x1_0000 + 2) * 0x1_0000
        self.allocations.append(Allocation(base, nbytes, is_device))
        return base

    def find(self, address: int) -> Allocation | None:
        return next((one for one in self.allocations if one.base <= address < one.base + max(one.nbytes, 1)), None)

    def place(self, sizes: Sequence[int | None]) -> tuple[Allocation, tuple[Extent | None, ...]]:
        """Tensors in an allocation of their own, with gaps."""
        whole = self.allocate(sum((size or 0) + 2 * GAP for size in sizes) + GAP)
        found, at = list[Extent | None](), whole
        for size in sizes:
            at = -(-at // 512) * 512 + 256
            found.append(None if size is None else Extent(at, size))
            at += (size or 0) + GAP
        return self.allocations[-1], tuple(found)


class Bench:
    """Two captures of a call with these tensors."""

    def __init__(self, inputs: Sequence[int | None] = (1024, 64), outputs: Sequence[int | None] = (1024,)) -> None:
        self.process = Process()
        self.inputs, self.outputs, self._count = inputs, outputs, len(inputs)
        self.sets = [self.process.place([*inputs, *outputs]) for _ in range(2)]
        self.nodes: list[list[Node]] = [[], []]

    def input(self, capture: int, number: int, offset: int = 0) -> int:
        extent = self.sets[capture][1][number]
        assert extent is not None
        return extent.address + offset

    def output(self, capture: int, number: int, offset: int = 0) -> int:
        return self.input(capture, self._count + number, offset)

    def add(self, *nodes: Node) -> None:
        """One for each capture."""
        for own, node in zip(self.nodes, nodes, strict=True):
            own.append(node)

    def captures(self) -> list[Capture]:
        return [
            Capture(tuple(nodes), extents[: self._count], extents[self._count :], memory)
            for nodes, (memory, extents) in zip(self.nodes, self.sets, strict=True)
        ]

    def compare(self) -> tuple[tuple[Step, ...], tuple[int, ...]]:
        return compare(self.captures(), self.process.find, lambda node: CODE)


def kernel(*params: bytes, align: int = 8, **changes: Any) -> KernelNode:
    """A launch with these parameters, each at the next multiple of `align`."""
    block, layout = bytearray(), list[tuple[int, int]]()
    for param in params:
        block += bytes(-len(block) % align)
        layout.append((len(block), len(param)))
        block += param
    given: dict[str, Any] = {
        "module": 1, "name": "k", "grid": (1, 2, 3), "block": (128, 1, 1), "shared_bytes": 0, "params": bytes(block),
        "layout": tuple(layout), "attributes": (), "max_shared_bytes": 0, "is_cluster_size_free": False,
    }  # fmt: skip
    return KernelNode(**{**given, **changes})


def word(value: int) -> bytes:
    return struct.pack("<Q", value)


def touched(steps: Sequence[Step]) -> list[tuple[Any, ...]]:
    """What steps do, without where: for comparing runs on different memory by hand."""
    found: list[tuple[Any, ...]] = []
    for step in steps:
        if isinstance(step, Fill):
            found.append(("fill", step.target))
        elif isinstance(step, Copy):
            found.append(("copy", step.source, step.target))
        else:
            found.append(("kernel", *((patch.at, patch.address) for patch in step.patches)))
    return found


def at(kind: Any, number: int, offset: int = 0) -> Address:
    return Address(kind, number, offset)
