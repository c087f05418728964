"""What a call of a function in an environment of its own costs, beside its floor and a peer in the same run. Writes
results/functions.md.

    python bench/functions.py [--quick] [--arrays]

Floor: a process that echoes pickles over multiprocessing.Pipe. Peers, where they are installed: loky, rpyc,
executorlib, Appose, an actor of Ray's (function_peers.py); none has another environment here. Rounds alternate between
all; a figure is the least of the rounds' medians and, behind it, the middle one, since other processes make rounds
longer, never shorter. With `--arrays` it measures what arguments cost alone: the least of single calls, in short turns,
where nearly all of them meet other work; it writes results/function_arrays.md.
"""

from __future__ import annotations

import multiprocessing
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

import layerzero as lz

ENV = lz.env("bench", requires=["numpy==1.26.4"], python="3.11")
ANY = lz.env("bench-any", requires=["numpy"])  # holds in this process
NULL_US, MIB_RATIO = 40.0, 1.05
FLOATS = 1 << 17  # float64: 1 MiB
IN_FLIGHT = 64


@lz.isolated(ENV)
def null() -> None: ...


@lz.isolated(ANY, placement="in_process")
def null_here() -> None: ...


@lz.isolated(ENV)
def interpreter() -> str:
    return sys.executable


@lz.isolated(ENV)
def take(array: Any) -> None: ...


@lz.isolated(ENV)
def take_three(one: Any, two: Any, three: Any) -> None: ...


@lz.isolated(ENV)
def give(array: Any) -> Any:
    return array


@lz.isolated(ENV)
class Holder:
    """State that stays there."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def null(self) -> None: ...

    def take(self, array: Any) -> None: ...


@lz.isolated(ENV)
def items() -> Any:
    while True:
        yield None


def echo(connection: Connection) -> None:
    while True:
        connection.send(connection.recv())


def start_s(python: str) -> float:
    """Of an interpreter that imports what its worker does to have these functions, LayerZero's own modules aside."""
    start = time.monotonic()
    subprocess.run([python, "-c", "import multiprocessing, statistics, numpy"], check=True)
    return time.monotonic() - start


def figure(rounds: list[float]) -> str:
    return f"{min(rounds):,.0f} ({statistics.median(rounds):,.0f})"


def arrays(*, is_quick: bool) -> None:
    from common import at_most, finish, own_broker

    plain = np.zeros(FLOATS)
    with own_broker():
        shared = lz.share(plain)
        calls: dict[str, Callable[[], Any]] = {
            "null": null,
            "a number": lambda: take(5),
            "64 bytes": lambda: take(shared[:8]),
            "1 MiB": lambda: take(shared),
            "512 KiB, every second element": lambda: take(shared[::2]),
            "three arrays": lambda: take_three(shared, shared[:8], shared[8:16]),
        }
        found: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(5 if is_quick else 40):
            for name, call in calls.items():
                for _ in range(10):
                    call()
                for _ in range(60):
                    start_ns = time.perf_counter_ns()
                    call()
                    found[name].append((time.perf_counter_ns() - start_ns) / 1e3)
    rows: list[tuple[str, ...]] = []
    for name, times in found.items():
        least, early = min(times), statistics.quantiles(times, n=20)[0]
        ratio = least / min(found["null"])
        aim = at_most(ratio, MIB_RATIO) if name == "1 MiB" else f"{ratio:.2f}"
        rows.append((f"{name}, us", f"{least:.1f}", f"{early:.1f}", aim))
    finish(
        "function_arrays",
        "What arguments of functions cost, in shared memory",
        {"bench": {"numpy": "1.26.4"}},
        ("what", "the least", "of twenty the least one", "the least, of null"),
        rows,
        (
            "In turns of 60 calls, behind 10 of the same kind.",
            "Before, when arguments became a frame in Python and were read anew by the worker, in the same turns: "
            "null 10.4, a number 11.2, 64 bytes 25.2, 1 MiB 26.0, every second element 27.1, three arrays 37.5 "
            "(of null 3.6).",
        ),
        is_quick=is_quick,
        command="python bench/functions.py --arrays",
    )


