"""What a dispatch costs, beside its floor and a peer measured in the same run. Writes results/dispatch.md.

    python bench/dispatch.py [--quick] [--repeats] [--many]

With `--repeats` the rows of repeated small calls alone, nothing saved: a median of each of many short rounds, in turns
with two processes of Python that ring each other by eventfds; the least of these medians and the middle one, since
other processes make rounds longer, never shorter.

With `--many` the rows of many calls at once alone, nothing saved.

Floors: three Python processes that echo over pyzmq and do nothing else; the same op in process, in the backend's own
environment, on as many threads. Peer: multiprocessing.Pipe, which copies. Rounds alternate between ours and the floor;
a figure is the median over rounds, a ratio the median of the rounds' ratios.

The large ops run on one thread and on all: waking a kernel's second thread takes up to as long as the kernel itself on
some machines, in process too, which hides what a dispatch costs.
"""

from __future__ import annotations

import functools
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import at_most, backend_versions, finish, own_broker, p50_us, parser, verdict
from dispatch_floors import (
    ARRAY_SHAPE,
    IN_FLIGHT,
    NULL_BYTES,
    behind_pyzmq,
    echo_once,
    echo_rate,
    echo_stack,
    eventfd_stack,
    in_process,
    pipe_stack,
)

import layerzero as lz
from layerzero.client.facade.default_session import session

HERE = Path(__file__).parent


class Row(NamedTuple):
    what: str
    ours: str
    floor: str
    peer: str
    ratio: str


# --- null calls


def null_rate(count: int) -> float:
    return submit_rate(count, lz.null)


def submit_rate(count: int, op: str | Callable[..., Any], *args: Any) -> float:
    futures: deque[Any] = deque()
    start = time.perf_counter()
    for _ in range(count):
        futures.append(lz.submit(op, *args))
        if len(futures) >= IN_FLIGHT:
            futures.popleft().result()
    while futures:
        futures.popleft().result()
    return count / (time.perf_counter() - start)


def wait_quiet() -> None:
    """Until no worker is starting."""
    waiter = threading.Event()
    while any(b["state"] in ("starting", "probing", "backoff") for b in lz.status()["backends"]):
        waiter.wait(0.1)


# --- an op on 16 MiB


def torch_python() -> str:
    store = lz.status()["broker"]["store"]
    python = next((str(p) for p in Path(store, "envs").glob("torch-*/bin/python")), None)
    if python is None:
        sys.exit("the torch environment is not built; run: lz env build")
    return python


def large_rows(rounds: int, threads: str) -> Iterator[Row]:
    """What the op adds to a null call, over the op in process on as many threads; the same of the bare stack."""
    x = lz.share(np.random.default_rng(0).standard_normal(ARRAY_SHAPE, dtype=np.float32))
    out = lz.empty(x.shape)
    python = torch_python()
    with pipe_stack() as pipe:
        data = x.tobytes()
        pipe_us = p50_us(lambda: (pipe.send_bytes(data), pipe.recv_bytes()), 5)
    with in_process(python) as local, behind_pyzmq(python) as bare:
        ours: dict[str, Callable[[], Any]] = {
            "silu": functools.partial(lz.silu, x, out=out, backend="torch"),
            "softmax": functools.partial(lz.softmax, x, -1, out=out, backend="torch"),
        }
        for call in (*ours.values(), lz.null):
            p50_us(call, 30)
            report = lz.last_report()
            assert (report.copied_bytes, report.path) == (0, "express")
        wait_quiet()
        for op, call in ours.items():
            figures = [
                (p50_us(call, 30), p50_us(lz.null, 100), bare(op, 30), bare("", 100), local(op, 30))
                for _ in range(rounds)
            ]
            ours_us, null_us, bare_us, _, local_us = (
                statistics.median(column) for column in zip(*figures, strict=True)
            )
            ratio = statistics.median((o - n) / f for o, n, _, _, f in figures)
            bare_ratio = statistics.median((b - e) / f for _, _, b, e, f in figures)
            yield Row(
                f"{op} on 16 MiB, {threads}, express lane, 0 bytes copied; a null call takes {null_us:,.0f} us",
                f"{ours_us:,.0f} us",
                f"{local_us:,.0f} us in process; {bare_us:,.0f} us behind bare pyzmq",
                f"{pipe_us:,.0f} us (echo alone)",
                f"(ours - null) / in process = {at_most(ratio, 1.15)}; bare pyzmq: {bare_ratio:.2f}",
            )


