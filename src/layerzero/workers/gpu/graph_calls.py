"""Calls in the clients' CUDA graphs, on a worker's side (docs/protocol.md, section 15): each has a graph slot in its
client's timeline page, and its kernel is a graph here, which is launched when the graph slot rings."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from layerzero.ipc.cuda.driver import Context
from layerzero.ipc.errors import CudaError, CudaGraphUnsafe, ProtocolError
from layerzero.ipc.shm.timeline_page import TimelinePage
from layerzero.ipc.shm.timeline_words import SILENT, TAKEN
from layerzero.workers.gpu.client_link import Link
from layerzero.workers.gpu.graph_cache import Graphs, Pinned
from layerzero.workers.gpu.plan import Plan, Task, names

AWAKE_S = 1.0  # after the last ring
MAX_TAKINGS = 1 << 31
REST_S = 5.0  # so long what blocks the loop is put off until no stream waits for a client
NAP_S, DOZE_MS = 50e-6, 1  # between two looks until then, and later


@dataclass(eq=False)
class GraphSlot:
    number: int  # in its page
    binding: int
    plan: int
    task: Task  # what the graph uses
    refs: bytes
    graph: Pinned
    takings: int = 0  # whoever watches sees from the graph slot's word that it is not the same one all the time

    def is_meant(self, page: TimelinePage) -> bool:
        """Whether it still rings for this call. MUTE may be under way, and the graph slot another call's by now."""
        return page.binding(self.number) == self.binding

    def take(self, page: TimelinePage) -> None:
        page.set_graph_slot(self.number, TAKEN + self.takings % MAX_TAKINGS)
        self.takings += 1


@dataclass(eq=False)
class _Board:
    """A client's graph slots on a GPU. One stream launches them all: what a library keeps for each stream is then
    used by one kernel at a time."""

    link: Link
    graph_slots: dict[int, GraphSlot] = field(default_factory=dict)
    first: int = 0  # graph slots lie from this one
    stop: int = 0  # to before this one

    def meant(self, graph_slot: int | None) -> GraphSlot | None:
        """What it launches here, if anything."""
        one = self.graph_slots.get(graph_slot) if graph_slot is not None else None
        return one if one is not None and one.is_meant(self.link.order.page) else None

    def bound(self) -> None:
        self.first, self.stop = (min(self.graph_slots), max(self.graph_slots) + 1) if self.graph_slots else (0, 0)


Launch = Callable[[Link, GraphSlot], None]


def launch(link: Link, graph_slot: GraphSlot) -> None:
    """Enqueue a graph slot's kernel and its answer."""
    link.context.driver.launch_graph(graph_slot.graph.graph, link.graph_slot_stream)
    link.order.answer_graph_slot(link.graph_slot_stream, graph_slot.number)


