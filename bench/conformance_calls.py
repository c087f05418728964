"""ONNX's operators as calls of ours: what `conformance.py` makes of a node test.

A function takes a node, its attributes and inputs, and returns the call; where ONNX asks for more than an op of ours
has, it raises Unserved with the option. Views are made of inputs, and for a past its concatenation with new keys;
nothing is computed here that an op of ours should."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

import layerzero as lz
from layerzero.ipc.vocabulary.ops import CAST_DTYPES

Array = np.ndarray
Call = Callable[..., Array]  # takes `backend`


class Unserved(Exception):
    """An option of ONNX's operator that our op does not have."""


def need(is_had: bool, option: str) -> None:
    if not is_had:
        raise Unserved(option)


class Node:
    """Attributes with ONNX's defaults, and inputs in ONNX's order: None where one is left out."""

    def __init__(
        self, attrs: Mapping[str, Any], names: list[str], inputs: list[Array | None], outputs: list[str], opset: int
    ) -> None:
        self.attrs = attrs
        self.names = names
        self.inputs = inputs
        self.outputs = outputs
        self.opset = opset

    def attr(self, name: str, default: Any) -> Any:
        found = self.attrs.get(name, default)
        return found.decode() if isinstance(found, bytes) else found

    def input(self, index: int) -> Array | None:
        return self.inputs[index] if index < len(self.inputs) else None

    def array(self, index: int) -> Array:
        found = self.input(index)
        assert found is not None
        return found

    def has_output(self, index: int) -> bool:
        return index < len(self.outputs) and bool(self.outputs[index])


def softmax(op: Call, node: Node) -> Call:
    need(node.opset >= 13, "flattening of opset 12")
    return partial(op, node.array(0), node.attr("axis", -1))


def each(op: Call, node: Node) -> Call:
    return partial(op, node.array(0))


def gelu(node: Node) -> Call:
    return partial(lz.gelu, node.array(0), node.attr("approximate", "none"))


def swish(node: Node) -> Call:
    """x sigmoid(alpha x): with an alpha by three calls."""
    x, alpha = node.array(0), node.attr("alpha", 1.0)
    if alpha == 1:
        return partial(lz.silu, x)
    factor = np.full(1, alpha, x.dtype)

    def call(backend: str) -> Array:
        share = lz.sigmoid(lz.mul(x, factor, backend=backend), backend=backend)
        made: Array = lz.mul(x, share, backend=backend)
        return made

    return call


def swiglu(node: Node) -> Call:
    """With an alpha swish of the gate, and a product."""
    gate, up = node.array(0), node.array(1)
    if node.attr("alpha", 1.0) == 1:
        return partial(lz.swiglu, gate, up)
    opened = swish(node)
    return lambda backend: lz.mul(opened(backend=backend), up, backend=backend)


def matmul(node: Node) -> Call:
    return partial(lz.matmul, node.array(0), node.array(1))


def gemm(node: Node) -> Call:
    """linear where it says all, since more backends have it; else addmm."""
    a, b, c = node.array(0), node.array(1), node.input(2)
    alpha, beta = node.attr("alpha", 1.0), node.attr("beta", 1.0)
    x = a.T if node.attr("transA", 0) else a
    weight = b if node.attr("transB", 0) else b.T
    is_plain = alpha == beta == 1 and (c is None or (c.size == len(weight) and c.shape[-1:] == (c.size,)))
    if is_plain:
        return partial(lz.linear, x, weight, None if c is None else c.reshape(-1))
    need(c is not None, "a product without a bias, scaled")
    return partial(lz.addmm, node.array(2), x, weight.T, beta=beta, alpha=alpha)


def layer_norm(node: Node) -> Call:
    x = node.array(0)
    shape = x.shape[node.attr("axis", -1) % x.ndim :]
    return partial(lz.layer_norm, x, shape, node.array(1), node.input(2), node.attr("epsilon", 1e-5))


def rms_norm(node: Node) -> Call:
    x = node.array(0)
    shape = x.shape[node.attr("axis", -1) % x.ndim :]
    return partial(lz.rms_norm, x, shape, node.array(1), node.attr("epsilon", 1e-5))


