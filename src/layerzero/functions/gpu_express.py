"""Calls with arrays on a GPU that go as one like them went: onto the ring of their worker, past what settled that.

Two calls are alike that have equal values, and arrays of equal layouts: then their frames are the same bytes, and what
differs is where the memory lies, which is asked of the driver each time. What such a call comes to that is not plain
- an exception, output, results of other shapes, a death, a deadline - is a Call's, which goes on from there.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol

from layerzero.client.arrays.recognition import Array, describe
from layerzero.client.connection import arena as arenas
from layerzero.client.connection import observing, overlay
from layerzero.client.connection.call import Request, Route
from layerzero.client.connection.report import EXPRESS, LIFTED, Copy
from layerzero.client.facade import default_session
from layerzero.client.facade.running import Future as Sent
from layerzero.client.facade.running import handler
from layerzero.client.gpu.arrays import device_name
from layerzero.client.gpu.call_cache import capture_watcher, context_watcher, maker, streamer
from layerzero.client.gpu.calls import READ_EVERY
from layerzero.client.gpu.device import Gpu
from layerzero.client.gpu.lent import Lent
from layerzero.client.gpu.lent_keys import ALIGNMENT, Key, versions_of
from layerzero.client.gpu.lent_ring import LOOK_EVERY, Asked, ask
from layerzero.client.gpu.results import layout_of
from layerzero.client.session.preparation import BYTES, NO_REF, placed_at
from layerzero.client.session.session import Session
from layerzero.client.session.shadow import NEVER
from layerzero.functions.calling import MIN_ROOM, Arguments, plan
from layerzero.functions.calls import Call
from layerzero.functions.lifting import Called, LiftedCall, Lifting
from layerzero.functions.ranges import MAX_LENT
from layerzero.functions.report import FunctionReport
from layerzero.functions.results import of_those, resolve
from layerzero.ipc.cuda.handles import STAGED
from layerzero.ipc.errors import BrokerLost, CudaError, LayerZeroError
from layerzero.ipc.functions import frames, values
from layerzero.ipc.transport.plain import pack_tree
from layerzero.ipc.transport.wire import REF
from layerzero.ipc.vocabulary import pools
from layerzero.ipc.vocabulary.ops import FUNCTION
from layerzero.ipc.vocabulary.tensors import TensorSpec

MAX_SITES, MAX_PLACES, MAX_BLOCKS = 64, 64, 64
MAX_PAUSE = 64  # calls that go the longer way after some that came to nothing
_root_logger = logging.getLogger()


class Block(NamedTuple):
    """Memory of a call, which is written already, and of its answer; references to both, and where the call is."""

    whole: memoryview
    answer: memoryview
    call_ref: bytes
    answer_ref: bytes
    place: tuple[Any, int, int]
    numbers: frozenset[int]  # of their arenas


class Plain(NamedTuple):
    """An answer that has nothing but a result: its first bytes, the tree, and what was copied or not."""

    head: bytes
    tree: Any
    copies: tuple[Copy, ...]
    placed_bytes: int


class WithCalls(Called, Protocol):
    """What is called, as of Express: it makes the calls that go the longer way, too."""

    def call(self, args: Sequence[Any], session: Session, loan: Any) -> Call: ...


class GpuExpress:
    """Of one function, or of one method of an object. Threads may share it."""

    def __init__(self, called: WithCalls) -> None:
        self.called = called
        self._sites: dict[Hashable, _Site] = {}
        self._results: dict[Hashable, tuple[TensorSpec, ...]] = {}  # of calls whose results were others than the last
        self._pause = self._skipped = 0
        self.lifting: Lifting | None = None  # of a function whose calls this process may launch

    def begin(self, args: tuple[Any, ...], found: Key, loan: Any) -> GpuExpressCall | LiftedCall | None:
        """A call that is on its ring, or that this process has launched; None for one that has to go the longer way."""
        lifting, start_ns = self.lifting, time.perf_counter_ns()
        is_skipped = self._skipped < self._pause
        declared = None if is_skipped and lifting is None else self.called.results(args)
        lifted = None if lifting is None else lifting.run(args, found.key, declared, start_ns)
        if lifted is not None:
            return lifted
        if is_skipped:
            self._skipped += 1
            return None
        session = default_session.session()
        key = (found.key, _root_logger.level, declared)
        site = self._sites.get(key)
        if site is None or not site.is_open(session):
            made = self._found(session, key, args, declared)
            site = made if made is not None and made.is_open(session) else None
            if site is not None:
                if len(self._sites) >= MAX_SITES:
                    self._sites.clear()
                self._sites[key] = site
        if lifting is not None and site is not None:
            lifted = lifting.ask(site, args, found.key)
            if lifted is not None:
                return lifted
        call = None if site is None else site.begin(args, found.addresses, loan)
        # Where such calls come to nothing in a row, ever more of them are not tried.
        self._pause, self._skipped = min(2 * self._pause + 1, MAX_PAUSE) if call is None else 0, 0
        return call

    def expect(self, site: _Site, results: Sequence[TensorSpec]) -> None:
        """Calls like those of this site are looked at anew, and may have such results."""
        self._sites.pop(site.key, None)
        if len(self._results) >= MAX_SITES:
            self._results.clear()
        self._results[site.key] = tuple(results)

    def _found(
        self, session: Session, key: Hashable, args: tuple[Any, ...], declared: tuple[TensorSpec, ...] | None
    ) -> _Site | None:
        """That of calls like this one, where this thread's last call was on a ring."""
        called = self.called
        owner, label = called.owner, called.label
        last: Any = getattr(owner._last, "call", None)
        record = getattr(last, "_record", None)
        results = self._results.get(key, owner._places.results_there.get(label)) if declared is None else declared
        if type(record) is not tuple or record[6].lane not in (EXPRESS, LIFTED) or results is None:
            return None
        if last._session is not session or session.link.lost is not None or observing.recorder is not None:
            return None
        given = Arguments(args, {}, called.backends, device=owner._options.device)
        lent = given.on_gpu
        if lent is None or given.copies or given.loans or given.ranges or given.memory[0] or not session.gpus.is_used:
            return None
        arrays, count = lent.arrays, len(lent.arrays) + bool(results)
        if not count:  # the worker is told which GPU it is by the memory that it is lent
            return None
        is_plain = lent.like.kind in ("torch", "cupy") and count <= MAX_LENT
        if not is_plain or any(one.needs_copy or not one.nbytes for one in arrays) or not all(s.numel for s in results):
            return None
        request = Request(FUNCTION, (), {"of": ""}, plan, None, pools.joined(called.backends))
        specs = (*(1 + count) * (BYTES,), *(MAX_LENT - count) * (None,))
        gpu = session.gpus.gpu(lent.like.device)
        route = session.routes.find(session.link, request, specs, (), overlay.current(), gpu.uuid)
        if route.lease is None or gpu.transport in STAGED:
            return None
        for position, (array, node) in enumerate(zip(arrays, lent.nodes, strict=True)):
            node[-2:] = [position, array.address % ALIGNMENT]
        outs = [frames.array_node(frames.OF_GPU, spec, frames.IN_FRAME, 0) for spec in results]
        for node, offset in zip(outs, layout_of(tuple(results)).offsets if results else (), strict=True):
            node[-2:] = [len(arrays), offset]
        try:
            call = called.head() + pack_tree(given.trees[0]) + called.tail(_root_logger.level)
            head = b"\x94" + pack_tree(frames.GPU) + call + pack_tree(outs) + pack_tree(called.has_out)
        except (OverflowError, ValueError):
            return None
        if len(head) > frames.MAX_KNOWN_BYTES:
            return None
        sizes = tuple(one.spec.span_bytes for one in arrays)
        first = next((at for at, one in enumerate(args) if one is lent.like.obj), None)
        frame, declares = frames.prefix(len(head)) + head, declared is not None
        its = (self, key, session, gpu, route, frame, sizes, tuple(results), lent.like, first)
        return _Site(*its, is_declared=declares)


