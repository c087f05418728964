"""What two ranks of a group send to each other, and have go through pipelines, told by tests/gpu/test_groups.py; and by
tests/frameworks/test_torch_points.py, where gloo on the CPU is in NCCL's place."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from tests.gpu import group_calls
from tests.gpu.group_calls import DTYPES, HIDDEN, INNER, LONG_CYCLES, of_rank, same

import layerzero as lz
from layerzero.groups import points

BIG = 1 << 20


def device(group: lz.Group) -> torch.device:
    """Its GPU, which is torch's current one from then on, as programs have it."""
    where = group_calls.device(group)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    return where


@contextlib.contextmanager
def on_a_stream(group: lz.Group) -> Iterator[None]:
    """Of the caller's own."""
    with torch.cuda.stream(torch.cuda.Stream(device(group))):
        yield


# --- from one to the other


def pass_on(group: lz.Group, rows: int) -> list[str]:
    """Arrays of every dtype, either way, beside what the other has: new ones, out=, strided and of no dimension."""
    done = []
    for seed, dtype in enumerate(DTYPES):
        xs = [of_rank(rank, (rows, 3), dtype, seed) for rank in range(2)]
        x, theirs = xs[group.rank].to(device(group)), xs[1 - group.rank]
        one = of_rank(7, (), dtype, seed).to(device(group))
        for wait in (True, False):
            for source in range(2):
                if group.rank == source:
                    for given in (x, x.t(), x[::2], x, one):
                        group.send(given, 1 - source, wait=wait)
                    continue
                found = [group.recv(source, kind="torch", wait=wait) for _ in range(3)]
                out = torch.empty_like(x)
                assert group.recv(source, out=out, wait=wait) is out
                found += [out, group.recv(source, kind="torch", wait=wait)]
                group.synchronize()
                for got, right in zip(found, (theirs, theirs.t(), theirs[::2], theirs, one.cpu()), strict=True):
                    assert got.device == x.device
                    same(got, right)
            report = group.last_report()
            assert (report.path, report.choice.op) == ("nccl", ("recv", "send")[group.rank])
        done.append(dtype)
    group.synchronize()
    return done


def write_over(group: lz.Group, count: int) -> bool:
    """What was sent is written over at once, and what was received is taken at once, on the same stream; nobody
    waits."""
    with on_a_stream(group):
        x, right = torch.empty(BIG, device=device(group)), []
        for number in range(count):
            if group.rank == 0:
                x.fill_(number)
                group.send(x, 1, wait=False)
                x.fill_(-1)
            else:
                group.recv(0, out=x, wait=False)
                right.append((x == number).all())
                x.fill_(-1)
        group.synchronize()
        return bool(torch.stack(right).all()) if right else True


def mixed(group: lz.Group, count: int) -> float:
    """Calls of both ranks and from one to the other, in turns, on a stream; nobody waits."""
    with on_a_stream(group):
        x = torch.full((BIG,), float(group.rank + 1), device=device(group))
        for _ in range(count):
            x = group.all_reduce(x, wait=False) / 3
            if group.rank == 0:
                group.send(x + 1, 1, wait=False)
                x = group.recv(1, kind="torch", wait=False)
            else:
                y = group.recv(0, kind="torch", wait=False)
                group.send(x + 1, 0, wait=False)
                x = y
            x = x * (group.rank + 1) / 2
        group.synchronize()
        return float(x.mean())


def point(group: lz.Group, sends: bool, where: str, shape: list[int], out: str = "", kind: str = "torch") -> list[str]:
    """One of arrays that may not fit, of the GPU "here", or NumPy's; of which kind is what came of it."""
    if sends:
        ones = torch.ones(shape, device=device(group)) if where == "here" else np.ones(shape, np.float32)
        group.send(ones, 1 - group.rank)
        return []
    target = {"": None, "here": torch.zeros(shape, device=device(group)), "numpy": np.zeros(shape, np.float32)}[out]
    found = group.recv(1 - group.rank, out=target, kind=kind)
    assert float(found.sum()) == math.prod(shape)
    return [type(found).__name__]


def point_on(group: lz.Group, sends: bool, on: int) -> None:
    """Of both ranks on one GPU."""
    x = torch.ones(3, device=torch.device("cuda", on))
    if sends:
        group.send(x, 1 - group.rank)
    else:
        group.recv(1 - group.rank, out=x)


def exchange(group: lz.Group) -> float:
    """Either way, of as many as those that die have."""
    x = torch.ones(BIG, device=device(group))
    if group.rank == 0:
        group.send(x, 1)
        return float(group.recv(1, kind="torch").sum())
    found = group.recv(0, kind="torch")
    group.send(x, 0)
    return float(found.sum())


def in_inference_mode(group: lz.Group) -> list[float]:
    """The first call, which another thread of the process enqueues."""
    with torch.inference_mode():
        x = torch.ones(5, device=device(group))
        out = torch.zeros(5, device=device(group))
        group.all_reduce(x, out=out)
        if group.rank == 0:
            group.send(x + out, 1)
        else:
            group.recv(0, out=x)
        return [float(out.sum()), float(x.sum())]