def group_norm(node: Node) -> Call:
    need(node.opset >= 21, "a scale of each group, of opset 18")
    x, scale, bias = (node.array(i) for i in range(3))
    return partial(lz.group_norm, x, node.attr("num_groups", 1), scale, bias, node.attr("epsilon", 1e-5))


def instance_norm(node: Node) -> Call:
    x, scale, bias = (node.array(i) for i in range(3))
    return partial(lz.instance_norm, x, weight=scale, bias=bias, eps=node.attr("epsilon", 1e-5))


def batch_norm(node: Node) -> Call:
    x, scale, bias, mean, var = (node.array(i) for i in range(5))
    need(not node.attr("training_mode", 0), "training_mode")
    return partial(lz.batch_norm, x, mean, var, scale, bias, eps=node.attr("epsilon", 1e-5))


def rotary(node: Node) -> Call:
    x, cos, sin, positions = node.array(0), node.array(1), node.array(2), node.input(3)
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    is_interleaved = bool(node.attr("interleaved", 0))
    if x.ndim == 3:
        tokens = x.reshape(*x.shape[:2], node.attr("num_heads", 0), -1)
        return lambda backend: lz.rope(tokens, cos, sin, interleaved=is_interleaved, backend=backend).reshape(x.shape)
    tokens = x.transpose(0, 2, 1, 3)
    return lambda backend: lz.rope(tokens, cos, sin, interleaved=is_interleaved, backend=backend).transpose(0, 2, 1, 3)


def attention(node: Node) -> Call:
    q, k, v = (node.array(i) for i in range(3))
    mask, past_k, past_v, lengths = (node.input(i) for i in range(3, 7))
    need(not node.has_output(3), "qk_matmul_output, the scores, which no kernel of attention keeps")
    is_flat = q.ndim == 3
    if is_flat:
        heads = node.attr("q_num_heads", 0), node.attr("kv_num_heads", 0), node.attr("kv_num_heads", 0)
        q, k, v = (x.reshape(*x.shape[:2], n, -1).transpose(0, 2, 1, 3) for x, n in zip((q, k, v), heads, strict=True))
    past = 0
    if past_k is not None and past_v is not None:
        past = past_k.shape[2]
        k, v = np.concatenate((past_k, k), 2), np.concatenate((past_v, v), 2)
    options: dict[str, Any] = {"scale": node.attr("scale", None), "enable_gqa": q.shape[1] != k.shape[1]}
    options |= {"softcap": node.attr("softcap", 0.0), "is_causal": bool(node.attr("is_causal", 0))}
    options["window_size"] = tuple(node.attr(f"{side}_window_size", -1) for side in ("left", "right"))
    if mask is not None and mask.shape[-1] < k.shape[2]:  # what it does not name is not seen
        beyond = [(0, 0)] * (mask.ndim - 1) + [(0, k.shape[2] - mask.shape[-1])]
        mask = np.pad(mask, beyond, constant_values=False if mask.dtype == bool else -np.inf)
    if lengths is not None or (past and past != k.shape[2] - q.shape[2]):
        mask = _mask_of(q, k, mask, past if lengths is None else lengths, lengths is not None, options)
    elif options["is_causal"] or options["window_size"] != (-1, -1):
        options["causal_alignment"] = "bottom_right" if past else "top_left"

    def call(backend: str) -> Array:
        out = lz.attention(q, k, v, mask, **options, backend=backend)
        return out.transpose(0, 2, 1, 3).reshape(len(out), out.shape[2], -1) if is_flat else out

    return call


def _mask_of(q: Array, k: Array, mask: Array | None, first: Any, is_length: bool, options: dict[str, Any]) -> Array:
    """The causal rule and the window of `options`, which lose them, as a mask: ours begin at the first or the last key,
    those of ONNX at the key `first`, or so that the last query is at the last key of each sequence's own length."""
    lengths = np.reshape(first, (-1, 1, 1, 1))
    keys = np.arange(k.shape[2])
    places = np.arange(q.shape[2])[:, None] + lengths - (q.shape[2] if is_length else 0)
    seen = (keys < lengths) if is_length else np.ones((1, 1, 1, k.shape[2]), bool)
    left, right = options.pop("window_size")
    right = 0 if options.pop("is_causal") else right
    seen = seen & (places - keys <= left if left >= 0 else True) & (keys - places <= right if right >= 0 else True)
    seen = np.broadcast_to(seen, (*seen.shape[:2], q.shape[2], k.shape[2]))
    if mask is None or mask.dtype == bool:
        return np.ascontiguousarray(seen if mask is None else seen & mask)
    return np.where(seen, mask, np.asarray(-np.inf, mask.dtype))


