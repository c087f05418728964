"""A frozen plan, step by step: results as they come, and beside them what another backend makes of the same
arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from layerzero.client.connection.record import kernel_of
from layerzero.client.plans.frozen import FrozenPlan
from layerzero.client.plans.recording import Step
from layerzero.client.plans.verifying import largest_difference
from layerzero.ipc.errors import InvalidArgument, LayerZeroError


@dataclass(frozen=True)
class Comparison:
    """What another backend gave for a step: by which kernel, in how many us of it, and how far off, relative to the
    largest number. `problem`: why there is none, or that it is beyond what is allowed; "" otherwise."""

    backend: str
    kernel_id: str = ""
    us: float = 0.0
    difference: float = 0.0
    problem: str = ""


def compared(
    plan: FrozenPlan, inputs: Sequence[Any], backend: str
) -> Iterator[tuple[Step, tuple[Any, ...], Comparison]]:
    """As FrozenPlan.debug, with a comparison for each step."""
    for step, results, args in plan.debug(inputs):
        yield step, results, _compare(plan, step, results, args, backend)


def _compare(plan: FrozenPlan, step: Step, results: tuple[Any, ...], args: Any, backend: str) -> Comparison:
    if step.request is None:
        return Comparison(backend, problem="a step of own code")
    if step.writes:
        return Comparison(backend, problem="it has written to what it takes")
    try:
        value = plan.session.run(replace(step.request, args=args, out=None, backend=backend))
    except LayerZeroError as exc:
        return Comparison(backend, problem=exc.message)
    record = plan.session.last_record
    found = Comparison(backend, kernel_of(record)[0], record[4] / 1e3 if isinstance(record, tuple) else 0.0)
    try:
        return replace(found, difference=largest_difference(results, value if isinstance(value, tuple) else (value,)))
    except InvalidArgument as exc:
        return replace(found, problem=exc.message)
