"""Groups whose arrays are torch's: the other rank is a process of its own, with NumPy's or torch's."""

from __future__ import annotations

import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.frameworks.soft_nccl import ByGloo  # noqa: E402

import layerzero as lz  # noqa: E402
from layerzero.groups import calls, nccl  # noqa: E402
from layerzero.groups.arrays import Given, Result  # noqa: E402

OTHER = """
import sys, torch
import layerzero as lz
lz.connect()
group = lz.group("torch", 1, 2)
for line in sys.stdin:
    op, dtype, kind, count = line.split()
    if op == "split":
        from tests.frameworks.test_torch_groups import split
        split(group)
        continue
    x = torch.full((int(count),), 0.1, dtype=getattr(torch, dtype))
    try:
        getattr(group, op)(x.numpy() if kind == "numpy" else x)
    except lz.RanksDisagree:
        pass
"""


@pytest.fixture(scope="module")
def ranks() -> Iterator[tuple[lz.Group, Any]]:
    lz.connect()
    other = subprocess.Popen([sys.executable, "-c", OTHER], stdin=subprocess.PIPE, text=True)
    with lz.group("torch", 0, 2) as group:
        yield group, other
    other.communicate()


def ask(other: Any, *words: object) -> None:
    other.stdin.write(" ".join(map(str, words)) + "\n")
    other.stdin.flush()


def test_a_call_of_an_nccl_that_was_aborted_is_the_death_that_it_was_for(tmp_path: Path) -> None:
    """As a thread does between what the ranks agree on and the call."""

    class Peers:
        def hear_fault(self, within_s: float) -> None: ...

        def look(self, until_s: float) -> None:
            raise lz.GroupBroken("rank 1 has died")

    made = ByGloo(tmp_path, "group", 1, 0, 0)
    made._connected.add((nccl._ALL, True))
    given = Given(torch.ones(4))
    result = Result(given, (4,), None, may_be_input=False)
    with pytest.raises(lz.GroupBroken, match="rank 1 has died"):
        made.run(Peers(), calls.Call(calls.ALL_REDUCE, 0, 2, given, result, "sum", time.monotonic() + 9))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="a rank has gone"):
        made.add_up(torch.ones(4))


@pytest.mark.parametrize("count", [0, 5, 100_000])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int64"])
def test_sums_of_tensors_are_added_in_float32_and_rounded_once(ranks: Any, dtype: str, count: int) -> None:
    group, other = ranks
    kind = getattr(torch, dtype)
    x = torch.rand(count).to(kind)
    ask(other, "all_reduce", dtype, "torch", count)
    total = group.all_reduce(x)
    assert (total.dtype, total.shape) == (kind, x.shape)
    theirs = torch.full((count,), 0.1, dtype=kind)
    wide = torch.float64 if dtype == "float64" else torch.float32 if kind.is_floating_point else torch.int64
    assert torch.equal(total, (x.to(wide) + theirs.to(wide)).to(kind))


def test_a_rank_of_numpy_in_place_and_what_is_not_meant(ranks: Any) -> None:
    group, other = ranks
    x = torch.ones(6).reshape(2, 3).t()  # strided
    ask(other, "all_gather", "float32", "numpy", 6)
    assert group.all_gather(x.reshape(6)).tolist() == [1.0] * 6 + [pytest.approx(0.1)] * 6
    y = torch.ones(4, dtype=torch.bfloat16)
    ask(other, "all_reduce", "bfloat16", "torch", 4)
    assert group.all_reduce(y, out=y) is y
    ask(other, "all_reduce", "float32", "torch", 3)
    with pytest.raises(lz.InvalidArgument, match=r"requires a gradient, which would end here; pass x.detach\(\)"):
        group.all_reduce(torch.ones(3, requires_grad=True))


class Block(torch.nn.Module):
    """Of a transformer; the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.o = (torch.nn.Linear(32, 32) for _ in range(4))
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def attention(self, x: Any) -> Any:
        q, k, v = (layer(x).view(2, 7, 4, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = lz.attention(q, k, v, is_causal=True).transpose(1, 2)
        return x + self.o(y.reshape(2, 7, 32))

    def mlp(self, x: Any) -> Any:
        return x + self.down(lz.silu(self.up(x)))

    def forward(self, x: Any) -> Any:
        return self.mlp(self.attention(x))


def split(group: lz.Group) -> lz.Group:
    """A module by split plans and as a pipeline, beside itself. By both ranks."""
    block = Block().eval()
    plan, stages = lz.split_plan(block, group), [lambda x: lz.silu(block.up(x)), lambda x: block.down(x) * 2]
    flow = lz.pipeline(stages, group, micro_batches=2)
    with torch.no_grad():
        for seed in range(3):
            x = torch.rand(2, 7, 32, generator=torch.Generator().manual_seed(seed))
            torch.testing.assert_close(plan(x), block(x), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(flow(x), block.down(lz.silu(block.up(x))) * 2, rtol=1e-4, atol=1e-5)
    assert plan.phase == "FROZEN"
    assert len(plan.explain().weights) == 6
    return group


def test_a_module_is_split_over_ranks_and_a_pipeline_of_tensors_gives_tensors(ranks: Any) -> None:
    """Heads by views and transposes; biases, of rows by one rank alone."""
    group, other = ranks
    ask(other, "split", "float32", "torch", 0)
    split(group)


class Waiting:
    """Of Peers, what waits."""

    name, generation, doing = "tp", 1, "call 1"

    def wait_for(self, fds: Any, until_s: float) -> None:
        assert select.select(fds, [], [], until_s - time.monotonic())[0]


def test_what_is_asked_of_nccl_gives_the_same_by_gloo(tmp_path: Path) -> None:
    """Every call of all ranks, with out and without; tests/gpu/test_groups.py has them on GPUs."""
    (tmp_path / "groups").mkdir()
    xs = [torch.arange(8.0).reshape(4, 2) + 10 * rank for rank in range(2)]
    total = xs[0] + xs[1]
    wanted: dict[tuple[str, Any], list[Any]] = {
        ("all_reduce", "sum"): [total, total],
        ("all_reduce", "mean"): [total / 2, total / 2],
        ("all_reduce", "max"): [xs[1], xs[1]],
        ("reduce_scatter", "sum"): [total[:2], total[2:]],
        ("all_gather", ""): [torch.cat(xs)] * 2,
        ("all_to_all", ""): [torch.cat([x[part] for x in xs]) for part in (slice(2), slice(2, 4))],
        ("broadcast", 1): [xs[1], xs[1]],
    }
    found: dict[int, list[Any]] = {}

    def rank(number: int) -> None:
        nccl = ByGloo(tmp_path, "tp", 1, number, 0)
        nccl.start(Waiting(), 2, 0.0)  # type: ignore[arg-type]
        made = []
        for name, detail in wanted:
            op, given = calls.BY_NAME[name], Given(xs[number].clone())
            out = given.keep if name == "broadcast" else None
            result = Result(given, op.result_shape(given.shape, 2), out, may_be_input=op.is_in_place)
            call = calls.Call(op, number, 2, given, result, detail, time.monotonic() + 60)
            copies = nccl.run(Waiting(), call)  # type: ignore[arg-type]
            made.append((result.value, len(copies)))
        found[number] = made

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, made in found.items():
        for (name, _), results, (value, copies) in zip(wanted, wanted.values(), made, strict=True):
            assert torch.equal(value, results[number]), name
            assert copies == (name == "all_reduce")
    assert len(found) == 2
