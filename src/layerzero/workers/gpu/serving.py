"""A worker's calls on GPUs, however they come: from the broker, by ring, by a client's CUDA graph.

The loop imports this file when the first GPU is offered, and with it all that speaks CUDA: a worker of the CPU never
does.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from layerzero.ipc.errors import OutOfMemory, ProtocolError
from layerzero.ipc.lifting.reasons import LiftReason
from layerzero.ipc.lifting.specimen import MAX_BYTES
from layerzero.ipc.shm.memory import ControlPage, create_memfd
from layerzero.ipc.shm.ring import Ring
from layerzero.ipc.transport import messages
from layerzero.ipc.transport.wire import Header, unpack_call
from layerzero.ipc.vocabulary.worker_codes import EXECUTING, MAPPED, WRITTEN
from layerzero.workers.blocks import Blocks
from layerzero.workers.gpu.errors import is_out_of_memory
from layerzero.workers.gpu.executor import Gpus
from layerzero.workers.gpu.graph_calls import REST_S
from layerzero.workers.gpu.lifting.lifter import Lifter, Request
from layerzero.workers.gpu.lifting.refusal import CannotLift
from layerzero.workers.gpu.plan import Enqueued, Plan
from layerzero.workers.gpu.polling import Events, Spin
from layerzero.workers.gpu.rings import Rings
from layerzero.workers.prepared import read_call
from layerzero.workers.provider import Bind, Call

if TYPE_CHECKING:
    from layerzero.workers.failpoint import Faults


class GpuServing:
    """For the loop's thread."""

    def __init__(
        self,
        poll: select.poll,
        page: ControlPage,
        on_stream: Callable[[int], AbstractContextManager[None]] | None,
        hear: Callable[..., bool],
        leave: Callable[[int, int, Exception | None], None],
        blocks: Blocks | None = None,
        *,
        graph_bytes: int,
        faults: Faults | None,
        lifter: Lifter | None = None,
    ) -> None:
        """`on_stream`, `hear`, `graph_bytes`, `blocks`: as of Gpus; `leave`: as of Rings. `lifter`: None where no
        machine code was watched."""
        self._page = page if faults is None else faults.gpu_page
        self._plans: dict[int, Plan] = {}
        self.gpus = Gpus(on_stream, hear, graph_bytes=graph_bytes, faults=faults, blocks=blocks)
        open_ring = Ring if faults is None else faults.open_ring
        self._rings = Rings(poll, self.gpus, self._plans, self._page, leave, open_ring)
        self._lifter = lifter
        self._spin = Spin(poll, self._rings, self.gpus.graph_slots)

    # What the broker says

    def prepare(self, route: int, call: Call, bind: Bind, message: messages.Prepare) -> None:
        self._plans[route] = Plan(call, bind, message.device, message.is_graph_safe)

    def drop(self, route: int) -> None:
        plan = self._plans.pop(route, None)
        if plan is not None:
            self.gpus.drop(plan)
        self._rings.forget_plan(route)

    def allow(self, lane: int, plan: int) -> None:
        self._rings.allow(lane, plan)

    def unmap_arena(self, client: int, arena: int) -> None:
        self.gpus.unmap_arena(client, arena, self._plans.values())

    def forget_arena(self, client: int, arena: int) -> None:
        """Shared memory that calls on GPUs may name goes."""
        self.gpus.drop_tasks(client, arena, self._plans.values())

    def open_ring(self, message: messages.MapLane, fds: list[int]) -> None:
        self._rings.open(message.lane, message.client, message.gpu, fds)

    def close_ring(self, lane: int) -> None:
        self._rings.close(lane)

    # Calls

    def run(self, header: Header, body: bytes) -> Enqueued:
        """Enqueue a call with a point. Raises as Gpus.task and Gpus.run do."""
        page, plan = self._page, self._plan(header)
        refs, point, *_ = unpack_call(header.flags, body)
        assert point is not None
        if self._rings:
            self._rings.catch_up(header.aux, plan.gpu, point)
            page.write(header.seq, MAPPED)
        task = self.gpus.task(plan, header.aux, refs)
        page.write(header.seq, EXECUTING)
        enqueued = self.gpus.run(plan, task, header.aux, point)
        page.write(header.seq, WRITTEN)
        return enqueued

    def bind_graph_slot(self, header: Header, body: bytes) -> None:
        """Raises as Gpus.bind_graph_slot does."""
        plan = self._plan(header)
        refs, _, graph_slot, binding, _ = unpack_call(header.flags, body)
        assert graph_slot is not None
        self.gpus.bind_graph_slot(plan, header.route, header.aux, refs, graph_slot, binding)

    def _plan(self, header: Header) -> Plan:
        plan = self._plans.get(header.route)
        if plan is None:
            raise ProtocolError(f"a call with a point or a graph slot on plan {header.route}, which is not on a GPU")
        return plan

    # Between two calls

    def answer(self, message: messages.Lift, kernels: Mapping[str, Bind]) -> tuple[messages.Lifted, tuple[int, ...]]:
        """What becomes of a kernel that is to be lifted, and descriptors that go with it, which the caller closes.
        Raises ProtocolError."""
        number = message.number
        if not self.gpus.graph_slots.rest(self.gpus.watch):
            late = f"streams waited for clients for {REST_S:g} s, and it serves calls in their CUDA graphs meanwhile"
            return messages.Lifted(number=number, reason=LiftReason.WORKER_FAILED.value, detail=late), ()
        try:
            data = self.lift(message, kernels)
            fd = create_memfd("lifted", len(data))
        except CannotLift as exc:
            detail = exc.detail.encode(errors="replace").decode()  # what UTF-8 cannot hold does not travel
            return messages.Lifted(number=number, reason=exc.reason.value, detail=detail), ()
        except OutOfMemory as exc:
            return messages.Lifted(number=number, reason=LiftReason.TOO_LARGE.value, detail=exc.message), ()
        os.pwrite(fd, data, 0)
        return messages.Lifted(number=number), (fd,)

    def lift(self, message: messages.Lift, kernels: Mapping[str, Bind]) -> bytes:
        """A packed Specimen of a call of one of these kernels. Raises CannotLift."""
        prepare, call = read_call(message.call)
        if self._lifter is None:
            raise CannotLift(LiftReason.NO_CUPTI, "this worker was not told to watch machine code when it started")
        if not prepare.is_graph_safe:
            raise CannotLift(LiftReason.NOT_CAPTURABLE, "its descriptor does not say that it may be captured")
        try:
            its = (message.alignments, message.seeds, message.is_repeatable)
            request = Request.of(call, kernels[call.kernel_id], *its)
            data = self._lifter.lift(request, self.gpus.context(prepare.device), self.gpus.when_idle).pack()
        except Exception as exc:  # whatever a library raises
            error = exc.__cause__ if isinstance(exc, CannotLift) and exc.__cause__ is not None else exc
            self.gpus.check(error)
            if is_out_of_memory(error):
                raise CannotLift(LiftReason.TOO_LARGE, f"{type(error).__name__}: {error}"[:500]) from exc
            if isinstance(exc, CannotLift):
                raise
            raise CannotLift(LiftReason.WORKER_FAILED, f"{type(exc).__name__}: {exc}"[:500]) from exc
        if len(data) > MAX_BYTES:
            raise CannotLift(LiftReason.TOO_LARGE, f"its machine code has {len(data):,} bytes; allowed: {MAX_BYTES:,}")
        return data

    def serve(self) -> None:
        """Calls that come past the broker, and what GPUs are done with."""
        self._spin.serve()
        self.gpus.watch_if_due()

    def wait(self) -> Events:
        """What `poll` says, or nothing when it is time to look at the GPUs. Serves rings and graph slots meanwhile."""
        events = self._spin.wait(self.gpus.timeout_ms)
        self.gpus.watch_if_due()
        return events
