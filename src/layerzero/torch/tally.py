"""What became of the calls of each class of layers: served, or handed over to the framework they are of, and why."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

from layerzero.torch.evidence import Comparison

SERVED = "served"


@dataclass(frozen=True)
class Row:
    """Calls of one class of layers. `what`: attention, experts, or the name of a layer. `outcome`: "served", or why
    they were handed over."""

    layer: str
    what: str
    outcome: str
    calls: int


@dataclass(frozen=True)
class Report:
    """Rows, those with most calls first. Compiled calls are not counted. `comparisons`: kinds of calls that were timed
    beside the framework's own."""

    rows: tuple[Row, ...] = field(default=())
    comparisons: tuple[Comparison, ...] = field(default=())

    @property
    def served(self) -> int:
        return sum(row.calls for row in self.rows if row.outcome == SERVED)

    @property
    def handed_over(self) -> int:
        return sum(row.calls for row in self.rows if row.outcome != SERVED)

    def __str__(self) -> str:
        if not self.rows:
            return "no calls yet"
        width = max(len(row.layer) for row in self.rows)
        lines = [f"{row.layer:<{width}}  {row.what:<10}  {row.calls:>8,}  {row.outcome}" for row in self.rows]
        headline = f"{self.served:,} calls served, {self.handed_over:,} handed over"
        return "\n".join((headline, *lines, *map(str, self.comparisons)))


class Tally:
    """Calls of this process's layers of one framework. Threads may count at once."""

    def __init__(self) -> None:
        self._calls: Counter[tuple[str, str, str]] = Counter()
        self._lock = threading.Lock()

    def count(self, layer: object, what: str, outcome: str = SERVED) -> None:
        """One more call of a layer, or of one whose name is given."""
        key = (layer if isinstance(layer, str) else type(layer).__name__, what, outcome)
        with self._lock:
            self._calls[key] += 1

    def report(self) -> Report:
        """What became of the calls so far."""
        with self._lock:
            found = self._calls.most_common()
        return Report(tuple(Row(*key, calls) for key, calls in found))

    def clear(self) -> None:
        """Forget all calls."""
        with self._lock:
            self._calls.clear()
