"""Convolutions, pooling and interpolation as nodes of ONNX. Used by onnxruntime.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from layerzero.ipc.vocabulary import resampling, windows
from layerzero.workers.provider import Call
from layerzero.workers.providers import _onnx_activations
from layerzero.workers.providers._onnx_graph import Graph, Shape

_NODES = {"conv": "Conv", "conv_transpose": "ConvTranspose"}


def conv(onnx: Any, numpy: Any, call: Call) -> Graph:
    """One node, and the activation."""
    x, weight, bias = call.inputs
    assert x is not None
    assert weight is not None
    attrs: dict[str, Any] = {
        "kernel_shape": list(weight.shape[2:]),
        "strides": list(windows.known(call.attrs["stride"])),
        "pads": list(windows.known(call.attrs["padding"])),
        "dilations": list(windows.known(call.attrs["dilation"])),
        "group": call.attrs["groups"],
    }
    inputs: dict[str, Shape] = {"x": x.shape, "weight": weight.shape}
    if bias is not None:
        inputs["bias"] = bias.shape
    nodes, names = [], list(inputs)
    if call.op == "conv_transpose":
        cuts = windows.cut(call.attrs)
        attrs["pads"] = [*(one.before for one in cuts), *(one.after for one in cuts)]
        attrs["output_padding"] = [one.more for one in cuts]
        if any(one.zeros for one in cuts):
            ends = numpy.array([0] * (x.ndim + 2) + [one.zeros for one in cuts], numpy.int64)
            value = onnx.numpy_helper.from_array(ends, "ends")
            nodes = [
                onnx.helper.make_node("Constant", [], ["ends"], value=value),
                onnx.helper.make_node("Pad", ["x", "ends"], ["longer"]),
            ]
            names[0] = "longer"
    activation = call.attrs["activation"]
    made = "made" if activation else "out"
    nodes.append(onnx.helper.make_node(_NODES[call.op], names, [made], **attrs))
    if activation:
        nodes += _onnx_activations.after(onnx.helper, activation, made, "out")
    return Graph(nodes, inputs, {"out": call.outputs[0].shape})


def pool(onnx: Any, numpy: Any, call: Call) -> Graph:
    """x gets what the last window sees beyond the padding by a Pad, since the runtime takes no more padding than
    kernel, and its counts where windows reach beyond are others. avg_pool: the mean of all of a window, times its
    share."""
    x, attrs = call.inputs[0], call.attrs
    assert x is not None
    sizes, is_max = call.outputs[0].shape[2:], call.op == "max_pool"
    kernel, stride = (windows.known(attrs[name]) for name in ("kernel_size", "stride"))
    pads, gaps = windows.pads(attrs["padding"]), windows.known(attrs["dilation"]) if is_max else (1,) * len(kernel)
    dims = list(zip(x.shape[2:], sizes, kernel, stride, pads, strict=True))
    ends = [(one[4][0], one[4][1] + windows.beyond(*one, gap)) for one, gap in zip(dims, gaps, strict=True)]
    made = _Nodes(onnx, numpy)
    given = "x"
    if any(map(any, ends)):
        around = [0, 0, *(low for low, _ in ends), 0, 0, *(high for _, high in ends)]
        beyond = made.constant("beyond", -math.inf if is_max else 0.0, "float32")
        given = made.add("Pad", ["x", made.constant("around", around, "int64"), beyond], "padded")
    options: dict[str, Any] = {"kernel_shape": kernel, "strides": stride}
    if is_max:
        found = made.add("MaxPool", [given], "largest", dilations=gaps, **options)
        # The runtime (1.18) leaves NaN out, and begins with the least finite number, which it gives of nothing but
        # -infinity.
        least = made.constant("least", numpy.finfo(numpy.float32).min, "float32")
        is_none = made.add("LessOrEqual", [found, least], "is_none")
        found = made.add("Where", [is_none, made.constant("none", -math.inf, "float32"), found], "finite")
        odd = made.add("Cast", [made.add("IsNaN", [given], "are_odd")], "odd", to=onnx.TensorProto.FLOAT)
        odd = made.add("MaxPool", [odd], "any_odd", dilations=gaps, **options)
        is_odd = made.add("Cast", [odd], "is_odd", to=onnx.TensorProto.BOOL)
        made.add("Where", [is_odd, made.constant("no_number", math.nan, "float32"), found], "out")
    else:
        share = numpy.full((), math.prod(kernel) / (attrs["divisor"] or 1))
        for one in dims if not attrs["divisor"] else ():
            share = share[..., None] / numpy.array(windows.shares(*one, counts_padding=attrs["count_include_pad"]))
        is_even = bool((share == 1.0).all())
        found = made.add("AveragePool", [given], "out" if is_even else "means", **options)
        if not is_even:
            made.add("Mul", [found, made.constant("share", share, "float32")], "out")
    return Graph(made.nodes, {"x": x.shape}, {"out": call.outputs[0].shape})


def adaptive_pool(onnx: Any, numpy: Any, call: Call) -> Graph:
    """One dimension after the other: each window's elements side by side, the last one again where windows are shorter
    than others. ONNX has such pooling of everything alone."""
    x = call.inputs[0]
    assert x is not None
    made = _Nodes(onnx, numpy)
    if call.op == "adaptive_avg_pool":
        made.add("Identity", [_adapted(made, call, x.shape, "x", is_max=False)], "out")
    else:  # the runtime's maximum (1.18) leaves NaN out
        odd = made.add("Cast", [made.add("IsNaN", ["x"], "are_odd")], "odd", to=onnx.TensorProto.FLOAT)
        found, odd = (_adapted(made, call, x.shape, name, is_max=True) for name in ("x", odd))
        is_odd = made.add("Cast", [odd], "is_odd", to=onnx.TensorProto.BOOL)
        made.add("Where", [is_odd, made.constant("no_number", math.nan, "float32"), found], "out")
    return Graph(made.nodes, {"x": x.shape}, {"out": call.outputs[0].shape})


def _adapted(made: _Nodes, call: Call, shape: Shape, given: str, *, is_max: bool) -> str:
    """The largest elements of the windows of `given`, or their means."""
    numpy, found = made.numpy, given
    for axis, (size, count) in enumerate(zip(shape[2:], call.outputs[0].shape[2:], strict=True), 2):
        ends = windows.adapted(size, count)
        width = max(end - start for start, end in ends)
        places = [[min(start + t, end - 1) for t in range(width)] for start, end in ends]
        over = made.constant(f"over{axis}_{given}", [axis + 1], "int64")
        found = made.add(
            "Gather", [found, made.constant(f"places{axis}_{given}", places, "int64")], f"seen{axis}_{given}", axis=axis
        )
        if is_max:
            found = made.add("ReduceMax", [found, over], f"made{axis}_{given}", keepdims=0)
            continue
        shares = [[(t < end - start) / (end - start) for t in range(width)] for start, end in ends]
        beside = numpy.array(shares).reshape(*[1] * axis, count, width, *[1] * (len(shape) - axis - 1))
        # An infinity times 0 would be NaN: what is repeated is left out.
        kept = made.constant(f"kept{axis}_{given}", beside > 0, "bool")
        held = made.add(
            "Where", [kept, found, made.constant(f"zero{axis}_{given}", 0.0, "float32")], f"held{axis}_{given}"
        )
        shared = made.add(
            "Mul", [held, made.constant(f"shares{axis}_{given}", beside, "float32")], f"shared{axis}_{given}"
        )
        found = made.add("ReduceSum", [shared, over], f"made{axis}_{given}", keepdims=0)
    return found


def interpolate(onnx: Any, numpy: Any, call: Call) -> Graph:
    """One node."""
    x, attrs = call.inputs[0], call.attrs
    assert x is not None
    made = _Nodes(onnx, numpy)
    scales = resampling.scales_of(attrs["scale"])
    if scales and call.outputs[0].shape == x.shape:  # the runtime (1.18) copies x, whatever the scales are
        return _weighed(made, call, x.shape, scales)
    if scales:
        given = ["x", "", made.constant("scales", [1.0, 1.0, *scales], "float32")]
    else:
        given = ["x", "", "", made.constant("sizes", call.outputs[0].shape, "int64")]
    mode = attrs["mode"]
    options: dict[str, Any] = {"mode": mode.partition("_")[0], "antialias": int(attrs["antialias"])}
    if mode == "nearest":
        options |= {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    elif mode == "nearest_exact":
        options |= {"coordinate_transformation_mode": "half_pixel", "nearest_mode": "round_prefer_ceil"}
    else:
        corners = "align_corners" if attrs["align_corners"] else "half_pixel"
        options["coordinate_transformation_mode"] = corners
    if mode == "cubic":
        options["cubic_coeff_a"] = -0.5 if attrs["antialias"] else -0.75
    made.add("Resize", given, "out", **options)
    return Graph(made.nodes, {"x": x.shape}, {"out": call.outputs[0].shape})


def _weighed(made: _Nodes, call: Call, shape: Shape, scales: Sequence[float]) -> Graph:
    """Elements that are taken and weighed, one dimension after the other."""
    found = "x"
    for axis, (size, scale) in enumerate(zip(shape[2:], scales, strict=True), 2):
        options = {"is_aligned": call.attrs["align_corners"], "is_smoothed": False}
        places, weights, _ = resampling.even(resampling.taps(size, size, scale, call.attrs["mode"], **options))
        seen = made.add("Gather", [found, made.constant(f"places{axis}", places, "int64")], f"seen{axis}", axis=axis)
        beside = made.numpy.array(weights).reshape(size, -1, *[1] * (len(shape) - 1 - axis))
        weighed = made.add("Mul", [seen, made.constant(f"weights{axis}", beside, "float32")], f"weighed{axis}")
        found = made.add(
            "ReduceSum", [weighed, made.constant(f"over{axis}", [axis + 1], "int64")], f"made{axis}", keepdims=0
        )
    made.add("Identity", [found], "out")
    return Graph(made.nodes, {"x": shape}, {"out": shape})


class _Nodes:
    """In order."""

    def __init__(self, onnx: Any, numpy: Any) -> None:
        self.onnx, self.numpy = onnx, numpy
        self.nodes: list[Any] = []

    def add(self, kind: str, inputs: list[str], output: str, **attrs: Any) -> str:
        self.nodes.append(self.onnx.helper.make_node(kind, inputs, [output], **attrs))
        return output

    def constant(self, name: str, values: Any, dtype: str) -> str:
        tensor = self.onnx.numpy_helper.from_array(self.numpy.array(values, dtype), name)
        self.nodes.append(self.onnx.helper.make_node("Constant", [], [name], value=tensor))
        return name


GRAPHS: dict[str, Callable[[Any, Any, Call], Graph]] = {
    **dict.fromkeys(("conv", "conv_transpose"), conv),
    **dict.fromkeys(("max_pool", "avg_pool"), pool),
    **dict.fromkeys(("adaptive_max_pool", "adaptive_avg_pool"), adaptive_pool),
    "interpolate": interpolate,
}
