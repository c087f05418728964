"""What ranks do with plans that are split over them, told by tests/process/test_groups.py."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np

import layerzero as lz

HIDDEN, INNER = 8, 64
UP, DOWN = (
    np.random.default_rng(n).standard_normal(shape) for n, shape in enumerate([(HIDDEN, INNER), (INNER, HIDDEN)])
)
_plans: dict[lz.Group, Any] = {}


def some(seed: int, rows: int = 4) -> Any:
    return np.random.default_rng(100 + seed).standard_normal((rows, HIDDEN))


def block(x: Any) -> Any:
    return x + lz.matmul(lz.silu(lz.matmul(x, UP)), DOWN)


def summed(x: Any) -> Any:
    return np.cumsum(lz.matmul(x, UP), axis=1)


def expected(x: Any) -> Any:
    h = x @ UP
    return x + (h / (1 + np.exp(-h))) @ DOWN


def agree(group: lz.Group, seeds: list[int], rows: int = 4) -> str:
    """Runs on these arrays, as NumPy computes it; the phase of the plan then."""
    plan = _plans.setdefault(group, lz.split_plan(block, group))
    for seed in seeds:
        np.testing.assert_allclose(plan(some(seed, rows)), expected(some(seed, rows)), rtol=1e-9, atol=1e-12)
    return str(plan.phase)


def explain(group: lz.Group) -> str:
    return str(_plans[group].explain())


def weight_bytes(group: lz.Group) -> int:
    return int(_plans[group].explain().weight_bytes)


def refuse(group: lz.Group, function: str, rows: int = 4) -> str:
    plan = lz.split_plan(globals()[function], group)
    plan(some(0, rows))
    try:
        plan(some(0, rows))
    except lz.InvalidArgument as exc:
        return exc.message
    return ""


def die_in_a_run(group: lz.Group) -> None:
    """After the first part."""
    group.all_reduce = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, assignment]
    _plans[group](some(0))
