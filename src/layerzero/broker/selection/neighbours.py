"""Which extents of a call may be others without another decision: calls that differ in these alone need no ranking.

What a ranking reads of a call is its validity key, its perf key, the classes that its kernels are certified for, and
what policy says. Each symbol is moved to the ends of its bucket, and to where it meets another extent of the call; one
that changes any of these there stays as it is. Of those in one bucket the first one moves, as tensors have them: rows
of what a layer is given come before what its weights are wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from layerzero.broker.selection.certification import Subject
from layerzero.broker.selection.signature import CallSpec, Verdict
from layerzero.capabilities.context import SelectionContext
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.neighbours import CONSTANT, MAX_SYMBOLS, Neighbourhood, Specs, check_sizes
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.shape_class import class_dtype, shape_class
from layerzero.ipc.vocabulary.shapes import check_call

if TYPE_CHECKING:
    from layerzero.broker.selection.ranking import Engine


def neighbourhood(
    engine: Engine, spec: CallSpec, context: SelectionContext, ranked: Sequence[Verdict]
) -> Neighbourhood | None:
    """Calls that are ranked as `ranked` says of this one; None where there are no others, or none that one could tell
    without a ranking."""
    op, policy = OPS[spec.op], engine.policy_for(spec)
    if spec.device or op.sized_output or op.in_place or not op.inputs:
        return None
    if policy.rules or policy.memory_headroom_bytes is not None or engine.table is not None:
        return None
    candidates = [verdict for verdict in ranked if verdict.is_accepted or verdict.uncompiled is not None]
    if any(verdict.transforms or (verdict.kernel is not None and verdict.kernel.needs_jit) for verdict in candidates):
        return None  # what a copy costs, and what is compiled, depends on every extent
    specs: Specs = (*spec.inputs, *spec.outputs)
    wanted = _read(engine, spec, context, specs)
    extents = list(dict.fromkeys(extent for one in specs if one is not None for extent in one.shape))
    buckets = {extent: _bucket(extent) for extent in extents if extent > 1}
    moving = [extent for extent, (low, high) in buckets.items() if low < high]
    symbols: list[int] = []
    for extent in moving:
        low, high = buckets[extent]
        if any(buckets[other] == (low, high) for other in symbols):
            continue  # two that move could meet anywhere in their bucket
        alone = _of_extents(specs, [extent], buckets)
        tried = {low, high, *(other for other in extents if low < other < high)} - {extent}
        if all(_reads(engine, spec, context, alone.apply(specs, [value]), wanted) for value in tried):
            symbols.append(extent)
    symbols = sorted(symbols[:MAX_SYMBOLS])
    if not symbols:
        return None
    found = _of_extents(specs, symbols, buckets)
    lows, highs = ([its[end] for its in found.ranges] for end in (0, 1))
    ends = [found.apply(specs, values) for values in (lows, highs)]
    if not all(_reads(engine, spec, context, end, wanted) for end in ends):
        return None
    return found if _are_certified_alike(engine, spec, ends) else None


def _are_certified_alike(engine: Engine, spec: CallSpec, ends: Sequence[Specs | None]) -> bool:
    """Whether certificates are the same for each size that a product of extents may have between these ends."""
    count, dtype = len(spec.inputs), class_dtype(spec.op, spec.inputs)
    classes = []
    for specs in ends:
        assert specs is not None
        outputs = [one for one in specs[count:] if one is not None]
        classes.append(shape_class(spec.op, specs[:count], spec.attrs, outputs).split("/"))
    if any(len(parts) != 3 for parts in classes):
        return True  # the op has no sizes
    (variant, low, memory), (_, high, _) = classes
    sizes = {low, high} if low == high == "long" else {low, high, "ragged", "aligned"}
    judge = engine.certification.judge
    return all(
        len({judge(Subject(kernel_id, dtype, f"{variant}/{size}/{memory}")) is None for size in sizes}) == 1
        for kernel_id, _ in engine.kernels(spec.op)
    )


def _reads(
    engine: Engine, spec: CallSpec, context: SelectionContext, specs: Specs | None, wanted: tuple[Any, ...]
) -> bool:
    """Whether a ranking would read the same of a call with these tensors."""
    try:
        return specs is not None and _read(engine, spec, context, specs) == wanted
    except InvalidArgument:
        return False  # its extents must be what they are


def _read(engine: Engine, spec: CallSpec, context: SelectionContext, specs: Specs) -> tuple[Any, ...]:
    """All that a ranking reads of a call's tensors. Raises InvalidArgument for those that do not belong together."""
    count = len(spec.inputs)
    inputs = tuple(specs[:count])
    outputs = tuple(one for one in specs[count:] if one is not None)
    check_sizes(specs)
    check_call(spec.op, inputs, outputs, spec.attrs)
    its = replace(context, inputs=inputs, outputs=outputs)
    subject = (class_dtype(spec.op, inputs), shape_class(spec.op, inputs, spec.attrs, outputs))
    judged = tuple(
        engine.certification.judge(Subject(kernel_id, *subject)) is None for kernel_id, _ in engine.kernels(spec.op)
    )
    return (its.validity_key(engine.thresholds(spec.op)), its.perf_key(), judged)


def _of_extents(specs: Specs, symbols: Sequence[int], buckets: dict[int, tuple[int, int]]) -> Neighbourhood:
    numbers = {extent: number for number, extent in enumerate(symbols)}
    places = tuple(None if one is None else tuple(numbers.get(n, CONSTANT) for n in one.shape) for one in specs)
    return Neighbourhood(tuple(buckets[extent] for extent in symbols), places)


def _bucket(extent: int) -> tuple[int, int]:
    """The least and the greatest extent of the perf key's bucket that this one is in."""
    high = 1 << (extent - 1).bit_length()
    return high // 2 + 1, high
