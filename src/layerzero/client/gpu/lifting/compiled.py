"""Lifted calls that are made again are launched in C (client/gpu/_lifted.c) where that was compiled: what it is told.

The same steps in Python are Lifts.run (client/gpu/lifting/lifts.py), which takes over where the C does not go on, or is
not there.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from layerzero.client.connection import overlay
from layerzero.client.gpu.fastpath import MISS
from layerzero.client.gpu.lifting import lifted_library
from layerzero.client.gpu.lifting.sites import Site
from layerzero.ipc.cuda import abi

if TYPE_CHECKING:
    from layerzero.client.gpu._lifted import LiftedCalls, LiftedSite
    from layerzero.client.gpu.lifting.lifts import Lifts

_OWN = 1 << 63  # beside an output's offset: it is no input


def compiled_calls(
    lifts: Lifts, failed: Any, following: Callable[..., Any], last: threading.local
) -> LiftedCalls | None:
    """For the calls of one connection; None where there is no C. `failed`: calls whose errors nobody has raised yet.
    `following` runs what is not lifted. `last` takes each thread's last call."""
    if lifted_library.lifted is None:
        return None
    nothing = type(None)
    made: LiftedCalls = lifted_library.lifted.LiftedCalls(
        known=lifts.known,
        lifts=lifts,
        failed=failed,
        last=last,
        next=following,
        miss=MISS,
        policy=overlay.current,
        baked=overlay.baked,
        dtypes={},
        tensor=nothing,  # the types of arrays are learned when their library is there
        parameter=nothing,
        size=nothing,
        exchange=None,
        array=nothing,
        is_grad_enabled=nothing,
    )
    return made


def compile_site(site: Site) -> LiftedSite | None:
    """What the C needs for a lifted call; None where it has no room, or the driver lacks a function."""
    gpu, caller, loaded = site.gpu, site.asked.caller, site.loaded
    functions = site.driver.entries(abi.LAUNCH_ENTRIES)
    if not functions or loaded.program is None:
        return None
    lifted, raw, empty, form = loaded.lifted, None, None, None
    results = site.asked.route.plan.results
    if caller.kind == "torch":  # with what torch.compile's code calls
        torch = sys.modules["torch"]
        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        empty = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "_empty_strided_cuda", None)
        if empty is not None and len(results) == 1:
            form = (results[0].shape, results[0].strides, getattr(torch, results[0].dtype))
    tensors = array("Q")
    for n, (spec, alignment) in enumerate(zip((*lifted.inputs, *lifted.outputs), lifted.alignments, strict=True)):
        output, span = n - len(lifted.inputs), 0 if spec is None else spec.span_bytes
        alias = site.tensors.aliases.get(output)
        own = _OWN | (site.tensors.offsets[output] if output >= 0 else 0)
        tensors.extend((max(alignment, 1) - 1, span, own if alias is None else alias))
    pairs = array("Q", [word for sharing in site.tensors.sharings for word in map(int, sharing)])
    made: LiftedSite = lifted_library.lifted.LiftedSite(
        site=site,
        gpu=gpu,
        streams=gpu.order.timelines,
        seen_failures=gpu.order.failures_seen,
        scratch=site.rooms.rooms,
        stream_of=caller.stream if raw is None else raw,
        device=None if raw is None else caller.device,
        empty=None if form is None else empty,
        form=form,
        make=caller.make,
        program=loaded.program,
        tensors=tensors.tobytes(),
        pairs=pairs.tobytes(),
        pieces=array("Q", loaded.scratch.offsets).tobytes(),
        plan=site.asked.route.plan,
        decision=site.decision,
        note=site.note,
        order=gpu.order.page.address,
        epoch=site.epoch,
        number=site.number,
        context=gpu.memory.context.handle,
        inputs=len(lifted.inputs),
        outputs=len(lifted.outputs),
        scratch_bytes=loaded.scratch.nbytes,
        is_ahead=site.is_ahead,
        row=site.row,
        **functions,
    )
    return made
