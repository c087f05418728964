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
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from common import at_most, finish, own_broker, parser, verdict
from gpu_common import F, qkv, served, torch, versions

import layerzero as lz

FROM, LENGTHS, LAYERS = 512, 512, 32
OWN_MS = 6.0
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
own = {"silu": lambda: torch.nn.functional.silu(x),
       "attention": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)}
calls = {"silu": lambda: lz.silu(x, backend="torch-cuda"),
         "attention": lambda: lz.attention(q, k, v, is_causal=True, backend="cudnn")}
said = {}
def torchs():
    for name, call in own.items():
        call()
        torch.cuda.synchronize()
        at["torch's " + name] = used()
def ours():
    lz.connect()
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
for part in (ours, torchs) if sys.argv[1] == "ours first" else (torchs, ours):
    part()
said["workers"] = [b["name"] for b in lz.status()["backends"] if b["pid"]]
said["bytes"] = at
print(json.dumps(said))
"""


class Token(NamedTuple):
    """us of the host: of the first layer's call and, on average, of the others'; and who served the last."""

    first: float
    other: float
    path: str


def decode(call: Callable[..., Any], q: Any, keys: Any, values: Any, lengths: list[int]) -> list[Token]:
    """Tokens whose layers see so many keys each; each token has OWN_MS of the model's own work on the GPU besides."""
    tokens = []
    torch.cuda.synchronize()
    for length in lengths:
        k, v = keys[:, :, :length], values[:, :, :length]
        start = time.perf_counter_ns()
        call(q, k, v)
        first = time.perf_counter_ns()
        for _ in range(LAYERS - 1):
            call(q, k, v)
        end = time.perf_counter_ns()
        torch.cuda._sleep(int(OWN_MS * 1.7e6))  # cycles
        torch.cuda.synchronize()
        report = lz.last_report()
        path = f"{report.kernel_id} {report.path}" if report else "torch"
        tokens.append(Token((first - start) / 1e3, (end - first) / 1e3 / (LAYERS - 1), path))
    return tokens


def told(tokens: list[Token]) -> tuple[float, str]:
    """us a call, and what it consists of."""
    us = statistics.mean(((LAYERS - 1) * token.other + token.first) / LAYERS for token in tokens)
    first = statistics.median(token.first for token in tokens)
    worst = max(token.first for token in tokens)
    other = statistics.median(token.other for token in tokens)
    paths = Counter(token.path for token in tokens).most_common(2)
    served = ", ".join(f"{path} {count}" for path, count in paths)
    return us, f"a token's first call {first:.0f} us (worst {worst:,.0f}), others {other:.1f}; {served}"


def growth(lengths: int) -> Iterator[list[str]]:
    """Decoding: each token's keys are one more. The first pass knows none of the lengths."""
    q, keys, values = qkv(1, 32, 1, 128, keys=4096, kv_heads=8)

    def ours(q: Any, k: Any, v: Any) -> Any:
        return lz.attention(q, k, v, enable_gqa=True)

    def torchs(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    settle(lambda: ours(q, keys[:, :, :FROM], values[:, :, :FROM]))
    grown = list(range(FROM + 1, FROM + 1 + lengths))
    constant_us, text = told(decode(ours, q, keys, values, [FROM] * 128))
    yield ["constant length", f"{constant_us:.1f} us", text, ""]
    early, late = decode(ours, q, keys, values, grown[:128]), decode(ours, q, keys, values, grown[128:])
    for name, tokens in (
        ("the first 128 new lengths", early),
        (f"the next {lengths - 128}", late),
        ("the same lengths again", decode(ours, q, keys, values, grown)),
    ):
        us, text = told(tokens)
        yield [name, f"{us:.1f} us", text, at_most(us / constant_us, 1.2)]
    us, text = told(decode(torchs, q, keys, values, grown))
    yield ["torch alone, lengths that it has not seen", f"{us:.1f} us", text.rpartition(";")[0], ""]


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
            found.append(run(NEW_PROCESS, "ours first"))
        after = [run(NEW_PROCESS, "torch's first") for _ in range(3)]
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
    for told, runs, limit in (
        ("in a program that has called both by torch", after, 64),
        ("in a program that has called nothing of torch's", found, None),
    ):
        steps = list(runs[0]["bytes"])
        mib = {step: statistics.median(one["bytes"][step] for one in runs) / (1 << 20) for step in steps}
        grown = {step: mib[step] - mib[before] for before, step in itertools.pairwise(steps)}
        ours = grown["silu"] + grown["attention"]
        yield [
            f"GPU memory of the system, two kernels lifted, {told}",
            f"{ours:.0f} MiB",
            "; ".join(f"{step} {grew:+.0f}" for step, grew in grown.items()),
            "" if limit is None else f"at most {limit} MiB: {verdict(ours <= limit)}",
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
    options = parser(__doc__, "half of the lengths")
    options.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), help="these rows alone")
    args = options.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this bench needs an NVIDIA GPU")
    rows: list[list[str]] = []
    libraries: dict[str, Mapping[str, str]] = {}
    for name in args.only:
        before = len(rows)
        with torch.inference_mode():
            if name == "growth":
                with own_broker():
                    rows += list(growth(LENGTHS // 2 if args.quick else LENGTHS))
                    libraries = versions()
            else:
                rows += list(ROWS[name](0))
        for row in rows[before:]:
            print(*row, sep=" | ", flush=True)
    headings = ["figure", "ours", "beside", "aim"]
    finish(
        "gpu_lifted_life",
        "Lifted calls: new lengths, new processes, memory",
        libraries,
        headings,
        rows,
        is_quick=args.quick,
    )


if __name__ == "__main__":
    main()
