"""Traces of programs with torch: modules are scopes, and torch.profiler's own record is on one clock with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import layerzero as lz
from layerzero.client.traces.chrome import merged


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        self.last = Activation()

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.inner(x))


class Activation(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return lz.softmax(lz.silu(x), -1)


def within(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(other["ts"] <= one["ts"] and one["ts"] + one["dur"] <= other["ts"] + other["dur"])


@torch.no_grad()
def test_a_profile_of_torch_and_a_trace_are_one_picture(tmp_path: Path) -> None:
    """Its ops lie in our scopes of their modules, and our calls in its ranges: two clocks, brought together."""
    model, x = Model(), torch.randn(4, 64)
    model(x)
    with profile(activities=[ProfilerActivity.CPU]) as profiled, lz.trace(model) as trace:
        for n in range(3):
            with record_function(f"range {n}"):
                model(x)
    assert [call.scopes for call in trace.calls] == [("Model", "last")] * 6
    assert [[one.call for one in call.sources] for call in trace.calls] == [[], [0], [], [2], [], [4]]
    profiled.export_chrome_trace(str(tmp_path / "torch.json"))
    value = merged(trace.contents, tmp_path / "torch.json")
    json.dumps(value, allow_nan=False)
    slices = [event for event in value["traceEvents"] if event.get("ph") == "X"]
    ranges = [one for one in slices if str(one["name"]).startswith("range ") and one.get("cat") == "user_annotation"]
    calls = [one for one in slices if one.get("cat") == "layerzero"]
    linear = [one for one in slices if one["name"] == "aten::linear"]
    inner = [one for one in slices if one.get("cat") == "layerzero.scope" and str(one["name"]).startswith("inner.")]
    assert (len(ranges), len(calls), len(linear), len(inner)) == (3, 6, 6, 6)
    assert [sum(within(call, one) for one in ranges) for call in calls] == [1] * 6
    assert [sum(within(op, one) for one in inner) for op in linear] == [1] * 6
    assert {one["pid"] for one in calls} == {one["pid"] for one in linear}
