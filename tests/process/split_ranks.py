"""What ranks do with plans that are split over them, and with pipelines, told by tests/process/test_groups.py."""

from __future__ import annotations

import os
import signal
import threading
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


# --- pipelines


def _first(x: Any) -> Any:
    return x, lz.matmul(x, UP)


def _second(x: Any, h: Any) -> Any:
    return x, lz.silu(h)


def _third(x: Any, h: Any) -> Any:
    return x, lz.matmul(h, DOWN)


def _raises(x: Any, h: Any) -> Any:
    raise ValueError("it cannot")


STAGES: dict[str, list[Any]] = {
    "two": [lambda x: _second(*_first(x)), lambda x, h: x + lz.matmul(h, DOWN)],
    "four": [_first, _second, _third, lambda x, h: x + h],
    "raises": [_first, _raises],
    "no arrays": [_first, lambda x, h: "nothing"],
}
_pipelines: dict[tuple[lz.Group, str, int], Any] = {}


def _pipeline(group: lz.Group, stages: str, micro_batches: int) -> Any:
    own = [one if n % group.size == group.rank else None for n, one in enumerate(STAGES[stages])]
    made = lz.pipeline(own, group, micro_batches=micro_batches)
    return _pipelines.setdefault((group, stages, micro_batches), made)


def flow(group: lz.Group, stages: str, micro_batches: int, seeds: list[int], rows: int = 8) -> str:
    """Runs on these arrays, as NumPy computes it; how it goes."""
    made = _pipeline(group, stages, micro_batches)
    for seed in seeds:
        np.testing.assert_allclose(made(some(seed, rows)), expected(some(seed, rows)), rtol=1e-9, atol=1e-12)
    return str(made.explain())


def flow_apart(group: lz.Group) -> bool:
    """The result is where it was made."""
    found = lz.pipeline(STAGES["two"], group, micro_batches=2, shares_result=False)(some(1, 4))
    return found is not None


def flow_alone(group: lz.Group) -> list[bool]:
    """Whether another thread could call the group while a stage is made."""
    found = []

    def look() -> None:
        found.append(group._lock.acquire(blocking=False))
        if found[-1]:
            group._lock.release()

    def stage(x: Any) -> Any:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return x

    lz.pipeline([stage] * group.size, group, micro_batches=1)(some(1, 4))
    return found


def flow_split(group: lz.Group) -> str:
    """Stages that are split over groups of their own."""
    with lz.group(f"stage{group.rank}", 0, 1) as own:
        first = lz.split_plan(_first, own)
        last = lz.split_plan(lambda x, h: x + lz.matmul(lz.silu(h), DOWN), own)
        flow = lz.pipeline([first, last], group, micro_batches=3)
        np.testing.assert_allclose(flow(some(1, 6)), expected(some(1, 6)), rtol=1e-9, atol=1e-12)
        return str([first, last][group.rank].phase)


def die_in_a_stage(group: lz.Group) -> None:
    """Of the second micro-batch."""
    calls = iter(range(2))

    def last(x: Any, h: Any) -> Any:
        if next(calls):
            os.kill(os.getpid(), signal.SIGKILL)
        return x + lz.matmul(h, DOWN)

    lz.pipeline([None, last], group, micro_batches=4)(some(0, 8))