# --- a worker's death


def deaths_ms(count: int) -> list[float]:
    """Time from SIGKILL of the busy worker to the fallback's answer, less the fallback kernel's own time."""
    x = lz.share(np.random.default_rng(0).standard_normal((8192, 2048), dtype=np.float32))
    out = lz.empty(x.shape)
    expected = lz.softmax(x, -1).copy()
    found: list[float] = []
    while len(found) < count:
        session().ask("reset")  # else its breaker opens, and calls go elsewhere
        wait_quiet()
        lz.softmax(x, -1, out=out)
        pid = lz.last_report().worker_pid  # of the one that will serve the next call as well
        future = lz.submit(lz.softmax, x, -1, out=out)
        threading.Event().wait(0.003)
        assert pid is not None
        killed_s = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        future.result()
        took_s = time.perf_counter() - killed_s
        report = lz.last_report()
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-7)
        assert report.kernel_us is not None
        if len(report.attempts) == 2:  # else the kill came after the answer
            found.append(took_s * 1e3 - report.kernel_us / 1e3)
    return found


# --- repeated small calls, beside a round trip of Python over two eventfds

ROUND = 40  # calls


def repeated_rows(rounds: int, how: str, limits: tuple[float, float, float]) -> Iterator[Row]:
    """`limits`: of the null call against the floor and in us, and in us of silu less its kernel."""
    x = np.linspace(-3, 3, 4, dtype=np.float32)
    with eventfd_stack() as floor:  # before there are threads

        def silu() -> None:
            lz.silu(x, backend="torch")

        for call in (lz.null, silu):
            p50_us(call, 60)
            while lz.last_report().path != "express":
                call()
        wait_quiet()
        figures: list[tuple[float, ...]] = []
        for _ in range(rounds):
            figures.append((p50_us(floor, ROUND), p50_us(lz.null, ROUND), p50_us(silu, ROUND), kernel_us(silu)))
    floors, nulls, silus, kernels = zip(*figures, strict=True)
    beside = [one - kernel for one, kernel in zip(silus, kernels, strict=True)]
    best, middle, floor_us = min(nulls), statistics.median(nulls), min(floors)
    ratio, most_us, most_beside_us = limits
    yield Row(
        f"null op that repeats, {how}: least and middle of {rounds} rounds",
        f"{best:.1f}, {middle:.1f} us",
        f"{floor_us:.1f}, {statistics.median(floors):.1f} us (eventfds)",
        "",
        at_most(best / floor_us, ratio)
        if ratio
        else f"{best:.1f} us (at most {most_us:g}: {verdict(best <= most_us)})",
    )
    least = min(beside)
    yield Row(
        f"silu of 4 floats that repeats, {how}, less its kernel",
        f"{least:.1f}, {statistics.median(beside):.1f} us",
        "",
        "",
        in_time(least, most_beside_us),
    )


def in_time(found_us: float, limit_us: float) -> str:
    return f"{found_us:.1f} us (at most {limit_us:g}: {verdict(found_us <= limit_us)})"