def die_in(group: lz.Group, what: str) -> None:
    """Once the other rank's GPU waits for this one's, which has something else to do for longer than the test takes; or
    in place of a call that the other is in."""
    if what == "gpu":
        torch.cuda.set_device(device(group))
        torch.cuda._sleep(LONG_CYCLES)
        group.send(torch.ones(BIG, device=device(group)), 0, wait=False)
    os.kill(os.getpid(), signal.SIGKILL)


def die_when_it_was_accepted(group: lz.Group) -> None:
    """By the other one, which is in its part of the call then."""
    points.pass_agreed = lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    group.send(torch.ones(BIG, device=device(group)), 0)


def send_what_ends_a_gradient(group: lz.Group) -> None:
    group.send(torch.ones(4, device=device(group), requires_grad=True), 1 - group.rank)


def receive_from_the_dying(group: lz.Group, wait: bool) -> list[Any]:
    """What it is told, how long that took, and what the GPU computes then."""
    begun_s, reason = time.monotonic(), ""
    try:
        group.recv(1, kind="torch", wait=wait)
        group.synchronize()
    except lz.GroupBroken as exc:
        reason = exc.facts["reason"]
    took_s = time.monotonic() - begun_s
    return [reason, took_s, float((torch.ones(1000, device=device(group)) * 2).sum())]


# --- pipelines


class Stage(torch.nn.Module):
    """The same on all ranks, by torch alone or by lz."""

    def __init__(self, seed: int, ops: str) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.is_lz = ops == "lz"
        self.up = torch.nn.Parameter(torch.randn(HIDDEN, INNER, generator=random) / HIDDEN**0.5)
        self.down = torch.nn.Parameter(torch.randn(INNER, HIDDEN, generator=random) / INNER**0.5)

    def forward(self, x: Any, before: Any = None) -> Any:
        """Two arrays go on, of which one is what came in."""
        x = x if before is None else x + before
        if self.is_lz:
            return x, lz.matmul(lz.silu(lz.matmul(x, self.up)), self.down)
        return x, torch.nn.functional.silu(x @ self.up) @ self.down


def flow(
    group: lz.Group, stages: int, micro_batches: int, ops: str, runs: int, rows: int = 8, shares: bool = True
) -> list[Any]:
    """A pipeline beside its stages one after the other in this process: whether this rank got the result, and how."""
    where = device(group)
    modules = [Stage(number, ops).to(where).eval().requires_grad_(False) for number in range(stages)]
    right_ones = [Stage(number, "torch").to(where).eval().requires_grad_(False) for number in range(stages)]
    own = [one if number % group.size == group.rank else None for number, one in enumerate(modules)]
    made = lz.pipeline(own, group, micro_batches=micro_batches, shares_result=shares)
    got = False
    with torch.no_grad(), on_a_stream(group):
        for seed in range(runs):
            x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(where)
            found = made(x)
            got = found is not None
            if got:
                parts = []
                for part in x.chunk(micro_batches):
                    value: Any = (part,)
                    for stage in right_ones:
                        value = stage(*value)
                    parts.append(value)
                for one, right in zip(found, (torch.cat(whole) for whole in zip(*parts, strict=True)), strict=True):
                    assert one.device == x.device
                    torch.testing.assert_close(one, right, rtol=2e-3, atol=2e-3)
    return [got, str(made.explain()).splitlines()[0]]


def uneven_flow(group: lz.Group, of_the_cpu: bool) -> str:
    """A stage that gives other shapes in its third run, of which both ranks know already what they are; or arrays of
    the CPU."""
    runs = iter(range(100))

    def first(x: Any) -> Any:
        if next(runs) < 4:
            return x
        return x.cpu().numpy() if of_the_cpu else x[:1]

    made = lz.pipeline([first, lambda x: x * 2], group, micro_batches=2)
    x = torch.ones(4, HIDDEN, device=device(group))
    for _ in range(2):
        assert float(made(x).sum()) == 2.0 * x.numel()
    made(x)
    return "went"


def flow_of_the_dying(group: lz.Group, at: int) -> None:
    """Two stages; the second one's rank dies in its `at`-th micro-batch, if that is not 0."""
    calls = iter(range(1, 100))

    def last(x: Any) -> Any:
        if next(calls) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return x + 1

    made = lz.pipeline([lambda x: x * 2, last], group, micro_batches=2)
    x = torch.ones(4, BIG, device=device(group))
    for _ in range(3):
        assert float(made(x).sum()) == 3.0 * x.numel()


def mismatched_flow(group: lz.Group) -> None:
    """Of a GPU's arrays on one rank, of the CPU's on the other."""
    where = device(group) if group.rank == 0 else torch.device("cpu")
    x = torch.ones(4, HIDDEN, device=where)
    lz.pipeline([lambda x: x * 2, lambda x: x + 1], group, micro_batches=2)(x if group.rank == 0 else x.numpy())
