"""ONNX's convolutions and pooling as calls of ours. As conformance_calls.py, which has the table."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from conformance_calls import Call, Node, need

import layerzero as lz

Pads = tuple[tuple[int, int], ...]


def padding(node: Node, kernel: list[int], strides: list[int], dilations: list[int]) -> Pads:
    """Before and after each dimension, by `pads` or by `auto_pad`."""
    kind, sizes = node.attr("auto_pad", "NOTSET"), node.array(0).shape[2:]
    if kind == "VALID":
        return ((0, 0),) * len(kernel)
    if kind == "NOTSET":
        pads = node.attr("pads", [0] * 2 * len(kernel))
        return tuple(zip(pads[: len(kernel)], pads[len(kernel) :], strict=True))
    found = []
    for size, n, step, gap in zip(sizes, kernel, strides, dilations, strict=True):
        total = max((-(-size // step) - 1) * step + gap * (n - 1) + 1 - size, 0)
        found.append(split(total, kind))
    return tuple(found)


def split(total: int, kind: str) -> tuple[int, int]:
    """The odd one at the end, or, of SAME_LOWER, in front."""
    low = total // 2 if kind == "SAME_UPPER" else total - total // 2
    return low, total - low


def conv(node: Node) -> Call:
    kernel = list(node.array(1).shape[2:])
    strides, dilations = (node.attr(name, [1] * len(kernel)) for name in ("strides", "dilations"))
    options = {"stride": strides, "dilation": dilations, "groups": node.attr("group", 1)}
    args = (node.array(0), node.array(1), node.input(2))
    return partial(lz.conv, *args, **options, padding=padding(node, kernel, strides, dilations))


def conv_transpose(node: Node) -> Call:
    x, weight = node.array(0), node.array(1)
    kernel = list(weight.shape[2:])
    strides, dilations = (node.attr(name, [1] * len(kernel)) for name in ("strides", "dilations"))
    more = list(node.attr("output_padding", [0] * len(kernel)))
    kind, shape = node.attr("auto_pad", "NOTSET"), node.attr("output_shape", None)
    if shape is None and kind.startswith("SAME"):
        shape = [size * step for size, step in zip(x.shape[2:], strides, strict=True)]
    if shape is None:
        pads = list(padding(node, kernel, strides, dilations))
    else:
        pads = []
        for at, (size, n, step, gap, wanted) in enumerate(
            zip(x.shape[2:], kernel, strides, dilations, shape[-len(kernel) :], strict=True)
        ):
            total = step * (size - 1) + more[at] + gap * (n - 1) + 1 - wanted
            if total < 0:
                more[at] -= total
            pads.append(split(max(total, 0), kind))
    fits = all(n < max(step, gap) for n, step, gap in zip(more, strides, dilations, strict=True))
    need(fits, "output_padding of the stride or more")
    options = {"stride": strides, "dilation": dilations, "groups": node.attr("group", 1), "output_padding": more}
    return partial(lz.conv_transpose, x, weight, node.input(2), **options, padding=tuple(pads))


def pool(node: Node, op: Call, *, is_max: bool) -> Call:
    x, kernel = node.array(0), node.attr("kernel_shape", None)
    strides, dilations = (node.attr(name, [1] * len(kernel)) for name in ("strides", "dilations"))
    need(x.dtype.kind == "f", str(x.dtype))
    need(not node.has_output(1), "Indices")
    pads = padding(node, kernel, strides, dilations)
    need(all(max(pad) <= n // 2 for pad, n in zip(pads, kernel, strict=True)), "padding of more than half the kernel")
    options = {"kernel_size": kernel, "stride": strides, "padding": pads, "ceil_mode": bool(node.attr("ceil_mode", 0))}
    if is_max:
        return partial(op, x, **options, dilation=dilations)
    need(all(n == 1 for n in dilations), "dilations")
    return partial(op, x, **options, count_include_pad=bool(node.attr("count_include_pad", 0)))


def of_everything(node: Node, op: Call) -> Call:
    return partial(op, node.array(0), 1)


CALLS: dict[str, Callable[[Node], Call]] = {
    "AveragePool": partial(pool, op=lz.avg_pool, is_max=False),
    "Conv": conv,
    "ConvTranspose": conv_transpose,
    "GlobalAveragePool": partial(of_everything, op=lz.adaptive_avg_pool),
    "GlobalMaxPool": partial(of_everything, op=lz.adaptive_max_pool),
    "MaxPool": partial(pool, op=lz.max_pool, is_max=True),
}
