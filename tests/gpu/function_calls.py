"""Functions for tests/gpu/test_functions.py: in an interpreter of the test's own, LZ_TEST_INTERPRETER, which sees what
this one has installed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import layerzero as lz

GPU = lz.env("gpu", from_interpreter=os.environ.get("LZ_TEST_INTERPRETER", "/nowhere"))
PAIR = lz.env("gpu-pair", from_interpreter=os.environ.get("LZ_TEST_INTERPRETER", "/nowhere"), workers=2)


@lz.isolated(GPU)
def place() -> int:
    return os.getpid()


@lz.isolated(GPU)
def described(*arrays: Any) -> list[Any]:
    return [
        (type(one).__module__.partition(".")[0], str(one.device), str(one.dtype), list(one.shape)) for one in arrays
    ]


@lz.isolated(GPU)
def scaled(x: Any, factor: float = 2.0) -> Any:
    return x * factor


@lz.isolated(GPU)
def cube(x: Any) -> Any:
    return x * x * x


@lz.isolated(GPU)
def cube_backward(grad: Any, x: Any) -> Any:
    return 3 * x * x * grad


@lz.isolated(GPU)
def total(x: Any) -> float:
    return float(x.sum())


@lz.isolated(GPU)
def parts(x: Any, y: Any, note: str) -> dict[str, Any]:
    return {"sum": x + y, "both": (x.t(), [y[1:], note]), "on_cpu": x.cpu(), "none": None, "empty": x[:0]}


@lz.isolated(GPU)
def same(x: Any) -> Any:
    return x


@lz.isolated(GPU)
def busy(x: Any, cycles: int) -> Any:
    import torch

    torch.cuda._sleep(cycles)
    return x * 2


def like(x: Any, *_: Any) -> Any:
    return x.shape, x.dtype


@lz.isolated(GPU, shapes=like)
def into(x: Any, *, out: Any) -> Any:
    import torch

    return torch.mul(x, 3, out=out)


@lz.isolated(GPU)
def written(x: Any) -> None:
    x.add_(1)


@lz.isolated(GPU)
def made_there() -> Any:
    import torch

    return torch.ones(3, device="cuda")


@lz.isolated(GPU)
def strike(x: Any) -> Any:
    """Its kernel reads where it must not: an index outside, which torch's kernels assert."""
    index = (x[:1] * 0 + (1 << 40)).long()
    return x[index]


@lz.isolated(GPU)
def leave(x: Any) -> None:
    os._exit(5)


@lz.isolated(GPU, timeout_s=2)
def endless(x: Any) -> Any:
    while True:
        x = x * 1


@lz.isolated(GPU)
class Counter:
    """State on the GPU."""

    def __init__(self, first: Any) -> None:
        self.sum = first

    def add(self, x: Any) -> None:
        self.sum = self.sum + x

    def mean(self) -> float:
        return float(self.sum.mean())

    def sums(self, x: Any) -> Any:
        return self.sum + 0 * x


@lz.isolated(GPU)
def rows(x: Any) -> Iterator[Any]:
    for row in x:
        yield row.cpu()


@lz.isolated(GPU)
def steps(x: Any, count: int) -> Iterator[Any]:
    for _ in range(count):
        x = x + 1
        yield x


@lz.isolated(PAIR)
def spread(x: Any) -> tuple[Any, int]:
    return x + 1, os.getpid()


@lz.isolated(GPU)
def struck(x: Any, y: Any = None) -> Any:
    """Ends its process where the first number is 13, and loses the GPU where it is 14."""
    import torch

    first = float(x.flatten()[0])
    if first == 13:
        os._exit(3)
    if first == 14:
        x.new_zeros(4)[torch.full((1,), 1 << 20, device=x.device)] += 1
        torch.cuda.synchronize()
    return x * 2 if y is None else (x * 2, float(y[0]))