QUANTIZED = ("int8", "uint8", "float8_e4m3fn", "float8_e5m2")


def quantize(node: Node) -> Call:
    x, scale, zero = node.array(0), node.array(1), node.input(2)
    dtype = _dtype(node.attr("output_dtype", 0) or 2) if zero is None else str(np.asarray(zero).dtype)  # 2: uint8
    need(dtype in QUANTIZED, f"quantized {dtype}")
    return partial(lz.quantize, x, _scale(node, x, scale), _points(node, x, zero), dtype=dtype)


def dequantize(node: Node) -> Call:
    """Scales of other floats, which are those of the result, by a cast."""
    x, scale = node.array(0), node.array(1)
    need(str(x.dtype) in QUANTIZED, f"quantized {x.dtype}")
    points, dtype = _points(node, x, node.input(2)), str(scale.dtype)
    if dtype == "float32":
        return partial(lz.dequantize, x, _scale(node, x, scale), points, dtype=dtype)

    def call(backend: str) -> Array:
        wide = _scale(node, x, lz.cast(scale, "float32", backend=backend))
        made: Array = lz.dequantize(x, wide, points, dtype=dtype, backend=backend)
        return made

    return call


def _dtype(number: int) -> str:
    from onnx import helper

    return str(helper.tensor_dtype_to_np_dtype(number))


def _points(node: Node, x: Array, zero: Array | None) -> Array | None:
    """In the shape of the scale; None where they are 0."""
    if zero is None or not np.any(zero.astype(np.float32)):
        return None
    return np.ascontiguousarray(_scale(node, x, zero.astype(np.float32)).astype(np.int32))


def dynamic_quantize(node: Node) -> Call:
    """The numbers, which are ONNX's first result."""
    x = node.array(0)

    def call(backend: str) -> Array:
        made: Array = lz.dynamic_quantize(x, dtype="uint8", group_size=0, symmetric=False, backend=backend)[0]
        return made

    return call


def matmul_integer(node: Node) -> Call:
    a, b, a_zero, b_zero = node.array(0), node.array(1), node.input(2), node.input(3)
    points = [None if zero is None else np.asarray(zero, np.int32).reshape(-1) for zero in (a_zero, b_zero)]
    return partial(lz.int_matmul, a, b, *points)


def qlinear_matmul(node: Node) -> Call:
    """A product in float32, quantized by a second call; of a batch of weights each by itself."""
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = (node.array(i) for i in range(8))
    need(all(one.dtype in (np.int8, np.uint8) for one in (a, b, y_zero)), f"quantized {a.dtype}")
    steps = [np.asarray(one, np.float32).reshape(-1) for one in (a_scale, b_scale, y_scale)]
    points = [np.asarray(one, np.int32).reshape(-1) for one in (a_zero, b_zero, y_zero)]

    def product(x: Array, weight: Array, backend: str) -> Array:
        options: dict[str, Any] = {"x_zero_point": points[0], "weight_zero_point": points[1], "backend": backend}
        made = lz.scaled_linear(x, np.ascontiguousarray(weight.T), steps[1], steps[0], **options)
        return lz.quantize(made, steps[2], points[2], dtype=str(y_zero.dtype), backend=backend)

    def call(backend: str) -> Array:
        if b.ndim == 2:
            return product(a, b, backend)
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        x, weight = (np.broadcast_to(one, (*batch, *one.shape[-2:])) for one in (a, b))
        each = [product(x[at], weight[at], backend) for at in np.ndindex(*batch)]
        return np.stack(each).reshape(*batch, *each[0].shape)

    return call


