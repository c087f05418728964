"""Results that a library makes in memory of its own and copies to where they belong: written there at once.

Libraries without an `out=` allocate their result, and a provider copies it. Lifted, the kernel that made it may as well
be given the output's address: one launch and one pass over the result less. The proof shows whether that was right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from layerzero.ipc.lifting.form import ALIGNMENTS, Address, Copy, Fill, Lifted, Patch, Step


def written_directly(lifted: Lifted) -> Lifted:
    """The same call, without the copies that are its last word on an output; without scratch that nothing uses then."""
    aliases = lifted.aliases()
    steps = lifted.steps
    for number, spec in enumerate(lifted.outputs):
        is_aligned = lifted.alignments[len(lifted.inputs) + number] == ALIGNMENTS[-1]  # as allocators align theirs
        if number not in aliases and is_aligned:
            steps = _without_copy(steps, number, spec.span_bytes)
    return lifted if steps is lifted.steps else _without_scratch(replace(lifted, steps=steps))


def _without_copy(steps: tuple[Step, ...], number: int, nbytes: int) -> tuple[Step, ...]:
    """Where one step makes all of an output in scratch that nothing else uses, and one copies it: without the copy."""
    target = Address("output", number, 0)
    copies = [n for n, step in enumerate(steps) if isinstance(step, Copy) and step.target == target]
    if len(copies) != 1 or sum(at[:2] == target[:2] for step in steps for at in _addresses(step)) != 1:
        return steps
    at = copies[0]
    copy = steps[at]
    assert isinstance(copy, Copy)
    source = copy.source
    if source.kind != "scratch" or copy.nbytes != nbytes:
        return steps
    users = []
    for n, step in enumerate(steps):
        offsets = [one.offset for one in _addresses(step) if one[:2] == source[:2]]
        if n == at or not offsets:
            continue
        # How far a kernel goes from an address is not known: only from what lies before might it reach this.
        if (
            n > at
            or min(offsets) < source.offset
            or any(source.offset < one < source.offset + nbytes for one in offsets)
        ):
            return steps
        if source.offset in offsets:
            users.append(n)
    if len(users) != 1:
        return steps
    made = _mapped(steps[users[0]], {source: target})
    return tuple(made if n == users[0] else step for n, step in enumerate(steps) if n != at)


def _addresses(step: Step) -> Iterator[Address]:
    if isinstance(step, Fill):
        yield step.target
    elif isinstance(step, Copy):
        yield from (step.source, step.target)
    else:
        yield from (patch.address for patch in step.patches)


def _mapped(step: Step, places: Mapping[Address, Address]) -> Step:
    if isinstance(step, Fill):
        return replace(step, target=places.get(step.target, step.target))
    if isinstance(step, Copy):
        return replace(step, source=places.get(step.source, step.source), target=places.get(step.target, step.target))
    return replace(step, patches=tuple(Patch(at, places.get(one, one)) for at, one in step.patches))


def _without_scratch(lifted: Lifted) -> Lifted:
    """Pieces that no step uses any more are not asked for."""
    used = sorted({one.number for step in lifted.steps for one in _addresses(step) if one.kind == "scratch"})
    return replace(
        lifted,
        scratch=tuple(lifted.scratch[number] for number in used),
        steps=tuple(_renumbered(lifted.steps, used)),
    )


def _renumbered(steps: Sequence[Step], used: Sequence[int]) -> Iterator[Step]:
    for step in steps:
        scratch = {one for one in _addresses(step) if one.kind == "scratch"}
        yield _mapped(step, {one: one._replace(number=used.index(one.number)) for one in scratch})
