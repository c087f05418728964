"""What one client's flood costs others: their latency beside a client that keeps a thousand calls open, one that never
reads, one that asks for status without pause, and one whose calls are refused. The floor is the same flood at a broker
of its own, which takes the same cores. `python bench/fairness.py`; writes results/fairness.md."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import NamedTuple

from common import at_most, backend_versions, finish, own_broker, parser

import layerzero as lz

CALLS, ROUNDS, LIMIT = 1000, 5, 1.5
FLOODS = {
    "1,000 calls open all the time": """
import collections
open_calls = collections.deque()
while True:
    while len(open_calls) < 1000:
        open_calls.append(lz.submit("null", backend="null"))
    open_calls.popleft().result()
""",
    "calls until BUSY, answers never read": """
import time
kept = []
try:
    while True:
        kept.append(lz.submit("null", backend="null"))
except lz.Busy:
    time.sleep(3600)
""",
    "lz.status() without pause": """
while True:
    lz.status()
""",
    "calls that are all refused": """
while True:
    try: lz.null(backend="nosuch")
    except lz.LayerZeroError: pass
""",
}
READY = "print('ready', flush=True)\n"


@contextlib.contextmanager
def flood(code: str, folder: str) -> Iterator[None]:
    """Another process that does so, at the broker of this runtime folder, until the end of the block."""
    setup = "import layerzero as lz\nlz.connect()\nlz.null(backend='null')\n"
    env = {**os.environ, "LAYERZERO_RUNTIME_DIR": folder}
    command = [sys.executable, "-c", setup + READY + code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.5)
            yield
        finally:
            process.kill()


def latencies_s() -> list[float]:
    """Of calls through the broker, one after the other."""
    took = []
    for _ in range(CALLS):
        start_s = time.perf_counter()
        lz.submit("null", backend="null").result()
        took.append(time.perf_counter() - start_s)
    return sorted(took)


class Found(NamedTuple):
    """p50 and p99, in s: alone, beside the flood, and beside the same flood at another broker."""

    quiet: tuple[float, float]
    beside: tuple[float, float]
    floor: tuple[float, float]


def measure(code: str, other: str, rounds_wanted: int) -> Found:
    """Medians of rounds in turn: the machine's mood is the same for all."""

    def ends() -> tuple[float, float]:
        took = latencies_s()
        return took[CALLS // 2], took[-CALLS // 100]

    rounds = []
    for _ in range(rounds_wanted):
        quiet = ends()
        with flood(code, os.environ["LAYERZERO_RUNTIME_DIR"]):
            beside = ends()
        with flood(code, other):
            rounds.append((quiet, beside, ends()))
    columns = (zip(*of_kind, strict=True) for of_kind in zip(*rounds, strict=True))
    return Found(*((statistics.median(p50s), statistics.median(p99s)) for p50s, p99s in columns))


def row(name: str, found: Found) -> list[str]:
    us = [f"{p50 * 1e6:,.0f} / {p99 * 1e6:,.0f} us" for p50, p99 in found]
    ratio, floor = found.beside[1] / found.quiet[1], found.floor[1] / found.quiet[1]
    return [name, *us, at_most(ratio, LIMIT), f"{floor:.2f}", f"{ratio / floor:.2f}"]


HEADINGS = (
    "the other client does",
    "p50 / p99 quiet",
    "beside it",
    "the floor",
    "p99 ratio",
    "floor's",
    "of the floor",
)


def main() -> None:
    args = parser(__doc__, "two rounds").parse_args()
    rounds, rows = 2 if args.quick else ROUNDS, []
    with tempfile.TemporaryDirectory(prefix="lz-bench-") as other, own_broker():
        lz.null(backend="null")
        for name, code in FLOODS.items():
            rows.append(row(name, measure(code, other, rounds)))
            print(*rows[-1], sep=" | ", flush=True)
        versions = backend_versions()
    note = (
        "A client calls null through the broker, one call after the other, while another process floods the same "
        "worker. The floor is the same flood at a broker and a worker of its own: what the machine's cores alone make "
        "others wait. The last column is what sharing a broker adds to that. "
        f"{CALLS:,} calls a round, medians of {rounds} rounds, in turn; load average at the end "
        f"{os.getloadavg()[0]:.1f}."
    )
    finish("fairness", "Clients beside one that floods", versions, HEADINGS, rows, [note], is_quick=args.quick)


if __name__ == "__main__":
    main()
