"""What a dispatch costs, beside its floor and a peer measured in the same run. Writes results/dispatch.md.

    python bench/dispatch.py [--quick]

Floors: three Python processes that echo over pyzmq and do nothing else; the same op in process, in the backend's own
environment. Peer: multiprocessing.Pipe, which copies. Rounds alternate between ours and the floor; a figure is the
median over rounds, a ratio the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import multiprocessing
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import zmq
from rich.console import Console
from rich.table import Table

import layerzero as lz

HERE = Path(__file__).parent
NULL_BYTES = 64  # of an echoed message: our own null call has 32
ARRAY_SHAPE = (4096, 1024)  # float32: 16 MiB
IN_FLIGHT = 64


def p50_us(call: Callable[[], Any], count: int) -> float:
    times = []
    for _ in range(count):
        start = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1e3


def alternating_us(one: Callable[[], Any], other: Callable[[], Any], count: int) -> tuple[float, float]:
    """p50 of each of two calls made in turn: what the one costs on a machine that the other has just left."""
    ones, others = [], []
    for _ in range(count):
        start = time.perf_counter_ns()
        one()
        middle = time.perf_counter_ns()
        other()
        ones.append(middle - start)
        others.append(time.perf_counter_ns() - middle)
    return statistics.median(ones) / 1e3, statistics.median(others) / 1e3


# --- floor: echo over pyzmq through three processes


def echo_broker(front: str, back: str) -> None:
    context = zmq.Context()
    clients, workers = context.socket(zmq.ROUTER), context.socket(zmq.ROUTER)
    clients.bind(front)
    workers.bind(back)
    worker, _ = workers.recv_multipart()
    poller = zmq.Poller()
    poller.register(clients, zmq.POLLIN)
    poller.register(workers, zmq.POLLIN)
    while True:
        for sock, _ in poller.poll():
            if sock is clients:
                message = clients.recv_multipart()
                workers.send_multipart([worker, *message])
            else:
                clients.send_multipart(workers.recv_multipart()[1:])


def echo_worker(back: str) -> None:
    sock = zmq.Context().socket(zmq.DEALER)
    sock.connect(back)
    sock.send(b"ready")
    while True:
        sock.send_multipart(sock.recv_multipart())


@contextlib.contextmanager
def echo_stack(folder: Path) -> Iterator[zmq.Socket[bytes]]:
    front, back = f"ipc://{folder}/f", f"ipc://{folder}/b"
    children = [
        multiprocessing.Process(target=echo_broker, args=(front, back), daemon=True),
        multiprocessing.Process(target=echo_worker, args=(back,), daemon=True),
    ]
    for child in children:
        child.start()
    sock = zmq.Context.instance().socket(zmq.DEALER)
    sock.connect(front)
    try:
        yield sock
    finally:
        sock.close(0)
        for child in children:
            child.kill()
            child.join()


def echo_once(sock: zmq.Socket[bytes]) -> Callable[[], None]:
    message = bytes(NULL_BYTES)

    def call() -> None:
        sock.send(message)
        sock.recv()

    return call


def echo_rate(sock: zmq.Socket[bytes], count: int) -> float:
    message, open_calls = bytes(NULL_BYTES), 0
    start = time.perf_counter()
    for _ in range(count):
        sock.send(message)
        open_calls += 1
        if open_calls >= IN_FLIGHT:
            sock.recv()
            open_calls -= 1
    for _ in range(open_calls):
        sock.recv()
    return count / (time.perf_counter() - start)


def null_rate(count: int) -> float:
    futures: deque[Any] = deque()
    start = time.perf_counter()
    for _ in range(count):
        futures.append(lz.submit(lz.null))
        if len(futures) >= IN_FLIGHT:
            futures.popleft().result()
    while futures:
        futures.popleft().result()
    return count / (time.perf_counter() - start)


# --- peer: multiprocessing.Pipe


def pipe_echo(end: Connection) -> None:
    while True:
        end.send_bytes(end.recv_bytes())


@contextlib.contextmanager
def pipe_stack() -> Iterator[Connection]:
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.Process(target=pipe_echo, args=(theirs,), daemon=True)
    child.start()
    try:
        yield ours
    finally:
        child.kill()
        child.join()


# --- floor: the op in process, in torch's own environment

IN_PROCESS = """
import statistics, sys, time, torch
torch.set_grad_enabled(False)
x = torch.randn(%d, %d); out = torch.empty_like(x)
for line in sys.stdin:
    count, pause_us = line.split()
    times = []
    for _ in range(int(count)):
        time.sleep(float(pause_us) / 1e6)
        start = time.perf_counter_ns()
        torch.ops.aten.silu.out(x, out=out)
        times.append(time.perf_counter_ns() - start)
    print(statistics.median(times) / 1e3, flush=True)
