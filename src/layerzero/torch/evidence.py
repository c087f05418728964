"""Whether our calls are faster than the framework's own, found out on the calls of a program as they come.

Calls of one kind, which is op, dtype and sizes, go the one way and the other in turns, each of them once, until the
medians of their times say which to take. On a CPU only: on a GPU a call's end is not the kernel's."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from layerzero.torch import autocasting

WARM = 6  # calls of ours, until a route is settled
SAMPLES = 8  # of each way
HOLDS = 10_000  # calls; then they are compared anew
MAX_KINDS = 4096  # of others the calls are ours, unmeasured
MAX_KNOWN = 4096  # sizes
TRYING = "timed beside ours"
SLOWER = "ours was slower, as timed"


_VALUES = frozenset((type(None), bool, int, float, str))
_any_needs_grad: Callable[..., bool] = torch._C._any_requires_grad


class Turn(Enum):
    """Which way a call goes. What is tried is to be timed, and told to `Trial.add`."""

    OURS = auto()
    NATIVE = auto()
    TRY_OURS = auto()
    TRY_NATIVE = auto()


@dataclass(frozen=True)
class Comparison:
    """Calls of one kind: what they are, the medians of both ways, and which was the faster. `sizes`: of each tensor,
    with a range for what differs between the calls."""

    op: str
    dtype: str
    sizes: str
    our_us: float
    native_us: float

    @property
    def is_ours(self) -> bool:
        return self.our_us <= self.native_us

    def __str__(self) -> str:
        taken = "ours" if self.is_ours else "the framework's"
        times = f"ours {self.our_us:,.0f} us, the framework's {self.native_us:,.0f} us"
        return f"{self.op} of {self.dtype} {self.sizes}: {times}: {taken}"


class Trial:
    """Of one kind of calls. Threads may share it; they may take a turn too many."""

    def __init__(self, op: str, dtype: str, sizes: str) -> None:
        self.names = op, dtype, sizes
        self.found: Comparison | None = None
        self._lock = threading.Lock()
        self._settled: Turn | None = None
        self._left = 0
        self._begin()

    def _begin(self) -> None:
        self._warm = WARM
        self._ours: list[int] = []
        self._native: list[int] = []

    def turn(self) -> Turn:
        """Of the next call."""
        settled = self._settled
        if settled is not None:
            self._left -= 1
            if self._left > 0:
                return settled
            self._settled = None
            self._begin()
        if self._warm > 0 or len(self._ours) <= len(self._native):
            return Turn.TRY_OURS
        return Turn.TRY_NATIVE

    def add(self, turn: Turn, taken_ns: int) -> None:
        """A call that was tried has ended well."""
        with self._lock:
            if turn is Turn.TRY_OURS and self._warm > 0:
                self._warm -= 1
                return
            (self._ours if turn is Turn.TRY_OURS else self._native).append(taken_ns)
            if min(len(self._ours), len(self._native)) < SAMPLES:
                return
            ours, native = (statistics.median(one) / 1e3 for one in (self._ours, self._native))
            self.found = Comparison(*self.names, ours, native)
            self._left = HOLDS
            self._settled = Turn.OURS if self.found.is_ours else Turn.NATIVE


class Evidence:
    """Trials by kind of calls. Threads may share it."""

    def __init__(self) -> None:
        self._trials: dict[Hashable, Trial] = {}
        self._known: dict[Hashable, Trial | None] = {}  # by exact sizes, which takes less time to look up

    def trial(self, op: str, given: Sequence[Any]) -> Trial | None:
        """That of this kind of calls; None where times would say nothing: on a GPU, where gradients are wanted, whose
        calls come later, and while torch compiles. `given`: the arguments, tensors and plain values; what autocast
        makes of them is another kind of calls."""
        if torch.compiler.is_compiling() or (torch.is_grad_enabled() and _any_needs_grad(*given)):
            return None
        exact = op, autocasting.state(), *[one if type(one) in _VALUES else _seen(one) for one in given]
        try:
            return self._known[exact]
        except KeyError:
            pass
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        found = self._known[exact] = self._of_kind(op, given)
        return found

    def _of_kind(self, op: str, given: Sequence[Any]) -> Trial | None:
        """Sizes are of one kind with those that have as many bits."""
        tensors = [one for one in given if isinstance(one, Tensor)]
        if not tensors or not all(one.is_cpu for one in tensors):
            return None
        kind = (
            op,
            autocasting.state(),
            *[
                (one.dtype, one.is_contiguous(), *map(int.bit_length, one.shape))
                if isinstance(one, Tensor)
                else _seen(one)
                for one in given
            ],
        )
        found = self._trials.get(kind)
        if found is None and len(self._trials) < MAX_KINDS:
            dtype = str(tensors[0].dtype).removeprefix("torch.")
            found = self._trials.setdefault(kind, Trial(op, dtype, ", ".join(map(_sizes, tensors))))
        return found

    def comparisons(self) -> tuple[Comparison, ...]:
        """Of those that have ended, in the order in which their calls came first."""
        return tuple(one.found for one in list(self._trials.values()) if one.found is not None)

    def clear(self) -> None:
        """Forget all."""
        self._trials.clear()
        self._known.clear()


def _seen(value: Any) -> Hashable:
    """What can be hashed of an argument."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.is_contiguous(), value.is_cpu
    return tuple(value) if isinstance(value, list) else value


def _sizes(tensor: Tensor) -> str:
    """A size, or the range of those that are of one kind with it: 64-127."""
    return "x".join(
        str(size) if size < 2 else f"{1 << size.bit_length() - 1}-{(1 << size.bit_length()) - 1}"
        for size in tensor.shape
    )
