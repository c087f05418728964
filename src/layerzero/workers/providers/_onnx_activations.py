"""Activations as nodes of ONNX and of ONNX Runtime's own domain. Used by onnxruntime.py."""

from __future__ import annotations

from typing import Any

from layerzero.workers.provider import Call
from layerzero.workers.providers._onnx_graph import CONTRIB

_ONE = {"relu": "Relu", "sigmoid": "Sigmoid", "tanh": "Tanh", "hardswish": "HardSwish"}
_GATES = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}
OPS = (*_ONE, "gelu", "silu", "quick_gelu", "mish", *_GATES)


def nodes(helper: Any, call: Call) -> list[Any]:
    """From `x`, and of a gate `w`, to `y`. Constants are attributes: Mish and Gelu are of opsets that the oldest
    supported runtime does not read."""
    if call.op not in _GATES:
        return _activation(helper, call, call.op, "y")
    return [*_activation(helper, call, _GATES[call.op], "gate"), helper.make_node("Mul", ["gate", "w"], ["y"])]


def _activation(helper: Any, call: Call, op: str, made: str) -> list[Any]:
    node = helper.make_node
    if op in _ONE:
        return [node(_ONE[op], ["x"], [made])]
    if op == "gelu":
        name = {"none": "Gelu", "tanh": "FastGelu"}[call.attrs["approximate"]]
        return [node(name, ["x"], [made], domain=CONTRIB)]
    if op == "quick_gelu":
        return [node("QuickGelu", ["x"], [made], domain=CONTRIB, alpha=1.702)]
    if op == "silu":
        return [node("Sigmoid", ["x"], ["share"]), node("Mul", ["x", "share"], [made])]
    assert op == "mish"
    parts = [node("Softplus", ["x"], ["soft"]), node("Tanh", ["soft"], ["share"])]
    return [*parts, node("Mul", ["x", "share"], [made])]
