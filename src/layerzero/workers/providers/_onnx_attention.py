"""Attention with its log-sum-exp, and its backward pass, as nodes of ONNX. Used by onnxruntime.py and
onnx_reference.py.

Tensors have 5 dimensions here, (batch, key heads, heads of a group, sequence, extent): for memory without gaps, and for
views, that is another shape of the same memory, and grouped heads become MatMul's broadcasting.
"""

from __future__ import annotations

from typing import Any

from layerzero.workers.provider import Call
from layerzero.workers.providers._onnx_graph import Graph, Shape


def forward(onnx: Any, numpy: Any, call: Call) -> Graph:
    """out and lse, float32. A row that sees nothing has 0 and -inf."""
    q, k, v, mask = call.inputs
    made = _Attention(onnx, numpy, call, q, k, v, mask)
    made.weights()
    made.add("MatMul", ["p", "v"], "out")
    made.add("Log", ["total"], "log_total")
    made.add("Add", ["top", "log_total"], "wide_lse")
    made.add("Cast", ["wide_lse"], "lse", to=onnx.TensorProto.FLOAT)
    shapes = {"out": made.shape_of(call.outputs[0].shape), "lse": (*made.rows, 1)}
    return Graph(made.nodes, made.inputs, shapes)


def backward(onnx: Any, numpy: Any, call: Call) -> Graph:
    """grad_q, grad_k and grad_v. The weights are computed anew, and so is sum(grad_out output) = sum(p dp)."""
    grad_out, q, k, v, _, _, mask = call.inputs
    made = _Attention(onnx, numpy, call, q, k, v, mask)
    made.weights()
    assert grad_out is not None
    made.inputs["grad_out"] = made.shape_of(grad_out.shape)
    made.add("Transpose", ["v"], "v_t", perm=[0, 1, 2, 4, 3])
    made.add("MatMul", ["grad_out", "v_t"], "dp")
    made.add("Mul", ["p", "dp"], "p_dp")
    made.add("ReduceSum", ["p_dp", made.constant("last", [-1], "int64")], "mean", keepdims=1)
    made.add("Sub", ["dp", "mean"], "centred")
    made.add("Mul", ["p", "centred"], "unscaled")
    made.add("Mul", ["unscaled", "scale"], "ds")
    made.add("MatMul", ["ds", "k"], "grad_q")
    shapes = {"grad_q": made.inputs["q"]}
    for name, left, right in (("grad_k", "ds", "q"), ("grad_v", "p", "grad_out")):
        made.add("Transpose", [left], f"{left}_t", perm=[0, 1, 2, 4, 3])
        made.add("MatMul", [f"{left}_t", right], f"{name}_of_each")
        made.add("ReduceSum", [f"{name}_of_each", made.constant("groups", [2], "int64")], name, keepdims=1)
        shapes[name] = made.inputs[name[-1]]
    return Graph(made.nodes, made.inputs, shapes)


def causal_rule(numpy: Any, shape: Shape, call: Call) -> Any:
    """What `seen` is: True where a query of (..., queries, keys) sees a key."""
    queries, keys = shape[-2:]
    shift = keys - queries if call.attrs["causal_alignment"] == "bottom_right" else 0
    return numpy.tri(queries, keys, shift, dtype=numpy.bool_).reshape(shape)


class _Attention:
    def __init__(self, onnx: Any, numpy: Any, call: Call, q: Any, k: Any, v: Any, mask: Any) -> None:
        self.onnx, self.numpy, self.call, self.mask, self.dtype = onnx, numpy, call, mask, q.dtype
        self.nodes: list[Any] = []
        self.constants: set[str] = set()
        self.heads, self.kv_heads = q.shape[1], k.shape[1]
        self.inputs = {name: self.shape_of(spec.shape) for name, spec in (("q", q), ("k", k), ("v", v))}
        self.rows = self.inputs["q"][:-1]

    def shape_of(self, shape: Shape) -> Shape:
        """In 5 dimensions."""
        batch, heads, *rest = shape
        group = self.heads // self.kv_heads
        return (batch, self.kv_heads, group, *rest) if heads == self.heads and group > 1 else (batch, heads, 1, *rest)

    def add(self, kind: str, given: list[str], made: str, **attributes: Any) -> None:
        self.nodes.append(self.onnx.helper.make_node(kind, given, [made], **attributes))

    def constant(self, name: str, values: Any, dtype: str = "") -> str:
        if name not in self.constants:
            self.constants.add(name)
            array = self.numpy.array(values, dtype or self.dtype)
            self.add("Constant", [], name, value=self.onnx.numpy_helper.from_array(array))
        return name

    def weights(self) -> None:
        """`p`, which is 0 in rows that see nothing; `top` and `total`, of which log-sum-exp is made."""
        self.add("Transpose", ["k"], "k_t", perm=[0, 1, 2, 4, 3])
        self.add("MatMul", ["q", "k_t"], "products")
        self.add("Mul", ["products", self.constant("scale", self.call.attrs["scale"])], "scaled")
        scores = "scaled"
        seen = ""
        if self.call.attrs["is_causal"]:
            seen = "seen"
            self.inputs[seen] = (1, 1, 1, self.rows[3], self.inputs["k"][3])
        elif self.mask is not None:
            self.inputs["attn_mask"] = self.shape_of(self.mask.shape)
            seen = "attn_mask" if self.mask.dtype == "bool" else ""
            if not seen:
                self.add("Add", ["scaled", "attn_mask"], "scores")
                scores = "scores"
        if seen:
            self.add("Where", [seen, "scaled", self.constant("hidden", -self.numpy.inf)], "scores")
            scores = "scores"
        self.add("ReduceMax", [scores, self.constant("last", [-1], "int64")], "largest", keepdims=1)
        # From the lowest number on: -inf minus -inf is none.
        lowest = self.constant("lowest", self.numpy.finfo(self.dtype).min)
        self.add("Max", ["largest", lowest], "top")
        self.add("Sub", [scores, "top"], "below")
        self.add("Exp", ["below"], "powers")
        self.add("ReduceSum", ["powers", self.constant("last", [-1], "int64")], "total", keepdims=1)
        self.add("Max", ["total", self.constant("one", 1.0)], "divisor")  # it is 1 or more where a key is seen
        self.add("Div", ["powers", "divisor"], "p")
