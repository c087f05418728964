"""Steps of plans that ran without a call of their own, counted as calls are (client/connection/counters.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from layerzero.client.connection.counters import Row
from layerzero.client.session.session import Session

GRAPH = "graph"  # the path of counters: steps of a plan's CUDA graph


def counter_rows(session: Session, steps: Iterable[tuple[str, str]], path: str) -> list[tuple[Row, int]]:
    """The rows of these steps, each an op and a kernel's id, and how many of them each row is of."""
    counters = session.link.counters
    return list(Counter(counters.row(op, kernel_id, path) for op, kernel_id in steps).items())


def count_steps(session: Session, rows: list[tuple[Row, int]], elapsed_ns: int) -> None:
    """They have run once more, in so many ns for all of them: each counts with its share."""
    counters, steps = session.link.counters, sum([count for _, count in rows])
    for row, count in rows:
        counters.count(row, elapsed_ns // steps, times=count)
