"""Attention over many shapes: the kernel that measured best here against torch's default in this process."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import gpu_common
from common import save
from gpu_common import Authentication, Row, attention, kernel, pipelined, qkv, torch, versions, wait_until

import layerzero as lz

RUNS = 16  # of a kernel; its worker times the first eight that are launched as a graph
WARM_RUNS = 10  # on memory that takes turns; then its worker has graphs of it
FLOOR_RUNS = 25
PLAIN, MAX_SCORES = "torch-cuda.attention.math", 1 << 28  # which keeps all scores at once: not for more than these
COMPILE_S = 300.0  # a kernel that is asked for alone waits until it is compiled
WALL_FROM_US = 200.0  # calls this long are timed as a pipeline, too: there the way through the broker is hidden
LIFT_S = 20.0
MEAN = 1.15  # speed-up that is aimed at


@dataclass(frozen=True)
class Found:
    shape: str
    served: str
    ours_us: float  # lifted, in a graph of this process, as the floor; where it is not lifted the worker's
    worker_us: float
    is_lifted: bool
    floor: str
    eager_us: float
    floor_us: float  # launched as ours is
    default_us: float  # torch's default, as ours: in a worker, its copy to the caller's output included
    walls: tuple[float, float] | None  # ours and the floor's
    runner_up: str  # the kernel that measured best but for the one that served

    @property
    def ratio(self) -> float:
        return self.ours_us / self.floor_us

    @property
    def choice(self) -> float:
        return self.worker_us / self.default_us if self.default_us else float("nan")

    def row(self) -> list[str]:
        wall = f"{self.walls[0] / self.walls[1]:.2f}" if self.walls else ""
        lifted = f"{self.ours_us:,.1f} us" if self.is_lifted else "not lifted"
        times = [lifted, *(f"{us:,.1f} us" for us in (self.worker_us, self.floor_us, self.eager_us))]
        ratios = [f"{self.ratio:.2f}", f"{self.choice:.2f}", wall]
        return [self.shape, *times, self.floor, *ratios, self.served, self.runner_up]


def sweep(quick: bool, without: Sequence[str] = ()) -> Iterator[Row]:
    """Times are the GPU's, between two events around a call that was enqueued while the GPU was busy: in the worker for
    ours, in this process for torch's."""
    found = [one_shape(name, shape, without) for name, shape in list(sweep_shapes())[:: 8 if quick else 1]]
    if not quick:
        save_shapes(found, without)
    worst = max(found, key=lambda one: one.ratio)
    mean = statistics.geometric_mean(1 / one.ratio for one in found)
    walls = [one.walls[0] / one.walls[1] for one in found if one.walls]
    wall = f"; pipelined wall of the {len(walls)} long ones, median {statistics.median(walls):.2f}" if walls else ""
    slower = sum(one.ratio > 1.05 for one in found)
    served = ", ".join(f"{name} {count}" for name, count in Counter(one.served for one in found).most_common())
    is_met = not slower and mean >= MEAN
    choices = [one.choice for one in found if one.default_us]
    lifted = sum(one.is_lifted for one in found)
    yield Row(
        f"attention over {len(found)} shapes, {lifted} lifted, time on the GPU, best kernel by measurement ({served})",
        f"geometric mean of the speed-ups {mean:.2f}",
        "torch's default in process",
        f"worst {worst.ratio:.2f} at {worst.shape}, {slower} above 1.05 (never above, mean at least {MEAN}: "
        f"{'met' if is_met else 'MISSED'}){wall}; against torch's default in a worker: mean "
        f"{statistics.geometric_mean(1 / ratio for ratio in choices):.2f}, worst {max(choices):.2f}",
    )


def one_shape(name: str, shape: tuple[Any, ...], without: Sequence[str]) -> Found:
    q, k, v = qkv(*shape)
    is_causal = q.shape[2] > 1
    ours, floor = attention(q, k, v, is_causal=is_causal)

    options = {"is_causal": is_causal, "enable_gqa": q.shape[1] != k.shape[1]}

    def times(and_uncompiled: bool = False) -> dict[str, float]:
        """Of the kernels that may serve it, 0 for one that is not measured. Those that must be compiled first have a
        score, too."""
        said = lz.explain(lz.attention, q, k, v, **options)
        found = (c for c in said.candidates if c.accepted or (and_uncompiled and c.score is not None))
        return {c.kernel_id: c.measured_us or 0.0 for c in found}

    scores = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    left_out = [*without, *([PLAIN] if scores > MAX_SCORES else [])]
    lz.configure(backend_isolation={"*": "subprocess"})
    with lz.avoid(*left_out) if left_out else nullcontext():
        candidates = list(times(and_uncompiled=True))
    for candidate in candidates:
        wait_until(lambda: not lz.status()["selection"]["compiled"]["running"], "no compiler is at work", COMPILE_S)
        try:
            with lz.prefer(candidate, only=True):
                lz.attention(q, k, v, **options, timeout_s=COMPILE_S)
                behind_gate(ours, RUNS, times)
        except lz.LayerZeroError as exc:
            print(f"{name}: {candidate}: {exc.message}", flush=True)
    with lz.avoid(*left_out) if left_out else nullcontext():
        torch.testing.assert_close(behind_gate(ours, 1, times), floor(), rtol=2e-2, atol=2e-2)
        served = kernel()
        if not times().get(served):  # it took over from one that failed
            behind_gate(ours, RUNS, times)
            served = kernel()
        eager_us = floor_time(floor)
        floor_us = graph_time(floor)
        lz.configure(backend_isolation={"*": "lifted"})
        lifted_us = None
        if becomes_lifted(ours):
            served, lifted_us = kernel(), graph_time(ours)
        walls = None
        if floor_us >= WALL_FROM_US:
            count = max(3, min(20, int(40_000 / floor_us)))
            pairs = [(pipelined(ours, count)[1], pipelined(floor, count)[1]) for _ in range(3)]
            walls = (statistics.median(p[0] for p in pairs), statistics.median(p[1] for p in pairs))
    measured, default = times(), default_kernel(q, k, v, is_causal)
    alike = [us for kernel_id, us in measured.items() if kernel_id.startswith(f"torch-cuda.attention.{default}") and us]
    others = sorted((us, kernel_id) for kernel_id, us in measured.items() if us and kernel_id != served)
    runner_up = f"{others[0][1]} {others[0][0]:,.1f} us" if others else ""
    default_us = min(alike, default=0.0)
    worker_us = measured[served]
    ours_us, is_lifted = (worker_us, False) if lifted_us is None else (lifted_us, True)
    found = Found(
        name, served, ours_us, worker_us, is_lifted, default, eager_us, floor_us, default_us, walls, runner_up
    )
    print(" | ".join(found.row()), flush=True)
    return found


