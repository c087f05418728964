"""layerzero.torch.benchmark: layers that get faster are taken over, and no others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.frameworks.torch_cases import random
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

import layerzero as lz
import layerzero.torch as lzt

SLOW_S = 0.02


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    """With one thread: on busy cores torch's threads wait for each other longer than any worker takes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    assert _get_current_function_mode_stack() == []


class Slow(TorchFunctionMode):
    """A torch whose silu takes longer than any of ours, and returns `factor` times its value."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is not F.silu:
            return found
        until_s = time.perf_counter() + SLOW_S
        while time.perf_counter() < until_s:
            pass
        return found * self.factor


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.SiLU(), torch.nn.Softmax(-1)).eval()


def test_what_got_faster_is_taken_over() -> None:
    """And what did not is torch's, with the reason."""
    net, x = model(), random(4, 16)
    expected = net(x)
    with Slow():
        with lzt.benchmark(net, x) as report:
            assert report.acceleration is not None, report
            torch.testing.assert_close(net(x), expected)
            taken = {(line.layer, line.op) for line in report.acceleration.report.lines if line.is_taken}
        assert type(net) is torch.nn.Sequential
    rows = {row.layer: row for row in report.rows}
    assert taken == {("1", "silu")}
    assert rows["1"].why == ""
    assert rows["1"].kernel.endswith(".silu")
    assert rows["0"].why == rows["2"].why == "not faster"
    assert report.after_us < report.before_us
    assert rows["1"].torch_us >= SLOW_S * 1e6 > rows["1"].our_us
    assert report.error < 2e-5
    text = str(report)
    assert "taken over: 1 of 3" in text
    assert max(map(len, text.splitlines())) <= 80
    assert report.to_dict()["rows"][0]["layer"] == "0"


def test_other_results_are_not_taken_over() -> None:
    """However fast they are."""
    net, x = model(), random(4, 16)
    with Slow(factor=1.001):
        report = lzt.benchmark(net, x)
        assert report.acceleration is None
        assert "differs by 1.0e-03" in {row.layer: row for row in report.rows}["1"].why
        assert type(net) is torch.nn.Sequential
        with lzt.benchmark(net, x, tolerance=0.01) as loose:
            assert loose.acceleration is not None


def test_nothing_got_faster() -> None:
    net = model()
    report = lzt.benchmark(net, random(4, 16))
    assert report.acceleration is None
    assert report.why == "no layer got faster"
    assert type(net) is torch.nn.Sequential
    assert "the model stays with torch" in str(report)


def test_layers_are_left_for_other_reasons() -> None:
    """What accelerate would leave is not measured; random numbers go on as if nothing had run."""
    net = torch.nn.Sequential(torch.nn.SiLU(inplace=True)).eval()
    torch.manual_seed(3)
    before = torch.rand(2)
    torch.manual_seed(3)
    with Slow():
        report = lzt.benchmark(net, random(4, 16))
    assert [row.why for row in report.rows] == ["inplace=True"]
    torch.testing.assert_close(torch.rand(2), before)


def test_disabled_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYERZERO_DISABLE", "1")
    report = lzt.benchmark(model(), random(4, 16))
    assert report.acceleration is None
    assert "LAYERZERO_DISABLE" in report.why


def test_wrong_calls_are_told() -> None:
    with pytest.raises(lz.InvalidArgument, match=r"model\.eval\(\)"):
        lzt.benchmark(model().train(), random(4, 16))
    with pytest.raises(lz.InvalidArgument, match="rounds is 0"):
        lzt.benchmark(model(), random(4, 16), rounds=0)
    with pytest.raises(RuntimeError, match="shapes"):
        lzt.benchmark(model(), random(4, 15))
