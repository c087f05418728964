"""Calls of a function that go as the last one went: onto its express lane, past what settled that.

For arguments of which nothing has to be copied, and results without arrays. Scalars, and arrays in arenas, become a
frame in C (client/session/_lending.h). What such a call comes to that is not plain - an exception, output, a death, a
deadline - is a Call's, which goes on from there.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias

from layerzero.client.connection import arena as arenas
from layerzero.client.connection import observing, overlay
from layerzero.client.connection.call import Request, Route
from layerzero.client.connection.express import Lane, Lease
from layerzero.client.connection.report import EXPRESS
from layerzero.client.facade import default_session
from layerzero.client.facade.running import handler
from layerzero.client.gpu import lent_keys
from layerzero.client.gpu.lent_keys import Key
from layerzero.client.session.lanes import OnLane
from layerzero.client.session.preparation import BYTES, NO_REF, placed_at
from layerzero.client.session.session import Session
from layerzero.client.session.shadow import NEVER
from layerzero.functions.calling import MIN_ROOM, Arguments, plan
from layerzero.functions.calls import Call, Owner
from layerzero.functions.devices import like_on
from layerzero.functions.gpu_express import GpuExpress, GpuExpressCall
from layerzero.functions.lifting import LiftedCall
from layerzero.functions.ranges import MAX_LENT, Place
from layerzero.functions.report import FunctionReport
from layerzero.functions.results import resolve
from layerzero.ipc.errors import LayerZeroError
from layerzero.ipc.functions import frames, values
from layerzero.ipc.functions.frames import HEAD_AT, Frame
from layerzero.ipc.shm import lane as lane_page
from layerzero.ipc.transport.plain import pack_tree
from layerzero.ipc.transport.wire import REF
from layerzero.ipc.vocabulary import pools
from layerzero.ipc.vocabulary.ops import FUNCTION
from layerzero.ipc.vocabulary.tensors import TensorSpec

FRAME_BYTES = 1024  # of a block, for the call; its answer lies behind that
MAX_BLOCKS = 64  # kept of a function
MAX_PAUSE = 1024  # calls that go the longer way after answers that were not plain
MAX_TAILS = 16
_NO_KWARGS = pack_tree([values.DICT])
_NOT_LENT = [(MAX_LENT - count) * NO_REF for count in range(MAX_LENT + 1)]
_NOTHING = bytes(Frame([frames.RETURNED, None, []]))
_root_logger = logging.getLogger()
Begun: TypeAlias = "ExpressCall | GpuExpressCall | LiftedCall"
"""A call that passes the broker, or that this process has launched."""


class Block(NamedTuple):
    """Memory of a call, and of its answer. `call_ref`, `answer_ref`: to both, as they are put on a
    lane; `place`: where the call is."""

    whole: memoryview
    answer: memoryview
    call_ref: bytes
    answer_ref: bytes
    place: Place


class Given(NamedTuple):
    """Arguments as they cross: their packed tree, references to what is lent, how many those are, and its bytes."""

    tree: bytes
    refs: bytes
    ranges: int
    nbytes: int


_NO_ARGUMENTS = Given(pack_tree([values.LIST]), b"", 0, 0)


class Express:
    """Of one function. Threads may share it."""

    def __init__(self, owner: Owner, counts: range, label: str = "", backends: tuple[str, ...] = ()) -> None:
        """`counts`: of its arguments. `label`, `backends`: of what is no function, but within an object."""
        self.owner, self._counts = owner, counts
        self._label, self._backends = label, backends
        self._ways: dict[int, _Way] = {}  # by how many ranges of memory a call lends beside its frame
        self._pause = self._skipped = 0
        self._on_gpu = GpuExpress(self)
        self._device = owner._options.device

    @property
    def label(self) -> str:
        return self._label or self.owner._label

    @property
    def backends(self) -> tuple[str, ...]:
        """The worker that serves it, alone."""
        return self._backends or self.owner._places.backends

    def head(self) -> bytes:
        """What its calls begin with, packed: all before their arguments."""
        return b"\x95" + pack_tree(frames.CALL) + pack_tree(self.owner._places.tree(self.backends))

    has_out = False  # results on a GPU are written into memory that the function is given

    def results(self, args: tuple[Any, ...]) -> tuple[TensorSpec, ...] | None:
        """What a call on a GPU results in, where that is declared."""
        return None

    def call(self, args: Sequence[Any], session: Session, loan: Any) -> Call:
        """A call as others are, for one that was sent and does not end plainly. `loan`: as of `begin`."""
        given = Arguments(args, {}, self.backends, device=self._device)
        return Call(self.owner, given, args, {}, self.owner._options, session=session)

    def begin(self, args: tuple[Any, ...], loan: Any = None) -> Begun | None:
        """A call that is on its lane; None for one that has to go the longer way. `loan`: is kept until it has
        ended."""
        if len(args) not in self._counts:
            return None
        if lent_keys.types or self._device is not None:
            on_gpu = self.key_of(args)
            if on_gpu is not None:
                return self._on_gpu.begin(args, on_gpu, loan)
            if self._device is not None:
                return None
        if self._skipped < self._pause:
            self._skipped += 1
            return None
        session = default_session.session()
        given = self.arguments(session, args)
        if given is None:
            self.note_plain(is_plain=False)
            return None
        count = given[2]
        way = self._ways.get(count)
        if way is None or not way.is_open(session):
            way = self._found(session, count)
            if way is None or not way.is_open(session):
                return None
            self._ways[count] = way
        return way.begin(args, given, loan)

    def key_of(self, args: tuple[Any, ...]) -> Key | None:
        """Of a call on a GPU; None for others, and for one that is looked at each time. Raises InvalidArgument where
        results are to be on a GPU that is not there."""
        if self._device is not None:
            return lent_keys.key_of(args, like_on(self._device).device)
        return lent_keys.key_of(args) if lent_keys.types else None

    def arguments(self, session: Session, args: tuple[Any, ...]) -> Given | tuple[bytes, bytes, int, int] | None:
        """As they cross; None where something is copied, or cannot be packed."""
        if not args:
            return _NO_ARGUMENTS
        return session.repeats.lend(args) or self._given(session, args)

    def tail(self, level: int) -> bytes:
        """What its calls end with, packed, behind their arguments. `level`: of what the caller wants to hear of."""
        return _NO_KWARGS + pack_tree(level)

    def _given(self, session: Session, args: tuple[Any, ...]) -> Given | None:
        """Of arguments that are not made in C; None where something is copied, or cannot be packed."""
        given = Arguments(args, {}, self.backends)
        tree: list[Any] = given.trees[0]  # type: ignore[assignment]
        session.repeats.learn({node[1] for node in tree if type(node) is list and node[0] == values.ARRAY})
        if given.copies or given.loans or given.on_gpu is not None or session.link.lost is not None:
            return None
        try:
            packed = pack_tree(tree)
        except (OverflowError, ValueError):
            return None
        numbers = session.arena_registry
        refs = [REF.pack(numbers[arena], 0, offset, nbytes) for arena, offset, nbytes in given.ranges]
        return Given(packed, b"".join(refs), len(refs), given.uncopied_bytes)

    def note_plain(self, *, is_plain: bool) -> None:
        """Of an answer: where others come in a row, calls go the longer way, ever more of them."""
        self._skipped = 0
        self._pause = 0 if is_plain else min(2 * self._pause + 1, MAX_PAUSE)

    def _found(self, session: Session, count: int) -> _Way | None:
        """The way of calls like this thread's last one, if that was on a lane, which lend so many ranges."""
        owner = self.owner
        last: Any = getattr(owner._last, "call", None)
        record = getattr(last, "_record", None)
        if type(record) is not tuple or record[6].lane != EXPRESS:
            return None
        if last._session is not session or session.link.lost is not None:
            return None
        request = Request(FUNCTION, (), {"of": ""}, plan, None, pools.joined(self.backends))
        specs = (*(1 + count) * (BYTES,), *(MAX_LENT - count) * (None,))
        route = session.routes.find(session.link, request, specs, (), overlay.current())
        place = session.lanes.of(route)
        return None if place is None or place[1].values else _Way(self, session, route, *place)