"""


@contextlib.contextmanager
def in_process(python: str) -> Iterator[Callable[[int, float], float]]:
    child = subprocess.Popen(
        [python, "-c", IN_PROCESS % ARRAY_SHAPE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None

    def measure(count: int, pause_us: float) -> float:
        print(count, pause_us, file=child.stdin, flush=True)
        assert child.stdout is not None
        return float(child.stdout.readline())

    try:
        measure(3, 0)
        yield measure
    finally:
        child.kill()
        child.communicate()


# --- a worker's death


def wait_ready(backend: str) -> int:
    """Pid of a backend's ready worker."""
    waiter = threading.Event()
    while True:
        row = next(b for b in lz.status()["backends"] if b["name"] == backend)
        if row["state"] == "ready":
            return int(row["pid"])
        waiter.wait(0.02)


def deaths_ms(count: int) -> list[float]:
    """Time from SIGKILL of the busy worker to the fallback's answer, less the fallback kernel's own time."""
    x, out = lz.share(np.random.default_rng(0).standard_normal((8192, 2048), dtype=np.float32)), None
    out = lz.empty(x.shape)
    expected = lz.softmax(x, -1).copy()
    first = lz.last_report()
    found: list[float] = []
    while len(found) < count:
        pid = wait_ready(first.backend)
        future = lz.submit(lz.softmax, x, -1, out=out)
        threading.Event().wait(0.003)
        killed_s = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        future.result()
        took_s = time.perf_counter() - killed_s
        report = lz.last_report()
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-7)
        if len(report.attempts) == 2:  # else the kill came after the answer
            found.append(took_s * 1e3 - report.kernel_us / 1e3)
    return found


# --- the run