class _Site:
    """What calls that are alike have in common: a lease, their frame, and where they make their results."""

    def __init__(
        self,
        express: GpuExpress,
        key: Hashable,
        session: Session,
        gpu: Gpu,
        route: Route,
        frame: bytes,
        sizes: tuple[int, ...],
        results: tuple[TensorSpec, ...],
        like: Array,
        first: int | None,
        *,
        is_declared: bool,
    ) -> None:
        """`sizes`: bytes that the arguments span; `first`: of them, that results are made like; None where none is on
        the GPU, so that they are made like `like`; `is_declared`: these are by a shape function."""
        self.express, self.key, self.session, self.gpu, self.route = express, key, session, gpu, route
        self.owner, self.label = express.called.owner, express.called.label
        self.results, self.asked_in = results, overlay.process()
        self.timeout_s, self.env = self.owner._options.timeout_s, self.owner._places.env.name
        self.nbytes = sum(sizes)
        assert route.lease is not None
        self.lease, self._transport = route.lease, gpu.transport
        self._link, self._policy, self._gpus = session.link, overlay.current(), session.gpus
        self._frame, self._sizes, self._first, self._like = frame, sizes, first, like if first is None else None
        self.device = "" if self.owner._options.device is None else device_name(like.device)
        self.stream, self.make = streamer(like), maker(like, results)
        self.is_capturing, self._is_here = capture_watcher(like, gpu), context_watcher(like, gpu)
        self._result_bytes = layout_of(results).nbytes if results else 0
        self._places: dict[tuple[int, ...], tuple[bytes, frozenset[int], tuple[tuple[int, int], ...]]] = {}
        self._rest = (MAX_LENT - len(sizes) - bool(results)) * NO_REF
        self._blocks: list[Block] = []
        self.plain: Plain | None = None  # the last answer of that kind
        self.is_declared = is_declared

    def is_open(self, asked: Session) -> bool:
        """Whether the next call of that session may go here, too."""
        session, route, link = self.session, self.route, self._link
        return (
            asked is session
            and link.lost is None
            and link.forks == arenas.forks
            and route.lease is self.lease
            and route.is_armed
            and self.gpu.transport == self._transport
            and not route.needs_digest
            and session.shadow.next_seq == NEVER
            and overlay.current() is self._policy
            and overlay.baked.get() is None
            and observing.recorder is None
            and handler.get() is None
        )

    def begin(self, args: tuple[Any, ...], addresses: tuple[int, ...], loan: Any) -> GpuExpressCall | None:
        """A call, on its ring. None where that has no lease, where memory is new to its worker, and while the stream is
        captured. Raises the error of an earlier call on the GPU that failed after it had returned."""
        start_ns = time.perf_counter_ns()
        gpu, stream, context = self.gpu, self.stream(), self.gpu.memory.context
        self._gpus.glance(gpu, stream, READ_EVERY)
        is_pushed = not self._is_here()
        if is_pushed:
            context.__enter__()
        try:
            if self.is_capturing(stream):
                return None
            made, address = self.make(self.like_of(args)) if self.results else (None, 0)
            refs = self._refs(addresses, address)
            if refs is None:
                return None
            try:
                block = self._blocks.pop()
            except IndexError:
                block = self._allocate()
            with gpu.lock:
                if self._gpus.is_closing or gpu.is_behind():
                    self.give(block)
                    return None
                place = self._gpus.lane_of(gpu, self.route, block.numbers)
                if place is None or place[1] is not self.lease:
                    self.give(block)
                    return None
                refs, its = block.call_ref + refs + block.answer_ref, (FUNCTION, self.route, (), start_ns)
                asked = ask(self._gpus, gpu, place, its, stream, refs, (block, args, made, loan), self.timeout_s)
        finally:
            if is_pushed:
                context.__exit__()
        if not asked.point.value % LOOK_EVERY:
            gpu.wait_for_room(asked.point)
        several: Sequence[Any] = made if len(self.results) > 1 else (made,)  # type: ignore[assignment]
        call = GpuExpressCall(self, asked, block, refs, args, several, stream, loan)
        if self.session.capsules.is_on:
            call.versions = versions_of(args)
        return call

    def like_of(self, args: tuple[Any, ...]) -> Any:
        """The array that results of a call are made like."""
        return args[self._first] if self._like is None else self._like.obj  # type: ignore[index]

    def _refs(self, addresses: tuple[int, ...], result: int) -> bytes | None:
        """References to the memory of a call. None where a worker does not reach all of it yet."""
        driver, key = self.gpu.memory.context.driver, (*addresses, result)
        found = self._places.get(key)
        if found is None:
            found = self._find(addresses, result)
            if found is None:
                return None
            if len(self._places) >= MAX_PLACES:
                self._places.clear()
            self._places[key] = found
            return found[0]
        try:
            for inside, buffer_id in found[2]:
                if driver.buffer_id(inside) != buffer_id:
                    break
            else:
                return found[0]
        except CudaError as exc:
            if exc.is_sticky:
                raise
        self._places.pop(key, None)
        return None

    def _find(
        self, addresses: tuple[int, ...], result: int
    ) -> tuple[bytes, frozenset[int], tuple[tuple[int, int], ...]] | None:
        gpu, refs, owners, numbers = self.gpu, list[bytes](), dict[int, int](), set[int]()
        memory, driver = gpu.memory, gpu.memory.context.driver
        spans = [*zip(addresses, self._sizes, strict=True)]
        if self.results:
            spans.append((result, self._result_bytes))
        for address, nbytes in spans:
            place = memory.find(address, nbytes, self._transport)
            if isinstance(place, str) or place[0].address % ALIGNMENT:
                return None
            arena, offset = place
            number = gpu.number(arena, self._transport)
            start = offset // ALIGNMENT * ALIGNMENT
            refs.append(REF.pack(number, 0, start, offset + nbytes - start))
            numbers.add(number)
            owners[arena.address] = driver.buffer_id(arena.address)
        if self.results and result % ALIGNMENT:
            return None
        if not gpu.has_reached(self.lease.decision.slot, frozenset(numbers)):
            return None
        return b"".join(refs) + self._rest, frozenset(numbers), tuple(owners.items())

    def _allocate(self) -> Block:
        """The answer has a slot of its own, as of Express."""
        nbytes = len(self._frame)
        (whole, arena, offset), (answer, its, at) = arenas.pool.allocate(nbytes), arenas.pool.allocate(MIN_ROOM)
        whole[:nbytes] = self._frame
        numbers = self.session.arena_registry
        call, room = REF.pack(numbers[arena], 0, offset, nbytes), REF.pack(numbers[its], 0, at, MIN_ROOM)
        return Block(whole, answer, call, room, (arena, offset, nbytes), frozenset({numbers[arena], numbers[its]}))

    def give(self, block: Block) -> None:
        """Nobody has it any more."""
        if len(self._blocks) < MAX_BLOCKS:
            self._blocks.append(block)

    def read(self, answer: memoryview) -> Plain:
        """An answer. Raises LayerZeroError or _NotPlainError for one that is more than a result."""
        plain = self.plain
        if plain is not None and answer[: len(plain.head)] == plain.head:
            return plain
        head, payload = frames.read(answer)
        there: list[int] = []
        match head:
            case [frames.RETURNED, tree, []]:
                pass
            case [frames.RETURNED_THERE, tree, [], list(there)]:
                if not self.results:
                    raise _NotPlainError
            case [frames.AWAITS, *_]:
                raise _OtherResultsError
            case _:
                raise _NotPlainError
        values.decode(tree, self._look, resolve, "result")  # which raises
        why = "a function's result lies in its own memory on the GPU"
        sizes = [(number in there, spec.span_bytes) for number, spec in enumerate(self.results)]
        is_there = head[0] == frames.RETURNED_THERE
        copies = tuple(Copy("result", size, "worker", why) for in_place, size in sizes if is_there and not in_place)
        start = bytes(answer[: frames.aligned(len(answer) - len(payload))])
        self.plain = plain = Plain(start, tree, copies, sum(size for in_place, size in sizes if in_place))
        return plain

    def _look(self, node: list[Any]) -> Any:
        if node[:1] != [frames.OF_GPU]:
            raise _NotPlainError
        return of_those([(spec, None) for spec in self.results], node)


