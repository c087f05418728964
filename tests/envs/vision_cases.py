"""Cases of convolutions, pooling and interpolation for tests/envs/test_conformance.py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
from tests import reference
from tests.envs.case import LAYOUTS, Case, normal
from tests.gpu.vision_calls import OPS, random_call

from layerzero.ipc.vocabulary.ops import LINEAR_ACTIVATIONS

RANDOM_CALLS = 12


def conv_cases(rng: np.random.Generator, op: str) -> Iterator[Case]:
    def case(
        name: str,
        x: tuple[int, ...],
        weight: tuple[int, ...],
        *,
        groups: int = 1,
        bias: bool = True,
        scale: float = 1.0,
        where: dict[str, Any] | None = None,
        **attrs: Any,
    ) -> Case:
        """`weight` as that of conv."""
        dims = len(x) - 2
        ones = {"stride": "1", "dilation": "1", "padding": "0"}
        made = {key: attrs.pop(key, ",".join([one] * dims)) for key, one in ones.items() if key != "padding"}
        made["padding"] = attrs.pop("padding", ",".join(["0"] * 2 * dims))
        made |= {"groups": groups, "activation": "", **attrs}
        count = weight[0]
        if op == "conv_transpose":
            made["output_padding"] = ",".join(["0"] * dims)
            weight = (x[1], weight[0] // groups, *weight[2:])
        tensors = (normal(rng, *x) * scale, normal(rng, *weight), normal(rng, count) if bias else None)
        return Case(name, tensors, made, **(where or {}))

    yield case("one element", (1, 1, 1), (1, 1, 1))
    yield case("1 x 1, many channels", (2, 33, 5, 3), (17, 33, 1, 1), bias=False)
    yield case("3 x 3, 64 channels", (1, 64, 14, 14), (48, 64, 3, 3), padding="1,1,1,1")
    yield case("4 x 4 patches", (1, 3, 24, 16), (40, 3, 4, 4), stride="4,4")
    yield case("7 x 7, stride 2", (1, 3, 23, 30), (16, 3, 7, 7), stride="2,2", padding="3,3,3,3")
    yield case("depthwise", (2, 24, 9, 8), (24, 1, 3, 3), groups=24, padding="1,1,1,1")
    yield case("depthwise, two of each", (1, 8, 30), (16, 1, 5), groups=8)
    yield case("dilated", (1, 4, 20, 21), (6, 4, 3, 2), dilation="4,3", padding="4,1,4,2")
    yield case("uneven padding", (1, 3, 6, 7), (5, 3, 2, 3), padding="2,0,0,1", stride="3,2")
    yield case("causal in time", (1, 4, 6, 5, 5), (4, 4, 3, 3, 3), padding="2,1,1,0,1,1")
    # Where one column comes out and the stride is more than 1, oneDNN's bfloat16 with AMX is wrong.
    yield case("one column", (1, 6, 7, 4), (6, 3, 3, 3), groups=2, stride="1,2")
    yield case("one column of many", (1, 2, 5, 10, 3), (3, 2, 1, 3, 3), stride="2,1,2", dilation="3,2,1")
    yield case("one column, padded before", (1, 3, 7, 2), (6, 1, 3, 3), groups=3, stride="1,2", padding="1,2,0,0")
    yield case("one column of zeros", (1, 2, 3, 2), (4, 2, 1, 2), stride="1,3", padding="0,2,0,0")
    yield case("values of 1e2", (1, 8, 9, 9), (8, 8, 3, 3), scale=1e2)
    for layout in LAYOUTS[1:]:
        for n, name in enumerate(("x", "weight", "bias")):
            layouts = tuple(layout if n == m else "contiguous" for m in range(3))
            yield case(f"{layout} {name}", (2, 4, 6, 5), (6, 4, 3, 2), where={"layouts": layouts})
    for layout in ("transposed", "gaps", "rows", "first last", "heads"):
        yield case(f"{layout} output", (2, 4, 6, 5), (6, 4, 3, 2), where={"out_layout": layout})
    yield case("channels last", (2, 4, 6, 5), (6, 4, 3, 2), where={"layouts": ("heads", "first last")})
    for activation in LINEAR_ACTIVATIONS:
        yield case(activation, (2, 6, 7, 5), (8, 3, 3, 3), groups=2, activation=activation, padding="1,1,1,1")
        yield case(f"{activation}, no bias", (3, 5, 40), (7, 5, 4), bias=False, activation=activation)
        yield case(f"{activation} to rows", (2, 6, 9), (8, 6, 3), activation=activation, where={"out_layout": "rows"})
    for dims in (1, 2, 3):
        yield case(f"no batch in {dims}", (0, 4, *[5] * dims), (6, 4, *[3] * dims))
    yield from random_cases(rng, op)


def pool_cases(rng: np.random.Generator, op: str) -> Iterator[Case]:
    def case(name: str, x: reference.Array, kernel: str, stride: str, padding: str, where: Any = None) -> Case:
        attrs: dict[str, Any] = {"kernel_size": kernel, "stride": stride, "padding": padding, "ceil_mode": False}
        if op == "max_pool":
            attrs["dilation"] = ",".join(["1"] * (x.ndim - 2))
        else:
            attrs |= {"count_include_pad": False, "divisor": 0}
        if op.startswith("adaptive"):
            attrs = {"output_size": stride}
        return Case(name, (x,), attrs, **(where or {}))

    yield case("3 x 3, stride 2", normal(rng, 1, 16, 56, 55), "3,3", "2,2", "1,1,1,1")
    yield case("of everything", normal(rng, 2, 33, 7, 9), "7,9", "1,1", "0,0,0,0")
    yield case("values of 1e4", normal(rng, 1, 3, 40) * 1e4, "5", "2", "2,2")
    yield case("below zero", -np.abs(normal(rng, 1, 3, 9, 9)) - 1, "3,3", "2,2", "1,1,1,1")
    for layout in LAYOUTS[1:]:
        yield case(layout, normal(rng, 2, 4, 6, 5), "3,2", "2,1", "1,0,1,0", {"layouts": (layout,)})
    for layout in ("transposed", "gaps", "rows", "first last", "heads"):
        yield case(f"{layout} output", normal(rng, 2, 4, 6, 5), "3,2", "1,2", "1,0,1,0", {"out_layout": layout})
    for dims in (1, 2, 3):
        x, ones = normal(rng, 0, 4, *[5] * dims), ",".join(["1"] * dims)
        yield case(f"no batch in {dims}", x, ones, ones, ",".join(["0"] * 2 * dims))
    far = np.where(normal(rng, 2, 3, 8, 7) > 1, np.inf, normal(rng, 2, 3, 8, 7))
    yield case("infinities", far, "2,2", "2,2", "0,0,0,0")
    yield case("nothing but -infinity", np.full((1, 2, 4, 4), -np.inf), "2,2", "2,2", "0,0,0,0")
    far[0, 0, :3, :3] = np.nan
    yield case("no numbers", far, "2,2", "2,2", "0,0,0,0")
    yield from random_cases(rng, op)


def resize_cases(rng: np.random.Generator, op: str) -> Iterator[Case]:
    def case(name: str, shape: tuple[int, ...], size: str, mode: str, scale: str = "", **where: Any) -> Case:
        attrs = {"size": size, "scale": scale, "mode": mode, "align_corners": False, "antialias": False}
        return Case(name, (normal(rng, *shape),), attrs, **where)

    yield case("nearest, where float32 is none", (1, 1, 7, 41), "49,123", "nearest")
    yield case("nearest, 1 to 101", (1, 1, 1, 3), "5,101", "nearest_exact")
    for mode in ("nearest", "nearest_exact", "linear", "cubic"):
        yield case(f"{mode}, twice", (1, 5, 16, 15), "32,30", mode, "2.0,2.0")
        yield case(f"{mode}, a half", (2, 3, 17, 16), "8,8", mode, "0.5,0.5")
        yield case(f"{mode}, the same", (2, 3, 6, 5), "6,5", mode)
        yield case(f"{mode}, one element", (1, 3, 1, 1), "4,3", mode)
        for layout in LAYOUTS[1:]:
            yield case(f"{mode}, {layout}", (2, 4, 6, 5), "4,7", mode, layouts=(layout,))
        for layout in ("transposed", "gaps", "rows", "first last", "heads"):
            yield case(f"{mode}, {layout} output", (2, 4, 6, 5), "4,7", mode, out_layout=layout)
        yield case(f"{mode}, no batch", (0, 4, 6, 5), "4,7", mode)
    yield from random_cases(rng, op)


def random_cases(rng: np.random.Generator, op: str) -> Iterator[Case]:
    """Calls that no list has, the same at each run."""
    chance = Random(op)
    for number in range(RANDOM_CALLS):
        shapes, attrs = random_call(op, chance)
        tensors = tuple(None if shape is None else normal(rng, *shape) for shape in shapes)
        yield Case(f"random {number}: {shapes} {attrs}", tensors, attrs)


CASES: dict[str, Callable[[np.random.Generator], Iterator[Case]]] = {
    op: functools.partial(conv_cases if "conv" in op else pool_cases if "pool" in op else resize_cases, op=op)
    for op in OPS
}
