"""Ops that work element by element, and cat, as nodes of ONNX. Used by onnxruntime.py."""

from __future__ import annotations

from typing import Any

from layerzero.ipc.vocabulary.ops import OPS
from layerzero.workers.provider import Call
from layerzero.workers.providers._onnx_graph import Graph

_NODES = {"add": "Add", "mul": "Mul", "where": "Where", "cat": "Concat", "clamp": "Clip", "cast": "Cast"}
SERVED = tuple(_NODES)


def graph(onnx: Any, numpy: Any, call: Call) -> Graph:
    """One node, and for clamp its bounds, which are constants of the graph."""
    helper = onnx.helper
    given = {n: spec.shape for n, spec in zip(OPS[call.op].inputs, call.inputs, strict=True) if spec is not None}
    names, nodes, attrs = list(given), [], {}
    if call.op == "cat":
        attrs["axis"] = call.attrs["dim"]
    elif call.op == "cast":
        attrs["to"] = helper.np_dtype_to_tensor_dtype(numpy.dtype(call.attrs["dtype"]))
    elif call.op == "clamp":
        dtype = numpy.dtype(call.outputs[0].dtype)
        kind = helper.np_dtype_to_tensor_dtype(dtype)
        for name, none in (("min", -numpy.inf), ("max", numpy.inf)):
            bound = call.attrs[name]
            if bound is None and dtype.kind == "f":  # a bound that is left out is the greatest finite number
                bound = none
            names.append("" if bound is None else name)
            if bound is not None:
                value = helper.make_tensor(name, kind, (), [bound])
                nodes.append(helper.make_node("Constant", [], [name], value=value))
    nodes.append(helper.make_node(_NODES[call.op], names, ["out"], **attrs))
    return Graph(nodes, given, {"out": call.outputs[0].shape})
