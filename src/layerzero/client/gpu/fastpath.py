"""Calls on a GPU that are made again run in C (client/gpu/_fastpath.c) where that was compiled: what it is told of
them.

The same steps in Python are GpuCalls.run_known, which takes over where the C does not go on, or is not there.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

from layerzero.client.arrays.recognition import Array
from layerzero.client.connection import overlay
from layerzero.client.connection.link import Link
from layerzero.client.gpu import fastpath_library
from layerzero.client.gpu.outcomes import RING, OnRing
from layerzero.ipc.shm.timeline_words import TimelinePoint

if TYPE_CHECKING:
    from layerzero.client.gpu._fastpath import CallSite, Repeats
    from layerzero.client.gpu._lifted import LiftedCalls
    from layerzero.client.gpu.call_cache import Known
    from layerzero.client.gpu.calls import GpuCalls

MISS = object()


def repeats_of(calls: GpuCalls, link: Link, last: threading.local) -> Repeats | None:
    """For the calls of one connection; None where there is no C. `last`: takes each thread's last call."""
    if fastpath_library.repeats is None:
        return None
    outcomes, nothing = calls.outcomes, type(None)
    made: Repeats = fastpath_library.repeats.Repeats(
        known=calls.known,
        calls=calls,
        outcomes=outcomes,
        late=outcomes.late,
        failed=outcomes.failed,
        numbers=link.numbers,
        last=last,
        record_type=OnRing,
        turn_type=TimelinePoint,
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


def learn(repeats: Repeats | LiftedCalls, like: Array) -> None:
    """Of a call with such an array, so that the next one is known."""
    if like.kind == "torch":
        torch = sys.modules["torch"]
        repeats.learn(
            tensor=torch.Tensor,
            parameter=torch.nn.Parameter,
            size=torch.Size,
            is_grad_enabled=torch.is_grad_enabled,
            exchange=getattr(torch.Tensor, "__dlpack_c_exchange_api__", None),
        )
    else:
        repeats.learn(array=sys.modules["cupy"].ndarray)


def call_site_of(known: Known, like: Array) -> CallSite | None:
    """What the C needs for a known call; None where the driver lacks a function."""
    gpu, lane, lease = known.gpu, known.lane, known.lease
    driver = gpu.memory.context.driver
    functions = driver.entries()
    if not functions:
        return None
    raw = empty = form = None
    if like.kind == "torch":  # with what torch.compile's code calls
        torch = sys.modules["torch"]
        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        empty = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "_empty_strided_cuda", None)
        specs = known.route.plan.results
        if empty is not None and len(specs) == 1 and specs[0].is_contiguous and specs[0].dtype == like.spec.dtype:
            form = (specs[0].shape, specs[0].strides, getattr(torch, like.spec.dtype))
    site: CallSite = fastpath_library.repeats.CallSite(
        gpu=gpu,
        lane=lane,
        lease=lease,
        route=known.route,
        transport=known.transport,
        on_the_way=gpu.on_the_way,
        streams=gpu.order.timelines,
        next_numbers=gpu.order.next_numbers,
        seen_failures=gpu.order.failures_seen,
        points=lane.points,
        routes=lane.routes,
        acquire=gpu.lock.acquire,
        release=gpu.lock.release,
        stream_of=known.stream if raw is None else raw,
        device=None if raw is None else like.device,
        empty=None if form is None else empty,
        form=form,
        make=known.make,
        places=known.places,
        order=gpu.order.page.address,
        order_device=gpu.order.base,
        ring=lane.address,
        epoch=lease.epoch,
        context=gpu.memory.context.handle,
        plan=lease.plan,
        number=known.route.number,
        doorbell=lane.doorbell,
        row=gpu.counters.row(known.route.plan.op, lease.decision.kernel_id, RING),
        **functions,
    )
    return site
