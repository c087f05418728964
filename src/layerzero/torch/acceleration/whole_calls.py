"""Which ops are to be taken over in a model's calls on a GPU, found out on the calls of a program as they come.

A call of an op has no time of its own there: the host goes on while the GPU computes, and which of both the program
waits for is not seen in one call. So whole calls of the model are timed, with no op taken over and with each one alone,
in turns, between two events on the GPU; what was faster is tried once more, alone and together. Where gradients are
wanted a call lasts until the next one's begin: a step of training, with its backward pass and its optimizer."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

WARM, WARM_S = 24, 5.0  # calls of all ops at least, for so long at least the first time: until kernels are lifted
ROUNDS = 9  # timed calls of each way
FASTER = 0.97  # of the time of torch alone at most, twice
HOLDS, LONGER = 1_000, 10_000  # calls, after the first trial and after others; then they are timed anew
MAX_KINDS = 64  # of others the calls are torch's

T = TypeVar("T")
Ops = frozenset[str]
NONE: Ops = frozenset()


class Mark(Protocol):
    """A point in time, as torch.cuda.Event is one."""

    def query(self) -> bool: ...

    def elapsed_time(self, later: Any) -> float: ...


class Clock(Protocol):
    def is_stopped(self) -> bool:
        """Marks cannot be made now."""

    def mark(self) -> Mark: ...


@dataclass(frozen=True)
class WholeComparison:
    """Calls of one kind of a model: `alone_us`, medians, by torch alone; `with_us` with each of these ops, or sets of
    them, taken over. `chosen`: what is. `is_step`: each from one call's begin to the next one's."""

    kind: str
    alone_us: float
    with_us: Mapping[str, float]
    chosen: tuple[str, ...]
    is_step: bool

    def __str__(self) -> str:
        what = "steps" if self.is_step else "calls"
        times = "".join(f", with {ops} {us:,.0f} us" for ops, us in self.with_us.items())
        taken = ", ".join(self.chosen) or "nothing"
        return f"{what} of the model{self.kind}: torch alone {self.alone_us:,.0f} us{times}: {taken} taken over"


class Turn(NamedTuple):
    """One call of the model: the ops that it takes over, and whether these are others than its last call's; `way`, its
    number in the trial, and `start` where it is timed."""

    ops: Ops
    is_other: bool
    kind: _Kind | None
    way: int = -1
    trial: int = 0
    start: Any = None


class _Pending(NamedTuple):
    way: int
    start: Any
    end: Any


@dataclass
class _Kind:
    name: str
    is_step: bool
    calls: int = 0
    until_s: float = 0.0
    seen: set[str] = field(default_factory=set)
    ways: tuple[Ops, ...] = ()
    times: list[list[float]] = field(default_factory=list)  # ms
    pending: list[_Pending] = field(default_factory=list)
    turns: int = 0
    trial: int = 0  # of how many ways were begun: a late time may be of earlier ones
    found: dict[Ops, float] = field(default_factory=dict)  # ms
    is_second: bool = False  # trial, of what was faster in the first
    chosen: Ops | None = None
    left: int = 0
    holds: int = HOLDS


class _Local(threading.local):
    """Of a thread: the kind of its last call; its last timed step, which ends where the next one begins."""

    kind: _Kind | None = None
    step: Turn | None = None
    is_within = False


class WholeCalls:
    """Of one accelerated model. Threads may share it; the ways of calls that run beside each other are mixed then."""

    def __init__(self, ops: Iterable[str], clock: Clock) -> None:
        self._all = frozenset(ops)
        self._order = tuple(ops)
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: dict[Hashable, _Kind] = {}
        self._local = _Local()
        self.awake = self._all  # what the last call took over

    @property
    def ops(self) -> tuple[str, ...]:
        """Those that are not looked at now."""
        return tuple(op for op in self._order if op not in self.awake)

    def note(self, op: str) -> None:
        """A call of it is ours."""
        kind = self._local.kind
        if kind is not None and not kind.ways:
            kind.seen.add(op)

    @property
    def is_within(self) -> bool:
        """Whether this thread is in a call that has begun and not ended."""
        return self._local.is_within

    def begin(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Turn:
        """Before a call of the model with these arguments. Whoever calls takes care that these ops, and no others, are
        taken over, and then calls `run`."""
        key, name = _kind_of(args, kwargs)
        is_timed = not self._clock.is_stopped()
        with self._lock:
            kind = self._kinds.get(key)
            if kind is None and len(self._kinds) < MAX_KINDS:
                kind = self._kinds[key] = _Kind(name, torch.is_grad_enabled())
            before, self._local.step = self._local.step, None
            if before is not None and before.kind is kind and kind is not None and is_timed:
                self._end(before)  # a step ends where the next one begins
            self._local.kind = kind
            ops, way = (NONE, -1) if kind is None else self._next(kind, is_timed=is_timed)
            is_other, self.awake = ops != self.awake, ops
            return Turn(ops, is_other, kind, way, kind.trial if kind is not None else 0)

    def run(self, turn: Turn, call: Callable[[], T]) -> T:
        """The call that `begin` has said how to make."""
        self._local.is_within = True
        start = self._clock.mark() if turn.way >= 0 else None
        try:
            found = call()
        finally:
            self._local.is_within = False
        kind = turn.kind
        if start is not None and kind is not None:
            turn = turn._replace(start=start)
            if kind.is_step:
                self._local.step = turn
            else:
                with self._lock:
                    self._end(turn)
        return found

    def comparisons(self) -> tuple[WholeComparison, ...]:
        """Of kinds whose trials have ended."""
        with self._lock:
            return tuple(
                WholeComparison(
                    kind.name,
                    kind.found[NONE] * 1e3,
                    {" and ".join(self._named(ops)): ms * 1e3 for ops, ms in kind.found.items() if ops},
                    self._named(kind.chosen),
                    kind.is_step,
                )
                for kind in self._kinds.values()
                if kind.chosen is not None and kind.found
            )

    # --- the lock is held ----------------------------------------------------------------------------

    def _next(self, kind: _Kind, *, is_timed: bool) -> tuple[Ops, int]:
        """What the next call takes over, and its way in the trial; -1 where it is not timed."""
        if kind.chosen is not None:
            kind.left -= 1
            if kind.left > 0 or not is_timed:
                return kind.chosen, -1
            self._warm_again(kind)
        if not is_timed:
            return self._all, -1
        if not kind.ways:
            now_s = time.monotonic()
            kind.until_s = kind.until_s or now_s + WARM_S
            kind.calls += 1
            if kind.calls <= WARM or now_s < kind.until_s:
                return self._all, -1
            self._try(kind, [frozenset((op,)) for op in self._order if op in kind.seen])
        self._collect(kind)
        if kind.chosen is not None:
            return kind.chosen, -1
        if all(len(times) + sum(one.way == n for one in kind.pending) >= ROUNDS for n, times in enumerate(kind.times)):
            return NONE, -1  # until the GPU has come to the ends of all
        kind.turns += 1
        way = kind.turns % len(kind.ways)
        return kind.ways[way], way

    def _warm_again(self, kind: _Kind) -> None:
        """Its kernels were lifted before the first trial: a few calls do, and `until_s` is past."""
        kind.chosen, kind.ways, kind.seen, kind.calls = None, (), set(), 0
        kind.found, kind.is_second = {}, False

    def _try(self, kind: _Kind, ways: Sequence[Ops]) -> None:
        kind.ways = (NONE, *ways)
        kind.times = [[] for _ in kind.ways]
        kind.pending, kind.turns, kind.trial = [], -1, kind.trial + 1
        if not ways:
            self._choose(kind, NONE)

    def _end(self, turn: Turn) -> None:
        kind = turn.kind
        if kind is not None and turn.trial == kind.trial and kind.chosen is None:
            kind.pending.append(_Pending(turn.way, turn.start, self._clock.mark()))

    def _collect(self, kind: _Kind) -> None:
        """Times of calls whose end the GPU has passed; of all ways enough of them decide."""
        pending, kind.pending = kind.pending, []
        for one in pending:
            if one.end.query():
                kind.times[one.way].append(one.start.elapsed_time(one.end))
            else:
                kind.pending.append(one)
        if min(map(len, kind.times)) < ROUNDS:
            return
        medians = [statistics.median(times) for times in kind.times]
        kind.found |= dict(zip(kind.ways, medians, strict=True))
        ratios = {ops: ms / medians[0] for ops, ms in zip(kind.ways[1:], medians[1:], strict=True) if medians[0]}
        good = [ops for ops, ratio in ratios.items() if ratio <= FASTER]
        best = min(good, key=lambda ops: ratios[ops], default=NONE)
        if kind.is_second or not best:
            self._choose(kind, best)
        else:  # once may be chance; and several together are not what each is alone
            kind.is_second = True
            self._try(kind, list(dict.fromkeys((best, frozenset[str]().union(*good)))))

    def _choose(self, kind: _Kind, ops: Ops) -> None:
        kind.chosen, kind.left, kind.holds = ops, kind.holds, LONGER

    def _named(self, ops: Ops | None) -> tuple[str, ...]:
        return tuple(op for op in self._order if op in (ops or NONE))


class GpuClock:
    """That of a GPU's current stream. Events that are captured have no times."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def is_stopped(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    def mark(self) -> torch.cuda.Event:
        made = torch.cuda.Event(enable_timing=True)
        made.record(torch.cuda.current_stream(self._device))
        return made


def gpu_of(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device | None:
    """Where a call with these arguments is one on a GPU: that of the model, or of the first tensor."""
    given = next((one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)), None)
    given = next(model.parameters(), given)
    return given.device if given is not None and given.is_cuda else None


def _kind_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Hashable, str]:
    """By the tensors among the arguments: sizes are of one kind with those that have as many bits."""
    tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
    key = (torch.is_grad_enabled(), *[(one.dtype, *map(int.bit_length, one.shape)) for one in tensors])
    shapes = ", ".join("x".join(map(str, one.shape)) for one in tensors[:2])
    return key, f" of {shapes}" if shapes else ""
