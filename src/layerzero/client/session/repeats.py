"""Calls on the CPU that are made again go over their express lane in C (client/session/_repeats.c), where that was
compiled: what it is told of them, once a call has run on a lane.

It knows a call by its key: op, values, backend, policy, and of each array its kind, dtype, shape, strides, alignment,
whether it can be written, and whether it lies in an arena. What it does not know goes the way of Session.run, and so
does each call where there is no C.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from layerzero.client.arrays.recognition import ML_DTYPES, Array
from layerzero.client.arrays.wrapping import wrap_torch
from layerzero.client.connection import arena as arenas
from layerzero.client.connection import overlay
from layerzero.client.connection.arena_registry import ArenaRegistry
from layerzero.client.connection.call import Submitted, why_copied
from layerzero.client.connection.express import Lane, Lease, Line, Wait
from layerzero.client.connection.link import Link
from layerzero.client.connection.report import EXPRESS, Copy
from layerzero.client.gpu import fastpath_library
from layerzero.client.gpu.fastpath import MISS
from layerzero.client.session import kept
from layerzero.ipc import spinning
from layerzero.ipc.functions import frames, values
from layerzero.ipc.shm import lane as lane_page
from layerzero.ipc.shm.counter_page import LAYOUT as COUNTER_LAYOUT
from layerzero.ipc.shm.memory import ALIGNMENT
from layerzero.ipc.transport.wire import NO_ARENA, REF_BYTES
from layerzero.ipc.vocabulary.ops import FUNCTION_INPUTS, OPS
from layerzero.ipc.vocabulary.tensors import MAX_NDIM, TensorSpec

if TYPE_CHECKING:
    from layerzero.client.connection.call import Request
    from layerzero.client.session.session import Session

MAX_KNOWN = 1024
NOTHING, PLACED, FRESH = 0, 1, 2  # results
COPIED = 2  # of an input: there is nothing of it in an arena
_LENDING = (len(FUNCTION_INPUTS) - 1, MAX_NDIM, frames.ALIGNMENT, 1 + frames.NODE_ITEMS, values.LIST, values.ARRAY)
LAYOUT = (*lane_page.LAYOUT, REF_BYTES, ALIGNMENT, NO_ARENA, *COUNTER_LAYOUT, *_LENDING)


def _load() -> Any:
    if os.environ.get(fastpath_library.DISABLED):
        return None
    try:
        from layerzero.client.session import _repeats
    except ImportError:
        return None
    return _repeats if _repeats.LAYOUT == LAYOUT else None


library = _load()
"""The module, or None where there is none that fits."""


class Repeats:
    """Of one connection. Threads may share it."""

    def __init__(self, session: Session, link: Link, registry: ArenaRegistry, last: threading.local) -> None:
        """`last`: takes each thread's last call."""
        self._registry, self._pool, self._link = registry, arenas.pool, link
        self._known: dict[bytes, Any] = {}
        self._kinds: set[str] = set()
        self._compiled = None
        self.run: Callable[[Request, int], Any] = _miss
        self.submit: Callable[[Request, int], Any] = _miss
        self.take: Callable[[Any, float], Any] = _take_nothing
        self.addresses: Callable[[tuple[Any, ...]], bytes | None] = _know_none  # for traces
        self.lend: Callable[[tuple[Any, ...]], tuple[bytes, bytes, int, int] | None] = _know_none  # of functions
        self.make_line: Callable[[lane_page.Page, int, int], Line] | None = None
        self.wait: Wait | None = None  # for a call on such a line
        if library is None:
            return
        link.counters.compiled = library.count
        limit_ns, nothing = spinning.limit_ns(os.environ), type(None)
        self._slabs = library.Slabs(self._allocate)
        self._pool.caches.add(self)
        self._compiled = library.Repeats(
            known=self._known,
            session=session,
            last=last,
            pool=self._pool,
            arenas=self._arenas,
            slabs=self._slabs,
            kept=kept.copies,
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
            spin_ns=limit_ns,
            cores=spinning.Cores().count if limit_ns else 0,
        )
        self.run, self.submit, self.take = self._compiled.run, self._compiled.submit, self._compiled.take
        self.make_line, self.wait = self._make_line, self._compiled.wait
        self.addresses, self.lend = self._compiled.addresses, self._compiled.lend
        registry.on_change = self._compiled.forget_arenas

    def clear(self) -> None:
        """Free the memory that is kept for results."""
        self._slabs.clear()

    def leave(self, key: bytes) -> None:
        """Look at the call with this key anew; the memory that is kept may not have been lent to its worker."""
        self._known.pop(key, None)
        self.clear()

    def forget(self) -> None:
        """Every call is looked at anew."""
        self._known.clear()

    def close(self) -> None:
        """Give all memory back; calls that are on their way keep theirs."""
        self.forget()
        if self._compiled is not None:
            self.clear()

    def remember(self, submitted: Submitted, lane: Lane, lease: Lease) -> None:
        """A call that ran on a lane, for the next one that is the same."""
        if self._compiled is None or submitted.request.places is not None:  # nobody but its maker calls that again
            return
        told = self._site(submitted, lane, lease)
        if told is None:
            return
        self.learn({one.kind for one in (*submitted.arrays, *submitted.outs) if one is not None})
        key = self._compiled.key(submitted.request)
        if key is None or overlay.process() is not submitted.asked_in:
            return  # the key may have another policy than the lease
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[key] = library.CallSite(**told)

    def learn(self, kinds: set[str]) -> None:
        """Arrays of these kinds are known from now on, as far as they can be."""
        if self._compiled is not None:
            for kind in (kinds & {*_KINDS}) - self._kinds:
                self._compiled.learn(**_types_of(kind))
                self._kinds.add(kind)

    def _site(self, submitted: Submitted, lane: Lane, lease: Lease) -> dict[str, Any] | None:
        """None for a call that is to go the longer way each time."""
        request, route, outs = submitted.request, submitted.route, submitted.outs
        plan, arrays = route.plan, [one for one in (*submitted.arrays, *outs) if one is not None]
        if (
            OPS[request.op].in_place
            or request.finish is not None
            or request.output_bytes is not None
            or submitted.adapted
            or route.dense
            or len(plan.outputs) > 1
            or len(plan.results) != len(plan.outputs)
            or (outs and not submitted.out_is_direct)
            or any(a.kind not in _KINDS or not a.nbytes or a.needs_copy or a.obj is not a.owner for a in arrays)
        ):
            return None
        inputs: list[int] = []  # how each crosses, and its bytes
        copies: list[Copy] = []  # of those that are copied
        copied_bytes = 0
        for name, one in zip(OPS[request.op].inputs, submitted.arrays, strict=True):
            if one is None:
                inputs += (NOTHING, 0)
            elif self._pool.find(one.address, 1) is None:
                if not one.spec.is_contiguous:
                    return None
                inputs += (COPIED, one.nbytes)
                copies.append(Copy(name, one.nbytes, "client", why_copied(one, is_adapted=False)))
                copied_bytes += -(-one.nbytes // ALIGNMENT) * ALIGNMENT
            else:
                inputs += (PLACED, one.spec.span_bytes)
        result, wrap = NOTHING, None
        if outs:
            result = PLACED
        elif plan.outputs:
            result, wrap = FRESH, _wrapper(next(a for a in arrays), plan.results[0])
            if wrap is None:
                return None
        return {
            "lane": lane,
            "line": lane.line,
            "link": submitted.link,
            "lease": lease,
            "route": route,
            "plan": plan,
            "decision": lease.decision,
            "copies": tuple(copies),
            "note": lease.note,
            "wrap": wrap,
            "values": lease.values,
            "inputs": array("Q", inputs).tobytes(),
            "epoch": lease.epoch,
            "number": lease.plan,
            "timeout_ns": int(lane.default_s * 1e9),
            "result": result,
            "result_bytes": plan.outputs[0].span_bytes if plan.outputs else 0,
            "copied_bytes": copied_bytes,
            "row": self._link.counters.row(plan.op, lease.decision.kernel_id, EXPRESS),
        }

    def _make_line(self, page: lane_page.Page, doorbell: int, answer: int) -> Line:
        line: Line = library.Line(page, page.address, doorbell, answer, self._link.hang_up_fd)
        return line

    def _allocate(self, nbytes: int) -> tuple[memoryview, arenas.Arena, int]:
        """As the pool does, in an arena that the broker knows."""
        found = self._pool.allocate(nbytes)
        self._registry[found[1]]
        return found

    def _arenas(self) -> tuple[Any, bytes]:
        addresses, found = self._pool.index
        rows = [number for a in found for number in (a.address, a.nbytes, self._registry.get(a, 0))]
        return addresses, array("Q", rows).tobytes()


_KINDS = ("numpy", "torch")


def _miss(request: Request, start_ns: int) -> Any:
    return MISS


def _take_nothing(receipt: Any, left_s: float) -> Any:
    return MISS


def _know_none(arrays: tuple[Any, ...]) -> None:
    return None


def _types_of(kind: str) -> dict[str, Any]:
    if kind == "numpy":
        return {"array": sys.modules["numpy"].ndarray}
    torch = sys.modules["torch"]
    return {
        "tensor": torch.Tensor,
        "parameter": torch.nn.Parameter,
        "size": torch.Size,
        "is_grad_enabled": torch.is_grad_enabled,
        "exchange": getattr(torch.Tensor, "__dlpack_c_exchange_api__", None),
    }


def _wrapper(like: Array, spec: TensorSpec) -> Callable[[Any], Any] | None:
    """Makes what `wrap` makes, of a block of _repeats.c."""
    if not spec.numel or not spec.is_contiguous:
        return None
    if like.kind == "torch":
        return functools.partial(wrap_torch, spec=spec)
    if spec.dtype in ML_DTYPES or spec.dtype == "float4_e2m1fn_x2":
        return None
    numpy = sys.modules["numpy"]
    return functools.partial(numpy.ndarray, spec.shape, numpy.dtype(spec.dtype))
