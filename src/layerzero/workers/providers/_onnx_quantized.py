"""Ops on quantized numbers, as nodes of ONNX. Used by onnxruntime.py.

On CPUs with AVX2 alone the runtime adds products of uint8 and int8 up in pairs of 16 bits, which saturate: 255 * 127 *
2 is 32767 (1.18.1; its option session.x64quantprecision changes nothing about that). It has them exact of two int8 and
of two uint8, so what differs from the other one is moved by 128 first, and its zero point with it.
"""

from __future__ import annotations

from typing import Any

from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.workers.provider import Call
from layerzero.workers.providers._onnx_graph import CONTRIB, Graph, Shape

POINTS, SHIFTS = "points", "shifts"  # constants of packed_linear
_RANGES = {"int8": (-128, 127), "uint8": (0, 255)}


class _Nodes:
    """Nodes one after the other; each method adds one and gives the name of its result."""

    def __init__(self, onnx: Any, numpy: Any) -> None:
        self.onnx = onnx
        self.numpy = numpy
        self.made: list[Any] = []

    def add(self, kind: str, *inputs: str, result: str = "", **attrs: Any) -> str:
        name = result or f"t{len(self.made)}"
        self.made.append(self.onnx.helper.make_node(kind, list(inputs), [name], **attrs))
        return name

    def cast(self, name: str, dtype: str, result: str = "") -> str:
        element = self.onnx.helper.np_dtype_to_tensor_dtype(self.numpy.dtype(dtype))
        return self.add("Cast", name, result=result, to=element)

    def constant(self, value: Any, dtype: str) -> str:
        array = self.numpy.array(value, dtype)
        return self.add("Constant", value=self.onnx.numpy_helper.from_array(array))

    def product(self, a: str, b: str, kinds: tuple[str, str], zeros: tuple[str, str], extent: int) -> str:
        """int32, of numbers with zero points, "" where there are none."""
        a_zero, b_zero = zeros
        if kinds[0] != kinds[1]:
            shift = self.constant(128, "int32")
            move = "Sub" if kinds[1] == "int8" else "Add"
            a = self.cast(self.add(move, self.cast(a, "int32"), shift), kinds[1])
            moved = shift if move == "Add" else self.add("Neg", shift)
            a_zero = self.add("Add", a_zero, moved) if a_zero else moved
        found = self.add("MatMulInteger", a, b)
        for zero, other, axis in ((a_zero, b, -2), (b_zero, a, -1)):
            if zero:
                axes = self.constant([axis], "int64")
                total = self.add("ReduceSum", self.cast(other, "int32"), axes, keepdims=1)
                found = self.add("Sub", found, self.add("Mul", zero, total))
        if a_zero and b_zero:
            both = self.add("Mul", self.add("Mul", a_zero, b_zero), self.constant(extent, "int32"))
            found = self.add("Add", found, both)
        return found


def _given(call: Call) -> dict[str, TensorSpec]:
    return {name: spec for name, spec in zip(OPS[call.op].inputs, call.inputs, strict=True) if spec is not None}


def int_matmul(onnx: Any, numpy: Any, call: Call) -> Graph:
    given, nodes = _given(call), _Nodes(onnx, numpy)
    zeros = ("a_zero_point" if "a_zero_point" in given else "", "b_zero_point" if "b_zero_point" in given else "")
    a, b = given["a"], given["b"]
    found = nodes.product("a", "b", (a.dtype, b.dtype), zeros, a.shape[-1])
    nodes.add("Identity", found, result="out")
    return Graph(nodes.made, {name: spec.shape for name, spec in given.items()}, {"out": call.outputs[0].shape})


def scaled_linear(onnx: Any, numpy: Any, call: Call) -> Graph:
    """Of integers, each with one scale a row."""
    given, nodes = _given(call), _Nodes(onnx, numpy)
    x, weight = given["x"], given["weight"]
    zeros = tuple(name if name in given else "" for name in ("x_zero_point", "weight_zero_point"))
    kinds = x.dtype, weight.dtype
    found = nodes.product("x", nodes.add("Transpose", "weight", perm=[1, 0]), kinds, (zeros[0], zeros[1]), x.shape[-1])
    scaled = nodes.add("Mul", nodes.add("Mul", nodes.cast(found, "float32"), "x_scale"), "weight_scale")
    if "bias" in given:
        scaled = nodes.add("Add", scaled, "bias")
    nodes.cast(scaled, call.outputs[0].dtype, "out")
    shapes = {name: spec.shape for name, spec in given.items()}
    for name in ("weight_scale", "weight_zero_point"):  # columns become rows, beside each of which rows of x are
        if name in shapes:
            shapes[name] = (1, given[name].shape[0])
    return Graph(nodes.made, shapes, {"out": call.outputs[0].shape})


