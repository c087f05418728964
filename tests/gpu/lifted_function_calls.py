"""Functions for tests/gpu/test_lifted_functions.py: of torch, in an interpreter that LZ_TEST_LIFT_INTERPRETER names."""

from __future__ import annotations

import os
from typing import Any

import layerzero as lz

THERE = lz.env("lifted-gpu", from_interpreter=os.environ.get("LZ_TEST_LIFT_INTERPRETER", "/nowhere"))
_state: dict[str, Any] = {"calls": 0}


def like(x: Any, *_: Any) -> Any:
    return x.shape, x.dtype


def like_rows(x: Any) -> Any:
    return x.shape[:1], x.dtype


def like_product(x: Any, w: Any) -> Any:
    return (x.shape[0], w.shape[1]), x.dtype


def like_taken(table: Any, index: Any) -> Any:
    return (*index.shape, table.shape[1]), table.dtype


def rows_of(table: Any, index: Any) -> Any:
    return {"index": range(table.shape[0])}


@lz.isolated(THERE)
def version() -> tuple[str, int]:
    import torch

    return str(torch.__version__), os.getpid()


@lz.isolated(THERE, shapes=like, lift=True)
def elementwise(x: Any, factor: float = 2.0) -> Any:
    import torch

    return torch.nn.functional.silu(x) * factor + 1


@lz.isolated(THERE, shapes=like_rows, lift=True)
def reduction(x: Any) -> Any:
    return x.sum(-1)


@lz.isolated(THERE, shapes=like_product, lift=True)
def product(x: Any, w: Any) -> Any:
    return x @ w


@lz.isolated(THERE, shapes=like, lift=True)
def allocates(x: Any) -> Any:
    """By way of memory that it takes and gives back, of several sizes."""
    import torch

    wide = torch.cat([x, x * 3], -1)
    parts = wide.view(x.shape[0], 2, -1).transpose(0, 1).contiguous()
    del wide
    zeros = torch.zeros_like(parts)
    return (parts + zeros).sum(0)


@lz.isolated(THERE, shapes=like, lift=True)
def into(x: Any, *, out: Any) -> Any:
    import torch

    return torch.mul(x, 3, out=out)


@lz.isolated(THERE, shapes=like_taken, lift=True, trial=rows_of)
def taken(table: Any, index: Any) -> Any:
    return table[index]


@lz.isolated(THERE, shapes=like, lift=True)
def branching(x: Any) -> Any:
    """By a number that is on the GPU: .item() waits for it, which no graph can hold."""
    return x * 2 if x.mean().item() > 0 else x * 3


@lz.isolated(THERE, shapes=like, lift=True)
def counted(x: Any) -> Any:
    """Each call is another than the one before."""
    _state["calls"] += 1
    return x + _state["calls"]


@lz.isolated(THERE, shapes=like, lift=True)
def summed(x: Any) -> Any:
    """The sum of all calls, on the GPU."""
    import torch

    if "sum" not in _state:
        _state["sum"] = torch.zeros_like(x)
    _state["sum"] += x
    return _state["sum"].clone()


@lz.isolated(THERE, shapes=like, lift=True)
def weighted(x: Any) -> Any:
    """Weights that the worker has, and nobody else."""
    import torch

    if "weights" not in _state:
        _state["weights"] = torch.full_like(x, 0.5)
    return x + _state["weights"]


@lz.isolated(THERE, shapes=like, lift=True)
def drawn(x: Any) -> Any:
    import torch

    return torch.nn.functional.dropout(x, 0.5)
