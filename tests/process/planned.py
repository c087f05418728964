"""What tests of execution plans share: a function, what must come of it, and waiting until its calls cross as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tests.process.harness import Site, wait_until

import layerzero as lz

X = np.linspace(-2, 2, 24, dtype=np.float32).reshape(4, 6)
W = np.linspace(-1, 1, 36, dtype=np.float32).reshape(6, 6)


def silu(a: Any) -> Any:
    return a / (1 + np.exp(-a))


def block(x: Any) -> Any:
    return lz.silu(lz.matmul(lz.silu(x), W))


def expected(x: Any) -> Any:
    return silu(silu(x) @ W)


def some(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape or (4, 6)).astype(np.float32)


def agree(got: Any, wanted: Any) -> None:
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def settled(plan: lz.ExecutionPlan, *args: Any, messages: int = 1) -> lz.ExecutionPlan:
    """Run until the plan crosses in so many messages."""

    def is_there() -> bool:
        plan(*args)
        assert plan.phase in ("WARM", "FROZEN"), plan.explain()
        return plan.explain().messages == messages and all(t.how != "call" for t in plan.timings())

    wait_until(is_there)
    return plan


def two_ready(new_site: Callable[..., Site]) -> Site:
    """alpha is first, beta second, and both are up."""
    made = new_site()
    made.connect()
    made.wait_ready("alpha", "beta")
    return made