class _Way:
    """A lease of a function's calls, and what all of them have in common."""

    def __init__(self, express: Express, session: Session, route: Route, lane: Lane, lease: Lease) -> None:
        self.express, self.owner, self.session = express, express.owner, session
        self.route, self.lane, self.lease = route, lane, lease
        self.asked_in = overlay.process()
        self._link, self._policy = session.link, overlay.current()
        options, env = self.owner._options, self.owner._places.env
        self.timeout_s = lane.default_s if options.timeout_s is None else options.timeout_s
        self.env = env.name
        self._head = express.head()
        self._tails: dict[int, bytes] = {}  # behind the arguments, by the level of what the caller wants to hear of
        self.blocks: list[Block] = []

    def is_open(self, asked: Session) -> bool:
        """Whether the next call of that session may go here, too."""
        session, route, link = self.session, self.route, self._link
        return (
            asked is session
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

    def begin(
        self, args: tuple[Any, ...], given: Given | tuple[bytes, bytes, int, int], loan: Any
    ) -> ExpressCall | None:
        """A call, on its lane. None where that has no room, or the block has none."""
        start_ns = time.perf_counter_ns()
        tree, lent, count, nbytes = given
        level = _root_logger.level
        head = self._head + tree + (self._tails.get(level) or self._tail(level))
        if len(head) > FRAME_BYTES - HEAD_AT:
            self.express.note_plain(is_plain=False)
            return None
        try:
            block = self.blocks.pop()
        except IndexError:
            block = self._allocate()
        whole, _, call_ref, answer_ref, _ = block
        whole[: HEAD_AT + len(head)] = frames.prefix(len(head)) + head
        refs = call_ref + lent + _NOT_LENT[count] + answer_ref
        receipt = self.lane.put(self.lease, refs, self.timeout_s, (block, args, loan))
        if receipt is None:
            self.give(block)
            return None
        return ExpressCall(self, receipt, block, refs, args, nbytes, start_ns, loan)

    def _tail(self, level: int) -> bytes:
        if len(self._tails) >= MAX_TAILS:
            self._tails.clear()
        tail = self._tails[level] = self.express.tail(level)
        return tail

    def _allocate(self) -> Block:
        """The answer has a slot of its own: arrays of it are the caller's, and keep that slot and no other."""
        (whole, arena, offset), (answer, its, at) = arenas.pool.allocate(FRAME_BYTES), arenas.pool.allocate(MIN_ROOM)
        numbers = self.session.arena_registry
        call, answer_ref = REF.pack(numbers[arena], 0, offset, FRAME_BYTES), REF.pack(numbers[its], 0, at, MIN_ROOM)
        return Block(whole, answer, call, answer_ref, (arena, offset, FRAME_BYTES))

    def give(self, block: Block) -> None:
        """Nobody has it any more."""
        if len(self.blocks) < MAX_BLOCKS:
            self.blocks.append(block)


class ExpressCall:
    """A call that is on its lane. It goes on as a Call where it does not end plainly."""

    def __init__(
        self,
        way: _Way,
        receipt: Any,
        block: Block,
        refs: bytes,
        args: Sequence[Any],
        nbytes: int,
        start_ns: int,
        loan: Any,
    ) -> None:
        """`refs`: as they were put there; `nbytes`: that are lent."""
        self._loan = loan
        self._way, self._receipt, self._block, self._refs, self._args = way, receipt, block, refs, args
        self._start_ns, self._uncopied_bytes = start_ns, nbytes
        self._session = way.session
        self._record: Any = None
        self._call: Call | None = None  # that it has become

    @property
    def label(self) -> str:
        return self._way.express.label

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
        self._args, self._receipt, self._loan = (), None, None

    def _become(self) -> Call:
        way, block = self._way, self._block
        call = way.express.call(self._args, way.session, self._loan)
        request = call.request_at(block.place, block.whole)
        its = (self._refs, [block.answer], self._start_ns, way.asked_in)
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
