"""What ranks of a group do with tensors of their own GPUs, told by tests/gpu/test_groups.py."""

from __future__ import annotations

import os
import signal
import time
from typing import Any
from unittest import mock

import numpy as np
import torch

import layerzero as lz
from layerzero.groups import joint_graph, one_shot_trial

DTYPES = ("float32", "float16", "bfloat16", "float64", "int32", "uint8", "bool")
LONG_CYCLES = 1 << 34  # eight seconds of a GPU
HIDDEN, INNER, HEADS, TOKENS = 64, 128, 4, 6


def device(group: lz.Group) -> torch.device:
    return torch.device("cuda", group.rank)


def of_rank(rank: int, shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    """Small whole numbers: sums and products are exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    kind = getattr(torch, dtype)
    return torch.randint(0, 2 if dtype == "bool" else 5, shape, generator=generator).to(kind)


def check(group: lz.Group, rows: int) -> list[str]:
    """Every op of every dtype beside torch's on the CPU: new results, out= and in place, and of strided arrays."""
    done = []
    for seed, dtype in enumerate(DTYPES):
        xs = [of_rank(rank, (2 * rows, 3), dtype, seed) for rank in range(group.size)]
        x = xs[group.rank].to(device(group))
        part = slice(group.rank * rows, (group.rank + 1) * rows)
        for op in ("sum", "prod", "min", "max", *(["mean"] if x.is_floating_point() else [])):
            if dtype == "bool":
                continue  # nccl adds up none
            right = reduced(xs, op)
            same(group.all_reduce(x, op), right)
            same(group.all_reduce(x.t().contiguous().t(), op), right)
            out = torch.empty_like(x)
            assert group.all_reduce(x, op, out=out) is out
            same(out, right)
            mine = x.clone()
            assert group.all_reduce(mine, op, out=mine) is mine
            same(mine, right)
            same(group.reduce_scatter(x, op), right[part])
            done.append(f"{op} {dtype}")
        same(group.all_gather(x), torch.cat(xs))
        same(group.all_to_all(x), torch.cat([one[part] for one in xs]))
        for root in range(group.size):
            same(group.broadcast(x, root), xs[root])
        report = group.last_report()
        assert (report.path, report.choice.path) == ("nccl", "nccl")
    return done


def reduced(xs: list[Any], op: str) -> Any:
    wide = torch.stack([x.to(torch.float64) for x in xs])
    found = {
        "sum": wide.sum(0), "mean": wide.mean(0), "prod": wide.prod(0), "min": wide.amin(0), "max": wide.amax(0),
    }[op]  # fmt: skip
    return found.to(xs[0].dtype)


def same(found: Any, right: Any) -> None:
    assert found.dtype == right.dtype
    assert torch.equal(found.cpu(), right), (found, right)


def stream_of_calls(group: lz.Group, count: int) -> bool:
    """Nobody waits: each takes what the one before has made, on a stream of the caller's."""
    stream = torch.cuda.Stream(device(group))
    with torch.cuda.stream(stream):
        x = torch.full((1 << 20,), float(group.rank + 1), dtype=torch.float64, device=device(group))
        for _ in range(count):
            x = group.all_reduce(x, wait=False) / group.size
        group.synchronize()
        assert stream.query()
        return bool((x == sum(range(1, group.size + 1)) / group.size).all())


def sum_of(group: lz.Group, count: int, on: int | None = None) -> Any:
    x = torch.ones(count, device=device(group) if on is None else torch.device("cuda", on))
    return group.all_reduce(x).tolist()


def sum_up(group: lz.Group) -> float:
    """Of as many as the calls of those that die have: NCCL makes connections with the first call of a size."""
    return float(group.all_reduce(torch.ones(1 << 20, device=device(group))).sum())


def die_behind_a_long_kernel(group: lz.Group) -> None:
    """Once the other rank's GPU waits for this one's, which has something else to do for longer than the test takes."""
    torch.cuda.set_device(device(group))
    torch.cuda._sleep(LONG_CYCLES)
    group.all_reduce(torch.ones(1 << 20, device=device(group)), wait=False)
    os.kill(os.getpid(), signal.SIGKILL)


def call_the_dying(group: lz.Group, wait: bool) -> list[Any]:
    """What it is told, how long that took, and what the GPU computes then."""
    x = torch.ones(1 << 20, device=device(group))
    begun_s, reason = time.monotonic(), ""
    try:
        group.all_reduce(x, wait=wait)
        torch.cuda.synchronize(x.device)  # nobody looks at the group meanwhile
        group.synchronize()
    except lz.GroupBroken as exc:
        reason = exc.facts["reason"]
    took_s = time.monotonic() - begun_s
    return [reason, took_s, float((torch.ones(1000, device=x.device) * 2).sum())]


def layer(seed: int, rank: int) -> Any:
    """Attention and a gated MLP of linear layers; the same on all ranks."""
    random = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> Any:
        return (torch.randn(shape, generator=random) / shape[0] ** 0.5).to(torch.device("cuda", rank))

    w_q, w_k, w_v, w_o = (weight(HIDDEN, HIDDEN) for _ in range(4))
    w_gate, w_up, w_down = weight(HIDDEN, INNER), weight(HIDDEN, INNER), weight(INNER, HIDDEN)

    def block(x: Any, ops: Any = lz) -> Any:
        heads = (1, TOKENS, HEADS, HIDDEN // HEADS)
        q, k, v = (ops.matmul(x, w).reshape(heads) for w in (w_q, w_k, w_v))
        if ops is lz:
            mixed = lz.attention(q, k, v, is_causal=True, layout="BSHD")
        else:
            q, k, v = (one.transpose(1, 2) for one in (q, k, v))
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        h = x + ops.matmul(mixed.reshape(TOKENS, HIDDEN), w_o)
        silu = lz.silu if ops is lz else torch.nn.functional.silu
        return h + ops.matmul(silu(ops.matmul(h, w_gate)) * ops.matmul(h, w_up), w_down)

    return block


def split(group: lz.Group) -> list[Any]:
    """A layer as a split plan beside torch's: its phase, weights in parts, calls of all ranks, and where they went."""
    block = layer(0, group.rank)
    plan = lz.split_plan(block, group)
    with torch.no_grad():
        for seed in range(6):
            x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(device(group))
            torch.testing.assert_close(plan(x), block(x, torch), rtol=2e-3, atol=2e-3)
    told = plan.explain()
    return [plan.phase, len(told.weights), len(told.collectives), group.last_report().path]


def split_and_lifted(group: lz.Group) -> list[Any]:
    """A split plan that is one CUDA graph on all ranks: for how many inputs it gives what torch gives, its calls of all
    ranks, and what it says of the graph."""
    block = layer(1, group.rank)
    plan = lz.split_plan(block, group)

    def some(seed: int) -> Any:
        return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(device(group))

    with torch.no_grad():
        settle(group, plan, some(0))
        right = 0
        for seed in range(40):
            x = some(seed)
            torch.testing.assert_close(plan(x), block(x, torch), rtol=2e-3, atol=2e-3)
            right += 1
        results = [plan(some(seed)) for seed in range(4)]  # of a run that is not waited for; nobody overwrites them
        for seed, result in enumerate(results):
            torch.testing.assert_close(result, block(some(seed), torch), rtol=2e-3, atol=2e-3)
    group.synchronize()
    told = plan.explain()
    return [right, [one.partition(", ")[2] for one in told.collectives], told.graph]


def sums_in_a_graph(group: lz.Group, dtype: str, rows: int, sums: int) -> list[Any]:
    """A function with so many sums, as one CUDA graph: in how many runs, on two streams, with arguments that stay where
    they are and others, it gave what its graph with NCCL's sums gives, to the bit; and what it says of them."""
    kind, width, here = getattr(torch, dtype), 256, device(group)
    ups, downs = (
        [(of_rank(9, (width, width), dtype, first + n) - 2).to(here) / 16 for n in range(sums)] for first in (0, 10)
    )

    def function(x: Any) -> Any:
        for up, down in zip(ups, downs, strict=True):
            x = lz.silu(lz.matmul(lz.silu(lz.matmul(x, up)), down))
        return x

    def some(seed: int) -> Any:
        return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(here, kind)

    plan, by_nccl = (lz.split_plan(function, group) for _ in range(2))
    with torch.no_grad():
        with mock.patch.object(one_shot_trial, "_timed", return_value=(1.0, 2.0, "")):  # else it may be NCCL's, too
            settle(group, plan, some(0))
        with mock.patch.object(joint_graph, "tried", return_value=one_shot_trial.Trial(None, "")):
            settle(group, by_nccl, some(0))
        streams, x, same = [torch.cuda.Stream(here) for _ in range(2)], some(1), 0
        for seed in range(60):
            given = some(seed) if seed % 3 else x
            torch.cuda.synchronize(here)
            with torch.cuda.stream(streams[seed % 2]):
                results = [plan(given) for _ in range(4)]
            torch.cuda.synchronize(here)
            right = by_nccl(given)
            assert right.isfinite().all()
            assert right.abs().max() > 0
            for one in results:
                assert torch.equal(one, right), (seed, float((one - right).abs().max()))
            same += len(results)
    return [same, plan.explain().graph]


def settle(group: lz.Group, plan: Any, x: Any) -> None:
    """Until all its runs are one CUDA graph on all ranks."""
    end_s = time.monotonic() + 60
    while True:
        before = plan.explain().replays if plan.phase == "FROZEN" else 0
        for _ in range(30):
            plan(x)
        torch.cuda.synchronize(x.device)
        is_one = plan.explain().replays - before == 30
        here, late = group.all_reduce(np.array([int(is_one), int(time.monotonic() > end_s)]))
        if here == group.size:
            return
        assert not late, str(plan.explain())


def die_in_a_graph(group: lz.Group) -> None:
    """Behind a kernel that takes longer than the test, so that the other rank's graph waits for this one's."""
    plan = one_graph(group)
    group.barrier()
    torch.cuda.set_device(device(group))
    torch.cuda._sleep(LONG_CYCLES)
    with torch.no_grad():
        plan(torch.ones(TOKENS, HIDDEN, device=device(group)))
    os.kill(os.getpid(), signal.SIGKILL)


def replay_beside_the_dying(group: lz.Group) -> list[Any]:
    """What it is told, how long that took, and what the GPU computes then."""
    plan, x = one_graph(group), torch.ones(TOKENS, HIDDEN, device=device(group))
    group.barrier()
    begun_s, reason = time.monotonic(), ""
    with torch.no_grad():
        try:
            plan(x)
            torch.cuda.synchronize(x.device)
            group.synchronize()
        except lz.GroupBroken as exc:
            reason = exc.facts["reason"]
    took_s = time.monotonic() - begun_s
    return [reason, took_s, float((torch.ones(1000, device=x.device) * 2).sum())]


def die_in_a_flood(group: lz.Group, runs: int) -> None:
    """While its GPU, and the other one's, are in the midst of runs."""
    plan = one_graph(group)
    group.barrier()
    with torch.no_grad():
        for _ in range(runs):
            plan(torch.ones(TOKENS, HIDDEN, device=device(group)))
    os.kill(os.getpid(), signal.SIGKILL)


def flood_beside_the_dying(group: lz.Group) -> list[Any]:
    """As `replay_beside_the_dying`, of many runs, none waited for."""
    plan, x, reason = one_graph(group), torch.ones(TOKENS, HIDDEN, device=device(group)), ""
    group.barrier()
    with torch.no_grad():
        while not reason:
            begun_s = time.monotonic()
            try:
                plan(x)
            except lz.GroupBroken as exc:
                reason = exc.facts["reason"]
    torch.cuda.synchronize(x.device)
    took_s = time.monotonic() - begun_s
    return [reason, took_s, float((torch.ones(1000, device=x.device) * 2).sum())]


_kept: dict[str, Any] = {}


def one_graph(group: lz.Group) -> Any:
    """A split plan that is one CUDA graph on all ranks."""
    plan = _kept.setdefault(group.name, lz.split_plan(layer(2, group.rank), group))
    x = torch.ones(TOKENS, HIDDEN, device=device(group))
    with torch.no_grad():
        end_s = time.monotonic() + 60
        while True:
            plan(x)
            here = group.all_reduce(np.array([int(plan.explain().replays > 0 or time.monotonic() > end_s)]))
            if here[0] == group.size:
                assert plan.explain().replays, str(plan.explain())
                return plan


def run_again(group: lz.Group) -> str:
    """The plan of `one_graph` with another rank. What the one before launched last is suspect, and stays in workers."""
    plan = _kept.setdefault(group.name, lz.split_plan(layer(2, group.rank), group))
    with torch.no_grad():
        for seed in range(6):
            x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(device(group))
            torch.testing.assert_close(plan(x), layer(2, group.rank)(x, torch), rtol=2e-3, atol=2e-3)
    return str(plan.phase)