def kernel_us(call: Callable[[], Any]) -> float:
    found = []
    for _ in range(ROUND // 4):
        call()
        took_us = lz.last_report().kernel_us
        assert took_us is not None
        found.append(took_us)
    return statistics.median(found)


def all_repeated_rows(quick: bool) -> Iterator[Row]:
    rounds = 50 if quick else 300
    with own_broker(LAYERZERO_SPIN_US="0"):
        yield from repeated_rows(rounds, "both sides sleep", (2.2, 0, 25))
    with own_broker():
        yield from repeated_rows(rounds, "both may look before they sleep", (0, 4, 25))


# --- many calls at once, beside a bare stack with as many in flight

THREADS = 8


def thread_rate(count: int, threads: int, call: Callable[[], Any]) -> float:
    """Calls a second of so many threads together, each of which waits for its own."""
    ready = threading.Barrier(threads + 1)

    def work() -> None:
        call()
        ready.wait()
        for _ in range(count // threads):
            call()

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for one in workers:
        one.start()
    ready.wait()
    start = time.perf_counter()
    for one in workers:
        one.join()
    return count / (time.perf_counter() - start)


def many_rows(quick: bool, how: str) -> Iterator[Row]:
    """Rounds in turns; a ratio is the middle one of the rounds' ratios."""
    rounds, count = (5, 4000) if quick else (15, 12_000)
    x = np.linspace(-3, 3, 4, dtype=np.float32)

    def silu() -> None:
        lz.silu(x, backend="torch")

    with tempfile.TemporaryDirectory(prefix="lz-bench-") as folder, echo_stack(Path(folder)) as sock:
        for call in (lz.null, silu):
            p50_us(call, 200)
        wait_quiet()
        for call in (lz.null, silu):
            p50_us(call, 200)
        assert lz.last_report().path == "express"
        rows = [
            (
                echo_rate(sock, count),
                submit_rate(count, lz.null),
                submit_rate(count, "silu", x),
                *(thread_rate(count, threads, call) for call in (lz.null, silu) for threads in (1, THREADS)),
            )
            for _ in range(rounds)
        ]
    middle = [statistics.median(column) for column in zip(*rows, strict=True)]
    for name, at, limit in (("null op", 1, 4), ("silu of 4 floats", 2, 0)):
        ratio = statistics.median(row[at] / row[0] for row in rows)
        yield Row(
            f"{name}, {IN_FLIGHT} in flight by lz.submit, {how}, rate",
            f"{middle[at]:,.0f} /s",
            f"{middle[0]:,.0f} /s",
            "",
            f"{ratio:.2f} (at least {limit}: {verdict(ratio >= limit)})" if limit else f"{ratio:.2f}",
        )
    for name, at in (("null op", 3), ("silu of 4 floats", 5)):
        ratio = statistics.median(row[at + 1] / row[at] for row in rows)
        yield Row(
            f"{name}, {THREADS} threads; one has {middle[at]:,.0f} /s; {how}, rate",
            f"{middle[at + 1]:,.0f} /s",
            f"{middle[0]:,.0f} /s",
            "",
            f"{ratio:.2f} of one thread (at least 1.5: {verdict(ratio >= 1.5)})",
        )


def all_many_rows(quick: bool) -> Iterator[Row]:
    with own_broker():
        yield from many_rows(quick, "both may look")
    with own_broker(LAYERZERO_SPIN_US="0"):
        yield from many_rows(quick, "both sides sleep")


# --- the run


def express_row(quick: bool) -> Row:
    rounds, calls = (3, 300) if quick else (9, 1500)
    with tempfile.TemporaryDirectory(prefix="lz-bench-") as folder, echo_stack(Path(folder)) as sock:
        echo = echo_once(sock)
        for call in (echo, lz.null):
            p50_us(call, 200)
        assert lz.last_report().path == "express"
        figures = [(p50_us(lz.null, calls), p50_us(echo, calls)) for _ in range(rounds)]
    ours, floor = (statistics.median(column) for column in zip(*figures, strict=True))
    ratio = statistics.median(a / b for a, b in figures)
    return Row(
        "null op on the express lane, synchronous, p50", f"{ours:,.0f} us", f"{floor:,.0f} us", "", f"{ratio:.2f}"
    )


def small_rows(quick: bool) -> Iterator[Row]:
    """Through the broker."""
    rounds, calls, piped = (3, 300, 3000) if quick else (9, 1500, 15000)
    with (
        tempfile.TemporaryDirectory(prefix="lz-bench-") as folder,
        echo_stack(Path(folder)) as sock,
        pipe_stack() as pipe,
    ):
        echo = echo_once(sock)
        for call in (echo, lz.null):
            p50_us(call, 200)
        sync = [(p50_us(lz.null, calls), p50_us(echo, calls)) for _ in range(rounds)]
        small = bytes(NULL_BYTES)
        pipe_us = p50_us(lambda: (pipe.send_bytes(small), pipe.recv_bytes()), calls)
        ours, floor = (statistics.median(column) for column in zip(*sync, strict=True))
        ratio = statistics.median(a / b for a, b in sync)
        yield Row(
            "null op through the broker, synchronous, p50",
            f"{ours:,.0f} us",
            f"{floor:,.0f} us",
            f"{pipe_us:,.0f} us",
            at_most(ratio, 1.5),
        )
        rates = [(null_rate(piped), echo_rate(sock, piped)) for _ in range(rounds)]
        ours, floor = (statistics.median(column) for column in zip(*rates, strict=True))
        ratio = statistics.median(a / b for a, b in rates)
        yield Row(
            f"null op through the broker, {IN_FLIGHT} in flight, rate",
            f"{ours:,.0f} /s",
            f"{floor:,.0f} /s",
            "",
            f"{ratio:.2f} (at least 0.6: {verdict(ratio >= 0.6)})",
        )


def death_row(quick: bool) -> Row:
    deaths = deaths_ms(5 if quick else 40)
    p50 = statistics.median(deaths)
    return Row(
        "SIGKILL of a busy worker to the fallback's answer, less its kernel, p50",
        f"{p50:.1f} ms",
        "",
        "",
        f"max {max(deaths):.1f} ms of {len(deaths)} (p50 under 30 ms: {verdict(p50 < 30)})",
    )


def measure(quick: bool) -> tuple[list[Row], dict[str, Any]]:
    rows: list[Row] = []
    with own_broker(LAYERZERO_EXPRESS="false"):
        rows.extend(small_rows(quick))
    with own_broker():
        rows.append(express_row(quick))
    rows.extend(all_repeated_rows(quick))
    rows.extend(all_many_rows(quick))
    rounds = 3 if quick else 15
    with own_broker(OMP_NUM_THREADS="1"):
        rows.extend(large_rows(rounds, "1 thread"))
    with own_broker():
        rows.extend(large_rows(rounds, f"{os.cpu_count()} threads"))
    # Every death here is our own doing: no restart budget, quick restarts.
    quick_restarts = {"LAYERZERO_BACKOFF_S": "0.02", "LAYERZERO_BACKOFF_MAX_S": "0.1"}
    with own_broker(LAYERZERO_RESTART_BUDGET="1000000", **quick_restarts):
        rows.append(death_row(quick))
        versions = backend_versions()
    return rows, versions


HEADINGS = ("figure", "LayerZero", "floor", "multiprocessing.Pipe", "ratio to floor")


def main() -> None:
    made = parser(__doc__, "a tenth of the calls")
    made.add_argument("--repeats", action="store_true", help="repeated small calls alone, nothing saved")
    made.add_argument("--many", action="store_true", help="many calls at once alone, nothing saved")
    args = made.parse_args()
    if args.repeats:
        finish("dispatch", "Repeated small calls", {}, HEADINGS, list(all_repeated_rows(args.quick)), is_quick=True)
        return
    if args.many:
        finish("dispatch", "Many calls at once", {}, HEADINGS, list(all_many_rows(args.quick)), is_quick=True)
        return
    rows, versions = measure(args.quick)
    finish("dispatch", "Cost of a dispatch", versions, HEADINGS, rows, is_quick=args.quick)


if __name__ == "__main__":
    main()
