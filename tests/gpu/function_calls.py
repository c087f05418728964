"""Functions for tests/gpu/test_functions.py and test_function_device.py: in an interpreter of the tests' own,
LZ_TEST_INTERPRETER, which sees what this one has installed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
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


@lz.isolated(GPU, device="cuda")
def load(count: int, value: float, dtype: str = "float32") -> Any:
    import torch

    return torch.full((count,), value, dtype=getattr(torch, dtype), device="cuda")


@lz.isolated(GPU, device="cuda")
def stored(count: int, value: float, cycles: int) -> Any:
    """Its stream is busy for a while first."""
    import torch

    torch.cuda._sleep(cycles)
    return torch.full((count,), value, device="cuda")


@lz.isolated(GPU, device="cuda")
def draw(prompt: str) -> Any:
    """Numbers and arrays of the CPU are beside what is on the GPU."""
    import torch

    image = torch.tensor(list(prompt.encode()), device="cuda").view(1, -1).expand(3, -1)
    return {"image": image, "half": image.half() / 2, "size": image.shape[1], "on_cpu": image.cpu()}


@lz.isolated(GPU, device="cuda")
def pages(count: int) -> Iterator[Any]:
    import torch

    for number in range(count):
        yield torch.arange(number + 1.0, device="cuda") if number % 3 else {"number": number}


@lz.isolated(GPU, device="cuda")
async def later(value: float) -> Any:
    import torch

    return torch.full((4,), value, device="cuda")


@lz.isolated(GPU, device="cuda", idempotent=True)
def survives(path: str) -> Any:
    """Ends its process the first time."""
    import torch

    if not Path(path).exists():
        Path(path).touch()
        os._exit(3)
    return torch.ones(3, device="cuda")


@lz.isolated(GPU, device="cuda", process="own")
class Net:
    """State on the GPU that is made there."""

    def __init__(self, width: int) -> None:
        import torch

        self.weights = torch.arange(float(width), device="cuda")

    def run(self, value: float) -> Any:
        self.weights = self.weights + value
        return self.weights

    def rows(self, count: int) -> Iterator[Any]:
        for number in range(count):
            yield self.weights * number

    def pid(self) -> int:
        return os.getpid()


def like_many(count: int, *_: Any) -> Any:
    return (count,), "float32"


@lz.isolated(GPU, shapes=like_many, device="cuda")
def filled(count: int, value: float, *, out: Any) -> Any:
    return out.fill_(value)


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
