"""lz.split_plan: a function that runs as plans on all ranks of a group, with its weights split over them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from layerzero.client.arrays.recognition import CPU
from layerzero.client.connection import overlay
from layerzero.client.connection.report import html_of_text
from layerzero.client.facade import default_session, running
from layerzero.client.plans.comparing import difference
from layerzero.client.plans.execution_plan import COLD, FROZEN, WARM, ExecutionPlan, plan
from layerzero.client.plans.guards import arrays_of, key_of, label_of, modes_of
from layerzero.client.plans.recording import CONSTANT, Recording, Use, record
from layerzero.client.plans.showing import PlanExplanation
from layerzero.client.plans.traced import map_leaves
from layerzero.client.plans.verifying import largest_difference
from layerzero.groups.choices import SHARED_MEMORY
from layerzero.groups.group import Group
from layerzero.groups.joint import next_number
from layerzero.groups.joint_graph import JointGraph
from layerzero.groups.products import Product, Summed, with_products
from layerzero.groups.split_run import Item, Part, go
from layerzero.groups.splitting import Collective, Split, Stretch, dtype_of, shape_of, split
from layerzero.groups.stretches import LocalStretch, Weights
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.wording import counted

_SAME, _UNLIKE, _REFUSED = 0, 1, 2  # first byte of what a rank says of its split
_OTHER_OPTIONS = ("warmup", "bake_constants", "fixed_weights", "timed")


@dataclass(frozen=True)
class SplitExplanation:
    """What became of a split plan. `weights`: steps whose weights are in parts, a line each; `collectives`: calls of
    all ranks in one run; `whole`: steps with weights that every rank makes whole, and why; `difference`: of its first
    run from the function, relative to the largest number; `stretches`: of the plans between them; `products`: on two
    GPUs, calls whose results are added up, and what made them last; `graph`: on GPUs, the CUDA graph of all of it, and
    `replays` of that."""

    phase: str
    arguments: str
    rank: int
    size: int
    weights: tuple[str, ...]
    collectives: tuple[str, ...]
    whole: tuple[str, ...]
    weight_bytes: int
    difference: float
    stretches: tuple[PlanExplanation, ...]
    products: tuple[str, ...]
    graph: str
    replays: int

    def __str__(self) -> str:
        lines = [f"{self.phase}: {self.arguments}, rank {self.rank} of {self.size}"]
        if self.weights:
            met = f"{counted(len(self.collectives), 'call')} of all ranks"
            lines.append(f"  {counted(len(self.weights), 'weight')} in parts, {self.weight_bytes} bytes here; {met}")
        lines += [f"    {line}" for line in (*self.weights, *self.collectives)]
        lines += [f"    whole: {line}" for line in self.whole]
        if self.stretches:
            lines.append(f"  differed from the function by {self.difference:.1e} of the largest number")
        if self.graph:
            lines.append(f"  {self.graph}")
        lines += [f"  product {line}" for line in self.products]
        for stretch in self.stretches:
            first, *rest = str(stretch).splitlines()
            lines += [f"  a plan, {first}", *(f"  {line}" for line in rest)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return html_of_text(str(self))


class _Variant:
    """For arguments of one kind, and one generation of the group."""

    def __init__(self, label: str) -> None:
        self.label, self.phase = label, COLD
        self.recording: Recording | None = None
        self.split: Split | None = None
        self.weights: Weights | None = None
        self.items: list[Item] = []
        self.graph: JointGraph | None = None  # of all of it, on a GPU
        self.difference = 0.0


class SplitPlan:
    """Made by lz.split_plan. All ranks call it with equal arguments, in the same order."""

    def __init__(self, function: Callable[..., Any], group: Group, options: Mapping[str, Any]) -> None:
        functools.update_wrapper(self, function, updated=())
        self._function, self._group, self._options = function, group, dict(options)
        self._lock = threading.RLock()
        self._variants: dict[Any, _Variant] = {}
        self._generation = 0
        self._latest: _Variant | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises InvalidArgument where the function cannot be split, on all ranks, and as group calls and plans do."""
        if running.handler.get() is not None or overlay.baked.get() is not None:  # lz.dry_run, lz.compile: they ask
            return self._function(*args, **kwargs)
        with self._lock:
            variant = self._variant(args, kwargs)
            if variant.phase == FROZEN:
                with self._group.giving_up():
                    return self._run(variant, arrays_of((args, kwargs)))
            return self._record(variant, args, kwargs)

    def __repr__(self) -> str:
        return f"<lz.split_plan of {getattr(self, '__qualname__', 'a function')}: {self.phase}, {self._group!r}>"

    @property
    def phase(self) -> str:
        """Of what ran last: COLD, WARM once the function was recorded, FROZEN where it is split."""
        return COLD if self._latest is None else self._latest.phase

    def explain(self) -> SplitExplanation:
        """How the last call's plan is split, and why. Raises InvalidArgument before the first call."""
        if self._latest is None:
            raise InvalidArgument("run the plan first: it has made none yet")
        return _explained(self._latest, self._group)

    def reset(self) -> None:
        """Forget all plans and parts of weights: to be called, on all ranks, after the function's own arrays were
        changed or replaced."""
        with self._lock:
            self._variants.clear()
            self._latest = None

    def verify(self, *args: Any, **kwargs: Any) -> float:
        """Run the function whole, and split, on the same arguments: the largest difference of their results, relative
        to the largest number. By all ranks. Raises InvalidArgument when they differ otherwise."""
        expected = self._function(*args, **kwargs)
        return largest_difference(expected, self(*args, **kwargs))

    # --- its life

    def _variant(self, args: Any, kwargs: Any) -> _Variant:
        arrays: list[Any] = []
        mode = getattr(getattr(self._function, "__self__", self._function), "training", None)
        key = (key_of((args, kwargs), arrays), modes_of(arrays), mode)
        if self._group.generation != self._generation:  # ranks are others: all of them begin anew
            self._variants.clear()
            self._generation = self._group.generation
        self._latest = self._variants.setdefault(key, _Variant(label_of((args, kwargs))))
        return self._latest

    def _record(self, variant: _Variant, args: Any, kwargs: Any) -> Any:
        value, made = record(default_session.session(), self._function, args, kwargs)
        first, problem = variant.recording, made.problem
        if first is None and not problem:
            variant.recording, variant.phase = made, WARM
            return value
        if not problem and first is not None:
            problem = difference(first, made, bakes_constants=False)
        error: InvalidArgument | None = None
        try:
            if problem:
                raise InvalidArgument(f"leave lz.split_plan out: the function {problem}")
            variant.split = split(made, self._group.size)
        except InvalidArgument as exc:
            error = exc
        self._agree(variant, error)
        self._freeze(variant)
        self._check(variant, value, arrays_of((args, kwargs)))
        return value

    def _agree(self, variant: _Variant, error: InvalidArgument | None) -> None:
        """All ranks have split it alike, or none goes on. Raises InvalidArgument on all."""
        digest = bytes(32) if variant.split is None else variant.split.digest
        told = self._told(_SAME if error is None else _REFUSED, digest)
        if error is not None:
            variant.phase, variant.recording, variant.split = COLD, None, None
            raise error
        wrong = {rank: "refused it" for rank, one in enumerate(told) if one[0] != _SAME}
        wrong |= {rank: "split another one" for rank, one in enumerate(told) if rank not in wrong and one[1:] != digest}
        if wrong:
            variant.phase, variant.recording, variant.split = COLD, None, None
            text = ", ".join(f"rank {rank} {what}" for rank, what in wrong.items())
            raise InvalidArgument(f"let all ranks plan the same function, of the same shapes: {text}")

    def _told(self, state: int, digest: bytes) -> list[bytes]:
        said = np.frombuffer(bytes([state]) + digest, np.uint8)
        found = self._group.all_gather(said, backend=SHARED_MEMORY)
        return [found[n * len(said) : (n + 1) * len(said)].tobytes() for n in range(self._group.size)]

    def _freeze(self, variant: _Variant) -> None:
        made = variant.split
        assert made is not None
        storages = made.recording.storages
        made.recording.let_go({storage.number for storage in storages if storage.origin == CONSTANT})
        variant.recording = None
        weights = variant.weights = Weights(made.recording, self._group.rank, self._group.size)
        device = made.recording.device
        is_joint = device not in (None, CPU) and self._group.size > 1
        # Options are those of plans, which products leave.
        items = with_products(made) if is_joint and self._group.size == 2 and not self._options else made.items
        variant.items = [self._item(item, made, weights) for item in items]
        has_calls = any(not isinstance(item, Part) for item in variant.items)  # of all ranks
        if is_joint and has_calls:
            assert device is not None
            values = made.recording.inputs, made.outputs()
            what = what_of(made, getattr(self, "__qualname__", "a function"), next_number(self._group))
            variant.graph = JointGraph(self._group, variant.items, values, what, device)
        variant.phase = FROZEN

    def _item(self, item: Stretch | Collective | Summed, made: Split, weights: Weights) -> Item:
        if isinstance(item, Collective):
            return item
        if isinstance(item, Summed):
            return Product(made, item, weights, self._group.rank)
        return Part(self._plan(LocalStretch(item, weights, self._group.rank)), item.takes, item.makes)

    def _plan(self, stretch: LocalStretch) -> ExecutionPlan | LocalStretch:
        """The function's own code alone is no plan."""
        return plan(stretch, fixed_weights=True, **self._options) if stretch.has_calls else stretch

    def _check(self, variant: _Variant, expected: Any, inputs: list[Any]) -> None:
        """Once, against the function. Raises InvalidArgument on all ranks."""
        error: InvalidArgument | None = None
        with self._group.giving_up():
            try:
                variant.difference = largest_difference(expected, self._run(variant, inputs))
            except InvalidArgument as exc:
                error = exc
        told = self._told(_SAME if error is None else _UNLIKE, b"")
        wrong = [rank for rank, one in enumerate(told) if one[0] != _SAME]
        if wrong:
            variant.phase, variant.recording, variant.split, variant.items, variant.graph = COLD, None, None, [], None
            why = "" if error is None else f": {error.message}"
            ranks = ", ".join(map(str, wrong))
            raise InvalidArgument(f"leave lz.split_plan out: split, it gave something else on ranks {ranks}{why}")

    # --- a run

    def _run(self, variant: _Variant, inputs: list[Any]) -> Any:
        made, weights = variant.split, variant.weights
        assert made is not None
        assert weights is not None
        known = dict(zip(made.recording.inputs, inputs, strict=True))
        if variant.graph is None:
            go(variant.items, known, self._group)
        else:
            variant.graph.run(known)

        def filled(leaf: Any) -> Any:
            if not isinstance(leaf, Use):
                return leaf
            return known[leaf.value] if leaf.value in known else weights.whole(leaf.value)

        return map_leaves(made.recording.output, filled)


