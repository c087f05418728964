"""What computes an op, as nodes of ONNX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

OPSET = 18  # from which on the axes of ReduceMax are an input; onnx 1.13's evaluator knows no other
CONTRIB = "com.microsoft"  # the domain of the runtime's own nodes
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Graph:
    """Nodes, and the shapes of their inputs and outputs by name, in order, as in ipc/vocabulary/ops.py. What attention
    has besides is made by `constant_input` there; inputs of the op that no node reads are left out."""

    nodes: list[Any]
    inputs: dict[str, Shape]
    outputs: dict[str, Shape]
