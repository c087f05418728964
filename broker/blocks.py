"""From call signatures and the engine's verdicts on them to a Block for the planner. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from layerzero.broker.planner import Block, Choice, Edge, Fusion, Node
from layerzero.broker.selection import CallSpec, Verdict
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.ops import OPS
from layerzero.ipc.tensors import TensorSpec

COPY_BYTES_PER_US = 5_000  # what one core copies; plans need no more than the order of magnitude
MAX_NODES = 1024
_WISHES = ("policy", "table")  # terms of the score that say what somebody wants, whatever it costs


@dataclass(frozen=True, slots=True)
class Link:
    """Call `target` takes the result of call `source` as its argument `arg`."""

    source: int
    target: int
    arg: str


@dataclass(frozen=True)
class Ranked:
    """A call signature with the engine's verdicts, best first."""

    spec: CallSpec
    verdicts: tuple[Verdict, ...]

    def tensor(self, arg: str) -> TensorSpec:
        """An argument by name. Raises InvalidArgument."""
        names = OPS[self.spec.op].inputs
        found = self.spec.inputs[names.index(arg)] if arg in names else None
        if found is None:
            raise InvalidArgument(f"{self.spec.op} is called without {arg!r:.40}; arguments: {', '.join(names)}")
        return found

    @property
    def candidates(self) -> tuple[Verdict, ...]:
        """What a plan may choose from: of the accepted kernels those that policy and dispatch table want most, and
        none that keeps failing unless there is no other."""
        accepted = [v for v in self.verdicts if v.is_accepted]
        healthy = [v for v in accepted if not v.is_last_resort] or accepted
        most = max((_wish(v) for v in healthy), default=0.0)
        return tuple(v for v in healthy if _wish(v) == most)

    def cost_us(self, verdict: Verdict) -> float:
        """Measured time. A kernel that was never measured counts as fast as the fastest, as it does for the engine; 0
        when none was."""
        known = [v.measured_us for v in self.candidates if v.measured_us]
        return verdict.measured_us or min(known, default=0.0)

    @property
    def is_measured(self) -> bool:
        return all(v.measured_us for v in self.candidates)


def block_of(
    calls: Sequence[Ranked], links: Sequence[Link], rewrites: Sequence[tuple[tuple[int, ...], Ranked]] = ()
) -> Block:
    """`rewrites`: one call that does what several nodes do. It counts where all times are known: a guess must not win
    against a measurement. Raises InvalidArgument for what is no block, or when nobody accepts a call."""
    if not 0 < len(calls) <= MAX_NODES:
        raise InvalidArgument(f"a plan is made for 1 to {MAX_NODES} calls, not {len(calls)}")
    for link in links:
        if not 0 <= link.source < link.target < len(calls):
            raise InvalidArgument(f"call {link.target} cannot take the result of call {link.source} of {len(calls)}")
    linked = {(link.target, link.arg) for link in links}
    nodes = [
        Node(
            call.spec.op,
            tuple(
                Choice(v.kernel_id, call.cost_us(v) + sum(_copy_us(call, a) for a in _dense(v) if (n, a) not in linked))
                for v in call.candidates
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
            for a in source.candidates
            for b in target.candidates
            if (count := _conversions(a, b, link.arg))
        }
        edges.append(Edge(link.source, link.target, costs))
    fusions = [
        Fusion(covered, Choice(v.kernel_id, call.cost_us(v)))
        for covered, call in rewrites
        if call.is_measured and all(0 <= n < len(calls) and calls[n].is_measured for n in covered)
        for v in call.candidates
    ]
    return Block(tuple(nodes), tuple(edges), tuple(fusions))


def _wish(verdict: Verdict) -> float:
    return sum(verdict.terms.get(term, 0.0) for term in _WISHES)


def _dense(verdict: Verdict) -> list[str]:
    """The arguments that are copied for this kernel."""
    return [transform.rpartition(" ")[2] for transform in verdict.transforms]


def _copy_us(call: Ranked, arg: str) -> float:
    spec = call.tensor(arg)
    return spec.numel * spec.itemsize / COPY_BYTES_PER_US


def _conversions(source: Verdict, target: Verdict, arg: str) -> int:
    """How often the tensor between two kernels is copied: to be dense, into another layout, into another dtype."""
    count = int(arg in _dense(target))
    if source.kernel is None or target.kernel is None:
        return count
    layout, layouts = source.kernel.produces_layout, target.kernel.requires_layouts
    count += layout is not None and bool(layouts) and layout not in layouts
    dtype, wanted = source.kernel.produces_dtype, target.kernel.requires_dtype
    return count + (dtype is not None and wanted is not None and dtype != wanted)
