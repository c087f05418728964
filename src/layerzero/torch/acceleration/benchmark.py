"""layerzero.torch.benchmark: which layers of a model get faster, measured on the model itself; those alone are taken
over."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import layerzero as lz
from layerzero.client.connection.report import html_of_text
from layerzero.torch.acceleration.handle import Acceleration
from layerzero.torch.acceleration.interception import Takeover
from layerzero.torch.acceleration.report import WIDTH, table

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
FASTER = 0.95  # of torch's time at most: what is measured twice differs by some percent
WARM, WARM_GPU = 6, 24  # calls until a route is settled; on a GPU until its kernels are lifted


@dataclass(frozen=True)
class Measured:
    """One layer's calls of one op within a call of the model: `torch_us` and `our_us` in all, medians. `error`: the
    largest, of the largest value of torch's result. `kernel` served ours. `why` it stays with torch; empty: taken."""

    layer: str
    op: str
    calls: int
    torch_us: float
    our_us: float
    error: float
    kernel: str
    why: str


@dataclass(frozen=True)
class BenchmarkReport:
    """`rows` of the layers. `before_us`, `after_us`: a call of the model, without and with the layers that got faster,
    both measured in turns; `error` as of rows, of its outputs. `acceleration` holds those layers, and is None where the
    model is as it was; `why` says why. `with` or `remove()` takes it out. Prints as a table."""

    rows: tuple[Measured, ...]
    before_us: float
    after_us: float
    error: float
    why: str
    acceleration: Acceleration | None = field(repr=False)

    def remove(self) -> None:
        """Leave the model to torch again."""
        if self.acceleration is not None:
            self.acceleration.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        rows = [asdict(row) for row in self.rows]
        return {
            "before_us": self.before_us,
            "after_us": self.after_us,
            "error": self.error,
            "why": self.why,
            "rows": rows,
        }

    def __str__(self) -> str:
        taken = sum(not row.why for row in self.rows)
        headline = f"benchmark: {self.before_us:,.0f} us before"
        headline += f", the model stays with torch: {self.why}" if self.why else f", {self.after_us:,.0f} us after"
        cells = [
            (row.layer, row.op, _us(row.torch_us), _us(row.our_us), f"torch's: {row.why}" if row.why else row.kernel)
            for row in self.rows
        ]
        names = ("layer", "op", "torch us", "our us", f"taken over: {taken} of {len(self.rows)}")
        return "\n".join((headline, *table(cells, names, WIDTH)))

    def _repr_html_(self) -> str:
        return html_of_text(str(self))


def benchmark(
    model: torch.nn.Module,
    *inputs: Any,
    ops: Iterable[str] | None = None,
    policy: Mapping[str, Any] | None = None,
    tolerance: float | None = None,
    rounds: int = 10,
    kwargs: Mapping[str, Any] | None = None,
) -> BenchmarkReport:
    """Measure each layer of `model` on `inputs` with torch's functions and ours in turns, and accelerate those layers
    alone that get faster by 5 % and whose results are torch's within `tolerance`, of the largest value; if then the
    whole model is not faster, or its outputs differ, none.

    The model is called some times without gradients, in eval mode; calls of a layer `rounds` times each. `ops`,
    `policy`: as of accelerate(); kwargs: those of the model's call. tolerance: default 1e-10 for float64, 2e-5 for
    float32, 5e-3 for float16, 4e-2 for bfloat16. Sizes other than those of `inputs` are not measured.
    Raises InvalidArgument, and what the model raises.
    """
    if getattr(model, "training", True) or hasattr(model, "_orig_mod"):
        raise lz.InvalidArgument(
            "benchmark: the model is in training mode, or compiled; allowed: one in eval mode; call model.eval(), and "
            "torch.compile after this"
        )
    if rounds < 1:
        raise lz.InvalidArgument(f"benchmark: rounds is {rounds}; allowed: 1 and more; leave it out for 10")
    call: Callable[[], Any] = lambda: model(*inputs, **(kwargs or {}))  # noqa: E731
    with torch.no_grad(), torch.random.fork_rng():
        whole = Acceleration(model, ops, policy)
        try:
            why = whole.why_off
            # What torch takes while no worker has anything to do. In turns with ours it may wait for a core on which a
            # library's threads spin on: then it would seem slow, and only because of us.
            device = _on_gpu(tree_leaves((inputs, kwargs)))
            alone = _timed([lambda: whole.native(call)], rounds, device)[0]
            measuring = _Measuring(whole.takeover, rounds, tolerance)
            if not why:
                with whole.policy(), measuring:
                    whole.native(call)
                    measuring.is_second = True
                    whole.native(call)
        finally:
            whole.remove()
        rows = measuring.rows()
        chosen = frozenset((row.layer, row.op) for row in rows if not row.why)
        if not chosen:
            why = why or "no layer got faster"
            return BenchmarkReport(rows, alone, alone, 0.0, why, None)
        kept = Acceleration(model, ops, policy, layers=chosen)
        try:
            report = _whole(kept, call, rows, alone, rounds, tolerance, device)
        except BaseException:
            kept.remove()
            raise
    if report.why:
        kept.remove()
    return report


