"""Calls of a function that go as the last one went: onto its express lane, past what settled that.

For arguments of which nothing has to be copied, and results without arrays. What such a call comes to that is not plain
- an exception, output, a death, a deadline - is a Call's, which goes on from there.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

from layerzero.client.connection import arena as arenas
from layerzero.client.connection import observing, overlay
from layerzero.client.connection.call import Request, Route
from layerzero.client.connection.express import Lane, Lease
from layerzero.client.connection.report import EXPRESS
from layerzero.client.facade import default_session
from layerzero.client.facade.running import handler
from layerzero.client.session.lanes import OnLane
from layerzero.client.session.preparation import BYTES, NO_REF, placed_at
from layerzero.client.session.session import Session
from layerzero.client.session.shadow import NEVER
from layerzero.functions.calling import MAX_LENT, MIN_ROOM, Arguments, Place, plan, resolve
from layerzero.functions.calls import Call, Owner
from layerzero.functions.report import FunctionReport
from layerzero.ipc.errors import LayerZeroError
from layerzero.ipc.functions import frames, values
from layerzero.ipc.functions.frames import HEAD_AT, Frame
from layerzero.ipc.shm import lane as lane_page
from layerzero.ipc.transport.plain import pack_tree
from layerzero.ipc.transport.wire import REF, REF_BYTES
from layerzero.ipc.vocabulary import pools
from layerzero.ipc.vocabulary.ops import FUNCTION

FRAME_BYTES = 1024  # of a block, for the call; its answer lies behind that
MAX_BLOCKS = 64  # kept of a function
MAX_PAUSE = 1024  # calls that go the longer way after answers that were not plain
_NO_KWARGS = pack_tree([values.DICT])
_NOTHING = bytes(Frame([frames.RETURNED, None, []]))
_root_logger = logging.getLogger()


class Block(NamedTuple):
    """Memory of a call and its answer. `answer`: its part; `refs`: to both, as they are put on a lane; `place`: where
    the call is."""

    whole: memoryview
    answer: memoryview
    refs: bytes
    place: Place


class Function(Owner, Protocol):
    """A function in one environment with one worker."""

    _count: int


class Express:
    """Of one function. Threads may share it."""

    def __init__(self, owner: Function) -> None:
        self._owner = owner
        self._ways: dict[int, _Way] = {}  # by how many ranges of memory a call lends beside its frame
        self._pause = self._skipped = 0

    def begin(self, args: tuple[Any, ...]) -> ExpressCall | None:
        """A call that is on its lane; None for one that has to go the longer way."""
        owner = self._owner
        if len(args) != owner._count:
            return None
        if self._skipped < self._pause:
            self._skipped += 1
            return None
        given = None
        if not values.SCALARS.issuperset(map(type, args)):
            given = Arguments(args, {}, owner._places.backends)
        lent = () if given is None else given.ranges
        way = self._ways.get(len(lent))
        if way is None or not way.is_open:
            way = self._found(len(lent))
            if way is None or not way.is_open:
                return None
            self._ways[len(lent)] = way
        return way.begin(args, given, lent)

    def note_plain(self, *, is_plain: bool) -> None:
        """Of an answer: where others come in a row, calls go the longer way, ever more of them."""
        self._skipped = 0
        self._pause = 0 if is_plain else min(2 * self._pause + 1, MAX_PAUSE)

    def _found(self, count: int) -> _Way | None:
        """The way of calls like this thread's last one, if that was on a lane, which lend so many ranges."""
        owner = self._owner
        last: Any = getattr(owner._last, "call", None)
        record = getattr(last, "_record", None)
        if type(record) is not tuple or record[6].lane != EXPRESS:
            return None
        session = default_session.session()
        if last._session is not session or session.link.lost is not None:
            return None
        pinned = pools.joined(owner._places.backends)
        request = Request(FUNCTION, (), {"of": ""}, plan, None, pinned)
        specs = (*(1 + count) * (BYTES,), *(MAX_LENT - count) * (None,))
        route = session.routes.find(session.link, request, specs, (), overlay.current())
        place = session.lanes.of(route)
        return None if place is None or place[1].values else _Way(self, owner, session, route, *place)