GATE = Authentication()


def behind_gate(call: Callable[[], Any], count: int, look: Callable[[], Any]) -> Any:
    """The call, again and again, each begun by the GPU when its worker has enqueued all of it, so that its time is the
    kernel's and not that of the processes that launch it. A worker tells a time with its next call, and the broker sees
    the last one that was told: have it `look` after each."""
    result = None
    for _ in range(WARM_RUNS):  # what a library allocates first would wait for the gate, and the gate for it
        result = call()
        torch.cuda.synchronize()
    for _ in range(count):
        GATE.close()
        try:
            result = call()
            lz.last_report()  # the worker has it
        finally:
            GATE.open()
        torch.cuda.synchronize()
        look()
    return result


def floor_time(call: Callable[[], Any]) -> float:
    """us on the GPU, measured like the worker's."""
    samples = []
    call()
    torch.cuda.synchronize()
    for _ in range(FLOOR_RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        GATE.close()
        begin.record()
        call()
        end.record()
        GATE.open()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(samples[FLOOR_RUNS // 5 :])


def graph_time(call: Callable[[], Any]) -> float:
    """us on the GPU of a call in a graph that this process has captured."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return floor_time(graph.replay)


def becomes_lifted(call: Callable[[], Any]) -> bool:
    end_s = time.monotonic() + LIFT_S
    while time.monotonic() < end_s:
        for _ in range(8):
            call()
        torch.cuda.synchronize()
        if gpu_common.served().path == "lifted":
            return True
        time.sleep(0.01)
    return False


def default_kernel(q: Any, k: Any, v: Any, is_causal: bool) -> str:
    """What torch chooses by itself."""
    number = torch._fused_sdp_choice(q, k, v, None, 0.0, is_causal, enable_gqa=q.shape[1] != k.shape[1])
    return str(torch.nn.attention.SDPBackend(number).name).removesuffix("_ATTENTION").lower()


def save_shapes(found: Sequence[Found], without: Sequence[str]) -> None:
    path = save(
        "gpu_sweep",
        "Attention on a GPU: the kernel that measured best",
        versions(),
        "python bench/gpu_dispatch.py --only sweep" + "".join(f" --without {name}" for name in without),
        (
            "bf16, causal where there are several queries",
            "lifted",
            "in its worker",
            "torch's default",
            "eager",
            "it is",
            "ratio",
            "alike",
            "wall",
            "served by",
            "next best",
        ),
        [one.row() for one in found],
        (
            "Times on the GPU, by events around calls that were enqueued while it waited: lifted and torch's in graphs",
            "of the client's process, and in its worker, which launches graphs, too, with its copy into the caller's",
            "output. Torch's eager call is beside it. Ratio: lifted against torch's default. Alike: in the worker,",
            "against torch's default kernel there, which is what the choice alone brings. Wall: the ratio for",
            f"pipelines of eager calls, lifted against torch, where that takes {WALL_FROM_US:.0f} us or more.",
        ),
    )
    print("written:", path)


def sweep_shapes() -> Iterator[tuple[str, tuple[Any, ...]]]:
    for width in (64, 128, 256):
        for batch, heads, length in (
            (1, 16, 256),
            (1, 32, 1024),
            (4, 16, 1024),
            (1, 32, 4096),
            (2, 16, 4096),
            (1, 8, 8192),
        ):
            yield f"prefill ({batch},{heads},{length},{width})", (batch, heads, length, width)
            grouped = (batch, heads, length, width, length, heads // 4)
            yield f"prefill, 4 heads a group ({batch},{heads},{length},{width})", grouped
        for batch, keys in ((1, 1024), (8, 4096), (32, 2048), (1, 32768)):
            yield f"decode ({batch},32,1 of {keys},{width})", (batch, 32, 1, width, keys, 32)
            yield f"decode, 8 heads a group ({batch},32,1 of {keys},{width})", (batch, 32, 1, width, keys, 4)
    yield "prefill (1,8,32768,128)", (1, 8, 32768, 128)
    yield "prefill, 8 heads a group (1,32,16384,128)", (1, 32, 16384, 128, 16384, 4)
