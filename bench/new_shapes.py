"""What a call costs whose lengths never came before, beside one that came often. Writes results/new_shapes.md.

    python bench/new_shapes.py [--quick]

Kernels are torch's, on the CPU, on two threads as its worker has them; inputs are NumPy's. Each round has lengths of
its own. Floor: the same in one process, in the backend's own environment. Beside it, what the call costs under a rule
(`lz.avoid`), where the broker ranks each: that was the way of all new lengths before leases had neighbours.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from common import at_most, backend_versions, finish, own_broker, parser
from dispatch import torch_python, wait_quiet

import layerzero as lz

LENGTHS = range(130, 511)  # two buckets
IN_PROCESS = """
import sys, time, statistics
import numpy as np
import torch
import torch.nn.functional as F
torch.set_num_threads(int(sys.argv[1]))
def tensor(*shape):
    return torch.from_numpy(np.ones(shape, np.float32))
def prompt(n):
    q = tensor(1, 12, n, 64)
    return lambda: F.scaled_dot_product_attention(q, q, q)
def step(n):
    q, k = tensor(1, 12, 1, 64), tensor(1, 12, n, 64)
    return lambda: F.scaled_dot_product_attention(q, k, k)
weight = tensor(1536, 384)
def linear(n):
    x = tensor(n, 384)
    return lambda: F.linear(x, weight)
makers = {"prompt": prompt, "step": step, "linear": linear}
for line in sys.stdin:
    name, *lengths = line.split()
    calls, times = [makers[name](int(n)) for n in lengths], []
    with torch.inference_mode():
        for call in calls:
            start = time.perf_counter_ns()
            call()
            times.append(time.perf_counter_ns() - start)
    print(statistics.median(times) / 1e3, flush=True)
"""


def array(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def prompt(n: int) -> Callable[[], Any]:
    q = array(1, 12, n, 64)
    return lambda: lz.attention(q, q, q, backend="torch")


def step(n: int) -> Callable[[], Any]:
    q, k = array(1, 12, 1, 64), array(1, 12, n, 64)
    return lambda: lz.attention(q, k, k, backend="torch")


WEIGHT = array(1536, 384)


def linear(n: int) -> Callable[[], Any]:
    x = array(n, 384)
    return lambda: lz.linear(x, WEIGHT, backend="torch")


OPS = {
    "step": ("attention, 1 query, n keys, 12 heads of 64", step),
    "prompt": ("attention, n queries and keys, 12 heads of 64", prompt),
    "linear": ("linear, n rows, 384 to 1536", linear),
}


def median_us(calls: list[Callable[[], Any]]) -> float:
    times = []
    for call in calls:
        start = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1e3


def rows(rounds: int, threads: int) -> Iterator[list[str]]:
    child = subprocess.Popen(
        [torch_python(), "-c", IN_PROCESS, str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None

    def floor_us(name: str, lengths: list[int]) -> float:
        assert child.stdout is not None
        print(name, *lengths, file=child.stdin, flush=True)
        return float(child.stdout.readline())

    try:
        for name, (what, make) in OPS.items():
            for settled in (200, 400):
                median_us([make(settled)] * 30)
                floor_us(name, [settled] * 30)
            wait_quiet()
            found = []
            order = np.random.default_rng(0).permutation([n for n in LENGTHS if n not in (200, 400)]).tolist()
            for number in range(rounds):
                fresh = order[number::rounds]
                apart, told = fresh[::2], fresh[1::2]
                known_us = median_us([make(200 if n <= 256 else 400) for n in apart])
                new_us = median_us([make(n) for n in apart])
                with lz.avoid("zentorch"):
                    told_us = median_us([make(n) for n in told])
                known_floor_us = floor_us(name, [200 if n <= 256 else 400 for n in apart])
                new_floor_us = floor_us(name, apart)
                found.append((known_us, new_us, told_us, known_floor_us, new_floor_us))
            known_us, new_us, told_us, known_floor_us, new_floor_us = map(statistics.median, zip(*found, strict=True))
            ratio = statistics.median(new / known for known, new, *_ in found)
            told_ratio = statistics.median(told / known for known, _, told, *_ in found)
            floor_ratio = statistics.median(new / known for *_, known, new in found)
            yield [
                what,
                f"{known_us:,.0f} us",
                f"{new_us:,.0f} us",
                at_most(ratio, 1.5),
                f"{told_us:,.0f} us, {told_ratio:.2f}",
                f"{known_floor_us:,.0f} and {new_floor_us:,.0f} us, {floor_ratio:.2f}",
            ]
    finally:
        child.kill()
        child.communicate()


def main() -> None:
    args = parser(__doc__, "three rounds").parse_args()
    with own_broker():
        threads = 2
        found = list(rows(3 if args.quick else 9, threads))
        versions = backend_versions()
    finish(
        "new_shapes",
        "Lengths that never came before, on the CPU",
        versions,
        ["call", "known length", "new length", "new / known", "ranked by the broker", "in process: known, new"],
        found,
        is_quick=args.quick,
    )


if __name__ == "__main__":
    main()