def _whole(
    kept: Acceleration,
    call: Callable[[], Any],
    rows: tuple[Measured, ...],
    alone: float,
    rounds: int,
    tolerance: float | None,
    device: torch.device | None,
) -> BenchmarkReport:
    torch.manual_seed(0)
    expected = kept.native(call)
    torch.manual_seed(0)
    found = call()
    error, is_close = 0.0, True
    for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        if isinstance(other, Tensor):
            distance = _error(one, other)
            error, is_close = max(error, distance), is_close and distance <= _tolerance(other, tolerance)
    in_turns, after = _timed([lambda: kept.native(call), call], rounds, device)
    before = min(alone, in_turns)
    why = ""
    if not is_close:
        why = f"its outputs differ by {error:.1e} of their largest value"
    elif after >= before:
        why = f"as a whole it is not faster, {after:,.0f} us"
    return BenchmarkReport(rows, before, after, error, why, None if why else kept)


class _Measuring(TorchFunctionMode):
    """Measures each call, and gives the program torch's result: torch alone in the first run of the model, both in its
    second."""

    def __init__(self, takeover: Takeover, rounds: int, tolerance: float | None) -> None:
        super().__init__()
        self._takeover, self._rounds, self._tolerance = takeover, rounds, tolerance
        self._found: dict[tuple[str, str], list[Measured]] = {}
        self._alone: dict[tuple[str, str], list[float]] = {}
        self.is_second = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = self._takeover.rules.get(func)
        if rule is None or rule.is_composite:
            return func(*args, **kwargs)
        layer = self._takeover.tally.layer(2)
        planned = rule.plan(*args, **kwargs)
        native: Callable[[], Any] = lambda: func(*args, **kwargs)  # noqa: E731
        if isinstance(planned, str):  # once: it may change its arguments
            if self.is_second:
                self._note(Measured(layer, rule.op, 1, 0.0, 0.0, 0.0, "", planned))
            return native()
        if not self.is_second:
            result = native()
            alone = _timed([native], self._rounds, _on_gpu([result]))[0]
            self._alone.setdefault((layer, rule.op), []).append(alone)
            return result
        ours: Callable[[], Any] = lambda: self._takeover.attempt(layer, rule.op, planned)  # noqa: E731
        result, first = native(), ours()
        if isinstance(first, str):
            self._note(Measured(layer, rule.op, 1, 0.0, 0.0, 0.0, "", first))
            return result
        error, why = _error(first, result), ""
        if error > _tolerance(result, self._tolerance):
            why = f"its result differs by {error:.1e} of the largest value"
        torch_us, our_us = _timed([native, ours], self._rounds, _on_gpu([result]))
        self._note(
            Measured(layer, rule.op, 1, torch_us, our_us, error, self._takeover.tally.last_kernel(layer, rule.op), why)
        )
        return result

    def _note(self, one: Measured) -> None:
        self._found.setdefault((one.layer, one.op), []).append(one)

    def rows(self) -> tuple[Measured, ...]:
        """One for each layer and op. A layer of which one call must be left stays with torch as a whole."""
        rows = []
        for (layer, op), calls in self._found.items():
            torch_us, our_us = sum(one.torch_us for one in calls), sum(one.our_us for one in calls)
            why = next((one.why for one in calls if one.why), "")
            if not why and our_us > FASTER * torch_us:
                why = "not faster"
            error = max(one.error for one in calls)
            rows.append(Measured(layer, op, len(calls), torch_us, our_us, error, calls[-1].kernel, why))
        return tuple(rows)


def _timed(calls: Sequence[Callable[[], Any]], rounds: int, device: torch.device | None) -> list[float]:
    """Microseconds of each, medians of rounds in which all run in turns, first one and then the other ahead."""
    times: list[list[int]] = [[] for _ in calls]
    for _ in range(WARM if device is None else WARM_GPU):
        for call in calls:
            call()
    order = list(range(len(calls)))
    for _ in range(rounds):
        for n in order:
            _settle(device)
            start_ns = time.perf_counter_ns()
            calls[n]()
            _settle(device)
            times[n].append(time.perf_counter_ns() - start_ns)
        order.reverse()
    return [statistics.median(found) / 1e3 for found in times]


def _settle(device: torch.device | None) -> None:
    if device is not None:
        torch.cuda.synchronize(device)


def _on_gpu(values: Iterable[Any]) -> torch.device | None:
    return next((one.device for one in values if isinstance(one, Tensor) and one.is_cuda), None)


def _tolerance(expected: Tensor, given: float | None) -> float:
    return TOLERANCE.get(expected.dtype, 0.0) if given is None else given


def _error(found: Any, expected: Tensor) -> float:
    """The largest difference, of the largest value; infinite where shapes differ, or one alone is no number."""
    if not isinstance(found, Tensor) or found.shape != expected.shape or found.dtype != expected.dtype:
        return math.inf
    if not expected.numel():
        return 0.0
    if not expected.is_floating_point():
        return 0.0 if torch.equal(found, expected) else math.inf
    one, other = found.double(), expected.double()
    is_same = (one == other) | (one.isnan() & other.isnan())
    distance = torch.where(is_same, 0.0, (one - other).abs()).nan_to_num(math.inf, math.inf)
    scale = float(torch.where(other.isfinite(), other.abs(), 0.0).max())
    return float(distance.max()) / (scale or 1.0)


def _us(value: float) -> str:
    return f"{value:,.1f}" if value else ""