class GraphCalls:
    """For the loop's thread."""

    def __init__(
        self, graphs: Graphs, busy: dict[int, Context], end: Callable[[str], NoReturn], launch: Launch
    ) -> None:
        """`busy`: where streams are put that get work. `end` ends the process. `launch` serves a graph slot that
        rings."""
        self._graphs, self._busy, self._end, self._launch = graphs, busy, end, launch
        self._boards: list[_Board] = []
        self._served_s = 0.0

    def __bool__(self) -> bool:
        return bool(self._boards)

    def bind(self, link: Link, graph_slot: int, binding: int, number: int, plan: Plan, task: Task, refs: bytes) -> None:
        """Capture the kernel, and launch it when a worker that is gone had taken the graph slot. Needs the link's
        context.

        `number`: of the plan. Raises CudaGraphUnsafe, and ProtocolError for a graph slot that is bound already.
        """
        board = next((board for board in self._boards if board.link is link), None)
        if board is None:
            board = _Board(link)
        if graph_slot in board.graph_slots:
            raise ProtocolError(f"graph slot {graph_slot} of client {link.client} is bound already")
        try:
            graph = self._graphs.pin(task.bound, link.context, link.graph_slot_stream)
        except ValueError as exc:
            raise refusal(plan, str(exc)) from exc
        one = board.graph_slots[graph_slot] = GraphSlot(graph_slot, binding, number, task, refs, graph)
        board.bound()
        if board not in self._boards:
            self._boards.append(board)
        self._served_s = time.monotonic()  # it may ring soon
        page = link.order.page
        # Who answers the one before takes this one back first and rings it later. So look at that one first.
        before = page.previous_graph_slot(graph_slot)
        has_point = before is None or page.is_graph_slot_done(before)
        if (taken := page.graph_slot(graph_slot)) >= TAKEN and one.is_meant(
            page
        ):  # the next taking must not look like this one
            one.takings = taken - TAKEN + 1
            if has_point and not page.is_graph_slot_done(graph_slot):
                self._answer(board, graph_slot, launch)

    def serve(self) -> bool:
        """Launch what was rung. Whether anything was. Bells that other workers serve are passed over."""
        came = False
        for board in self._boards:
            page, graph_slot = board.link.order.page, board.first
            while (found := page.rung(graph_slot, board.stop)) is not None:
                one = board.meant(found)
                if one is not None:
                    one.take(page)
                    self._answer(board, found, self._launch)
                    came = True
                graph_slot = found + 1
        if came:
            self._served_s = time.monotonic()
        return came

    def rest(self, watch: Callable[[], None]) -> bool:
        """Serve graph slots alone until no stream waits for a client; says whether it came to that within REST_S.

        To be called before what may block this thread until all streams are through (a library that loads or takes
        memory, a kernel that is lifted): a stream that waits for a client may wait for a replay of that client's graph,
        which waits for this thread. `watch` is Gpus.watch.
        """
        end_s = time.monotonic() + REST_S
        while self._boards and not self._busy.keys() <= {board.link.graph_slot_stream for board in self._boards}:
            if time.monotonic() > end_s:
                return False
            self.serve()
            watch()
            time.sleep(NAP_S)
        return True

    @property
    def is_awake(self) -> bool:
        """Whether one was rung not long ago."""
        return time.monotonic() - self._served_s < AWAKE_S

    def names(self, client: int, arena: int) -> bool:
        """Whether a graph slot of the client has a call on this arena."""
        return any(
            board.link.client == client and any(names(one.refs, arena) for one in board.graph_slots.values())
            for board in self._boards
        )

    def drop(self, is_gone: Callable[[Link, int, GraphSlot], bool]) -> list[tuple[str, Task]]:
        """Let go of graph slots. Returns what their graphs may use yet, by GPU."""
        dropped = []
        for board in self._boards:
            for graph_slot, one in list(board.graph_slots.items()):
                if is_gone(board.link, graph_slot, one):
                    del board.graph_slots[graph_slot]
                    self._graphs.unpin(one.graph)
                    dropped.append((board.link.context.gpu, one.task))
            board.bound()
        self._boards = [board for board in self._boards if board.graph_slots]
        return dropped

    def _answer(self, board: _Board, graph_slot: int, launch: Launch) -> None:
        """Launch a taken graph slot's kernel, and those of the graph slots that follow it, up to one that another
        worker serves."""
        link, page = board.link, board.link.order.page
        run, following = {graph_slot: board.graph_slots[graph_slot]}, page.next_graph_slot(graph_slot)
        # All are taken before the first is launched: who takes over must see what is not done.
        while following is not None and following not in run and (one := board.meant(following)) is not None:
            # One that is taken and not done is of this replay: a worker that is dead took it.
            if page.is_graph_slot_done(following) or page.graph_slot(following) < TAKEN:
                page.clear_graph_slot_done(following)
                one.take(page)
            run[following] = one
            following = page.next_graph_slot(following)
        if following in run:
            following = None  # a circle: no graph of ours has one
        if following is not None:
            page.clear_graph_slot_done(following)
            page.set_graph_slot(following, SILENT)
        stream = link.graph_slot_stream
        self._busy[stream] = link.context
        try:
            with link.context:
                for one in run.values():
                    launch(link, one)
                if following is not None:
                    link.order.ring(stream, following)
        except CudaError as exc:  # the client's graph waits: the next worker serves it when this one is gone
            self._end(f"graph slot {graph_slot} of client {link.client} was taken and cannot be served: {exc.message}")


def refusal(plan: Plan, reason: str) -> CudaGraphUnsafe:
    kernel_id = plan.call.kernel_id
    return CudaGraphUnsafe(
        f"kernel {kernel_id} cannot run within a CUDA graph of the caller: {reason}", kernel=kernel_id, reason=reason
    )
