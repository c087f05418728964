"""From a request to a call that can be sent: its route, and memory that whoever runs it can reach."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from layerzero.client.arrays.copies import copy_into
from layerzero.client.arrays.recognition import Array
from layerzero.client.connection import arena as arenas
from layerzero.client.connection import overlay
from layerzero.client.connection.call import (
    Request,
    Route,
    Submitted,
    overlap,
    refuse_gradients,
    refuse_sharing,
    why_copied,
)
from layerzero.client.connection.link import Link, Pending
from layerzero.client.connection.overlay import Overlay
from layerzero.client.connection.report import BEFORE, Attempt, Copy, not_kept
from layerzero.client.gpu import lent_calls
from layerzero.client.planning.plans import refuse_overlapping
from layerzero.client.session import kept as kept_copies
from layerzero.client.session.in_process import Place
from layerzero.client.session.kept import Found
from layerzero.ipc.transport.wire import NO_ARENA, REF
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec

if TYPE_CHECKING:
    from layerzero.client.session.session import Session

NO_MORE_COPIES = Overlay.of({"origin": "copies did not help", "values": {"allow_adaptation": False}})
BYTES = TensorSpec.contiguous("uint8", (0,))  # of inputs that are as long as a call says
NO_REF = REF.pack(NO_ARENA, 0, 0, 0)


def prepare(
    session: Session,
    request: Request,
    prior: tuple[Attempt, ...],
    arrays: tuple[Array | None, ...],
    outs: tuple[Array, ...],
    start_ns: int,
) -> Submitted:
    """A call that may run in this process has run on return, unless its kernel failed here: then it is ready to be sent
    like any other. `prior`: attempts that failed so far."""
    link, asked_in = session.link, overlay.process()
    found = [None if a is None or a.needs_copy else arenas.pool.find(a.address, a.spec.span_bytes) for a in arrays]
    specs: list[TensorSpec | None] = []
    op = OPS[request.op]
    names = op.inputs
    if op.in_place:
        refuse_sharing(request.op, arrays)
    for name, array, place in zip(names, arrays, found, strict=True):
        if array is None:
            specs.append(None)
        elif place is not None or array.spec.is_contiguous:
            specs.append(array.spec)
        else:
            if name in op.in_place:
                refuse_overlapping(request.op, name, array.spec)
            specs.append(TensorSpec.contiguous(array.spec.dtype, array.spec.shape))
    bake = overlay.baked.get()
    policy = overlay.current() if bake is None else bake(request, tuple(specs), "")
    if request.is_rigid:
        policy = overlay.on_top(policy, NO_MORE_COPIES)
    route = session.routes.find(link, request, tuple(specs), outs, policy)
    adapted: frozenset[str] = frozenset()
    if route.dense and time.monotonic() < route.dense_until_s:
        adapted = route.dense
        for position, name in enumerate(names):
            spec = specs[position]
            if name in adapted and spec is not None:
                found[position], specs[position] = None, TensorSpec.contiguous(spec.dtype, spec.shape)
        route = session.routes.find(link, request, tuple(specs), outs, policy)
    refuse_gradients(request.op, arrays)
    here, plan, arena_registry = route.here, route.plan, session.arena_registry
    if here is not None and time.monotonic() >= here.until_s:
        here = None
    copies: list[Copy] = []
    blocks: list[memoryview] = []
    refs: list[bytes] = []  # for a worker
    places: list[Place | None] = []  # for a kernel in this process, which reaches memory outside arenas too
    written: list[tuple[str, Array, memoryview, TensorSpec]] = []
    for name, array, place, spec in zip(names, arrays, found, specs, strict=True):
        if array is None or spec is None:
            refs.append(NO_REF)
            places.append(None)
        elif here is not None and array.spec == spec and not array.needs_copy:
            places.append((array.address, array.spec.span_bytes))
        elif here is None and place is not None:
            arena, offset = place
            refs.append(REF.pack(arena_registry[arena], 0, offset, array.spec.span_bytes))
        else:
            may_keep = here is None and array.spec == spec and not array.needs_copy and name not in op.in_place
            kept = kept_copies.copies.find(array) if may_keep else None
            if kept is not None and kept.memory is not None and kept.place is not None:
                blocks.append(kept.memory)
                copies.append(_told_of(name, array, kept))
                arena, offset = kept.place
                refs.append(REF.pack(arena_registry[arena], 0, offset, array.nbytes))
                continue
            block, arena, offset = arenas.pool.allocate(array.nbytes)
            copy_into(array, block)
            blocks.append(block)
            if array.nbytes:
                made = Copy(name, array.nbytes, "client", why_copied(array, name in adapted))
                copies.append(made if kept is None else not_kept(made, kept.told))
                if name in op.in_place:
                    written.append((name, array, block, spec))
            if here is None:
                refs.append(REF.pack(arena_registry[arena], 0, offset, array.nbytes))
            else:
                places.append((arena.address + offset, array.nbytes))
    outputs: list[memoryview] = []
    targets: list[Place] = []  # as `places`, for what the kernel writes
    out_is_direct = False
    if outs and not any(out.needs_copy or any(overlap(out, a) for a in arrays if a is not None) for out in outs):
        lying = [arenas.pool.find(out.address, out.spec.span_bytes) for out in outs] if here is None else []
        if here is not None:
            targets += [(out.address, out.spec.span_bytes) for out in outs]
            out_is_direct = True
        elif None not in lying:
            for out, at in zip(outs, lying, strict=True):
                assert at is not None
                refs.append(REF.pack(arena_registry[at[0]], 0, at[1], out.spec.span_bytes))
            out_is_direct = True
    for name in op.in_place:
        if here is None:
            refs.append(refs[names.index(name)])
        elif (target := places[names.index(name)]) is not None:
            targets.append(target)
    if not out_is_direct and not op.in_place:
        for nbytes in request.output_bytes or [spec.span_bytes for spec in plan.outputs]:
            block, arena, offset = arenas.pool.allocate(nbytes)
            outputs.append(block)
            if here is None:
                refs.append(REF.pack(arena_registry[arena], 0, offset, nbytes))
            else:
                targets.append((arena.address + offset, nbytes))
    submitted = Submitted(
        link,
        route,
        request,
        Pending((arrays, blocks, outputs, outs), request.timeout_s),
        arrays,
        blocks,
        outputs,
        plan.results,
        outs,
        out_is_direct,
        copies,
        start_ns,
        b"".join(refs),
        adapted,
        asked_in,
        written,
        prior=prior,
    )
    if here is not None:
        attempt = session.local.run(submitted, here, places, targets)
        if attempt is not None:
            return prepare(session, request, (attempt,), arrays, outs, start_ns)
    return submitted


def _told_of(name: str, array: Array, kept: Found) -> Copy:
    """Of a copy that is kept: it was made for this call, or before it."""
    made = Copy(name, array.nbytes, "client", why_copied(array, is_adapted=False))
    return replace(made, where=BEFORE, reason=kept.told) if kept.uses else not_kept(made, kept.told)


def prepare_placed(session: Session, request: Request, start_ns: int) -> Submitted:
    """As `prepare`, of a call whose inputs lie in arenas as `request.places` says. It never runs in this process."""
    assert request.places is not None
    assert request.output_bytes is not None
    link, registry, asked_in = session.link, session.arena_registry, overlay.process()
    specs = tuple([None if place is None else BYTES for place in request.places])
    loan = request.on_gpu
    device = "" if loan is None else loan.gpu.uuid
    route = session.routes.find(link, request, specs, (), overlay.current(), device)
    refs = []
    for at in request.places:
        if at is None:
            refs.append(NO_REF)
        else:
            is_shared = loan is None or isinstance(at[0], arenas.Arena)
            number = registry[at[0]] if is_shared else loan.gpu.number(at[0], loan.transport)
            refs.append(REF.pack(number, 0, at[1], at[2]))
    outputs = []
    for nbytes in request.output_bytes:
        block, arena, offset = arenas.pool.allocate(nbytes)
        outputs.append(block)
        refs.append(REF.pack(registry[arena], 0, offset, nbytes))
    placed = placed_at(link, route, request, b"".join(refs), outputs, start_ns, asked_in)
    if loan is not None:
        placed.pending = lent_calls.pending(session.gpus, placed)
    return placed


def placed_at(
    link: Link,
    route: Route,
    request: Request,
    refs: bytes,
    outputs: list[memoryview],
    start_ns: int,
    asked_in: object,
) -> Submitted:
    """As `prepare_placed`, where the memory of results is there, too, and `refs` lead to all of it."""
    assert request.places is not None
    return Submitted(
        link,
        route,
        request,
        Pending((request, outputs), request.timeout_s),
        (None,) * len(request.places),
        [],
        outputs,
        (),
        (),
        False,
        [] if request.copies is None else request.copies,
        start_ns,
        refs,
        frozenset(),
        asked_in,
    )
