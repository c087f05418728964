"""What an all_reduce of two ranks costs by lz.group, beside torch.distributed's own gloo on the same machine; and a
layer of a Llama over two ranks, split and as a pipeline, beside its plan in one of them.

    python bench/groups.py [--quick]

Two processes are ranks of a group, two more ranks of torch.distributed in torch's environment of the store; both add up
the same float32 in place, in rounds that alternate. Ours are NumPy arrays, theirs tensors; each process has one thread.
The layers' kernels run in the broker's workers, of which there is one for each backend, whatever the number of ranks.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import at_most, finish, own_broker, parser

from layerzero.envs.build.build import find, resolve
from layerzero.envs.functions import default_store

RANKS = 2
SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 26)
LIMIT = 1.05
# Reads lines of "bytes calls", makes that many, and says the median in us.
LOOP = """
import statistics, sys, time
for line in sys.stdin:
    nbytes, count = map(int, line.split())
    x = array(nbytes // 4)
    call(x), call(x)
    times = []
    for _ in range(count):
        start = time.perf_counter_ns()
        call(x)
        times.append((time.perf_counter_ns() - start) / 1e3)
    print(statistics.median(times), flush=True)
"""
OURS = """
import sys
import numpy as np
import layerzero as lz
lz.connect()
group = lz.group("bench", int(sys.argv[1]), int(sys.argv[2]))
array = lambda count: np.zeros(count, np.float32)
call = lambda x: group.all_reduce(x, out=x)
"""
THEIRS = """
import os, sys
import torch
from torch import distributed
torch.set_num_threads(1)
store = distributed.FileStore(sys.argv[3], int(sys.argv[2]))
distributed.init_process_group("gloo", store=store, rank=int(sys.argv[1]), world_size=int(sys.argv[2]))
array = lambda count: torch.zeros(count)
call = distributed.all_reduce
"""
LAYER = """
import sys
import numpy as np
import layerzero as lz
lz.connect()
group = lz.group("layers", int(sys.argv[1]), int(sys.argv[2]), timeout_s=600)
random = np.random.default_rng(0)
HIDDEN, INNER, HEADS, DIM, TOKENS = 512, 1408, 8, 64, 256
def weight(*shape): return lz.share((random.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32))
q, k, v, o = (weight(HIDDEN, HIDDEN) for _ in range(4))
gate, up, down = weight(INNER, HIDDEN), weight(INNER, HIDDEN), weight(HIDDEN, INNER)
cos, sin = weight(TOKENS, DIM // 2), weight(TOKENS, DIM // 2)
ones = lz.share(np.ones(HIDDEN, np.float32))
tokens = weight(TOKENS, HIDDEN)
def attention(x):
    h = lz.rms_norm(x, HIDDEN, ones)
    a, b, c = (lz.linear(h, w).reshape(1, -1, HEADS, DIM) for w in (q, k, v))
    count = x.shape[0]
    a, b = lz.rope(a, cos[:count], sin[:count]), lz.rope(b, cos[:count], sin[:count])
    y = lz.attention(a, b, c, is_causal=True, layout="BSHD")
    return x + lz.linear(y.reshape(-1, HIDDEN), o)
def mlp(x):
    h = lz.rms_norm(x, HIDDEN, ones)
    return x + lz.linear(lz.swiglu(lz.linear(h, gate), lz.linear(h, up)), down)
def layer(x): return mlp(attention(x))
one = lz.plan(layer, fixed_weights=True)
ways = [
    (lambda: one(tokens)) if group.rank == 0 else (lambda: None),
    lambda split=lz.split_plan(layer, group): split(tokens),
    lambda flow=lz.pipeline([attention, mlp], group, micro_batches=4): flow(tokens),
]
for way in ways:
    for _ in range(60):
        way()
    group.barrier()
array = lambda number: ways[number]
call = lambda way: way()
"""
WAYS = ("lz.split_plan", "lz.pipeline, 4 micro-batches")


def start(python: str | Path, code: str, *args: str) -> list[subprocess.Popen[str]]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environ}
    argv = [[str(python), "-c", code + LOOP, str(rank), str(RANKS), *args] for rank in range(RANKS)]
    return [subprocess.Popen(one, **pipes) for one in argv]


def median_us(ranks: Sequence[subprocess.Popen[str]], nbytes: int, count: int) -> float:
    """Of the slower rank."""
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write(f"{nbytes} {count}\n")
        rank.stdin.flush()
    return max(float(rank.stdout.readline()) for rank in ranks if rank.stdout is not None)


def main() -> None:
    arguments = parser(__doc__, "few rounds").parse_args()
    torch = find(resolve("torch"), store=default_store(os.environ))
    version = subprocess.check_output([torch.python, "-c", "import torch; print(torch.__version__)"], text=True).strip()
    rows = []
    with own_broker(), tempfile.TemporaryDirectory() as folder:
        ours = start(sys.executable, OURS)
        theirs = start(torch.python, THEIRS, f"{folder}/store")
        layers = start(sys.executable, LAYER)
        try:
            for nbytes in SIZES:
                count = 4 if nbytes > 1 << 20 else 50
                rounds = 3 if arguments.quick else 15
                pairs = [(median_us(ours, nbytes, count), median_us(theirs, nbytes, count)) for _ in range(rounds)]
                own, other = (statistics.median(times) for times in zip(*pairs, strict=True))
                ratio = statistics.median(one / two for one, two in pairs)
                rows.append([f"{nbytes >> 10:,} KiB", f"{own:,.0f}", f"{other:,.0f}", at_most(ratio, LIMIT)])
            for number, way in enumerate(WAYS, 1):
                rounds = 3 if arguments.quick else 7
                pairs = [(median_us(layers, 4 * number, 5), median_us(layers, 0, 5)) for _ in range(rounds)]
                own, one = (statistics.median(times) for times in zip(*pairs, strict=True))
                rows.append([f"a layer by {way}", f"{own:,.0f}", f"{one:,.0f} by lz.plan", f"{own / one:.2f}"])
        finally:
            for rank in (*ours, *theirs, *layers):
                rank.communicate()
    finish(
        "groups",
        "Calls and layers of two ranks on one machine",
        {"torch": {"torch": version}},
        ("all_reduce of float32, in place", "lz.group, us", "torch.distributed's gloo, us", "ratio"),
        rows,
        (
            "Medians of rounds that alternate, of the slower rank; the ratio is the median of each round's.",
            "Layers: 256 tokens, 512 wide, 8 heads, float32, in plans that have settled; one worker for each backend "
            "computes for both ranks here, so that two of them gain nothing by it: what is seen is what the splitting "
            "costs. Over two GPUs: gpu_groups.md.",
        ),
        is_quick=arguments.quick,
    )


if __name__ == "__main__":
    main()