def measure(quick: bool) -> tuple[list[tuple[str, str, str, str, str]], dict[str, Any]]:
    rounds, calls, piped = (3, 300, 3000) if quick else (9, 1500, 15000)
    rows: list[tuple[str, str, str, str, str]] = []

    def row(what: str, ours: float, floor: float, peer: str, ratio: float, aim: str, unit: str, good: bool) -> None:
        verdict = f"{ratio:.2f} ({aim}: {'met' if good else 'MISSED'})"
        rows.append((what, f"{ours:,.0f} {unit}", f"{floor:,.0f} {unit}", peer, verdict))

    with (
        tempfile.TemporaryDirectory(prefix="lz-bench-") as folder,
        echo_stack(Path(folder)) as sock,
        pipe_stack() as pipe,
    ):
        echo = echo_once(sock)
        for call in (echo, lz.null):
            p50_us(call, 200)
        sync = [(p50_us(lz.null, calls), p50_us(echo, calls)) for _ in range(rounds)]
        null_us = statistics.median(a for a, _ in sync)
        small = bytes(NULL_BYTES)
        pipe_us = p50_us(lambda: (pipe.send_bytes(small), pipe.recv_bytes()), calls)
        ratio = statistics.median(a / b for a, b in sync)
        floor = statistics.median(b for _, b in sync)
        row("null op, synchronous, p50", null_us, floor, f"{pipe_us:,.0f} us", ratio, "at most 1.5", "us", ratio <= 1.5)

        rates = [(null_rate(piped), echo_rate(sock, piped)) for _ in range(rounds)]
        ratio = statistics.median(a / b for a, b in rates)
        ours, floor = (statistics.median(column) for column in zip(*rates, strict=True))
        row(f"null op, {IN_FLIGHT} in flight, rate", ours, floor, "", ratio, "at least 0.6", "/s", ratio >= 0.6)

        x = lz.share(np.random.default_rng(0).standard_normal(ARRAY_SHAPE, dtype=np.float32))
        out = lz.empty(x.shape)
        large = x.tobytes()
        pipe_us = p50_us(lambda: (pipe.send_bytes(large), pipe.recv_bytes()), 5)

    store = lz.status()["broker"]["store"]
    python = next((str(p) for p in Path(store, "envs").glob("torch-*/bin/python")), None)
    if python is None:
        sys.exit("the torch environment is not built; run: lz env build")
    with in_process(python) as local:
        large_op = functools.partial(lz.silu, x, out=out, backend="torch")
        p50_us(large_op, 10)
        copied = lz.last_report().copied_bytes
        tight = [(p50_us(large_op, 30), local(30, 0)) for _ in range(rounds)]
        paced = []
        for _ in range(rounds):
            ours_us, between_us = alternating_us(large_op, lz.null, 30)
            paced.append((ours_us, between_us, local(30, between_us)))
    ours, floor = (statistics.median(column) for column in zip(*tight, strict=True))
    slope = statistics.median((a - null_us) / b for a, b in tight)
    what = f"silu on 16 MiB, {copied} bytes copied; ratio is (ours - null) / in process"
    is_met = slope <= 1.15 and copied == 0
    row(what, ours, floor, f"{pipe_us:,.0f} us (echo alone)", slope, "at most 1.15", "us", is_met)
    ours, null_between_us, floor = (statistics.median(column) for column in zip(*paced, strict=True))
    slope = statistics.median((a - n) / b for a, n, b in paced)
    what = (
        f"the same, in turn with null calls, which then take {null_between_us:,.0f} us; in process with as long a pause"
    )
    row(what, ours, floor, "", slope, "at most 1.15", "us", slope <= 1.15)

    deaths = deaths_ms(5 if quick else 40)
    p50 = statistics.median(deaths)
    ms = f"{p50:.1f} ms"
    rows.append(
        (
            "SIGKILL of a busy worker to the fallback's answer, less its kernel, p50",
            ms,
            "",
            "",
            f"max {max(deaths):.1f} ms of {len(deaths)} (p50 under 30 ms: {'met' if p50 < 30 else 'MISSED'})",
        )
    )
    versions = {b["name"]: b["versions"] for b in lz.status()["backends"] if b["versions"]}
    return rows, versions


HEADINGS = ("figure", "LayerZero", "floor", "multiprocessing.Pipe", "ratio to floor")


def save(rows: list[tuple[str, str, str, str, str]], versions: dict[str, Any], command: str) -> Path:
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name")), "unknown CPU")
    memory_gib = psutil.virtual_memory().total >> 30
    libraries = ", ".join(f"{name} {v}" for backend in versions.values() for name, v in backend.items())
    lines = [
        "# Cost of a dispatch",
        "",
        f"- date: {datetime.date.today().isoformat()}",
        f"- machine: {cpu}, {psutil.cpu_count()} cores, {memory_gib} GiB, Linux {platform.release()}",
        f"- versions: Python {platform.python_version()}, layerzero-broker {lz.__version__}, pyzmq {version('pyzmq')}, "
        f"libzmq {zmq.zmq_version()}, {libraries}",
        f"- command: `{command}`",
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "| --- | ---: | ---: | ---: | --- |",
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
    ]
    path = HERE / "results" / "dispatch.md"
    path.write_text("\n".join(lines))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the calls, nothing saved")
    args = parser.parse_args()
    # Every death here is our own doing: no restart budget, quick restarts.
    os.environ |= {
        "LAYERZERO_RESTART_BUDGET": "1000000",
        "LAYERZERO_BACKOFF_S": "0.02",
        "LAYERZERO_BACKOFF_MAX_S": "0.1",
    }
    with tempfile.TemporaryDirectory(prefix="lz-bench-") as folder:
        lz.connect(runtime_dir=folder)
        try:
            rows, versions = measure(args.quick)
        finally:
            lz.disconnect()
    table = Table(*HEADINGS, title="Cost of a dispatch")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    if not args.quick:
        print(f"written: {save(rows, versions, 'python bench/dispatch.py')}", file=sys.stderr)


if __name__ == "__main__":
    main()
