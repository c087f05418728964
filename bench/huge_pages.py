"""What shared memory in huge pages gains, beside pages of 4 KiB. Writes results/huge_pages.md.

    python bench/huge_pages.py [--quick]

Torch's kernels over the express lane, in one process, on arrays in shared memory of both kinds, in turns; least and
middle of all rounds. Results go to `out=` in the same kind of memory. Then how long it takes until an array is there.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from common import backend_versions, finish, own_broker, parser

import layerzero as lz
from layerzero.ipc.shm import huge_pages

MIB = 1 << 20
SMALL, HUGE = KINDS = ("0", "1")  # values of LAYERZERO_HUGE_PAGES
LAYERS = ((384, 384),) * 4 + ((1536, 384), (384, 1536))  # MiniLM's weights of a layer, and a larger model's
LARGE = ((2048, 2048),) * 4 + ((5632, 2048), (2048, 5632))


def new(kind: str, *shape: int) -> Any:
    """Float32 in an arena of its own, which arrays of 8 MiB and more have."""
    os.environ[huge_pages.VARIABLE] = kind
    return lz.empty(shape, "float32")


def linears(kind: str, rows: int, shapes: tuple[tuple[int, int], ...], layers: int) -> Callable[[], Any]:
    """All linear layers, one after the other, each with weights of its own."""
    weights = new(kind, sum(n * k for n, k in shapes) * layers)
    weights[...] = np.random.default_rng(0).standard_normal(weights.shape, np.float32)
    given = new(kind, max(4 * MIB, 2 * rows * max(map(max, shapes))))
    given[...] = 1
    calls, at = [], 0
    for n, k in shapes * layers:
        calls.append((given[: rows * k].reshape(rows, k), weights[at : at + n * k].reshape(n, k)))
        at += n * k

    def run() -> None:
        for x, weight in calls:
            lz.linear(x, weight, backend="torch")

    return run


def unary(kind: str, op: Any, *more: Any) -> Callable[[], Any]:
    x, out = new(kind, 4 * MIB // 1024, 1024), new(kind, 4 * MIB // 1024, 1024)
    x[...] = np.random.default_rng(0).standard_normal(x.shape, np.float32)
    return lambda: op(x, *more, out=out, backend="torch")


def compared(name: str, make: Callable[[str], Callable[[], Any]], rounds: int) -> list[str]:
    calls = {kind: make(kind) for kind in KINDS}
    for call in calls.values():
        for _ in range(5):  # until it goes by the lane
            call()
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind, call in calls.items():
            start = time.perf_counter()
            call()
            times[kind].append(1e6 * (time.perf_counter() - start))
    least = [min(times[kind]) for kind in KINDS]
    middle = [statistics.median(times[kind]) for kind in KINDS]
    pairs = [f"{one:,.0f}, {other:,.0f} us" for one, other in zip(least, middle, strict=True)]
    return [name, *pairs, f"{least[1] / least[0]:.2f}, {middle[1] / middle[0]:.2f}"]


def coming(nbytes: int, rounds: int) -> list[str]:
    """Until an array of new memory can be written; of what was freed before nothing is left."""
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind in KINDS:
            start = time.perf_counter()
            x = new(kind, nbytes // 4)
            times[kind].append(1e3 * (time.perf_counter() - start))
            held.append(x)
    held.clear()
    first = [times[kind][0] for kind in KINDS]
    middle = [statistics.median(times[kind]) for kind in KINDS]
    pairs = [f"{one:.1f}, {other:.1f} ms" for one, other in zip(first, middle, strict=True)]
    return [f"{nbytes // MIB} MiB of new memory: the first, and the middle", *pairs, f"{middle[1] / middle[0]:.2f}"]


held: list[Any] = []  # memory that must not be used again


def main() -> None:
    options = parser(__doc__, quick="few rounds").parse_args()
    rounds = 10 if options.quick else 100
    reason = huge_pages.why_none()
    if reason:
        raise SystemExit(f"there are no huge pages to measure: {reason}")
    with own_broker():
        rows = [coming(64 * MIB, 5)]
        for tokens in (1, 16, 256):
            name = f"36 linear layers of MiniLM, {tokens} rows"
            rows.append(compared(name, lambda kind: linears(kind, tokens, LAYERS, 6), rounds))  # noqa: B023
        for tokens in (1, 16, 256):
            name = f"6 linear layers of 2,048 features, {tokens} rows"
            rows.append(compared(name, lambda kind: linears(kind, tokens, LARGE, 1), max(rounds // 2, 5)))  # noqa: B023
        rows.append(compared("silu of 16 MiB", lambda kind: unary(kind, lz.silu), rounds))
        rows.append(compared("softmax of 16 MiB", lambda kind: unary(kind, lz.softmax, -1), rounds))
        versions = backend_versions()
    headings = ["figure", "pages of 4 KiB", "huge pages", "ratio"]
    finish("huge_pages", "Shared memory in huge pages", versions, headings, rows, is_quick=options.quick)


if __name__ == "__main__":
    main()
