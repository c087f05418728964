"""Attention with its log-sum-exp, and its backward pass, as nodes of ONNX. Used by onnxruntime.py and
onnx_reference.py.

Tensors have 5 dimensions here, (batch, key heads, heads of a group, sequence, extent): for memory without gaps, and for
views, that is another shape of the same memory, and grouped heads become MatMul's broadcasting.
"""

from __future__ import annotations

from typing import Any

from layerzero.ipc.vocabulary.ops import MERGE_INPUTS
from layerzero.workers.provider import Call
from layerzero.workers.providers._onnx_graph import Graph, Shape


def forward(onnx: Any, numpy: Any, call: Call) -> Graph:
    """out and lse, float32. A row that sees nothing has 0 and -inf."""
    made = _Attention(onnx, numpy, call, *call.inputs)
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
    made = _Attention(onnx, numpy, call, q, k, v, mask, None, None)
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


def merge(onnx: Any, numpy: Any, call: Call) -> Graph:
    """out and lse of two to four parts. What has no weight may hold anything."""
    names = [name for name, spec in zip(MERGE_INPUTS, call.inputs, strict=True) if spec is not None]
    outs, sums = names[::2], names[1::2]
    shape = call.outputs[0].shape
    nodes: list[Any] = []

    def after(kind: str, given: list[str], made: str) -> str:
        nodes.append(onnx.helper.make_node(kind, given, [made]))
        return made

    for name, value in (("lowest", numpy.finfo(numpy.float32).min), ("one", 1.0), ("zero", 0.0)):
        tensor = onnx.numpy_helper.from_array(numpy.array(value, numpy.float32))
        nodes.append(onnx.helper.make_node("Constant", [], [name], value=tensor))
    after("Max", [*sums, "lowest"], "top")  # from the lowest number on: -inf minus -inf is none
    weights = [after("Exp", [after("Sub", [one, "top"], f"{one}_below")], f"{one}_weight") for one in sums]
    after("Sum", weights, "total")
    after("Add", ["top", after("Log", ["total"], "log_total")], "lse")
    after("Max", ["total", "one"], "divisor")  # it is 1 or more where there is a key
    parts = []
    for out, weight in zip(outs, weights, strict=True):
        seen = after("Greater", [weight, "zero"], f"{out}_seen")
        kept = after("Where", [seen, out, "zero"], f"{out}_kept")
        parts.append(after("Mul", [kept, after("Div", [weight, "divisor"], f"{out}_share")], f"{out}_part"))
    after("Sum", parts, "out")
    rows = (*shape[:-1], 1)
    shapes = {name: rows if name in sums else shape for name in names}
    return Graph(nodes, shapes, {"out": shape, "lse": rows})


def constant_input(numpy: Any, name: str, shape: Shape, dtype: str, call: Call) -> Any:
    """What an input of the graph is that no argument is. `seen`: True where a query of (..., queries, keys) sees a key
    by the causal rule and by windows; `distance`: from the place of a query to a key; `block_of_query`, `block_of_key`:
    the block of the mask that each is in."""
    if name in _BLOCKS:
        return numpy.arange(shape[0], dtype=dtype) // call.attrs[_BLOCKS[name]]
    queries, keys = shape[-2:]
    shift = keys - queries if call.attrs["causal_alignment"] == "bottom_right" else 0
    distance = numpy.arange(keys) - numpy.arange(queries)[:, None] - shift
    if name == "distance":
        return numpy.abs(distance).astype(dtype).reshape(shape)
    left, right = call.attrs.get("window_left"), 0 if call.attrs["is_causal"] else call.attrs.get("window_right")
    seen = numpy.ones((queries, keys), numpy.bool_)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    return seen.reshape(shape)


_BLOCKS = {"block_of_query": "mask_block_q", "block_of_key": "mask_block_k"}
CONSTANT_INPUTS = {
    "seen": "bool",
    "distance": "",
    **dict.fromkeys(_BLOCKS, "int64"),
}  # and their dtypes; "" for that of the data


class _Attention:
    def __init__(self, onnx: Any, numpy: Any, call: Call, *given: Any) -> None:
        q, k, v, self.mask, self.sinks, self.slopes = given
        self.onnx, self.numpy, self.call, self.dtype = onnx, numpy, call, q.dtype
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

    def after(self, kind: str, given: list[str], made: str, **attributes: Any) -> str:
        """What `add` has made."""
        self.add(kind, given, made, **attributes)
        return made

    def hidden(self, seen: str, scores: str, made: str) -> str:
        """Scores, and -inf where `seen` is False."""
        return self.after("Where", [seen, scores, self.constant("hidden", -self.numpy.inf)], made)

    @property
    def element(self) -> Any:
        return self.onnx.helper.np_dtype_to_tensor_dtype(self.numpy.dtype(self.dtype))

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
        cap, attrs = self.call.attrs.get("softcap"), self.call.attrs
        if cap is not None:
            bound = self.constant("softcap", cap)
            scores = self.after("Tanh", [self.after("Div", [scores, bound], "inner")], "turned")
            scores = self.after("Mul", [scores, bound], "capped")
        keys = self.inputs["k"][3]
        if self.slopes is not None:
            self.inputs["alibi_slopes"] = self.shape_of((*self.slopes.shape, 1, 1))
            self.inputs["distance"] = (1, 1, 1, self.rows[3], keys)
            slopes = self.after("Cast", ["alibi_slopes"], "slopes", to=self.element)
            scores = self.after("Sub", [scores, self.after("Mul", [slopes, "distance"], "bias")], "biased")
        if self.mask is not None:
            self.inputs["attn_mask"] = self.shape_of(self.mask.shape)
            mask = "attn_mask"
            for axis, (name, extent) in enumerate(zip(_BLOCKS, (self.rows[3], keys), strict=True), 3):
                if _BLOCKS[name] in attrs and self.inputs["attn_mask"][axis] > 1:
                    self.inputs[name] = (extent,)
                    mask = self.after("Gather", [mask, name], f"of_{name}", axis=axis)
            if self.mask.dtype != "bool":
                scores = self.after("Add", [scores, mask], "masked")
            else:
                scores = self.hidden(mask, scores, "masked")
        if attrs["is_causal"] or "window_left" in attrs or "window_right" in attrs:
            self.inputs["seen"] = (1, 1, 1, self.rows[3], keys)
            scores = self.hidden("seen", scores, "scores")
        self.add("ReduceMax", [scores, self.constant("last", [-1], "int64")], "largest", keepdims=1)
        # From the lowest number on: -inf minus -inf is none.
        lowest = self.constant("lowest", self.numpy.finfo(self.dtype).min)
        if self.sinks is not None:
            self.inputs["sinks"] = self.shape_of((1, self.heads, 1, 1))
        self.add("Max", ["largest", lowest, *(["sinks"] if self.sinks is not None else [])], "top")
        self.add("Sub", [scores, "top"], "below")
        self.add("Exp", ["below"], "powers")
        of_keys = "total" if self.sinks is None else "of_keys"
        self.add("ReduceSum", ["powers", self.constant("last", [-1], "int64")], of_keys, keepdims=1)
        if self.sinks is not None:
            power = self.after("Exp", [self.after("Sub", ["sinks", "top"], "sinks_below")], "power")
            self.add("Add", ["of_keys", power], "total")
        # It is 1 or more where a key is seen. The runtime's Max leaves NaN out, which a sink may be.
        one = self.constant("one", 1.0)
        self.add("Where", [self.after("Less", ["total", one], "sees_none"), one, "total"], "divisor")
        self.add("Div", ["powers", "divisor"], "p")