def what_of(made: Split, name: str, number: int) -> tuple[str, str, tuple[int, ...]]:
    """What all ranks are to agree on in each run: the split, of these arguments, and which of the group's it is, since
    ranks that launch graphs of two would wait for each other for ever; and for texts the function's name, and what its
    first argument is."""
    inputs = made.recording.inputs
    first = made.recording.values[inputs[0]] if inputs else None
    dtype, shape = ("", ()) if first is None else (dtype_of(first), shape_of(first))
    return f"{name}, split {made.digest.hex()[:12]}, number {number}", dtype, shape


def _explained(variant: _Variant, group: Group) -> SplitExplanation:
    made, weights = variant.split, variant.weights
    if made is None or weights is None or variant.phase != FROZEN:
        facts: tuple[Any, ...] = ((), (), (), 0, 0.0, (), (), "", 0)
        return SplitExplanation(variant.phase, variant.label, group.rank, group.size, *facts)
    names = {step.number: f"{step.number} {step.name} at {step.where}" for step in made.recording.steps}
    split_ones = [one for one in made.steps() if one.applied.how]
    lines = tuple(f"{names[one.step.number]}: {one.applied.how}" for one in split_ones)
    makers = {number: step for step in made.recording.steps for number in step.made}
    collectives = tuple(_line_of(made, item, makers) for item in made.items if isinstance(item, Collective))
    whole = tuple(f"{names[number]}: {why}" for number, why in sorted(made.whole.items()))
    plans = [item.run for item in variant.items if isinstance(item, Part)]
    stretches = tuple(plan.explain() for plan in plans if isinstance(plan, ExecutionPlan))
    graph = ("", 0) if variant.graph is None else (str(variant.graph), variant.graph.replays)
    products = tuple(str(item) for item in variant.items if isinstance(item, Product))
    facts = (lines, collectives, whole, weights.nbytes, variant.difference, stretches, products, *graph)
    return SplitExplanation(variant.phase, variant.label, group.rank, group.size, *facts)


