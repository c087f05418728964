"""When a torch.cuda.CUDAGraph is gone, with stand-ins for torch and the driver."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from layerzero.client.gpu import torch_graphs


class Driver:
    def __init__(self) -> None:
        self.capture: int | None = None

    def capture_id(self, stream: int) -> int | None:
        assert stream == 7
        return self.capture


Fake = tuple[Any, Driver]


@pytest.fixture
def fake() -> Fake:
    class CUDAGraph:
        def __init__(self) -> None:
            self.calls: list[object] = []

        def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
            self.calls.append(("begin", pool, capture_error_mode))

        def capture_end(self) -> None:
            self.calls.append("end")

        def reset(self) -> None:
            self.calls.append("reset")

        def raw_cuda_graph(self) -> int:
            return 1234

    torch_cuda = SimpleNamespace(CUDAGraph=CUDAGraph, current_stream=lambda: SimpleNamespace(cuda_stream=7))
    driver = Driver()
    for _ in range(2):  # more sessions than one may ask for it
        torch_graphs.follow(torch_cuda, driver)  # type: ignore[arg-type]
    return torch_cuda, driver


def captured(fake: Fake, number: int) -> Any:
    torch_cuda, driver = fake
    driver.capture = number
    graph = torch_cuda.CUDAGraph()
    graph.capture_begin("pool", capture_error_mode="relaxed")
    assert graph.calls == [("begin", "pool", "relaxed")]
    return graph


def test_graph_is_known_by_its_capture(fake: Fake) -> None:
    """And others are not."""
    graph = captured(fake, 10001)
    assert torch_graphs.graph_of(10001) is graph
    assert torch_graphs.graph_of(10002) is torch_graphs.graph_of(None) is None


@pytest.mark.parametrize("end", ["del", "reset"])
def test_end_is_told_once(fake: Fake, end: str) -> None:
    """When nobody can replay it any more."""
    told: list[str] = []
    graphs = [captured(fake, 10003)]
    torch_graphs.tell_end(graphs[0], lambda: told.append("one"))
    torch_graphs.tell_end(graphs[0], lambda: told.append("two"))
    gc.collect()
    assert told == []
    if end == "reset":
        graphs[0].reset()
        assert graphs[0].calls[-1] == "reset"
        assert sorted(told) == ["one", "two"]
    graphs.clear()
    gc.collect()
    assert sorted(told) == ["one", "two"]
    assert torch_graphs.graph_of(10003) is None


def test_end_is_not_told_of_a_graph_that_others_may_have_copied(fake: Fake) -> None:
    """What they instantiated may be replayed for ever."""
    told: list[str] = []
    graphs = [captured(fake, 10004)]
    torch_graphs.tell_end(graphs[0], lambda: told.append("one"))
    assert graphs[0].raw_cuda_graph() == 1234
    graphs.clear()
    gc.collect()
    assert told == []


def test_torch_without_such_graphs_is_left_alone() -> None:
    """Its captures are watched by the driver."""
    kind: Callable[[], object] = type("CUDAGraph", (), {})
    torch_graphs.follow(SimpleNamespace(CUDAGraph=kind), Driver())  # type: ignore[arg-type]
    assert not hasattr(kind, "_layerzero_follows")
