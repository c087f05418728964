"""Programs made at random, as plans and as they are: the same numbers, with views, writes in place, shared memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.example_counts import examples
from tests.process.harness import Site

import layerzero as lz

N = 6  # all arrays are N x N, or views of such, so that any may be combined with any
RUNS = 7
Step = tuple[str, tuple[int, ...]]

VIEWS: dict[str, Callable[[Any], Any]] = {
    "transpose": lambda a: a.T,
    "reshape": lambda a: a.reshape(4, 9).reshape(N, N),
    "flip": lambda a: a[::-1],
    "whole": lambda a: a[:, :],
    "ravel": lambda a: a.ravel().reshape(N, N),
    "swap": lambda a: np.swapaxes(a, 0, 1),
}
OWN: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "minus": lambda a, b: 1.5 - a * b,
    "product": lambda a, b: np.matmul(a, b) / 8,
    "times_row": lambda a, b: np.multiply(a, b[:1]) + np.subtract(a.T, b),
    "slopes": lambda a: np.gradient(a)[1] - np.gradient(a)[0],
    "maximum": lambda a, b: np.maximum(a, b) + 0,
    "concatenate": lambda a, b: np.concatenate([a[:3], b[3:]]),
    "where": lambda a, b: np.where(a > b, a, b),
    "tanh": lambda a: 2 * np.tanh(a),
    "mean": lambda a: a - a.mean(axis=1, keepdims=True),
    "copy": lambda a: a.copy(),
}


def write_add(a: Any, b: Any) -> Any:
    a += b
    return a


def write_row(a: Any, b: Any) -> Any:
    a[1] = b[2]
    return a


def write_out(a: Any, b: Any) -> Any:
    return np.add(a, b, out=a)


def write_copy(a: Any, b: Any) -> Any:
    np.copyto(a[2:4], b[:2])
    return a


def write_clip(a: Any) -> Any:
    np.clip(a, -1, 1, out=a)
    return a


WRITES: dict[str, Callable[..., Any]] = {
    "write_add": write_add,
    "write_row": write_row,
    "write_out": write_out,
    "write_copy": write_copy,
    "write_clip": write_clip,
}


def call(name: str, *args: Any) -> Any:
    """By lz, or by NumPy where the arguments are those of the expected run."""
    if args[0].dtype == np.float64:
        return args[0] @ args[1] if name == "matmul" else args[0] / (1 + np.exp(-args[0]))
    return lz.matmul(*args) if name == "matmul" else lz.silu(*args)


def program(seed: int) -> tuple[Callable[..., Any], list[Any]]:
    """A function of two arrays and a list of constants, and those constants."""
    dice = random.Random(seed)
    numbers = np.random.default_rng(seed)
    fixed = np.frombuffer(numbers.standard_normal((N, N)).astype(np.float32).tobytes(), np.float32).reshape(N, N)
    constants = [fixed, numbers.standard_normal((N, N)).astype(np.float32)]
    constants.append(lz.share(numbers.standard_normal((N, N)).astype(np.float32)))
    steps: list[Step] = []
    arguments = 2 + len(constants)
    for _ in range(dice.randint(3, 25)):
        kind = dice.choices(["silu", "matmul", "view", "own", "write"], [4, 3, 2, 3, 2])[0]
        known = arguments + len(steps)
        if kind == "write" and steps:
            name = dice.choice(list(WRITES))
            target = dice.randrange(arguments, known)  # not the caller's own arrays
            steps.append((name, (target, dice.randrange(known))))
        else:
            names = {"view": VIEWS, "own": OWN}.get(kind)
            name = kind if names is None else dice.choice(list(names))
            name = "silu" if name == "write" else name
            steps.append((name, (dice.randrange(known), dice.randrange(known))))
    outputs = [dice.randrange(arguments, arguments + len(steps)) for _ in range(dice.randint(1, 4))]
    is_tame = dice.random() < 0.5

    def function(x: Any, y: Any, given: list[Any]) -> Any:
        values = [x, y, *given]
        for name, (a, b) in steps:
            one, other = values[a], values[b]
            if name in WRITES:
                # A view of the caller's own array is that array.
                safe = values[a] if a not in of_caller else values[a] + 0
                made = WRITES[name](safe, other) if WRITES[name].__code__.co_argcount == 2 else WRITES[name](safe)
            elif name in ("silu", "matmul"):
                made = call(name, one, other) if name == "matmul" else call(name, one)
                made = np.tanh(made) if is_tame else made / 4
            else:
                function = VIEWS.get(name) or OWN[name]
                made = function(one, other) if function.__code__.co_argcount == 2 else function(one)
            values.append(made)
        given_back = [values[n] + 0 if n in of_caller else values[n] for n in outputs]
        return {"all": given_back, "first": given_back[0][1:4]}

    of_caller: set[int] = set(range(arguments))
    for number, (name, (a, _)) in enumerate(steps, arguments):
        if name in VIEWS and a in of_caller:
            of_caller.add(number)
    return function, constants


@pytest.mark.parametrize("first", range(0, examples(80), 10))
def test_a_plan_gives_what_its_function_gives(connected: Site, first: int) -> None:
    """Against the same program in float64 by NumPy, with constants that change in place between the runs."""
    connected.wait_ready("alpha")
    frozen = 0
    for seed in range(first, first + 10):
        function, constants = program(seed)
        plan = lz.plan(lambda x, y: function(x, y, constants))  # noqa: B023  # it ends before the next one
        kept = []
        for run in range(RUNS):
            numbers = np.random.default_rng((seed, run))
            x, y = (numbers.standard_normal((N, N)).astype(np.float32) for _ in range(2))
            if run > 2:
                constants[1][...] = numbers.standard_normal((N, N))
                constants[2][...] = numbers.standard_normal((N, N))
            wanted = function(*(a.astype(np.float64) for a in (x, y)), [c.astype(np.float64) for c in constants])
            before = x.copy(), y.copy()
            with np.errstate(all="ignore"):
                kept.append((plan(x, y), wanted))
            assert np.array_equal(x, before[0])
            assert np.array_equal(y, before[1])
        for run, (got, wanted) in enumerate(kept):
            for one, other in zip([*got["all"], got["first"]], [*wanted["all"], wanted["first"]], strict=True):
                scale = max(1.0, float(np.abs(other).max()))
                np.testing.assert_allclose(one, other, rtol=0, atol=2e-4 * scale, err_msg=f"seed {seed}, run {run}")
        frozen += plan.phase == "FROZEN"
        if plan.phase != "FROZEN":
            why = plan.explain().problem  # constants alone, in NumPy, and what is written to such
            assert (
                "no lz call" in why
                or "anew at each run" in why
                or "other numbers at each run" in why
                or "itself" in why
            ), plan.explain()
    assert frozen >= 1
