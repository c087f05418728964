"""What one client's flood costs others: their latency beside a client that keeps a thousand calls open, one that never
reads, and one that asks for status without pause. `python bench/fairness.py`; writes results/fairness.md."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from common import backend_versions, save

import layerzero as lz

CALLS, ROUNDS, LIMIT = 1000, 5, 1.5
FLOOR = "two processes compute, and call nothing (the floor)"
FLOODS = {
    FLOOR: """
import os
if os.fork() == 0:
    parent = os.getppid()
    while os.getppid() == parent: pass
    os._exit(0)
while True: pass
""",
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
def flood(code: str) -> Iterator[None]:
    """Another process that does so until the end of the block."""
    setup = "import layerzero as lz\nlz.connect()\nlz.null(backend='null')\n"
    with subprocess.Popen([sys.executable, "-c", setup + READY + code], stdout=subprocess.PIPE, text=True) as process:
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


def measure(code: str) -> tuple[float, float, float, float]:
    """p50 and p99 without and with the flood, medians of rounds in turn: the machine's mood is the same for both."""
    found: list[tuple[float, ...]] = []
    for _ in range(ROUNDS):
        quiet = latencies_s()
        with flood(code):
            loaded = latencies_s()
        found.append((quiet[CALLS // 2], quiet[-CALLS // 100], loaded[CALLS // 2], loaded[-CALLS // 100]))
    p50, p99, loaded_p50, loaded_p99 = (statistics.median(column) for column in zip(*found, strict=True))
    return p50, p99, loaded_p50, loaded_p99


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(LAYERZERO_RUNTIME_DIR=folder, LAYERZERO_PERF_DB=str(Path(folder) / "perf.db"))
        lz.connect()
        lz.null(backend="null")
        for name, code in FLOODS.items():
            p50, p99, loaded_p50, loaded_p99 = measure(code)
            ratio = loaded_p99 / p99
            verdict = "" if name == FLOOR else f" (at most {LIMIT}: {'met' if ratio <= LIMIT else 'MISSED'})"
            rows.append(
                [
                    name,
                    f"{p50 * 1e6:,.0f} / {p99 * 1e6:,.0f} us",
                    f"{loaded_p50 * 1e6:,.0f} / {loaded_p99 * 1e6:,.0f} us",
                    f"{ratio:.2f}{verdict}",
                ]
            )
            print(*rows[-1], sep=" | ", flush=True)
        versions = backend_versions()
        lz.disconnect()
    notes = [
        "A client calls null through the broker, one call after the other, while another process floods the same "
        "worker. The floor is what the scheduler alone does to a caller when that many cores are busy: a flood keeps "
        "its own process, the broker and the worker at work. "
        f"{CALLS:,} calls a round, medians of {ROUNDS} rounds, quiet and loaded in turn; load average at the "
        f"end {os.getloadavg()[0]:.1f}.",
    ]
    save(
        "fairness",
        "Clients beside one that floods",
        versions,
        "python bench/fairness.py",
        ["the other client does", "p50 / p99 quiet", "p50 / p99 beside it", "p99 ratio"],
        rows,
        notes,
    )


if __name__ == "__main__":
    main()
