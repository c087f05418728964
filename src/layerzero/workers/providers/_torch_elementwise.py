"""Ops that work element by element, and cat, by torch, on every device. Used by torch_cpu.py, torch_cuda.py and
_torch_staged.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from layerzero.workers.provider import Call
from layerzero.workers.providers._torch_ops import Builder, Run


def builders(torch: Any) -> Mapping[str, Builder]:
    """By name of the op. All write any strides themselves."""

    def add(views: Sequence[Any], call: Call) -> Run:
        return lambda out: torch.add(*views, out=out)

    def mul(views: Sequence[Any], call: Call) -> Run:
        return lambda out: torch.mul(*views, out=out)

    def clamp(views: Sequence[Any], call: Call) -> Run:
        (x,), low, high = views, call.attrs["min"], call.attrs["max"]
        return lambda out: torch.clamp(x, low, high, out=out)

    def where(views: Sequence[Any], call: Call) -> Run:
        return lambda out: torch.where(*views, out=out)

    def cat(views: Sequence[Any], call: Call) -> Run:
        given, dim = [view for view in views if view is not None], call.attrs["dim"]
        return lambda out: torch.cat(given, dim, out=out)

    def cast(views: Sequence[Any], call: Call) -> Run:
        (x,) = views
        return lambda out: out.copy_(x)

    return {"add": add, "mul": mul, "clamp": clamp, "where": where, "cat": cat, "cast": cast}