def main() -> None:
    from common import at_most, finish, own_broker, p50_us, parser, verdict  # what these functions' environment lacks
    from function_peers import peers

    options = parser(__doc__, "few and short rounds")
    options.add_argument("--arrays", action="store_true", help="only what arguments cost")
    args = options.parse_args()
    rounds, count = (3, 50) if args.quick else (15, 300)
    ENV.build()
    if args.arrays:
        arrays(is_quick=args.quick)
        return
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=echo, args=(theirs,), daemon=True)
    child.start()

    def piped(value: Any) -> Any:
        ours.send(value)
        return ours.recv()

    plain = np.zeros(FLOATS)
    with own_broker(), peers(is_quick=args.quick) as others:
        start = time.monotonic()
        null.warmup()
        first_s = time.monotonic() - start
        floor_s = min(start_s(interpreter()) for _ in range(3))
        shared = lz.share(plain)
        construct: Any = Holder
        holder = construct(None)
        kept, stream = give.options(keep=True)(shared), items()
        calls: dict[str, Callable[[], Any]] = {
            "null": null,
            "null, placed in this process": null_here,
            "64 bytes, shared": lambda: take(shared[:8]),
            "1 MiB, shared": lambda: take(shared),
            "1 MiB, in ordinary memory": lambda: take(plain),
            "1 MiB there and back, shared": lambda: give(shared),
            "a method, null": holder.null,
            "a method, 1 MiB, shared": lambda: holder.take(shared),
            "1 MiB that stays there, null": lambda: take(kept),
            "the next item of a generator, null": lambda: next(stream),
            "constructed and released, null": lambda: construct(None).close(),
            "pipe null": lambda: piped(None),
            "pipe 1 MiB": lambda: piped(plain),
        }
        for peer, run in others.items():
            calls |= {f"{peer} null": partial(run, None), f"{peer} 1 MiB": partial(run, plain)}
        found: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                call()
                found[name].append(p50_us(call, count if "null" in name else count // 3))
        rates: list[float] = []
        mapped: list[float] = []
        for _ in range(rounds):
            start = time.monotonic()
            for future in [null.submit() for _ in range(IN_FLIGHT)]:
                future.result()
            rates.append(IN_FLIGHT / (time.monotonic() - start))
            start = time.monotonic()
            for _ in take.map(range(100 * IN_FLIGHT), chunksize=IN_FLIGHT):
                pass
            mapped.append(100 * IN_FLIGHT / (time.monotonic() - start))
    child.terminate()
    null_us, mib = min(found["null"]), min(found["1 MiB, shared"])
    rows: list[tuple[str, ...]] = []
    blank = [""] * (1 + len(others))
    for name, peer in (
        ("null", "null"),
        ("null, placed in this process", "null"),
        ("64 bytes, shared", "null"),
        ("1 MiB, shared", "1 MiB"),
        ("1 MiB, in ordinary memory", "1 MiB"),
        ("1 MiB there and back, shared", "1 MiB"),
        ("a method, null", "null"),
        ("a method, 1 MiB, shared", "1 MiB"),
        ("1 MiB that stays there, null", "1 MiB"),
        ("the next item of a generator, null", "null"),
        ("constructed and released, null", "null"),
    ):
        aim = f"at most {NULL_US:g}: {verdict(null_us <= NULL_US)}" if name == "null" else ""
        if name == "1 MiB, shared":
            aim = f"of null: {at_most(mib / null_us, MIB_RATIO)}"
        beside = [figure(found[f"{one} {peer}"]) for one in others]
        rows.append((f"{name}, us", figure(found[name]), figure(found[f"pipe {peer}"]), *beside, aim))
    rows.append(
        (
            f"{IN_FLIGHT} in flight, calls a second",
            f"{max(rates):,.0f}",
            *blank,
            "100,000: " + verdict(max(rates) >= 1e5),
        )
    )
    rows.append(
        (
            f"map, {IN_FLIGHT} as one, calls a second",
            f"{max(mapped):,.0f}",
            *blank,
            "100,000: " + verdict(max(mapped) >= 1e5),
        )
    )
    rows.append(
        (
            "start of a built environment to its first answer, s",
            f"{first_s:.2f}, of which {floor_s:.2f} an interpreter that imports what this module imports",
            *blank,
            "0.3: " + verdict(first_s <= 0.3),
        )
    )
    versions = {"bench": {"numpy": "1.26.4"}}
    notes = (
        "In brackets the middle of the rounds' medians; before it, the least. Where other work shares the machine, "
        "figures vary by a factor of two and more between runs.",
        "The pipe and the peers copy the array there and back, and have no other environment; take() sends it one way. "
        "Appose's array was put into shared memory by hand before, and goes by name; executorlib looks each 10 ms.",
    )
    headings = ("what", "lz.isolated", "multiprocessing.Pipe", *others, "aim")
    versions |= {"peers": {name: version(name) for name in others}}
    finish("functions", "Functions in environments of their own", versions, headings, rows, notes, is_quick=args.quick)


if __name__ == "__main__":
    main()
