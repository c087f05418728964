"""From call signatures and the engine's verdicts on them to a Block for the planner. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from layerzero.broker.selection.planner import Block, Choice, Edge, Fusion, Node
from layerzero.broker.selection.signature import CallSpec, Verdict
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec

COPY_BYTES_PER_US = 5_000  # what one core copies; plans need no more than the order of magnitude
GPU_COPY_BYTES_PER_US = 1_000_000  # on a GPU, likewise
MAX_NODES = 1024
MAX_LINKS = 4 * MAX_NODES
MAX_REWRITES = MAX_NODES
MAX_PAIRS = 100_000  # of kernels on both sides of all links
ROUNDING = 1e-9  # points that differ by less are equal


@dataclass(frozen=True, slots=True)
class Link:
    """Call `target` takes the result of call `source` as its argument `arg`."""

    source: int
    target: int
    arg: str


@dataclass(frozen=True)
class Ranked:
    """A call signature with the engine's verdicts, best first. `time_weight`: points of the score that the fastest
    kernel gets for its time (Weights.perfdb)."""

    spec: CallSpec
    verdicts: tuple[Verdict, ...]
    time_weight: float

    def tensor(self, arg: str) -> TensorSpec:
        """An argument by name. Raises InvalidArgument."""
        names = OPS[self.spec.op].inputs
        found = self.spec.inputs[names.index(arg)] if arg in names else None
        if found is None:
            raise InvalidArgument(f"{self.spec.op} is called without {arg!r:.40}; arguments: {', '.join(names)}")
        return found

    @cached_property
    def candidates(self) -> tuple[Verdict, ...]:
        """Accepted kernels, and none that keeps failing unless there is no other."""
        accepted = tuple(v for v in self.verdicts if v.is_accepted)
        return tuple(v for v in accepted if not v.is_last_resort) or accepted

    @cached_property
    def costs_us(self) -> Mapping[str, float]:
        """What each candidate costs: its measured time, with its other points (priority, policy, reliability) at the
        time that they stand for. One whose points no time makes good is left out: it is not wanted here.

        The engine gives `time_weight` * fastest / time for a time, so that a lack of points is a share of that weight.
        Kernels that were never measured count as fast as the fastest, as they do there.
        """
        fastest_us = min((v.measured_us for v in self.candidates if v.measured_us), default=0.0)
        best = max(self.candidates, key=_points, default=None)
        if best is None:
            return {}
        best_us = best.measured_us or fastest_us
        costs = {}
        for verdict in self.candidates:
            lack = _points(best) - _points(verdict)
            share = (fastest_us / best_us if best_us else 1.0) - _ratio(lack, self.time_weight)
            if share > 0:
                costs[verdict.kernel_id] = fastest_us / share
        return costs

    @cached_property
    def choices(self) -> list[tuple[Verdict, float]]:
        """Those that a plan may choose, in the engine's order, with their costs."""
        return [(v, self.costs_us[v.kernel_id]) for v in self.candidates if v.kernel_id in self.costs_us]

    @property
    def is_measured(self) -> bool:
        return all(v.measured_us for v in self.candidates)


def block_of(
    calls: Sequence[Ranked], links: Sequence[Link], rewrites: Sequence[tuple[tuple[int, ...], Ranked]] = ()
) -> Block:
    """`rewrites`: one call that does what several nodes do. It counts where all times are known: a guess must not win
    against a measurement. Raises InvalidArgument for what is no block, or when nobody accepts a call."""
    check_counts(len(calls), len(links), len(rewrites))
    for link in links:
        if not 0 <= link.source < link.target < len(calls):
            raise InvalidArgument(f"call {link.target} cannot take the result of call {link.source} of {len(calls)}")
    pairs = sum(len(calls[link.source].choices) * len(calls[link.target].choices) for link in links)
    if pairs > MAX_PAIRS:
        raise InvalidArgument(f"the links of a plan join {pairs} pairs of kernels; allowed: {MAX_PAIRS}")
    linked = {(link.target, link.arg) for link in links}
    nodes = [
        Node(
            call.spec.op,
            tuple(
                Choice(v.kernel_id, us + sum(_copy_us(call, arg) for arg in _dense(v) if (n, arg) not in linked))
                for v, us in call.choices
            ),
        )
        for n, call in enumerate(calls)
    ]
    edges = []
    for link in links:
        source, target = calls[link.source], calls[link.target]
        copy_us = _copy_us(target, link.arg)
        costs = {
            (a.kernel_id, b.kernel_id): count * copy_us
            for a, _ in source.choices
            for b, _ in target.choices
            if (count := _conversions(a, b, link.arg))
        }
        edges.append(Edge(link.source, link.target, costs))
    fusions = [
        Fusion(covered, Choice(v.kernel_id, us))
        for covered, call in rewrites
        if call.is_measured and all(0 <= n < len(calls) and calls[n].is_measured for n in covered)
        for v, us in call.choices
    ]
    return Block(tuple(nodes), tuple(edges), tuple(fusions))


def check_counts(calls: int, links: int, rewrites: int) -> None:
    """Raises InvalidArgument for more than anybody plans for."""
    if not 0 < calls <= MAX_NODES:
        raise InvalidArgument(f"a plan is made for 1 to {MAX_NODES} calls, not {calls}")
    if links > MAX_LINKS:
        raise InvalidArgument(f"a plan has at most {MAX_LINKS} links, not {links}")
    if rewrites > MAX_REWRITES:
        raise InvalidArgument(f"a plan has at most {MAX_REWRITES} rewrites, not {rewrites}")


def _points(verdict: Verdict) -> float:
    """Its score without that of copies, which a plan counts itself."""
    return verdict.score - verdict.terms.get("transform", 0.0)


def _ratio(lack: float, weight: float) -> float:
    """A lack of points in units of the time's weight; without weight any lack is beyond remedy."""
    if lack < ROUNDING:
        return 0.0
    return lack / weight if weight else math.inf


def _dense(verdict: Verdict) -> list[str]:
    """The arguments that are copied for this kernel."""
    return [transform.rpartition(" ")[2] for transform in verdict.transforms]


def _copy_us(call: Ranked, arg: str) -> float:
    spec = call.tensor(arg)
    return spec.numel * spec.itemsize / (GPU_COPY_BYTES_PER_US if call.spec.device else COPY_BYTES_PER_US)


def _conversions(source: Verdict, target: Verdict, arg: str) -> int:
    """How often the tensor between two kernels is copied: to be dense, into another layout, into another dtype."""
    count = int(arg in _dense(target))
    if source.kernel is None or target.kernel is None:
        return count
    layout, layouts = source.kernel.produces_layout, target.kernel.requires_layouts
    count += layout is not None and bool(layouts) and layout not in layouts
    dtype, wanted = source.kernel.produces_dtype, target.kernel.requires_dtype
    return count + (dtype is not None and wanted is not None and dtype != wanted)
