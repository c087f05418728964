"""What notes calls while a trace is on (client/connection/observing.py): tuples in a row, which snapshot.py reads."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter_ns
from typing import Any, NamedTuple

from layerzero.client.arrays.recognition import CPU, Array, describe
from layerzero.client.connection import arena as arenas
from layerzero.client.connection import observing
from layerzero.client.connection.call import Request, describe_args
from layerzero.client.planning.plans import Plan
from layerzero.client.traces import gpu_times
from layerzero.client.traces.gpu_times import Span
from layerzero.client.traces.keeping import Keeper, Kept
from layerzero.client.traces.scopes import Scope, TraceScope, current, here, numbers
from layerzero.ipc.errors import LayerZeroError
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec

UNKNOWN = (LayerZeroError, TypeError, ValueError, RuntimeError)
"""What is raised of what cannot be looked at, by us or by the array's library. A call is not to fail of its record."""
MAX_PLANS = 8192  # whose arguments' specs are remembered
Specs = tuple[TensorSpec | None, ...]


class CallEntry(NamedTuple):
    """A call of an op that has ended. `number` grows with the ends of calls, `read_at` is one of when it was begun.
    `end_ns`: 0 where the record tells it. `record`: what its report is made of, or its error. `memory`: addresses of
    its arguments and results. `span`: on a GPU."""

    number: int
    read_at: int
    thread: int
    scope: Scope | None
    start_ns: int
    end_ns: int
    record: Any
    op: str
    params: dict[str, Any]
    backend: str | None
    specs: Specs
    device: int
    memory: Sequence[int]
    kept: Kept | None
    span: Span | None


class ChainEntry(NamedTuple):
    """Calls of ops that crossed as one."""

    number: int
    thread: int
    scope: Scope | None
    start_ns: int
    end_ns: int
    steps: tuple[observing.StepNote, ...]


class FunctionEntry(NamedTuple):
    """A call of a function in an environment. `inputs`, `outputs`: name, spec and address of arrays."""

    number: int
    thread: int
    scope: Scope | None
    start_ns: int
    end_ns: int
    call: Any
    inputs: tuple[tuple[str, TensorSpec, int], ...]
    outputs: tuple[tuple[str, TensorSpec, int], ...]


class Fresh(NamedTuple):
    """Memory that the program has for something else since then."""

    number: int
    address: int
    nbytes: int


class Begun(NamedTuple):
    """A request that was sent, without its arrays."""

    op: str
    params: dict[str, Any]
    backend: str | None
    specs: Specs
    memory: tuple[int, ...]
    kept: Kept | None
    number: int
    scope: Scope | None
    start_ns: int


class Buffer:
    """The newest entries of one trace, each with how many there were until then."""

    def __init__(self, most: int, keeper: Keeper | None) -> None:
        self.keeper = keeper
        self.calls: deque[tuple[int, Any]] = deque(maxlen=most)
        self.scopes: deque[Scope] = deque(maxlen=most)
        self.fresh: deque[Fresh] = deque(maxlen=2 * most)
        self.count = itertools.count(1)
        self._purged = 0  # so many were forgotten when it was purged

    def clear(self) -> None:
        self._purged = self.noted
        for entries in (self.calls, self.scopes, self.fresh):
            entries.clear()
        if self.keeper is not None:
            self.keeper.clear()

    @property
    def noted(self) -> int:
        """How many there were, ever."""
        calls = self.calls
        return calls[-1][0] if calls else self._purged

    def dropped(self, calls: Sequence[tuple[int, Any]]) -> int:
        """How many had to make room for these."""
        return calls[-1][0] - self._purged - len(calls) if calls else 0


