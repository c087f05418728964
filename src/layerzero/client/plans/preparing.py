"""From recordings to programs: which passes run, in which order, and what else is to be tried."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from layerzero.client.arrays.immutable import immutable_owner
from layerzero.client.arrays.recognition import CPU
from layerzero.client.plans.activation_fusion import fuse_activations
from layerzero.client.plans.attention_fusion import fuse_attention
from layerzero.client.plans.comparing import NEW, constant_kind
from layerzero.client.plans.gating_fusion import fuse_gating
from layerzero.client.plans.identities import leave_out_identities
from layerzero.client.plans.passes import (
    FIXED,
    Program,
    choose_chained,
    drop_unused,
    fold_constants,
    place,
    share_equal,
)
from layerzero.client.plans.projection_fusion import fuse_projections
from layerzero.client.plans.recording import Recording
from layerzero.client.plans.residual_fusion import fuse_residuals
from layerzero.client.plans.sums import make_calls_of_sums
from layerzero.client.session.session import Session
from layerzero.ipc.errors import InvalidArgument

_PLAIN: dict[str, Callable[[Program], None]] = {
    "constants": fold_constants,
    "identities": leave_out_identities,
    "common": share_equal,
}
_FUSIONS: dict[str, Callable[[Session, Program], None]] = {
    "attention": fuse_attention,
    "projections": fuse_projections,
    "residuals": fuse_residuals,
    "gating": fuse_gating,
    "activations": fuse_activations,
    "sums": make_calls_of_sums,
}
PASSES = (*_PLAIN, *_FUSIONS, "unused")
"""Names of the passes that can be left out, in their order."""
FUSED_BY = {
    "attention fusion": "attention",
    "projection fusion": "projections",
    "residual fusion": "residuals",
    "gating fusion": "gating",
    "activation fusion": "activations",
    "sums as calls": "sums",
}


def check_passes(passes: Iterable[str] | None) -> frozenset[str]:
    """Those that are wanted; None: all. Raises InvalidArgument for others than PASSES."""
    if passes is None:
        return frozenset(PASSES)
    if isinstance(passes, str) or not isinstance(passes, Iterable):
        raise InvalidArgument(f"passes is {passes!r}; allowed: names, of {', '.join(PASSES)}")
    wanted = list(passes)
    unknown = [name for name in wanted if name not in PASSES]
    if unknown:
        raise InvalidArgument(f"passes has {unknown[0]!r}; allowed: {', '.join(PASSES)}")
    return frozenset(wanted)


def prepare(
    session: Session,
    first: Recording,
    recording: Recording,
    passes: Collection[str] = frozenset(PASSES),
    *,
    has_fixed_weights: bool = False,
) -> Program:
    """The program of two equal recordings, with the arrays of the second. Fused calls are made once, on these."""
    program = Program(recording, list(recording.steps))
    for number in recording.constants:
        value = recording.values[number]
        kind = constant_kind(first.values[number], value)
        if kind == NEW:
            program.fresh_constants.add(value.storage.number)
        is_immutable = immutable_owner(value.obj) is not None
        if kind == NEW or is_immutable or (has_fixed_weights and not value.storage.writers):
            program.immutable.add(value.storage.number)
    choose_chained(program)
    is_on_gpu = recording.device not in (None, CPU)
    for name, leave_out in _PLAIN.items():
        if name in passes and not (is_on_gpu and name == "identities"):
            leave_out(program)
    for name, fuse in _FUSIONS.items():
        if name in passes and not is_on_gpu:  # what is in a graph costs no submission
            fuse(session, program)
    if "unused" in passes:
        drop_unused(program)
    if is_on_gpu:
        program.chained.clear()  # its calls go in a CUDA graph
    else:
        choose_chained(program)
    place(program)
    missing = [name for name in PASSES if name not in passes]
    if missing:
        program.done.append(f"passes left out: {', '.join(missing)}")
    return program


def alternatives(
    session: Session, first: Recording, recording: Recording, passes: Collection[str], *, has_fixed_weights: bool
) -> list[Program]:
    """The program with all passes that are wanted, and behind it those that lack one of the fusions that found
    something, or all of them: which is fastest only a run can tell."""

    def make(without: Collection[str]) -> Program:
        wanted = frozenset(passes) - frozenset(without)
        made = prepare(session, first, recording.copy(), wanted, has_fixed_weights=has_fixed_weights)
        made.without = tuple(without)
        return made

    whole = make(())
    found = [FUSED_BY[name] for name in whole.fused]
    others = [(name,) for name in found] + ([tuple(found)] if len(found) > 1 else [])
    programs = [whole, *map(make, others)]
    for program in programs:
        program.recording.let_go({number for number, home in program.homes.items() if home == FIXED})
    return programs
