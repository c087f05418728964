"""A worker's side of calls on GPUs (docs/protocol.md, section 13): clients' memory mapped, a stream for each of their
lanes, kernels enqueued in order, and the end of the process when the GPU is lost. For the loop's thread alone."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from layerzero.ipc.cuda import driver as cuda
from layerzero.ipc.cuda import streams
from layerzero.ipc.cuda.driver import Context
from layerzero.ipc.cuda.handles import ArenaHandle, Key
from layerzero.ipc.cuda.mappings import Mapping, Mappings
from layerzero.ipc.cuda.offer import Offer
from layerzero.ipc.cuda.offer_worker import sign
from layerzero.ipc.cuda.streams import WorkerOrder
from layerzero.ipc.errors import BackendError, CudaError, LayerZeroError, NoTransport, ProtocolError
from layerzero.ipc.shm.timeline_words import TimelinePoint, graph_slot_words
from layerzero.ipc.transport.messages import MapGpu, MapGpuArena
from layerzero.ipc.transport.wire import NO_ARENA, REF_BYTES, unpack_refs
from layerzero.ipc.vocabulary.ops import FUNCTION
from layerzero.ipc.vocabulary.worker_codes import RENEWAL_EXIT
from layerzero.workers.blocks import Blocks
from layerzero.workers.boot import GRAPH_BYTES
from layerzero.workers.gpu.binder import Binder
from layerzero.workers.gpu.client_link import Link
from layerzero.workers.gpu.ending import end, set_alarm
from layerzero.workers.gpu.errors import is_out_of_memory, no_transport
from layerzero.workers.gpu.graph_cache import Graphs, State, tell
from layerzero.workers.gpu.graph_calls import GraphCalls, GraphSlot, launch, refusal
from layerzero.workers.gpu.plan import MAX_TASKS, Dropped, Enqueued, Plan, Task, names
from layerzero.workers.recording import OnStream

if TYPE_CHECKING:
    from layerzero.workers.failpoint import Faults

STALL_S = 1.0  # then SIGALRM ends one that is blocked by streams which wait for the call that it is in
WATCH_S = 0.02  # how late a lost context may be noticed
_PAUSE_S = 0.001  # how often to look for what is expected soon
SETTLE_S = 1.0  # for what a failed kernel left on its stream
MAX_GONE = 256  # clients that are remembered after they were unmapped


class Gpus:
    """All that this process has on GPUs. Nothing of CUDA is loaded before a client of a GPU comes."""

    def __init__(
        self,
        on_stream: OnStream | None,
        hear: Callable[..., bool],
        *,
        graph_bytes: int = GRAPH_BYTES,
        load: Callable[[], cuda.Driver] = cuda.load,
        end: Callable[..., NoReturn] = end,
        set_alarm: Callable[[float], object] = set_alarm,
        faults: Faults | None = None,
        blocks: Blocks | None = None,
    ) -> None:
        """`on_stream`: Loaded.on_stream. `hear(waits=...)` takes one message from the control socket, which calls the
        methods below; without `waits` only one that is there. Returns whether it did. `graph_bytes`: memory that
        CUDA graphs may take; with 0 there are none. `faults`: for tests. `blocks`: as of Binder."""
        self._on_stream = on_stream
        self._hear = hear
        self._load = load
        self._end, self._set_alarm = end, set_alarm
        self._contexts: dict[str, Context] = {}
        self._mappings = Mappings(self.context)
        self._graphs = Graphs(on_stream, graph_bytes)
        self._links: dict[tuple[int, str], Link | NoTransport] = {}
        self._gone: deque[tuple[int, str]] = deque(maxlen=MAX_GONE)
        self._arenas: dict[tuple[int, int], Mapping | LayerZeroError] = {}
        # Arenas that graph slots name; plans that may, too.
        self._given_back: dict[tuple[int, int], Iterable[Plan]] = {}
        self._binder = Binder(on_stream, self.context, self._arenas, hear, blocks)
        self._free: dict[str, list[int]] = {}  # GPU -> streams without a timeline
        self._busy: dict[int, Context] = {}  # streams that may have work, and theirs
        self._retired: list[Link] = []
        self._abandoned: list[Link] = []  # by their clients
        self._dropped: list[Dropped] = []
        self.graph_slots = GraphCalls(
            self._graphs, self._busy, end, launch if faults is None else faults.around_graph_slot(launch)
        )
        self._launch = self._launch_kernel if faults is None else faults.around_kernel(self._launch_kernel)
        self._watched_s = 0.0
        self._is_untidy = False  # something is retired
        self._excuses: dict[str, str] = {}  # GPU -> why streams cannot wait for words there, or ""

    # What the broker says of clients

    def map_gpu(self, message: MapGpu, fds: list[int]) -> None:
        """Takes the descriptors over. A client that cannot be served is remembered with the reason."""
        key = (message.client, message.gpu)
        self.unmap_gpu(*key)
        try:
            self._links[key] = self._open_link(message, fds)
        except NoTransport as exc:
            print(f"client {message.client} cannot be served on {message.gpu}: {exc.message}", file=sys.stderr)
            self._links[key] = exc

    def unmap_gpu(self, client: int, gpu: str) -> None:
        link = self._links.pop((client, gpu), None)
        if link is None:
            return
        self._gone.append((client, gpu))
        if isinstance(link, Link):
            self._drop_graph_slots(lambda its, graph_slot, one: its is link)
            self._mappings.retire(link.offer, link.streams)
            self._retired.append(link)
            self._is_untidy = True
        self.watch()

    def release(self, client: int, gpu: str) -> None:
        """The client is gone: none of our streams may wait for its own."""
        links = [link for link in self._retired if (link.client, link.context.gpu) == (client, gpu)]
        if (link := self.link((client, gpu))) is not None:
            links.append(link)
        self._abandoned.extend(links)
        self.watch()

    def map_arena(self, message: MapGpuArena, fds: list[int]) -> None:
        """Takes the descriptor over. Calls on an arena that cannot be mapped fail with the reason."""
        arena: Mapping | LayerZeroError
        try:
            if self._given_back.pop((message.client, message.arena), None) is not None:
                return  # it is still mapped
            handle = _own(ArenaHandle.from_wire(message.handle), message.client)
            if handle.arena != message.arena or len(fds) != handle.has_fd:
                raise ProtocolError(f"arena {message.arena} comes with {len(fds)} descriptors and {handle}")
            arena = self._mappings.open(handle, fds.pop() if fds else None)
        except (LayerZeroError, OSError) as exc:
            self.check(exc)
            arena = exc if isinstance(exc, CudaError) and exc.is_out_of_memory else no_transport(exc, message.handle)
            print(f"cannot map arena {message.arena} of client {message.client}: {arena.message}", file=sys.stderr)
        finally:
            for fd in fds:
                os.close(fd)
        self._arenas[message.client, message.arena] = arena

    def unmap_arena(self, client: int, arena: int, plans: Iterable[Plan]) -> None:
        """It is unmapped when nothing that was enqueued uses it any more. Not a GPU's: nothing happens.

        A graph slot that names it has overtaken this message: either it was lent once more, and bound, before we heard
        that it was taken back, or MUTE is on the way, by the other socket. So it stays until one or the other is here.
        """
        if self.graph_slots.names(client, arena):
            self._given_back[client, arena] = plans
            return
        mapping = self._arenas.pop((client, arena), None)
        if mapping is None:
            return
        self.drop_tasks(client, arena, plans)
        if isinstance(mapping, Mapping):
            self._mappings.retire(mapping.handle.key, self._busy_on(mapping.context))
            self._is_untidy = True
        self.watch()

    def drop_tasks(self, client: int, arena: int, plans: Iterable[Plan]) -> None:
        """Nothing is bound to an arena any more, which may be one of shared memory."""
        for plan in plans:
            for key in [key for key in plan.tasks if key[0] == client and names(key[1], arena)]:
                self._drop(plan.gpu, plan.tasks.pop(key))

    def drop(self, plan: Plan) -> None:
        """A plan is no longer used."""
        for task in plan.tasks.values():
            self._drop(plan.gpu, task)
        plan.tasks.clear()
        if plan.gpu in self._contexts:
            with self._contexts[plan.gpu] as context:
                plan.clock.close(context.driver)

    # Calls

    def task(self, plan: Plan, client: int, refs: bytes) -> Task:
        """The plan's kernel bound to these references. Leaves nothing on any timeline's stream.

        Raises NoTransport for a client whose memory does not reach this process, and what the provider raises.
        """
        self._link(client, plan.gpu)
        key = (client, refs)
        task = plan.tasks.get(key)
        if task is None:
            task = self._binder.task(plan, client, refs)
            if len(plan.tasks) >= MAX_TASKS:
                self._drop(plan.gpu, plan.tasks.pop(next(iter(plan.tasks))))
            plan.tasks[key] = task
        return task

    def run(self, plan: Plan, task: Task, client: int, point: TimelinePoint) -> Enqueued:
        """Enqueue a call; returns before the GPU comes to it.

        When the kernel raises, this raises the same once the stream is through with what it left there. When that does
        not come, or the GPU is lost, the process ends.
        """
        link = self._link(client, plan.gpu)
        with link.context:
            return self.enqueue(plan, task, link, point)

    def enqueue(self, plan: Plan, task: Task, link: Link, point: TimelinePoint) -> Enqueued:
        """`run`, for a client whose context is current."""
        if not plan.has_run:
            self.graph_slots.rest(self.watch)
        if link.is_behind(point):
            if plan.call.op == FUNCTION:  # what is here waits for it, and may hold up what it loads
                raise BackendError(f"call {point.value} of its stream came behind later ones; call it again")
            if not plan.has_run:
                # CUDA may wait for all streams to load a kernel, says its text on lazy loading; ours wait for this.
                text = f"the first {plan.call.kernel_id} came behind later calls of its client's stream"
                self._end(f"{text}, which wait for it: a new process loads it before them", RENEWAL_EXIT)
            what = f"if their streams block {plan.call.kernel_id} for {STALL_S:g} s, SIGALRM ends this process"
            print(f"call {point.value} came behind later ones; {what}", file=sys.stderr, flush=True)
            self._set_alarm(STALL_S)  # a library may wait for all streams in one that is new to it: cuDNN did
            try:
                return self._enqueue_in_order(plan, task, link, point)
            finally:
                self._set_alarm(0)
        return self._enqueue_in_order(plan, task, link, point)

    def _enqueue_in_order(self, plan: Plan, task: Task, link: Link, point: TimelinePoint) -> Enqueued:
        stream = link.stream(point, self._new_stream)
        if plan.is_graph_safe and task.steady.state is State.WARMUP:
            reason = self._graphs.advance(task.steady, task.bound, link.context, stream)
            if reason:
                plan.is_graph_safe, plan.why_eager = False, reason
                tell(plan.call.kernel_id, reason)
        link.order.await_ready(stream, point)
        self._busy[stream] = link.context
        try:
            return self._enqueue(plan, task, link, point, stream)
        except Exception as exc:
            self._settle(link, point, stream, exc)
            if not is_out_of_memory(exc) or plan.call.op == FUNCTION:  # which may have run, and has state
                raise
            self._graphs.clear()
            self.watch()
            try:
                return self._enqueue(plan, task, link, point, stream)
            except Exception as again:
                self._settle(link, point, stream, again)
                raise

    def bind_graph_slot(self, plan: Plan, number: int, client: int, refs: bytes, graph_slot: int, binding: int) -> None:
        """Make the plan's kernel on these references what the client's graph slot launches, in this binding. It is
        not run.

        Raises CudaGraphUnsafe for a kernel that cannot be captured, and what `task` does.
        """
        link = self._link(client, plan.gpu)
        graph_slot_words(graph_slot)  # raises ProtocolError for a graph slot that is none
        if not plan.is_graph_safe:
            raise refusal(plan, plan.why_eager or "its descriptor does not say that it may be captured")
        if not link.order.has_memops:
            raise refusal(plan, "streams cannot wait for words of memory here")
        self.graph_slots.rest(self.watch)
        if not plan.has_run:
            self._rehearse(plan)
        # Of its own: it runs in another stream than calls on the same memory.
        task = self._binder.task(plan, client, refs)
        if task.inputs or task.outputs:
            raise refusal(plan, "the client's memory reaches this worker by copies only")
        with link.context:
            link.graph_slot_stream = link.graph_slot_stream or self._new_stream(link.context)
            self.graph_slots.bind(link, graph_slot, binding, number, plan, task, refs)

    def _rehearse(self, plan: Plan) -> None:
        self._is_untidy = True
        try:
            self._binder.rehearse(plan)
        except Exception as exc:  # whatever a library raises
            self.check(exc)
            raise refusal(plan, f"its first run failed: {type(exc).__name__}: {exc}"[:500]) from exc
        finally:
            self.watch()
        plan.has_run = True

    def mute(self, client: int, graph_slot: int, number: int) -> None:
        """The graph slot is no longer used for this plan."""
        self._drop_graph_slots(lambda link, its, one: (link.client, its, one.plan) == (client, graph_slot, number))
        self.watch()

    def link(self, key: tuple[int, str]) -> Link | None:
        """Of a client, by its number, on a GPU; None for one that cannot be served."""
        link = self._links.get(key)
        return link if isinstance(link, Link) else None

    def has_arenas(self, plan: Plan, client: int, refs: bytes) -> bool:
        """Whether `task` would have to wait for none of them. False for references that are not the plan's."""
        call = plan.call
        count = len(call.inputs) + len(call.outputs)
        return len(refs) == count * REF_BYTES and all(
            ref.arena == NO_ARENA or self._binder.has(plan, client, ref.arena) for ref in unpack_refs(refs, count)
        )

    def check(self, error: BaseException) -> None:
        """End the process when this error says that its GPU is lost."""
        if isinstance(error, CudaError) and error.is_sticky:
            self._end(error.message)

    def when_idle(self, free: Callable[[], None]) -> None:
        """Call it while no stream waits: the driver blocks who frees memory while one does."""
        self._binder.free_later(free)
        self._is_untidy = True
        self.watch()

    # What happens on its own

    @property
    def is_busy(self) -> bool:
        return bool(self._busy)

    @property
    def timeout_ms(self) -> int | None:
        """For how long the loop may wait before it calls `watch_if_due`. None: until something comes."""
        return int(self._period_s * 1000) if self._busy else None

    @property
    def _period_s(self) -> float:
        """The driver unmaps in a moment without work only, and such moments are short."""
        return _PAUSE_S if self._is_untidy or self._graphs.has_retired else WATCH_S

    def watch_if_due(self) -> None:
        """`watch`, unless that was a moment ago."""
        if self._busy and time.monotonic() - self._watched_s >= self._period_s:
            self.watch()

    def watch(self) -> None:
        """See which streams are through, end the process when the GPU is lost, and let go of what nobody uses."""
        self._watched_s = time.monotonic()
        try:
            for stream, context in list(self._busy.items()):
                with context:
                    if context.driver.is_stream_idle(stream):
                        del self._busy[stream]
            self._release()
            self._dropped = [dropped for dropped in self._dropped if not dropped.is_over()]
            if not self._busy:  # the driver blocks who unmaps while a stream waits
                self._tidy()
        except CudaError as exc:
            self.check(exc)
            raise

    def _release(self) -> None:
        self._abandoned = [link for link in self._abandoned if not self._busy.keys().isdisjoint(link.streams)]
        for link in self._abandoned:
            link.release()

    def _tidy(self) -> None:
        self._graphs.reap()
        if not self._is_untidy:
            return
        self._mappings.reap()
        for link in self._retired:
            link.order.close()
            self._free.setdefault(link.context.gpu, []).extend(link.streams)
        self._retired.clear()
        self._binder.reap()
        self._is_untidy = False

    # Clients

    def context(self, gpu: str) -> Context:
        """Raises NoTransport for kernels of the CPU, CudaError for a GPU that this process does not see."""
        if self._on_stream is None:
            raise NoTransport("the kernels of this backend compute on the CPU", transport="", reason="no GPU kernels")
        if gpu not in self._contexts:
            self._contexts[gpu] = Context(self._load(), gpu)
        return self._contexts[gpu]

    def _seen(self, gpu: str) -> Context:
        """As `context`, whose errors say that no other way of sharing memory would do. Raises NoTransport."""
        try:
            return self.context(gpu)
        except (CudaError, OSError) as exc:
            self.check(exc)
            reason = exc.message if isinstance(exc, CudaError) else f"no driver of NVIDIA's: {exc}"
            raise NoTransport(f"this worker does not see {gpu}: {reason}", transport="", reason=reason) from exc

    def _open_link(self, message: MapGpu, fds: list[int]) -> Link:
        """Raises NoTransport."""
        key: Key | None = None
        try:
            offer = Offer.from_wire(message.offer)
            handle = _own(offer.handle, message.client)
            if handle.gpu != message.gpu or len(fds) != 1 + handle.has_fd:
                raise ProtocolError(f"{message.gpu} comes with {len(fds)} descriptors and {handle}")
            context = self._seen(message.gpu)
            if message.gpu not in self._excuses:
                self._excuses[message.gpu] = streams.probe(context)
            if message.has_memops and self._excuses[message.gpu]:
                raise ProtocolError(f"this worker's streams cannot wait for words: {self._excuses[message.gpu]}")
            key = handle.key
            memory = fds.pop() if handle.has_fd else None
            sign(self._mappings, replace(offer, handle=handle), memory, message.slot)
            order = WorkerOrder(context, fds[0], has_memops=message.has_memops)
            return Link(message.client, context, order, key)
        except (LayerZeroError, OSError) as exc:
            self.check(exc)
            with contextlib.suppress(ProtocolError):
                if key is not None:
                    self._mappings.retire(key, ())
                    self._is_untidy = True
            raise no_transport(exc, message.offer.get("handle")) from exc
        finally:
            for fd in fds:
                os.close(fd)

    def _link(self, client: int, gpu: str) -> Link:
        """Waits for a client that is not known yet: it was told of before its first RUN was sent, elsewhere."""
        key = (client, gpu)
        link = self._links.get(key)
        while not isinstance(link, Link):
            is_refused = link is not None or key in self._gone
            if not self._hear(waits=not is_refused):
                raise link or NoTransport(
                    f"client {client} has taken its offer on {gpu} back", transport="", reason="gone"
                )
            link = self._links.get(key)
        return link

    def _new_stream(self, context: Context) -> int:
        free = self._free.get(context.gpu)
        return free.pop() if free else context.driver.create_stream()

    def _enqueue(self, plan: Plan, task: Task, link: Link, point: TimelinePoint, stream: int) -> Enqueued:
        enqueued = self._launch(plan, task, link, stream)
        plan.has_run = True
        link.order.done(stream, point)  # last: with it, no other worker may run the call
        return enqueued

    def _launch_kernel(self, plan: Plan, task: Task, link: Link, stream: int) -> Enqueued:
        assert self._on_stream is not None
        driver = link.context.driver
        for mapping, offset, nbytes in task.inputs:
            mapping.collect(offset, nbytes, stream)
        clock = plan.clock
        elapsed_ns = clock.read_ns(driver) if clock.is_open else 0
        is_warming_up = plan.is_graph_safe and task.steady.state is State.WARMUP
        is_measured = clock.start(driver, stream, is_warming_up=is_warming_up)
        result, is_replayed = None, self._graphs.launch(task.steady, stream)
        if not is_replayed:
            with self._on_stream(stream):
                result = task.bound()
        if is_measured:
            clock.stop(driver, stream)
        for mapping, offset, nbytes in task.outputs:
            mapping.publish(offset, nbytes, stream)
        return Enqueued(elapsed_ns, result, is_replayed)

    def _settle(self, link: Link, point: TimelinePoint, stream: int, error: Exception) -> None:
        """Wait until what a failed kernel left on a stream is over: another worker will write to the same outputs."""
        driver = link.context.driver
        self._set_alarm(0)  # this may take its time
        self.check(error)
        try:
            event = driver.create_event()
            driver.record_event(event, stream)
            give_up_s = None
            while not driver.is_event_done(event):
                if give_up_s is None and link.order.page.is_ready(point):
                    give_up_s = time.monotonic() + SETTLE_S  # before, it waits for the client
                elif give_up_s is not None and time.monotonic() > give_up_s:
                    self._end(f"a stream is not through {SETTLE_S:g} s after its kernel raised {error!r:.500}")
                time.sleep(_PAUSE_S)
            driver.destroy_event(event)
        except CudaError as exc:
            self._end(f"{exc.message}, after its kernel raised {error!r:.500}")

    def _drop_graph_slots(self, is_gone: Callable[[Link, int, GraphSlot], bool]) -> None:
        for gpu, task in self.graph_slots.drop(is_gone):
            self._drop(gpu, task)
        for (client, arena), plans in list(self._given_back.items()):
            if not self.graph_slots.names(client, arena):
                del self._given_back[client, arena]
                self.unmap_arena(client, arena, plans)

    def _drop(self, gpu: str, task: Task) -> None:
        """Its workspace may be in use until what is enqueued now is over."""
        self._graphs.drop(task.steady)
        context = self._contexts[gpu]
        events = []
        with context:
            for stream in self._busy_on(context):
                events.append(context.driver.create_event())
                context.driver.record_event(events[-1], stream)
        if events:
            self._dropped.append(Dropped(context, events, task))

    def _busy_on(self, context: Context) -> list[int]:
        return [stream for stream, its in self._busy.items() if its is context]


def _own(handle: ArenaHandle, client: int) -> ArenaHandle:
    """Clients choose their own names; ours for them are different from each other."""
    return replace(handle, client=str(client))
