"""What lifted calls cost beside the one that repeats: lengths that grow, the first call of a process, memory.

    python bench/gpu_lifted_life.py [--quick] [--only ROW ...]

Needs an NVIDIA GPU, torch, and built environments for torch-cuda and cudnn. Writes results/gpu_lifted_life.md.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from common import at_most, finish, own_broker, parser, verdict
from gpu_common import F, qkv, served, torch, versions

import layerzero as lz

FROM, LENGTHS, LAYERS = 512, 512, 8
SETTLE_S = 60.0
NEW_PROCESS = """
import json, sys, time, torch
import layerzero as lz
from gpu_common import qkv
x = torch.randn(1024, 4096, device="cuda", dtype=torch.bfloat16)
q, k, v = qkv(2, 16, 1024, 128)
torch.cuda.synchronize()
def used():
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()
at = {"at first": used()}
lz.connect()
calls = {"silu": lambda: lz.silu(x, backend="torch-cuda"),
         "attention": lambda: lz.attention(q, k, v, is_causal=True, backend="cudnn")}
said = {}
for name, call in calls.items():
    times = []
    for _ in range(3):
        start = time.perf_counter()
        result = call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
        path = lz.last_report().path
        if len(times) == 1:
            said[name] = {"path": path, "ms": times}
    at[name] = used()
said["workers"] = [b["name"] for b in lz.status()["backends"] if b["pid"]]
own = {"silu": lambda: torch.nn.functional.silu(x),
       "attention": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)}
for name, call in own.items():
    call()
    torch.cuda.synchronize()
    at["torch's " + name] = used()
said["bytes"] = at
print(json.dumps(said))
"""


def decode(call: Callable[..., Any], q: Any, keys: Any, values: Any, lengths: list[int]) -> tuple[float, Counter[str]]:
    """us a call of tokens whose layers see so many keys each, until the GPU is through with each token; and who served
    the last layer of each."""
    paths: Counter[str] = Counter()
    torch.cuda.synchronize()
    start = time.perf_counter_ns()
    for length in lengths:
        k, v = keys[:, :, :length], values[:, :, :length]
        for _ in range(LAYERS):
            call(q, k, v)
        torch.cuda.synchronize()
        report = lz.last_report()
        paths[f"{report.kernel_id} {report.path}" if report else "torch"] += 1
    return (time.perf_counter_ns() - start) / 1e3 / len(lengths) / LAYERS, paths


def growth(lengths: int) -> Iterator[list[str]]:
    """Decoding: each token's keys are one more. The first pass knows none of the lengths."""
    q, keys, values = qkv(1, 32, 1, 128, keys=4096, kv_heads=8)

    def torchs(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    for number, backend in enumerate((None, "torch-cuda")):

        def ours(q: Any, k: Any, v: Any, backend: str | None = backend) -> Any:
            return lz.attention(q, k, v, enable_gqa=True, backend=backend)

        first = FROM + number * (lengths + 64)  # none that was lifted before
        settle(lambda: ours(q, keys[:, :, :first], values[:, :, :first]))  # noqa: B023
        grown = list(range(first + 1, first + 1 + lengths))
        constant_us, _ = decode(ours, q, keys, values, [first] * lengths)
        for begin in range(0, lengths, 64):
            us, paths = decode(ours, q, keys, values, grown[begin : begin + 64])
            print(f"{backend}: lengths from {grown[begin]}: {us:.1f} us, {dict(paths)}", flush=True)
            late_us = us
        again_us, paths = decode(ours, q, keys, values, grown)
        torch_us = decode(torchs, q, keys, values, grown)[0] if number == 0 else 0.0
        name = f"a call of {LAYERS} layers, {next(iter(paths))}, {'all backends' if backend is None else backend}"
        told = f"constant length: {constant_us:.1f} us" + (f"; torch, growing {torch_us:.1f}" if torch_us else "")
        yield [
            f"{name}: the last 64 of {lengths} new lengths",
            f"{late_us:.1f} us",
            told,
            at_most(late_us / constant_us, 1.2),
        ]
        yield [f"{name}: the same lengths again", f"{again_us:.1f} us", told, at_most(again_us / constant_us, 1.2)]


def settle(call: Callable[[], Any]) -> None:
    """Call until it is lifted."""
    end_s = time.monotonic() + SETTLE_S
    while time.monotonic() < end_s:
        for _ in range(16):
            call()
        torch.cuda.synchronize()
        if served().path == "lifted":
            return
        time.sleep(0.01)
    print("not lifted:", served(), flush=True)


def new_process(_: int) -> Iterator[list[str]]:
    """With a store that has the calls, and a broker that has started no worker."""
    x = torch.randn(1024, 4096, device="cuda", dtype=torch.bfloat16)
    q, k, v = qkv(2, 16, 1024, 128)
    with own_broker():
        settle(lambda: lz.silu(x, backend="torch-cuda"))
        settle(lambda: lz.attention(q, k, v, is_causal=True, backend="cudnn"))
    found = []
    with own_broker():
        lz.status()
        for _ in range(5):
            found.append(run(NEW_PROCESS))
    for name in ("silu", "attention"):
        ms = statistics.median(one[name]["ms"][0] for one in found)
        paths = {one[name]["path"] for one in found}
        workers = sorted({worker for one in found for worker in one["workers"]})
        second = statistics.median(one[name]["ms"][1] for one in found)
        told = f"{'/'.join(map(str, paths))}; workers: {', '.join(workers) or 'none'}; the second call {second:.2f} ms"
        yield [
            f"first {name} of a process, its store warm",
            f"{ms:.1f} ms",
            told,
            f"at most 60 ms: {verdict(ms <= 60)}",
        ]
    steps = list(found[0]["bytes"])
    mib = {step: statistics.median(one["bytes"][step] for one in found) / (1 << 20) for step in steps}
    grown = {step: mib[step] - mib[before] for before, step in itertools.pairwise(steps)}
    ours = grown["silu"] + grown["attention"]
    yield [
        "GPU memory of the system beyond the caller's own, two kernels lifted",
        f"{ours:.0f} MiB",
        "; ".join(f"{step} {grew:+.0f}" for step, grew in grown.items()),
        f"at most 64 MiB: {verdict(ours <= 64)}",
    ]


def run(code: str, *arguments: str) -> dict[str, Any]:
    """What a process of its own says in its last line."""
    ran = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    if not lines:
        sys.exit(f"a process of the bench ended with {ran.returncode}: {ran.stderr[-2000:]}")
    return dict(json.loads(lines[-1]), code=ran.returncode)


ROWS = {"growth": growth, "new_process": new_process}


def main() -> None:
    options = parser(__doc__, "an eighth of the lengths")
    options.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), help="these rows alone")
    args = options.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this bench needs an NVIDIA GPU")
    rows, told = [], {}
    for name in args.only:
        before = len(rows)
        with torch.inference_mode():
            if name == "growth":
                with own_broker():
                    rows += list(growth(LENGTHS // 8 if args.quick else LENGTHS))
                    told = versions()
            else:
                rows += list(ROWS[name](0))
        for row in rows[before:]:
            print(*row, sep=" | ", flush=True)
    headings = ["figure", "ours", "beside", "aim"]
    finish(
        "gpu_lifted_life",
        "Lifted calls: new lengths, new processes, memory",
        told,
        headings,
        rows,
        is_quick=args.quick,
    )


if __name__ == "__main__":
    main()
