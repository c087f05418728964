"""Rotary position embedding as nodes of the runtime's own. Used by onnxruntime.py."""

from __future__ import annotations

from typing import Any

from layerzero.ipc.vocabulary.ops import OPS
from layerzero.workers.provider import Call
from layerzero.workers.providers._onnx_graph import CONTRIB, Graph, Shape


def graph(onnx: Any, numpy: Any, call: Call) -> Graph:
    """rope and rope_qk, a node for each of their results. A node's rows of cos and sin are those of one sequence: of
    tables for each batch all tokens are one."""
    *tensors, cos, _ = call.inputs
    assert cos is not None
    batches, sequence, pairs = cos.shape
    helper = onnx.helper
    first = onnx.numpy_helper.from_array(numpy.zeros(1, "int64"), "first")
    nodes = [helper.make_node("Constant", [], ["first"], value=first)]
    inputs: dict[str, Shape] = {}
    outputs: dict[str, Shape] = {}
    op = OPS[call.op]
    for name, made, x in zip(op.inputs, op.outputs, tensors, strict=False):
        assert x is not None
        batch, _, heads, dim = x.shape
        rows = (1, batch * sequence) if batches > 1 else (batch, sequence)
        inputs[name] = outputs[made] = (*rows, heads * dim)
        attrs = {"num_heads": heads, "rotary_embedding_dim": 2 * pairs, "interleaved": int(call.attrs["interleaved"])}
        given = [name, "first", "cos", "sin"]
        nodes.append(helper.make_node("RotaryEmbedding", given, [made], domain=CONTRIB, **attrs))
    inputs |= dict.fromkeys(("cos", "sin"), (batches * sequence, pairs))
    return Graph(nodes, inputs, outputs)