class _Way:
    """A lease of a function's calls, and what all of them have in common."""

    def __init__(
        self, express: Express, owner: Function, session: Session, route: Route, lane: Lane, lease: Lease
    ) -> None:
        self.express, self.owner, self.session, self.route, self.lane, self.lease = (
            express,
            owner,
            session,
            route,
            lane,
            lease,
        )
        self.asked_in = overlay.process()
        self._link, self._policy = session.link, overlay.current()
        options, env = owner._options, owner._places.env
        self.timeout_s = lane.default_s if options.timeout_s is None else options.timeout_s
        self.env = env.name
        self._head = b"\x95" + pack_tree(frames.CALL) + pack_tree(owner._places.tree(owner._places.backends))
        self.blocks: list[Block] = []

    @property
    def is_open(self) -> bool:
        """Whether the next call may go here, too."""
        session, route, link = self.session, self.route, self._link
        return (
            default_session.session() is session
            and link.lost is None
            and link.forks == arenas.forks
            and route.lease is self.lease
            and self.lane.holds(self.lease)
            and not route.needs_digest
            and session.shadow.next_seq == NEVER
            and overlay.current() is self._policy
            and overlay.baked.get() is None
            and observing.recorder is None
            and handler.get() is None
        )

    def _packed(self, args: tuple[Any, ...], given: Arguments | None) -> bytes | None:
        """The head of a call's frame; None where it is too long, or has a number that is."""
        try:
            tree = pack_tree([values.LIST, *args] if given is None else given.trees[0])
        except (OverflowError, ValueError):
            return None
        head = self._head + tree + _NO_KWARGS + pack_tree(_root_logger.level)
        return head if len(head) <= FRAME_BYTES - HEAD_AT else None

    def begin(self, args: tuple[Any, ...], given: Arguments | None, lent: Sequence[Place]) -> ExpressCall | None:
        """A call, on its lane. None where that has no room, or the block has none."""
        start_ns = time.perf_counter_ns()
        head = None if given is not None and (given.copies or given.loans) else self._packed(args, given)
        if head is None:
            self.express.note_plain(is_plain=False)
            return None
        try:
            block = self.blocks.pop()
        except IndexError:
            block = self._allocate()
        whole, refs = block.whole, block.refs
        whole[: HEAD_AT + len(head)] = frames.prefix(len(head)) + head
        if lent:
            numbers = self.session.arena_registry
            part = b"".join([REF.pack(numbers[arena], 0, offset, nbytes) for arena, offset, nbytes in lent])
            refs = refs[:REF_BYTES] + part + refs[REF_BYTES + len(part) :]
        receipt = self.lane.put(self.lease, refs, self.timeout_s, (whole, args))
        if receipt is None:
            self.give(block)
            return None
        return ExpressCall(self, receipt, block._replace(refs=refs) if lent else block, args, given, start_ns)

    def _allocate(self) -> Block:
        whole, arena, offset = arenas.pool.allocate(FRAME_BYTES + MIN_ROOM)
        number = self.session.arena_registry[arena]
        call, answer = REF.pack(number, 0, offset, FRAME_BYTES), REF.pack(number, 0, offset + FRAME_BYTES, MIN_ROOM)
        refs = call + MAX_LENT * NO_REF + answer
        return Block(whole, whole[FRAME_BYTES:], refs, (arena, offset, FRAME_BYTES))

    def give(self, block: Block) -> None:
        """Nobody has it any more. What its calls lend besides is written anew for each."""
        if len(self.blocks) < MAX_BLOCKS:
            self.blocks.append(block)