class GpuExpressCall:
    """A call that is on its ring. It goes on as a Call where it does not end plainly."""

    def __init__(
        self,
        site: _Site,
        asked: Asked,
        block: Block,
        refs: bytes,
        args: tuple[Any, ...],
        made: Sequence[Any],
        stream: int,
        loan: Any,
    ) -> None:
        """`made`: arrays for its results."""
        self._site, self._asked, self._block, self._refs = site, asked, block, refs
        self._args, self._made, self._stream, self._loan = args, made, stream, loan
        self._session, self._start_ns, self._forks = site.session, asked.start_ns, arenas.forks
        self._record: Any = None
        self._has_others = False  # results, than were expected
        self._plain: Plain | None = None
        self._call: Call | None = None  # that it has become
        self.versions: list[int | None] | None = None  # torch's counts of writes then, for a capsule

    @property
    def label(self) -> str:
        return self._site.label

    @property
    def is_sent(self) -> bool:
        """As Call.is_sent."""
        if self._call is not None:
            return self._call.is_sent
        if self._record is not None:
            return False
        link = self._session.link
        is_over = self._asked.see() if link.forks != self._forks else self._asked.look_around(link)
        return not is_over

    def run(self) -> Any:
        """As `finish`."""
        return self.finish()

    def finish(self, timeout: float | None = None) -> Any:
        """As Call.finish."""
        if self._call is None:
            if self._session.link.forks != self._forks:
                raise BrokerLost("the call was sent before a fork, and its answer goes to the parent; call again here")
            site, until_s = self._site, math.inf if timeout is None else time.monotonic() + timeout
            try:
                is_over = self._asked.await_answer(self._session.link, until_s)
            except TimeoutError:
                text = f"{self.label} is still running after {timeout:g} s; ask again, or wait longer"
                raise TimeoutError(text) from None
            if is_over:
                try:
                    plain = site.read(self._block.answer)
                except _OtherResultsError:
                    self._has_others = True
                except (LayerZeroError, _NotPlainError):
                    pass
                else:
                    return self._end(plain)
            self._call = self._become(is_over=is_over)
        try:
            return self._call.finish(timeout)
        finally:
            self._record = self._call._record
            if self._has_others and not self._site.is_declared:
                self._site.express.expect(self._site, self._site.owner._places.results_there.get(self.label, ()))
            self._let_go()

    def _end(self, plain: Plain) -> Any:
        site, made = self._site, self._made
        value = values.decode(plain.tree, lambda node: made[node[-1]], resolve, "result")
        owner = site.owner
        site.session.lanes.note_asked(self._asked, plain.copies)
        self._record, self._plain = site.session.last_record, plain
        owner._kernel_ns, owner._last.call = 0, self
        site.give(self._block)
        self._let_go()
        return value

    def _let_go(self) -> None:
        """It has ended: what its report is made of keeps no argument."""
        self._args, self._made, self._loan = (), (), None

    def _become(self, *, is_over: bool) -> Call:
        site, block, session = self._site, self._block, self._site.session
        call = site.express.called.call(self._args, session, self._loan)
        given = None if call.given is None else call.given.on_gpu
        if given is not None:  # as they were when it was put
            given.stream = self._stream
            given.versions = given.versions if self.versions is None else self.versions
        like = describe(site.like_of(self._args))
        lent = Lent(site.gpu, like, self._stream, site.results, list(self._made) if site.results else [])
        lent.uncopied_bytes, lent.pending = site.nbytes, self._asked
        request = call.request_at(block.place, block.whole, lent)
        request.on_gpu = lent
        its = (self._refs, [block.answer], self._start_ns, site.asked_in)
        submitted = placed_at(session.link, site.route, request, *its)
        submitted.pending = self._asked
        if is_over:
            value = session.lanes.end_asked(submitted, self._asked)
            call.go_on(Sent(session, FUNCTION, value=value, record=session.last_record), self._start_ns)
        else:
            call.go_on(Sent(session, FUNCTION, submitted), self._start_ns)
        return call

    @property
    def report(self) -> FunctionReport | None:
        """As Call.report."""
        if self._call is not None or self._record is None:
            return None if self._call is None else self._call.report
        site, selection, plain = self._site, self._session.report_of(self._record), self._plain
        assert selection is not None
        assert plain is not None
        elapsed_us, nbytes = selection.elapsed_us or 0.0, site.nbytes + plain.placed_bytes
        backend = site.lease.decision.backend
        its = (self.label, site.env, backend, 1, (), plain.copies, nbytes, elapsed_us, selection)
        return FunctionReport(*its, device=site.device)


class _NotPlainError(Exception):
    """More than a result."""


class _OtherResultsError(Exception):
    """Of other shapes than there was memory for."""
