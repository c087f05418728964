"""The call of a function's capsule made smaller, as long as it ends in the same way: as client/tools/shrink.py does of
an op's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from layerzero.client.arrays.recognition import CPU
from layerzero.client.capsules import of_function
from layerzero.client.capsules.form import ALIGNMENTS, Capsule, Segment
from layerzero.client.tools.replay import START_S
from layerzero.client.tools.shrink import MAX_TRIES, put
from layerzero.functions.replaying import Memory, run, why
from layerzero.ipc.errors import InvalidArgument, LayerZeroError
from layerzero.ipc.functions.frames import ALIGNMENT, Code
from layerzero.ipc.transport.plain import pack_tree
from layerzero.ipc.vocabulary.numerics import gather
from layerzero.ipc.vocabulary.tensors import TensorSpec

_SHAPE, _STRIDES, _POSITION, _OFFSET = 3, 4, 5, 6  # in what stands for an array, behind what says that it does


@dataclass(frozen=True)
class Shrunk:
    """`told`: the memory of each part of the smallest call found that ends by `what`; `tries`: how many calls that
    took."""

    told: list[Memory]
    what: str
    tries: int

    @property
    def shapes(self) -> list[list[int]]:
        return [list(node[_SHAPE]) for memory in self.told for node in of_function.nodes(memory[0])]


def shrink(
    session: Any,
    capsule: Capsule,
    code: Code,
    env: str,
    told: list[Memory],
    *,
    times: int = 1,
    timeout_s: float | None = None,
    ordinal: int = CPU,
    tried: Callable[[str], None] = lambda _: None,
) -> Shrunk:
    """Halve the extents of all arrays among the arguments, equal ones together, as long as one of `times` calls ends as
    the whole one does; first the front half is kept, then the back half. All other values stay. `ordinal`: of the GPU
    that arrays are on which were on one.

    Raises InvalidArgument for a call that ends well here."""
    function, tries = capsule.function, 0
    assert function is not None

    def failure(given: Sequence[Memory]) -> str:
        """In a word; empty where it does not fail."""
        nonlocal tries
        for _ in range(times):
            tries += 1
            try:
                run(session, function, code, env, given, timeout_s or START_S, ordinal)
            except LayerZeroError as exc:
                return why(exc)[0]
        return ""

    what = failure(told)
    if not what:
        raise InvalidArgument(f"it ends well in {env} here, in {times} runs: nothing to shrink; --times runs more")
    kept, done = told, False
    while not done and tries < MAX_TRIES:
        done = True
        for candidate in _smaller(kept):
            tried(", ".join("x".join(map(str, shape)) for shape in Shrunk(candidate, what, tries).shapes))
            if failure(candidate) == what:
                kept, done = candidate, False
                break
            if tries >= MAX_TRIES:
                break
    return Shrunk(kept, what, tries)


def _smaller(told: Sequence[Memory]) -> Iterator[list[Memory]]:
    """Each with one extent halved, wherever it is: the largest first."""
    shapes = Shrunk(list(told), "", 0).shapes
    for extent in sorted({n for shape in shapes for n in shape if n > 1}, reverse=True):
        for keeps_front in (True, False):
            yield [_compact(_cut(memory, extent, keeps_front=keeps_front)) for memory in told]


def _cut(memory: Memory, extent: int, *, keeps_front: bool) -> Memory:
    """Views of the same memory; of an array without gaps that shares it with no other one without gaps again."""
    trees, beside, ranges = copy.deepcopy(memory[0]), memory[1], list(memory[2])
    nodes = of_function.nodes(trees)
    for number, node in enumerate(nodes):
        before, half = _spec(node), extent // 2
        cut = [n == extent for n in before.shape]
        if not any(cut):
            continue
        node[_SHAPE] = [half if is_cut else n for is_cut, n in zip(cut, before.shape, strict=True)]
        if not keeps_front:
            steps = [(extent - half) * step for is_cut, step in zip(cut, before.strides, strict=True) if is_cut]
            node[_OFFSET] += sum(steps) * before.itemsize
        if not before.is_contiguous or any(_share(node, one) for n, one in enumerate(nodes) if n != number):
            continue
        spec, start = _spec(node), node[_OFFSET]
        data = beside if node[_POSITION] < 0 else ranges[node[_POSITION]][0]
        dense = bytes(gather(memoryview(data)[start : start + spec.span_bytes], spec))
        data = data[:start] + dense + data[start + len(dense) :]
        node[_STRIDES] = list(TensorSpec.contiguous(spec.dtype, spec.shape).strides)
        if node[_POSITION] < 0:
            beside = data
        else:
            ranges[node[_POSITION]] = data, ranges[node[_POSITION]][1]
    return trees, beside, ranges


def _compact(memory: Memory) -> Memory:
    """Without the bytes that no array has any more. What is left lies as it did, modulo the alignment of memory."""
    trees, beside, ranges = memory
    by_position: dict[int, list[list[Any]]] = {}
    for node in of_function.nodes(trees):
        by_position.setdefault(node[_POSITION], []).append(node)

    def bounds(position: int) -> tuple[int, int]:
        its = [one for one in by_position.get(position, ()) if _spec(one).span_bytes]
        low = min((one[_OFFSET] for one in its), default=0) // ALIGNMENT * ALIGNMENT
        return low, max((one[_OFFSET] + _spec(one).span_bytes for one in its), default=0)

    for position in range(-1, len(ranges)):
        low, high = bounds(position)
        for node in by_position.get(position, ()):
            node[_OFFSET] = max(node[_OFFSET] - low, 0)
        if position < 0:
            beside = beside[low:high]
        else:
            data, offset = ranges[position]
            ranges[position] = data[low:high], offset + low
    return trees, beside, ranges


def _spec(node: Sequence[Any]) -> TensorSpec:
    return TensorSpec.from_wire(node[2:5])


def _share(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two arrays lie in the same memory, as far as their ends tell."""
    if one[_POSITION] != other[_POSITION]:
        return False
    starts, ends = zip(*[(n[_OFFSET], n[_OFFSET] + _spec(n).span_bytes) for n in (one, other)], strict=True)
    return bool(max(starts) < min(ends))


def save(folder: Path, capsule: Capsule, shrunk: Shrunk) -> str:
    """A capsule of the smaller call, beside the whole one; its name. Raises OSError."""
    function, parts = capsule.function, []
    assert function is not None
    segments, blocks = list[Segment](), list[bytes]()
    for part, (trees, beside, ranges) in zip(function.parts, shrunk.told, strict=True):
        first = len(blocks)
        blocks += [pack_tree(trees), beside, *(data for data, _ in ranges)]
        segments += [Segment(len(one), 0) for one in blocks[first : first + 2]]
        segments += [Segment(len(data), offset % ALIGNMENTS) for data, offset in ranges]
        given = of_function.given_of(*trees)
        parts.append(replace(part, given=given, memory=tuple(range(first, len(blocks)))))
    smaller = replace(capsule, function=replace(function, parts=tuple(parts)), segments=tuple(segments))
    return put(folder, capsule, smaller, blocks)