def _line_of(made: Split, collective: Collective, makers: Mapping[int, Any]) -> str:
    after = " and ".join(f"{makers[number].number} {makers[number].name}" for number in collective.values)
    what = ", ".join(made.text_of(number) for number in collective.values)
    if collective.dim is not None:
        return f"all_gather after {after}, {what} along dimension {collective.dim}"
    return f"all_reduce after {after}, {what}" + (" as one" if len(collective.values) > 1 else "")


def split_plan(function: Callable[..., Any], group: Group, **options: Any) -> SplitPlan:
    """A function, or a model, whose weights are split over the ranks of a group: tensor parallel, as far as its ops
    have a rule for that.

    All ranks call it with equal arguments, in the same order, and get the whole result. The first two calls run the
    function whole, and record it as lz.plan does; then each rank keeps its part of the weights in shared memory, or on
    its GPU, and what lies between two calls of the group is a plan of its own. A weight that takes a whole array is
    split by column, one that takes an array in parts by row; a sum over all ranks follows that, and sums that could be
    one are. Weights are taken to be fixed: call `reset` on all ranks after changes.

    options: keep_choice, passes and diagnostics of lz.plan.
    Raises InvalidArgument, and at the second call where the function cannot be split: with the step, and why.
    """
    wrong = [name for name in options if name in _OTHER_OPTIONS]
    if wrong:
        raise InvalidArgument(f"leave {wrong[0]}= out; allowed: keep_choice, passes, diagnostics")
    if not isinstance(group, Group):
        raise InvalidArgument(f"group is a {type(group).__name__}; allowed: what lz.group gives")
    plan(function, **options)  # raises what it does not take
    return SplitPlan(function, group, options)