def int4_linear(onnx: Any, numpy: Any, call: Call) -> Graph:
    """x, as float32, by the numbers that a weight of 4 bits stands for, which are made first."""
    given, nodes = _given(call), _Nodes(onnx, numpy)
    (n, half), (rows, groups) = given["weight"].shape, given["weight_scale"].shape
    shapes = {name: spec.shape for name, spec in given.items()}
    wide = _floats(nodes, given, shapes)
    shapes["weight"] = (rows, n // rows, half)
    last, four = nodes.constant([-1], "int64"), nodes.constant(4, "uint8")
    low = nodes.add("BitwiseAnd", "weight", nodes.constant(15, "uint8"))
    high = nodes.add("BitShift", "weight", four, direction="RIGHT")
    pairs = nodes.add("Concat", *(nodes.add("Unsqueeze", one, last) for one in (low, high)), axis=-1)
    blocks = nodes.constant([rows, n // rows, groups, 2 * half // groups], "int64")
    numbers = nodes.cast(nodes.add("Reshape", pairs, blocks), "float32")
    points = nodes.constant(8, "float32")
    for name in ("weight_scale", "weight_zero_point"):
        if name in given:
            shapes[name] = (rows, 1, groups, 1)
    if "weight_zero_point" in given:
        points = nodes.cast("weight_zero_point", "float32")
    numbers = nodes.add("Mul", nodes.add("Sub", numbers, points), "weight_scale")
    numbers = nodes.add("Reshape", numbers, nodes.constant([n, 2 * half], "int64"))
    found = nodes.add("MatMul", wide, nodes.add("Transpose", numbers, perm=[1, 0]))
    return _finished(nodes, call, found, shapes)


def packed_linear(onnx: Any, numpy: Any, call: Call, block: int, points: str) -> Graph:
    """As int4_linear, by the runtime's own node, of blocks of a size that it has kernels for; by the constants
    `numbers`, `steps` and what `points` names: packed zero points, or what is added for each block because they are
    none of 4 bits. Of inputs in place of constants the node makes floats at each call, as slowly as int4_linear."""
    given, nodes = _given(call), _Nodes(onnx, numpy)
    n, half = given["weight"].shape
    shapes = {name: spec.shape for name, spec in given.items() if not name.startswith("weight")}
    wide = _floats(nodes, given, shapes)
    inputs = [wide, "numbers", "steps", *([points] if points == POINTS else [])]
    # Level 1: x and all sums are float32. At level 4 x is rounded to 8 bits, which is off by some 1e-2.
    sizes: dict[str, Any] = {"K": 2 * half, "N": n, "bits": 4, "block_size": block, "accuracy_level": 1}
    found = nodes.add("MatMulNBits", *inputs, domain=CONTRIB, **sizes)
    if points == SHIFTS:
        parts = nodes.constant([*[0] * (len(shapes["x"]) - (2 if "x_scale" in given else 1)), -1, block], "int64")
        sums = nodes.add("ReduceSum", nodes.add("Reshape", wide, parts), nodes.constant([-1], "int64"), keepdims=0)
        found = nodes.add("Add", found, nodes.add("MatMul", sums, SHIFTS))
    return _finished(nodes, call, found, shapes)


def _floats(nodes: _Nodes, given: dict[str, TensorSpec], shapes: dict[str, Shape]) -> str:
    """x in float32; rows of it, of any number of them, where it has no scales."""
    x = given["x"]
    if "x_scale" not in given:
        shapes["x"] = (x.numel // x.shape[-1], x.shape[-1])
        return "x" if x.dtype == "float32" else nodes.cast("x", "float32")
    lead, parts = x.shape[:-1], given["x_scale"].shape[-1]
    shapes["x"] = (*lead, parts, x.shape[-1] // parts)
    wide = nodes.cast("x", "float32")
    for name, kind in (("x_zero_point", "Sub"), ("x_scale", "Mul")):
        if name in given:
            shapes[name] = (*shapes[name], 1)
            wide = nodes.add(kind, wide, nodes.cast(name, "float32"))
    return nodes.add("Reshape", wide, nodes.constant([*[0] * len(lead), x.shape[-1]], "int64"))


def _finished(nodes: _Nodes, call: Call, found: str, shapes: dict[str, Shape]) -> Graph:
    """With the bias, in the dtype of the result."""
    result = call.outputs[0]
    kind, *more = ("Add", "bias") if "bias" in shapes else ("Identity",)
    if result.dtype == "float32":
        nodes.add(kind, found, *more, result="out")
    else:
        nodes.cast(nodes.add(kind, found, *more), result.dtype, "out")
    return Graph(
        nodes.made, shapes, {"out": result.shape if "x_scale" in shapes else (*shapes["x"][:-1], result.shape[-1])}
    )


def quantize(onnx: Any, numpy: Any, call: Call) -> Graph:
    given, nodes = _given(call), _Nodes(onnx, numpy)
    part = nodes.add("Div", nodes.cast("x", "float32"), "scale")
    nothing = nodes.constant(0, "float32")
    whole = nodes.add("Where", nodes.add("IsNaN", part), nothing, nodes.add("Round", part))
    if "zero_point" in given:
        whole = nodes.add("Add", whole, nodes.cast("zero_point", "float32"))
    low, high = (nodes.constant(bound, "float32") for bound in _RANGES[call.attrs["dtype"]])
    nodes.cast(nodes.add("Clip", whole, low, high), call.attrs["dtype"], "out")
    return Graph(nodes.made, *_in_groups(call, given))


def dequantize(onnx: Any, numpy: Any, call: Call) -> Graph:
    given, nodes = _given(call), _Nodes(onnx, numpy)
    wide = nodes.cast("x", "int32")
    if "zero_point" in given:
        wide = nodes.add("Sub", wide, "zero_point")
    nodes.cast(nodes.add("Mul", nodes.cast(wide, "float32"), "scale"), call.outputs[0].dtype, "out")
    return Graph(nodes.made, *_in_groups(call, given))


def _in_groups(call: Call, given: dict[str, TensorSpec]) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Shapes in which each scale broadcasts to its numbers."""
    lead, groups = given["x"].shape[:-1], given["scale"].shape[-1]
    numbers = (*lead, groups, given["x"].shape[-1] // groups)
    shapes = {name: numbers if name == "x" else (*spec.shape, 1) for name, spec in given.items()}
    return shapes, {"out": numbers}
