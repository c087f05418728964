"""Activations as nodes of ONNX and of ONNX Runtime's own domain. Used by onnxruntime.py."""

from __future__ import annotations

from typing import Any

from layerzero.workers.provider import Call
from layerzero.workers.providers._onnx_graph import CONTRIB

_ONE = {"relu": "Relu", "sigmoid": "Sigmoid", "tanh": "Tanh", "hardswish": "HardSwish"}
_GELUS = {"none": "Gelu", "tanh": "FastGelu"}
_GATES = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}
OPS = (*_ONE, "gelu", "silu", "quick_gelu", "mish", *_GATES)


def nodes(helper: Any, call: Call) -> list[Any]:
    """From `x`, and of a gate `w`, to `y`. Constants are attributes: Mish and Gelu are of opsets that the oldest
    supported runtime does not read."""
    approximate = call.attrs.get("approximate", "none")
    if call.op not in _GATES:
        return _activation(helper, call.op, approximate, "x", "y")
    gate = _activation(helper, _GATES[call.op], approximate, "x", "gate")
    return [*gate, helper.make_node("Mul", ["gate", "w"], ["y"])]


def after(helper: Any, activation: str, given: str, made: str = "y") -> list[Any]:
    """From one tensor to another: an activation of linear."""
    op, _, approximate = activation.partition("_")
    return _activation(helper, op, approximate or "none", given, made)


def gated_mlp(helper: Any, activation: str) -> list[Any]:
    """From `x`, by the weights `w` of gate and up and `b` of down, to `y`."""
    return [
        helper.make_node("Gemm", ["x", "w"], ["product"], transB=1),
        helper.make_node("Split", ["product"], ["gate", "up"], axis=-1),
        *after(helper, activation, "gate", "opened"),
        helper.make_node("Mul", ["opened", "up"], ["hidden"]),
        helper.make_node("Gemm", ["hidden", "b"], ["y"], transB=1),
    ]


def _activation(helper: Any, op: str, approximate: str, given: str, made: str) -> list[Any]:
    node = helper.make_node
    if op in _ONE:
        return [node(_ONE[op], [given], [made])]
    if op == "gelu":
        return [node(_GELUS[approximate], [given], [made], domain=CONTRIB)]
    if op == "quick_gelu":
        return [node("QuickGelu", [given], [made], domain=CONTRIB, alpha=1.702)]
    if op == "silu":
        return [node("Sigmoid", [given], ["share"]), node("Mul", [given, "share"], [made])]
    assert op == "mish"
    parts = [node("Softplus", [given], ["soft"]), node("Tanh", ["soft"], ["share"])]
    return [*parts, node("Mul", [given, "share"], [made])]
