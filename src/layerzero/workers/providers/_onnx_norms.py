"""Norms of channels as nodes of ONNX. Used by onnxruntime.py.

The runtime's own kernels multiply x and a mean by one factor and subtract then, which loses the digits of a large mean
(1.18.1): they get what it was subtracted from already."""

from __future__ import annotations

import math
from typing import Any

from layerzero.workers.provider import Call
from layerzero.workers.providers import _onnx_activations
from layerzero.workers.providers._onnx_graph import CONTRIB, Graph, Shape


def group_norm(onnx: Any, numpy: Any, call: Call) -> Graph:
    """x as (batch, groups, elements of one); of instance_norm each channel is a group."""
    x, weight, bias = call.inputs
    assert x is not None
    made = _Norm(onnx, numpy)
    batch, channels, size = x.shape[0], x.shape[1], math.prod(x.shape[2:])
    groups = call.attrs.get("num_groups", channels)
    last = made.constant("last", [-1], "int64")
    made.add("ReduceMean", ["x", last], "mean", keepdims=1)
    made.add("Sub", ["x", "mean"], "centred")
    plain = [made.constant("ones", [1.0] * groups, "float32"), made.constant("zeros", [0.0] * groups, "float32")]
    made.add("InstanceNormalization", ["centred", *plain], "normalized", epsilon=call.attrs["eps"])
    made.add("Reshape", ["normalized", made.constant("shape", [0, channels, -1], "int64")], "found")
    inputs: dict[str, Shape] = {"x": (batch, groups, channels // groups * size)}
    found = "found"
    for name, node, spec in (("weight", "Mul", weight), ("bias", "Add", bias)):
        if spec is not None:
            inputs[name] = (channels, 1)
            made.add(node, [found, name], f"with_{name}")
            found = f"with_{name}"
    if "activation" in call.attrs:
        made.nodes += _onnx_activations.after(onnx.helper, call.attrs["activation"], found, "out")
    else:
        made.add("Identity", [found], "out")
    return Graph(made.nodes, inputs, {"out": (batch, channels, size)})


def add_rms_norm(onnx: Any, numpy: Any, call: Call) -> Graph:
    """x and residual as rows. A node of the runtime's own, not of ONNX."""
    x, _, _ = call.inputs
    assert x is not None
    made = _Norm(onnx, numpy)
    columns = math.prod(x.shape[x.ndim - call.attrs["ndim"] :])
    names, found = ["x", "residual", "weight"], ["out", "", "", "summed"]
    kind, eps = "SkipSimplifiedLayerNormalization", call.attrs["eps"]
    node = onnx.helper.make_node(kind, names, found, domain=CONTRIB, epsilon=eps)
    made.nodes.append(node)
    rows: Shape = (x.numel // columns, columns)
    return Graph(made.nodes, {"x": rows, "residual": rows, "weight": (columns,)}, {"out": rows, "summed": rows})


def batch_norm(onnx: Any, numpy: Any, call: Call) -> Graph:
    """x as (batch, channels, elements of one)."""
    x, _, _, weight, bias = call.inputs
    assert x is not None
    made = _Norm(onnx, numpy)
    batch, channels, size = x.shape[0], x.shape[1], math.prod(x.shape[2:])
    made.add("Sub", ["x", "running_mean"], "centred")
    ones, zeros = (
        made.constant(name, [value] * channels, "float32") for name, value in (("ones", 1.0), ("zeros", 0.0))
    )
    factors = ["weight" if weight is not None else ones, "bias" if bias is not None else zeros]
    made.add("BatchNormalization", ["centred", *factors, zeros, "running_var"], "out", epsilon=call.attrs["eps"])
    inputs: dict[str, Shape] = {"x": (batch, channels, size), "running_mean": (channels, 1), "running_var": (channels,)}
    inputs |= {name: (channels,) for name, spec in (("weight", weight), ("bias", bias)) if spec is not None}
    return Graph(made.nodes, inputs, {"out": (batch, channels, size)})


class _Norm:
    """Nodes, in order."""

    def __init__(self, onnx: Any, numpy: Any) -> None:
        self.onnx, self.numpy = onnx, numpy
        self.nodes: list[Any] = []

    def add(self, kind: str, inputs: list[str], output: str, **attrs: Any) -> None:
        self.nodes.append(self.onnx.helper.make_node(kind, inputs, [output], **attrs))

    def constant(self, name: str, values: list[Any], dtype: str) -> str:
        tensor = self.onnx.numpy_helper.from_array(self.numpy.array(values, dtype), name)
        self.nodes.append(self.onnx.helper.make_node("Constant", [], [name], value=tensor))
        return name