class ExpressCall:
    """A call that is on its lane. It goes on as a Call where it does not end plainly."""

    def __init__(
        self, way: _Way, receipt: Any, block: Block, args: Sequence[Any], given: Arguments | None, start_ns: int
    ) -> None:
        self._way, self._receipt, self._block, self._args, self._given = way, receipt, block, args, given
        self._start_ns, self._uncopied_bytes = start_ns, 0 if given is None else given.uncopied_bytes
        self._session = way.session
        self._record: Any = None
        self._call: Call | None = None  # that it has become

    @property
    def label(self) -> str:
        return self._way.owner._label

    @property
    def is_sent(self) -> bool:
        """As Call.is_sent."""
        if self._call is not None:
            return self._call.is_sent
        lane = self._way.lane
        return self._record is None and not lane.is_inherited and lane.is_under_way(self._receipt)

    def run(self) -> Any:
        """As `finish`; a call that is interrupted is taken back."""
        try:
            return self.finish()
        except BaseException:
            if self._record is None and self._call is None:
                self._way.lane.give_up(self._receipt)
            raise

    def finish(self, timeout: float | None = None) -> Any:
        """As Call.finish."""
        way, receipt = self._way, self._receipt
        if self._call is None and not way.lane.is_inherited:
            end = receipt.end()
            if end is None:
                until_s = math.inf if timeout is None else time.monotonic() + timeout
                if way.lane.is_awaited(receipt, way.timeout_s, until_s):
                    raise TimeoutError(f"{self.label} is still running after {timeout:g} s; ask again, or wait longer")
                end = receipt.end()
            if end is not None and end[0] == lane_page.OK:
                try:
                    value = _plain(self._block.answer)
                except (LayerZeroError, _NotPlainError):
                    way.express.note_plain(is_plain=False)
                else:
                    self._note(end[1])
                    return value
        if self._call is None:
            self._call = self._become()
        try:
            return self._call.finish(timeout)
        finally:
            self._record = self._call._record
            self._let_go()

    def _note(self, kernel_ns: int) -> None:
        way = self._way
        owner, session = way.owner, way.session
        session.lanes.note(way.route, way.lease, (self._start_ns, time.perf_counter_ns()), kernel_ns)
        self._record = session.last_record
        owner._kernel_ns, owner._last.call = kernel_ns, self
        way.give(self._block)
        way.express.note_plain(is_plain=True)
        self._let_go()

    def _let_go(self) -> None:
        """It has ended: what its report is made of keeps no argument."""
        self._args, self._given, self._receipt = (), None, None

    def _become(self) -> Call:
        way, args = self._way, self._args
        owner, block = way.owner, self._block
        given = self._given or Arguments(args, {}, owner._places.backends)
        call = Call(owner, given, args, {}, owner._options, session=way.session)
        request = call.request_at(block.place, block.whole)
        its = (block.refs, [block.answer], self._start_ns, way.asked_in)
        placed = placed_at(way.session.link, way.route, request, *its)
        call.go_on(OnLane(placed, way.lane, way.lease, self._receipt), self._start_ns)
        return call

    @property
    def report(self) -> FunctionReport | None:
        """As Call.report."""
        if self._call is not None or self._record is None:
            return None if self._call is None else self._call.report
        way, selection = self._way, self._session.report_of(self._record)
        assert selection is not None
        elapsed_us, nbytes = selection.elapsed_us or 0.0, self._uncopied_bytes
        return FunctionReport(self.label, way.env, way.lease.decision.backend, 1, (), (), nbytes, elapsed_us, selection)


class _NotPlainError(Exception):
    """An array, or an object, in a result."""


def _refused(_: list[Any]) -> NoReturn:
    raise _NotPlainError


def _plain(memory: memoryview) -> Any:
    """The result that an answer has. Raises LayerZeroError or _NotPlainError for what is more than that."""
    if memory[: len(_NOTHING)] == _NOTHING:
        return None
    head, _ = frames.read(memory)
    match head:
        case [frames.RETURNED, tree, []]:
            return values.decode(tree, _refused, resolve, "result")
    raise _NotPlainError