def _scale(node: Node, x: Array, scale: Array) -> Array:
    need(scale.dtype == np.float32, "scales of other dtypes than float32")
    if scale.size == 1:
        return scale.reshape(-1)
    axis = node.attr("axis", 1) % x.ndim
    if not node.attr("block_size", 0):
        return scale.reshape([-1 if d == axis else 1 for d in range(x.ndim)])
    need(axis == x.ndim - 1, "blocks that are not along the last axis")
    return scale


def gather(node: Node) -> Call:
    """Of rows of a matrix, whose row is all that an index names."""
    data, indices = node.array(0), node.array(1)
    axis = node.attr("axis", 0) % data.ndim
    first = np.moveaxis(data, axis, 0)
    rows = np.ascontiguousarray(first).reshape(len(first), -1)

    def call(backend: str) -> Array:
        made = lz.embedding(indices, rows, backend=backend).reshape(*indices.shape, *first.shape[1:])
        places = range(indices.ndim)
        return np.moveaxis(made, places, [place + axis for place in places])

    return call


def pair(op: Call, node: Node) -> Call:
    need(node.opset >= 7, "broadcasting of opset 6")
    return partial(op, node.array(0), node.array(1))


def clip(node: Node) -> Call:
    """ONNX's bounds are tensors of one number each."""
    x = node.array(0)
    low, high = (None if bound is None else bound.item() for bound in (node.input(1), node.input(2)))
    if low is None and high is None:  # ONNX's default is the least number of the dtype
        low = float(np.finfo(x.dtype).min) if x.dtype.kind == "f" else int(np.iinfo(x.dtype).min)
    return partial(lz.clamp, x, low, high)


def where(node: Node) -> Call:
    return partial(lz.where, node.array(0), node.array(1), node.array(2))


def concat(node: Node) -> Call:
    tensors = [one for one in node.inputs if one is not None]
    need(len(tensors) <= 8, "more than 8 tensors")
    return partial(lz.cat, *tensors, dim=node.attr("axis", 0))


def cast(node: Node) -> Call:
    """Of 8-bit floats as their numbers by a scale of 1."""
    x, to = node.array(0), _dtype(node.attr("to", 0))
    given, narrow, wide = str(x.dtype), ("float8_e4m3fn", "float8_e5m2"), ("float32", "bfloat16", "float16")
    one = np.ones((), np.float32)
    if to in narrow and given in wide:
        need(bool(node.attr("saturate", 1)), f"to {to}, not saturated")
        return partial(lz.quantize, x, one, dtype=to)
    if given in narrow and to in wide:
        return partial(lz.dequantize, x, one, dtype=to)
    for dtype in (given, to):
        need(dtype in CAST_DTYPES, f"{'text' if dtype in ('object', 'StringDType()') else dtype}")
    return partial(lz.cast, x, to)


CALLS: dict[str, Callable[[Node], Call]] = {
    "Add": partial(pair, lz.add),
    "Attention": attention,
    "BatchNormalization": batch_norm,
    "Cast": cast,
    "Clip": clip,
    "Concat": concat,
    "DequantizeLinear": dequantize,
    "DynamicQuantizeLinear": dynamic_quantize,
    "Gather": gather,
    "Gelu": gelu,
    "Gemm": gemm,
    "GroupNormalization": group_norm,
    "HardSwish": partial(each, lz.hardswish),
    "InstanceNormalization": instance_norm,
    "LayerNormalization": layer_norm,
    "LogSoftmax": partial(softmax, lz.log_softmax),
    "MatMul": matmul,
    "MatMulInteger": matmul_integer,
    "Mish": partial(each, lz.mish),
    "Mul": partial(pair, lz.mul),
    "QLinearMatMul": qlinear_matmul,
    "QuantizeLinear": quantize,
    "RMSNormalization": rms_norm,
    "Relu": partial(each, lz.relu),
    "RotaryEmbedding": rotary,
    "Sigmoid": partial(each, lz.sigmoid),
    "Softmax": partial(softmax, lz.softmax),
    "SwiGLU": swiglu,
    "Swish": swish,
    "Tanh": partial(each, lz.tanh),
    "Where": where,
}
