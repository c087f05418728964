"""Groups whose arrays are torch's: the other rank is a process of its own, with NumPy's or torch's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import layerzero as lz  # noqa: E402

OTHER = """
import sys, torch
import layerzero as lz
lz.connect()
group = lz.group("torch", 1, 2)
for line in sys.stdin:
    op, dtype, kind, count = line.split()
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
