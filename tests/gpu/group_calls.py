"""What ranks of a group do with tensors of their own GPUs, told by tests/gpu/test_groups.py."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import torch

import layerzero as lz

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
    """A split plan until no worker has a part in it, on any rank, and then with calls of the group that are not waited
    for: how its calls run, and for how many inputs it gave what torch gives."""
    block = layer(1, group.rank)
    plan = lz.split_plan(block, group)
    with torch.no_grad():
        x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0)).to(device(group))
        end_s, paths = time.monotonic() + 60, set[str]()
        while True:
            for _ in range(30):
                plan(x)
            torch.cuda.synchronize(x.device)
            graphs = [one.graph for one in plan.explain().stretches]
            paths = {path for one in graphs if one is not None and one.is_captured for path in one.calls}
            is_here = all(one is not None and one.is_captured for one in graphs) and paths == {"lifted"}
            word = np.array([int(is_here), int(time.monotonic() > end_s)])
            here, late = group.all_reduce(word)
            if here == group.size or late:
                break
        right = 0
        for seed in range(40):
            x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(device(group))
            found = plan(x)
            torch.testing.assert_close(found, block(x, torch), rtol=2e-3, atol=2e-3)
            right += 1
    group.synchronize()
    return [sorted(paths), right]
