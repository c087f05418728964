"""Whether sums of a plan are one-shot: both ranks of two set it up, try it, and time it beside NCCL."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from layerzero.client.gpu.memory import GpuMemory
from layerzero.client.plans.graph_library import LIBRARIES, Graph
from layerzero.groups.group import Group
from layerzero.groups.joint import exchange, expect_none, launch, nccl_of, pass_descriptor
from layerzero.groups.nccl import Nccl
from layerzero.groups.one_shot import OneShot, retire, sweep
from layerzero.ipc.errors import EnvError, LayerZeroError
from layerzero.ipc.vocabulary.tensors import ITEMSIZE

ROUNDS = 6  # that are timed; an even number
TRIED = 1 << 20  # elements, of which it is seen whether sums are right
_HERE = (LayerZeroError, OSError, RuntimeError, BufferError)  # what this process may meet, torch and the driver


class Sum(NamedTuple):
    """One of a plan. `is_placed`: its summands are made where it wants them; others are copied there."""

    dtype: str
    shape: tuple[int, ...]
    is_placed: bool

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


class Trial(NamedTuple):
    """`told`: what was found, for a person."""

    one_shot: OneShot | None
    told: str


def tried(group: Group, memory: GpuMemory, sums: list[Sum]) -> Trial:
    """By all ranks at once, outside of captures; the same on all. `sums`: of the plan. Raises GroupBroken."""
    nccl, fit = nccl_of(group), [one for one in sums if OneShot.takes(one.dtype, one.shape)]
    assert nccl is not None, "a run has added up"
    if group.size != 2:
        return Trial(None, "NCCL adds up, as for all groups of more than two ranks")
    if not fit:
        return Trial(None, f"NCCL adds up {', '.join(sorted({one.dtype for one in sums}))}")
    largest = max(fit, key=lambda one: (one.nbytes, not one.is_placed))
    sweep()
    made, why = _opened(group, memory, largest)
    if made is None:
        return Trial(None, f"NCCL adds up: {why}")
    nccl.release_by(made)
    try:
        why = _wrong(group, made, largest)
        own_us = nccl_us = 0.0
        if not why:
            own_us, nccl_us, why = _timed(group, memory, nccl, made, largest)
        if why:
            return Trial(None, f"NCCL adds up: {why}")
        sizes = f"{largest.nbytes >> 10:,} KiB took {own_us:.0f} us, NCCL {nccl_us:.0f}"
        if own_us < nccl_us:
            found, made = made, None
            return Trial(found, f"each GPU reads the other's summands: {sizes}")
        return Trial(None, f"NCCL adds up: GPUs that read each other's summands: {sizes}")
    finally:
        if made is not None:
            nccl.forget(made)
            retire(made, nccl.is_done)
            sweep()


def _opened(group: Group, memory: GpuMemory, largest: Sum) -> tuple[OneShot | None, str]:
    """Or why it cannot be, on whichever rank."""
    made: OneShot | None = None
    page, is_open = -1, False

    def make() -> list[Any]:
        nonlocal made, page
        if memory.why_no_memops:
            raise EnvError(f"streams cannot wait for words: {memory.why_no_memops}")
        made = OneShot(memory.context, group.rank, largest.nbytes)
        if group.rank == 0:
            page = made.new_page()
        return made.offer()

    def join() -> None:
        assert made is not None
        made.join(offers[1 - group.rank], page)

    try:
        offers, why = _agreed(group, make, expects=group.rank == 1)
        if why:
            expect_none(group)
            return None, why
        page = pass_descriptor(group, page, source=0)
        _, why = _agreed(group, join)
        is_open = not why
        return (made if is_open else None), why
    finally:
        if page >= 0:
            os.close(page)
        if made is not None and not is_open:
            made.close()


def _agreed(group: Group, work: Callable[[], Any], *, expects: bool = False) -> tuple[list[Any], str]:
    """What it gives on each rank, in order, and why it fails on one. It waits for no other rank."""
    value, why = None, ""
    try:
        value = work()
    except _HERE as exc:
        why = str(exc).partition("\n")[0][:300] or type(exc).__name__
    told = sorted(exchange(group, [value, why], expects=expects).items())
    whys = [f"{one[1]} (rank {rank})" for rank, one in told if one[1]]
    return [one[0] for _, one in told], "; ".join(whys)


def _wrong(group: Group, one_shot: OneShot, largest: Sum) -> str:
    """Of small whole numbers, in both places. Empty where its sums are right on both ranks."""
    torch, count = sys.modules["torch"], min(math.prod(largest.shape), TRIED)
    given: list[Any] = []
    right: list[Any] = []
    found: list[Any] = []

    def prepare() -> None:
        pattern = torch.arange(count, device=torch.device("cuda", one_shot.ordinal), dtype=torch.int32).remainder_(7)
        dtype = getattr(torch, largest.dtype)
        given.extend(((pattern + group.rank) * factor).to(dtype) for factor in (1, 2))
        right.extend(((2 * pattern + 1) * factor).to(dtype) for factor in (1, 2))
        found.extend(torch.empty_like(one) for one in given)

    def work() -> None:
        one_shot.begin()
        for x, out in zip(given, found, strict=True):
            one_shot.add_up(x, out)
        one_shot.end()

    def enqueue() -> None:
        problem: list[Exception] = []

        def kept() -> None:
            try:
                work()
            except _HERE as exc:
                problem.append(exc)

        launch(group, kept, is_counted=False)
        if problem:
            raise problem[0]

    def compare() -> None:
        if not all(map(torch.equal, found, right)):
            raise EnvError("sums of what was read in the other GPU's memory were wrong")

    _, why = _agreed(group, prepare)
    if why:
        return why
    _, why = _agreed(group, enqueue)
    if why:
        return why
    group.synchronize()
    return _agreed(group, compare)[1]


def _timed(group: Group, memory: GpuMemory, nccl: Nccl, one_shot: OneShot, largest: Sum) -> tuple[float, float, str]:
    """What a sum takes by it and by NCCL within a graph, in us, on the slower rank; or why one cannot be there."""
    library, torch, context = LIBRARIES["torch"], sys.modules["torch"], memory.context
    scratch: Any = None
    graphs: list[Graph] = []

    def prepare() -> None:
        nonlocal scratch
        device = torch.device("cuda", context.ordinal)
        scratch = torch.zeros(largest.shape, dtype=getattr(torch, largest.dtype), device=device)

    def own_sums() -> None:
        one_shot.begin()
        for _ in range(ROUNDS):
            one_shot.add_up(one_shot.place(largest.dtype, largest.shape) if largest.is_placed else scratch, scratch)
        one_shot.end()

    def nccl_sums() -> None:
        for _ in range(ROUNDS):
            nccl.add_up(scratch)

    def capture() -> None:
        why: Exception | None = None
        for work in (own_sums, nccl_sums):  # both, whatever comes of one: NCCL's is captured by all ranks
            try:
                graphs.append(library.capture(work, context.ordinal, context.driver, None, is_timed=True)[0])
            except _HERE as exc:
                why = why or exc
        if why is not None:
            raise why

    def times() -> list[float]:
        return [(graph.time_us() or math.inf) / ROUNDS for graph in graphs]

    try:
        for step in (prepare, capture):
            _, why = _agreed(group, step)
            if why:
                return 0.0, 0.0, why
        for _ in range(2):
            for graph in graphs:
                launch(group, graph.replay, is_counted=False)
        group.synchronize()
        told, why = _agreed(group, times)
        if why:
            return 0.0, 0.0, why
        own_us, nccl_us = (max(float(one[place]) for one in told) for place in range(2))
        return own_us, nccl_us, ""
    finally:
        for graph in graphs:
            graph.destroy()
