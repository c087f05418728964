"""Calls of an engine, tried by us and finished by the engine's own kernel wherever that fails: nothing of ours raises
into an engine. In shadow mode the engine's result is the one that counts, and ours is compared with it."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

import layerzero as lz
from layerzero.torch.running import HandedOver, Runner

R = TypeVar("R")

# Twice what a kernel may be off by (docs/ops.md#tolerances): both may be, in opposite directions.
TOLERANCES = {torch.float64: 2e-10, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}


class Guard:
    """How an engine's calls are tried. `shadow`: both compute, the engine's result is used; `share`: of the calls of
    each kind, evenly spread; the others are left to the engine."""

    def __init__(self, runner: Runner, shadow: bool = False, share: float = 1.0) -> None:
        if not (isinstance(share, int | float) and 0 <= share <= 1):
            raise lz.InvalidArgument(f"give share a number of 0 to 1, the share of calls to take over: it is {share!r}")
        self.runner = runner
        self.shadow = bool(shadow)
        self.share = float(share)
        self._seen: Counter[str] = Counter()
        self._said: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def run(
        self,
        layer: object,
        what: str,
        ours: Callable[[], Sequence[Tensor]],
        theirs: Callable[[], R],
        used: Callable[[Sequence[Tensor]], R],
        made: Callable[[R], Sequence[Tensor]],
    ) -> R:
        """The result of a call. `ours` computes it and writes nothing; `theirs` is the engine's own kernel; `used`:
        what the engine gets of ours; `made`: the tensors of a result of theirs, to compare ours with."""
        if not self._is_ours(what):
            self.runner.count(layer, what, f"left to {self.runner.framework}: share")
            return theirs()
        try:
            found = ours()
            if not self.shadow:
                result = used(found)
                self.runner.count(layer, what)
                return result
        except HandedOver as why:
            reason = str(why)
            if not reason.startswith("error ") and self._is_first(what, reason):  # errors are said by the runner
                self.runner.log.info("%s is computed by %s: %s", what, self.runner.framework, reason)
            self.runner.count(layer, what, f"handed to {self.runner.framework}: {reason}")
            return theirs()
        except Exception as error:  # whatever it is, an engine's request does not fail of it
            name = type(error).__name__
            if self._is_first(what, name):
                self.runner.log.warning("%s is computed by %s", what, self.runner.framework, exc_info=True)
            self.runner.count(layer, what, f"handed to {self.runner.framework}: {name}")
            return theirs()
        expected = theirs()
        self._compare(layer, what, found, made(expected))
        return expected

    def _is_ours(self, what: str) -> bool:
        if self.share == 1:
            return True
        with self._lock:
            self._seen[what] += 1
            seen = self._seen[what]
        return math.floor(seen * self.share) > math.floor((seen - 1) * self.share)

    def _is_first(self, what: str, of: str) -> bool:
        with self._lock:
            is_first = (what, of) not in self._said
            self._said.add((what, of))
        return is_first

    def _compare(self, layer: object, what: str, found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
        verdict = difference(found, expected)
        if verdict is not None and self._is_first(what, "shadow"):
            self.runner.log.warning("%s: ours differs from that of %s: %s", what, self.runner.framework, verdict)
        self.runner.count(layer, what, "shadow: the same" if verdict is None else "shadow: differs")


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
    """In what results differ by more than TOLERANCES, or None: the largest absolute error, divided by the largest
    expected magnitude, or by 1 where that is smaller. What is not finite must be equal."""
    if len(found) != len(expected):
        return f"{len(found)} tensors, not {len(expected)}"
    for mine, other in zip(found, expected, strict=True):
        if mine.shape != other.shape or mine.dtype != other.dtype:
            return f"{mine.dtype} {tuple(mine.shape)}, not {other.dtype} {tuple(other.shape)}"
        a, b = mine.double(), other.double()
        is_finite = torch.isfinite(b)
        if not torch.equal(
            torch.where(is_finite, 0, a).nan_to_num(nan=0.5), torch.where(is_finite, 0, b).nan_to_num(nan=0.5)
        ):
            return "infinities or NaN at other places"
        a, b = torch.where(is_finite, a, 0), torch.where(is_finite, b, 0)
        error = float((a - b).abs().max()) if b.numel() else 0.0
        allowed = TOLERANCES.get(other.dtype, 0.0) * max(1.0, float(b.abs().max()) if b.numel() else 0.0)
        if not error <= allowed:
            return f"by {error:.3g}, where {allowed:.3g} is allowed"
    return None
