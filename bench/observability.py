"""What being seen costs: counting calls that pass the broker by, traces, and scrapes. Writes results/observability.md.

    python bench/observability.py [--quick]

Counting: the same compiled call on an express lane, counted and not, in short rounds in turn at one broker; the ratio
is the median of the rounds' ratios. Traces: likewise, with one on and none; and what is done for the recording alone,
around a call that does nothing; likewise spans of OpenTelemetry. History: the mean of such calls in blocks of 2 s, in
turn with the recorder and with it stopped. A record of the core: brokers with it and without, in turn.
Capsules (crashes.py): calls with capsules of whole arguments and without any, in turn; how much later an answer comes
for a capsule of 64 MiB; and the crash made again in every environment by one command.
Scrapes: a broker with 200 backends, and clients whose pages of counters
make 10,000 series of it; how long a scrape takes over a unix socket, and what a scrape each second does to another
client's calls, through the broker and on a lane, in blocks in turn with blocks without.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import tempfile
import threading
import time
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import crashes
import numpy as np
from common import at_most, backend_versions, finish, own_broker, p50_us, parser, verdict

import layerzero as lz
from layerzero.client.connection import observing
from layerzero.client.connection.call import Request
from layerzero.client.connection.link import Link
from layerzero.client.facade.default_session import session
from layerzero.client.session import repeats
from layerzero.client.traces.recorder import recorder
from layerzero.ipc.shm.counter_words import Label
from layerzero.ipc.transport.endpoints import Endpoints
from layerzero.ipc.version import __version__

BACKENDS, SERIES, SCRAPES = 200, 10_000, 50
OPS = ("silu", "gelu")
EVERY_S = 1.0  # a scrape; Prometheus' default is 60 s, and 15 s is usual


def null() -> None:
    lz.null(backend="null")


def settle() -> None:
    while True:
        null()
        report = lz.last_report()
        if report is not None and report.path == "express":
            return


# --- counting


def counting(rounds: int, calls: int) -> Iterator[tuple[str, str, str, str]]:
    counters = session().link.counters
    row_of = counters.row

    def timed(is_counted: bool) -> float:
        counters.row = row_of if is_counted else lambda *_: 0  # type: ignore[method-assign]
        session().repeats.forget()
        settle()
        settle()
        return p50_us(null, calls)

    settle()
    on, off = [], []
    for n in range(rounds):
        for is_counted in (n % 2 == 0, n % 2 == 1):
            (on if is_counted else off).append(timed(is_counted))
    counters.row = row_of  # type: ignore[method-assign]
    ratio = statistics.median(a / b for a, b in zip(on, off, strict=True))
    yield (
        "null call on an express lane, compiled: counted",
        f"{min(on):.2f} us, middle {statistics.median(on):.2f}",
        f"not: {min(off):.2f} us, middle {statistics.median(off):.2f}",
        at_most(ratio, 1.01),
    )
    row = row_of("null", "null.null", "express")
    assert repeats.library is not None
    assert row, counters.why_not
    count = repeats.library.count
    counted = min(p50_us(lambda: count(row, 5000, 0, 1), 2000, 50) for _ in range(5))
    not_counted = min(p50_us(lambda: count(0, 5000, 0, 1), 2000, 50) for _ in range(5))
    least = counted - not_counted
    what = "the counting itself, in C, beside a call of the same function that counts nothing"
    yield what, f"{1e3 * least:.1f} ns", "aim: 100 ns", verdict(least <= 0.1)


# --- traces


class NoCall:
    """A session whose call has ended: what is left is what the recorder does."""

    def __init__(self, result: Any) -> None:
        own = session()
        self.last, self.repeats, self.gpus, self._result = own.last, own.repeats, own.gpus, result

    def run(self, request: Request, *, is_recorded: bool = False) -> Any:
        return self._result


def recording_us(op: str, args: tuple[Any, ...]) -> float:
    stand_in, request = NoCall(args[0] if args else None), Request(op, args, {}, lambda *_: None)  # type: ignore[arg-type, return-value]
    with_it = min(p50_us(lambda: recorder.run(stand_in, request), 50, 200) for _ in range(10))
    return with_it - min(p50_us(lambda: stand_in.run(request, is_recorded=True), 50, 200) for _ in range(10))


def tracing(rounds: int, calls: int) -> Iterator[tuple[str, str, str, str]]:
    settle()
    on, off = [], []
    for n in range(rounds):
        for is_on in (n % 2 == 0, n % 2 == 1):
            if is_on:
                with lz.trace():
                    on.append(p50_us(null, calls))
            else:
                off.append(p50_us(null, calls))
    more = statistics.median(a - b for a, b in zip(on, off, strict=True))
    yield (
        "null call on an express lane, compiled: with a trace on",
        f"{min(on):.2f} us, middle {statistics.median(on):.2f}",
        f"none: {min(off):.2f} us, middle {statistics.median(off):.2f}",
        f"the fastest {min(on) - min(off):+.2f} us, the middle {more:+.2f} (aim 1: {verdict(more <= 1)})",
    )
    x = np.zeros((8, 8), np.float32)
    lz.silu(x)
    for op, args in (("null", ()), ("silu", (x,)), ("attention", (x, x, x))):
        with lz.trace():
            us = recording_us(op, args)
        arrays = f"{len(args)} array{'' if len(args) == 1 else 's'}"
        yield f"the recording itself, of a call of {arrays} of NumPy", f"{us:.2f} us", "aim: 1 us", verdict(us <= 1)
    look = min(timeit.repeat("seen.recorder is not None", globals={"seen": observing}, number=100_000, repeat=20))
    nothing = min(timeit.repeat("None is not None", number=100_000, repeat=20))
    ns = 1e4 * (look - nothing)
    yield "what a call pays while no trace is on: one look", f"{ns:.0f} ns", "", ""


def spanning() -> Iterator[tuple[str, str, str, str]]:
    """What is done in the caller's thread; spans are made by another."""
    from opentelemetry.sdk.trace import TracerProvider

    from layerzero import otel

    x = np.zeros((8, 8), np.float32)
    tracer = TracerProvider().get_tracer("bench")
    with lz.trace():
        traced = recording_us("silu", (x,))
    with otel.start(tracer):
        unsampled = recording_us("silu", (x,))
        with tracer.start_as_current_span("request"):
            sampled = recording_us("silu", (x,))
    for what, us in (("not sampled", unsampled), ("sampled", sampled)):
        yield f"spans of OpenTelemetry on, a call that is {what}", f"{us:.2f} us", f"a trace: {traced:.2f} us", ""