class Recorder:
    """The one of this process. Threads share it without locks: a deque takes one entry at a time."""

    def __init__(self) -> None:
        self._buffers: tuple[Buffer, ...] = ()
        self._ways: tuple[tuple[Iterator[int], Callable[[tuple[int, Any]], None]], ...] = ()  # into them
        self._keepers: tuple[Keeper, ...] = ()
        self._specs: dict[Plan, Specs] = {}
        self._watched: dict[tuple[int, int], weakref.ref[Any]] = {}
        self._lock = threading.Lock()

    def add(self, buffer: Buffer) -> None:
        with self._lock:
            self._set((*self._buffers, buffer))

    def remove(self, buffer: Buffer) -> None:
        with self._lock:
            self._set(tuple(one for one in self._buffers if one is not buffer))

    def has(self, buffer: Buffer) -> bool:
        return any(one is buffer for one in self._buffers)

    def leave(self) -> None:
        """In a forked child, whose calls are not the parent's: no trace is on. The lock may have been held."""
        self._lock = threading.Lock()
        self._set(())

    def _set(self, buffers: tuple[Buffer, ...]) -> None:
        self._buffers = buffers
        self._ways = tuple((one.count, one.calls.append) for one in buffers)
        self._keepers = tuple(one.keeper for one in buffers if one.keeper is not None)
        observing.recorder = self if buffers else None
        if not buffers:
            self._specs.clear()
            self._watched.clear()

    # --- calls of ops

    def run(self, session: Any, request: Request) -> Any:
        if request.places is not None:  # of a function, which says more of its call
            return session.run(request, is_recorded=True)
        kept = Kept.of(request, self._keepers) if self._keepers else None
        was_used = session.gpus.is_used
        device, span = gpu_times.begin(request.args) if was_used else (CPU, None)
        start_ns = perf_counter_ns()
        try:
            result = session.run(request, is_recorded=True)
        except BaseException as exc:
            if span is not None:
                span.drop()
            self._note_failed(request, start_ns, exc, device, kept)
            raise
        if span is not None:
            span.end()
        elif not was_used and session.gpus.is_used:  # the first call there
            device = gpu_times.device_of(request.args)
        record = session.last.record
        if type(result) is not tuple:
            memory = session.repeats.addresses((*request.args, result))
        else:
            memory = session.repeats.addresses((*request.args, *result))
        plan = record[0] if type(record) is tuple else None
        specs = self._specs.get(plan) if plan is not None else None
        if specs is None:
            specs = self._specs_of(request, plan)
        if memory is None:
            session.repeats.learn(_kinds(request.args))
        if memory is None or request.out is not None or device != CPU:
            memory = self._look(request.args, result, memory)
        if result is None and request.args:
            self._watch_written(request)
        if kept is not None:
            kept.take_results(result, request)
        number = next(numbers)
        entry = (  # as a CallEntry, which takes longer to make
            number, number, here.number, current.get(), start_ns, 0, record, request.op, request.params,
            request.backend, specs, device, memory, kept, span,
        )  # fmt: skip
        for count, append in self._ways:
            append((next(count), entry))
        return result

    def begin(self, request: Request) -> Begun:
        kept = Kept.of(request, self._keepers) if self._keepers else None
        memory = tuple([0 if arg is None else _address(arg) for arg in request.args])
        start_ns, specs = perf_counter_ns(), self._specs_of(request, None)
        return Begun(
            request.op, request.params, request.backend, specs, memory, kept, next(numbers), current.get(), start_ns
        )

    def end(self, begun: Begun, session: Any, value: Any, error: BaseException | None) -> None:
        end_ns, number = perf_counter_ns(), next(numbers)
        record, memory = error, begun.memory
        if error is None:
            record, memory = session.last.record, (*begun.memory, *self._look((), value, None))
            if begun.kept is not None:
                begun.kept.take_results(value, None)
        entry = CallEntry(
            number, begun.number, here.number, begun.scope, begun.start_ns, end_ns, _lightened(record), begun.op,
            begun.params, begun.backend, begun.specs, CPU, memory, begun.kept, None,
        )  # fmt: skip
        self._append(entry)

    def _note_failed(
        self, request: Request, start_ns: int, error: BaseException, device: int, kept: Kept | None
    ) -> None:
        end_ns, number = perf_counter_ns(), next(numbers)
        entry = CallEntry(
            number, number, here.number, current.get(), start_ns, end_ns, _lightened(error), request.op, request.params,
            request.backend, self._specs_of(request, None), device, (), kept, None,
        )  # fmt: skip
        self._append(entry)

    def _specs_of(self, request: Request, plan: Plan | None) -> Specs:
        """What the arguments are. A plan is of one kind of arguments alone."""
        specs: Specs = ()
        with suppress(*UNKNOWN):
            specs = tuple([None if one is None else one.spec for one in describe_args(request)])
        if plan is not None:
            if len(self._specs) >= MAX_PLANS:
                self._specs.clear()
            self._specs[plan] = specs
        return specs

    def _look(self, args: Sequence[Any], result: Any, known: bytes | None) -> Sequence[int]:
        """Addresses; of results that lie outside of our memory until they are collected: it may be used again then."""
        made = result if type(result) is tuple else () if result is None else (result,)
        found = array("Q", known) if known is not None else array("Q", map(_address, args))
        if known is None:
            found.extend(map(_address, made))
        for at, one in zip(range(len(found) - len(made), len(found)), made, strict=True):
            if found[at] and not self._watch(one, found[at]):
                found[at] = 0
        return found

    def _watch(self, result: Any, address: int) -> bool:
        """Whether it will be known when the memory is no longer this result."""
        if arenas.pool.find(address, 1) is not None:
            return True
        key = id(result), address
        if key not in self._watched:
            try:
                nbytes = describe(result).spec.span_bytes
                self._watched[key] = weakref.ref(result, partial(self._gone, key, nbytes))
            except UNKNOWN:  # of a TypeError: it has no weak references
                return False
        return True

    def _watch_written(self, request: Request) -> None:
        """What an op writes in place."""
        op = OPS[request.op]
        for name in op.in_place:
            target = request.args[op.inputs.index(name)]
            self._watch(target, _address(target))

    def _gone(self, key: tuple[int, int], nbytes: int, _: weakref.ref[Any]) -> None:
        self._watched.pop(key, None)
        self.note_fresh(key[1], nbytes)

    def _append(self, entry: Any) -> None:
        for count, append in self._ways:
            append((next(count), entry))

    # --- others

    def note_chain(self, steps: Iterable[observing.StepNote], start_ns: int, end_ns: int) -> None:
        entry = ChainEntry(next(numbers), here.number, current.get(), start_ns, end_ns, tuple(steps))
        self._append(entry)

    def note_function(self, call: Any, span_ns: tuple[int, int], args: Any, kwargs: Any, value: Any) -> None:
        inputs = [_array_in(str(name), one) for name, one in (*enumerate(args), *kwargs.items())]
        values = value if isinstance(value, (tuple, list)) else (value,)
        outputs = [(_array_in(str(name), one), one) for name, one in enumerate(values)]
        made = [told for told, one in outputs if told is not None and self._watch(one, told[2])]
        entry = FunctionEntry(
            next(numbers), here.number, current.get(), *span_ns, call, tuple([i for i in inputs if i]), tuple(made)
        )
        self._append(entry)

    def note_fresh(self, address: int, nbytes: int) -> None:
        entry = Fresh(next(numbers), address, nbytes)
        for buffer in self._buffers:
            buffer.fresh.append(entry)

    def note_scope(self, scope: Scope) -> None:
        for buffer in self._buffers:
            buffer.scopes.append(scope)

    def scope(self, name: str) -> TraceScope:
        return TraceScope(name)


def _array_in(name: str, value: Any) -> tuple[str, TensorSpec, int] | None:
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return None
    with suppress(*UNKNOWN):
        found = describe(value)
        return name, found.spec, found.address
    return None


def _address(value: Any) -> int:
    if value is None:
        return 0
    with suppress(*UNKNOWN):
        found: Array = describe(value)
        return found.address
    return 0


def _kinds(args: Sequence[Any]) -> set[str]:
    found: set[str] = set()
    for arg in args:
        with suppress(*UNKNOWN):
            found.add(describe(arg).kind)
    return found


def _lightened(record: Any) -> Any:
    """An error keeps its frames, and they the caller's arrays: what is told of it is kept instead."""
    if not isinstance(record, BaseException):
        return record
    code = record.code if isinstance(record, LayerZeroError) else type(record).__name__
    message = record.message if isinstance(record, LayerZeroError) else str(record)
    return Failed(f"{code}: {message}", getattr(record, "report", None))


class Failed(NamedTuple):
    """How a call failed, and its report where it has one."""

    error: str
    report: Any


recorder = Recorder()
os.register_at_fork(after_in_child=recorder.leave)