def sampling(rounds: int, calls: int) -> Iterator[tuple[str, str, str, str]]:
    """Whole calls, in short rounds in turn with spans of one in a hundred and with none."""
    from opentelemetry.sdk.trace import TracerProvider

    from layerzero import otel

    tracer = TracerProvider().get_tracer("bench")
    settle()
    on, off = [], []
    for n in range(rounds):
        for is_on in (n % 2 == 0, n % 2 == 1):
            if is_on:
                with otel.start(tracer, share=0.01):
                    on.append(p50_us(null, calls))
            else:
                off.append(p50_us(null, calls))
    more = statistics.median(a - b for a, b in zip(on, off, strict=True))
    yield (
        "null call on an express lane, compiled: spans of 1 in 100",
        f"{min(on):.2f} us, middle {statistics.median(on):.2f}",
        f"none: {min(off):.2f} us, middle {statistics.median(off):.2f}",
        f"the middle {more:+.2f} us",
    )


# --- history


def recording(folder: Path, *, is_quick: bool) -> Iterator[tuple[str, str, str, str]]:
    """The same lane, in blocks in turn: the recorder goes on, or is stopped."""
    records = [json.loads(line) for line in Endpoints(folder).log.read_text().splitlines() if line.startswith("{")]
    [pid] = [one["pid"] for one in records if one["event"] == "history.started"]
    settle()
    on, off = [], []
    try:
        for n in range(2 * (3 if is_quick else 20)):
            os.kill(pid, signal.SIGSTOP if n % 2 else signal.SIGCONT)
            (off if n % 2 else on).append(mean_us(null, 2.0))
    finally:
        os.kill(pid, signal.SIGCONT)
    ratio = statistics.median(a / b for a, b in zip(on, off, strict=True))
    yield (
        "mean of null calls on a lane for 2 s: history on",
        f"{statistics.median(on):.2f} us, at least {min(on):.2f}",
        f"stopped: {statistics.median(off):.2f} us, at least {min(off):.2f}",
        at_most(ratio, 1.01),
    )
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    cpu_s = (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")
    up_s = session().ask("metrics")["up_s"]
    yield "the recorder's own time, its start included", f"{cpu_s:.1f} s", f"of {up_s:.0f} s", ""


def mean_us(call: Callable[[], Any], seconds: float) -> float:
    count, start = 0, time.perf_counter()
    while (took := time.perf_counter() - start) < seconds:
        call()
        count += 1
    return 1e6 * took / count


# --- a record of the core


def core_recorded(*, is_quick: bool) -> Iterator[tuple[str, str, str, str]]:
    """Calls that all go by the broker, whose core is recorded or not: brokers in turn."""
    with_it, without, seen = [], [], (0, 0)
    with tempfile.TemporaryDirectory(prefix="lz-bench-") as made:
        path = Path(made) / "record.jsonl"
        for n in range(2 * (2 if is_quick else 8)):
            settings = {"LAYERZERO_RECORD": str(path)} if n % 2 else {}
            with own_broker(LAYERZERO_EXPRESS="0", **settings):
                mean_us(null, 0.5)
                (with_it if n % 2 else without).append(mean_us(null, 1.5))
                if settings:
                    lines = path.read_bytes().partition(b"\n")[2]  # behind the start, half a megabyte
                    seen = len(lines), lines.count(b'"event":"CallRan"')
    yield (
        "mean of null calls through the broker, for 1.5 s: its core is recorded",
        f"{statistics.median(with_it):.0f} us, at least {min(with_it):.0f}",
        f"not: {statistics.median(without):.0f} us, at least {min(without):.0f}",
        f"+{statistics.median(with_it) - statistics.median(without):.0f} us",
    )
    yield "of the record, for each such call", f"{seen[0] / max(seen[1], 1):,.0f} bytes", "", ""


# --- scrapes


def add_backends(folder: Path) -> None:
    """None of them is ever started."""
    for n in range(BACKENDS):
        name = f"made{n:03}"
        claims = {"dtypes": ["float32"], "priority": 1, "source": "bench", "deterministic": True}
        kernels = {op: [{**claims, "kernel_id": f"{name}.{op}"}] for op in OPS}
        descriptor = {
            "schema_version": "1.0",
            "backend": name,
            "backend_version": "1",
            "platform": "cpu",
            "ops": kernels,
        }
        (folder / f"{name}.json").write_text(json.dumps(descriptor))
        (folder / f"{name}.py").write_text("def load():\n    raise RuntimeError('it is never loaded')\n")
        manifest = f'summary = "bench"\nprovider = "{name}.py"\ndescriptor = "{name}.json"\ninterpreter = "host"\n'
        (folder / f"{name}.toml").write_text(manifest)


def fill_pages(control: Path) -> list[Link]:
    """Clients that have counted calls of as many kernels as make 10,000 series, with those of the backends' states."""
    left = (SERIES - BACKENDS * 9) // 28
    labels = [Label(op, f"made{n:03}.{op}", "express") for op in OPS for n in range(BACKENDS)][:left]
    links = []
    for at in range(0, len(labels), 100):
        link = Link(control, __version__, lambda *_: None, lambda *_: None)
        for n, label in enumerate(labels[at : at + 100]):
            link.counters.count(link.counters.row(*label), 1000 << n % 20)
        links.append(link)
    return links


def scrape(where: Path) -> bytes:
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.sock.connect(str(where))
    connection.request("GET", "/metrics")
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    assert answer.status == 200, body
    return body


def p99_us(call: Callable[[], Any], seconds: float) -> float:
    took, end = [], time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        call()
        took.append(time.perf_counter() - start)
    return 1e6 * statistics.quantiles(took, n=100)[-1]


def beside(where: Path, call: Callable[[], Any], blocks: int, seconds: float) -> tuple[float, float, float]:
    """p99 of calls with scrapes and without, and the median of the blocks' ratios."""
    over, pauses = threading.Event(), threading.Event()
    command = ["curl", "-sf", "--unix-socket", str(where), "http://localhost/metrics"]  # not this process's interpreter

    def scraper() -> None:
        while not over.wait(EVERY_S):
            if not pauses.is_set():
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    thread = threading.Thread(target=scraper)
    thread.start()
    with_scrapes, without = [], []
    try:
        for n in range(2 * blocks):
            if n % 2:
                pauses.clear()
                with_scrapes.append(p99_us(call, seconds))
            else:
                pauses.set()
                without.append(p99_us(call, seconds))
    finally:
        over.set()
        thread.join()
    ratio = statistics.median(a / b for a, b in zip(with_scrapes, without, strict=True))
    return statistics.median(with_scrapes), statistics.median(without), ratio


def scraping(folder: Path, where: Path, *, is_quick: bool) -> Iterator[tuple[str, str, str, str]]:
    links = fill_pages(Endpoints(folder).control)
    text = scrape(where)
    series = sum(not line.startswith(b"#") for line in text.splitlines())
    times = []
    for _ in range(10 if is_quick else SCRAPES):
        start = time.perf_counter()
        scrape(where)
        times.append(1e3 * (time.perf_counter() - start))
    middle = statistics.median(times)
    yield (
        f"a scrape of {series:,} series, {BACKENDS} backends, {len(text) / 1e6:.1f} MB",
        f"{middle:.0f} ms, at least {min(times):.0f}, at most {max(times):.0f}",
        "aim: 50 ms",
        verdict(middle <= 50),
    )
    asked = []
    for _ in range(10 if is_quick else SCRAPES):
        start = time.perf_counter()
        session().ask("metrics")
        asked.append(1e3 * (time.perf_counter() - start))
    yield "of it the broker's answer, as a client sees it", f"{statistics.median(asked):.1f} ms", "", ""
    settle()
    yield calls_beside(where, "on a lane", is_quick=is_quick)
    for link in links:
        link.close()


def scraping_by_broker(folder: Path, where: Path, *, is_quick: bool) -> Iterator[tuple[str, str, str, str]]:
    """Where no calls have lanes."""
    links = fill_pages(Endpoints(folder).control)
    null()
    yield calls_beside(where, "through the broker", is_quick=is_quick)
    for link in links:
        link.close()


def calls_beside(where: Path, what: str, *, is_quick: bool) -> tuple[str, str, str, str]:
    on, off, ratio = beside(where, null, *((2, 2.0) if is_quick else (5, 4.0)))
    return (
        f"p99 of another client's null calls {what}, beside a scrape each second",
        f"{on:.0f} us",
        f"without: {off:.0f} us",
        at_most(ratio, 1.05),
    )


def main() -> None:
    args = parser(__doc__, "few rounds").parse_args()
    rows: list[tuple[str, str, str, str]] = []
    load_before = os.getloadavg()[0]
    with own_broker():
        rows += counting(*((6, 500) if args.quick else (200, 1000)))
        rows += tracing(*((6, 500) if args.quick else (200, 1000)))
        versions = backend_versions()
        rows += spanning()
        rows += sampling(*((6, 500) if args.quick else (100, 1000)))
        rows += crashes.before_a_crash(null, settle, *((6, 200) if args.quick else (100, 500)))
    with own_broker(LAYERZERO_HISTORY="1") as folder:
        rows += recording(folder, is_quick=args.quick)
    rows += core_recorded(is_quick=args.quick)
    with tempfile.TemporaryDirectory(prefix="lz-bench-") as made:
        crashes.add_crasher(Path(made))
        with own_broker(**crashes.environment(Path(made))):
            rows += crashes.delays(is_quick=args.quick)
            rows += crashes.again(Path(made), is_quick=args.quick)
    with tempfile.TemporaryDirectory(prefix="lz-bench-") as made:
        add_backends(Path(made))
        where = Path(made) / "metrics.sock"
        with own_broker(LAYERZERO_MANIFEST_DIRS=made, LAYERZERO_METRICS=f"unix:{where}") as folder:
            rows += scraping(folder, where, is_quick=args.quick)
        with own_broker(
            LAYERZERO_MANIFEST_DIRS=made, LAYERZERO_METRICS=f"unix:{where}", LAYERZERO_EXPRESS="0"
        ) as folder:
            rows += scraping_by_broker(folder, where, is_quick=args.quick)
    notes = [
        "A trace that is on holds its newest 100,000 calls; one with tensors copies and hashes them, which is not in "
        "these figures, nor are two CUDA events a call on a GPU. Arrays of other libraries than NumPy and torch are "
        "looked at in Python: some microseconds each.",
        "Predicted: counting under 1 % of a compiled call, since it is three additions to words and no call of a clock "
        "that was not made before; a scrape of 10,000 series 40 to 60 ms, nearly all of it rendering "
        f"in the exporter's process. Load average {load_before:.1f} before, {os.getloadavg()[0]:.1f} at the "
        "end: where that is more than the bench's own, ratios count, not times. A page of counters is 128 KiB "
        "of a client's.",
        "History: predicted 0.5 to 1 %. A sample costs the recorder and the broker 0.9 ms together for the question, "
        "by a connection that stays (2.3 ms by a new one each second), and the recorder 0.7 ms to keep it. What is "
        "more is the lane's: an end that finds no free core at that moment does not watch for the other one for 10 ms "
        "(docs/dispatch.md).",
        "Capsules: predicted 25 to 40 ms for 64 MiB, nearly all of it the copy into the page cache; SHA-256 comes "
        "after the answer. Before a crash nothing of them is done on the CPU. Memory that a virtual machine has not "
        "touched before costs the page cache 60 ms more for 64 MiB here, since its host has to find it: the first ones "
        "after a start, which are among the greatest.",
        "A scrape each second is fifteen times what is usual, and four processes (caller, worker or broker, exporter, "
        "who scrapes) share the cores; the exporter runs at niceness 10.",
    ]
    finish(
        "observability",
        "What being seen costs",
        versions,
        ("what", "with it", "beside", "verdict"),
        rows,
        notes,
        is_quick=args.quick,
    )


if __name__ == "__main__":
    main()
