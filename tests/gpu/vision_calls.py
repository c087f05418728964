"""Random calls of convolutions, pooling and interpolation, as shapes and attributes: for every test that draws some.
Without any library."""

from __future__ import annotations

from random import Random
from typing import Any

Shapes = list["tuple[int, ...] | None"]
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")


def random_call(op: str, rng: Random) -> tuple[Shapes, dict[str, Any]]:
    """Shapes of the arguments, None for one that is left out, and the attributes as they cross the wire."""
    return _MAKERS[op](op, rng)


def text(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))


def _conv(op: str, rng: Random) -> tuple[Shapes, dict[str, Any]]:
    dims = rng.randint(1, 3)
    groups, each, more = rng.choice((1, 1, 2, 5)), rng.choice((1, 2, 8)), rng.choice((1, 3, 16))
    if rng.random() < 0.3:
        groups, each = groups * each, 1
    kernel = [rng.randint(1, 3) for _ in range(dims)]
    stride, dilation = ([rng.randint(1, 3) for _ in range(dims)] for _ in range(2))
    low, high = ([rng.randint(0, 2) for _ in range(dims)] for _ in range(2))
    if rng.random() < 0.5:
        high = low
    sizes = []
    for n, gap, first, last in zip(kernel, dilation, low, high, strict=True):
        least = max(gap * (n - 1) + 1 - first - last, 1) if op == "conv" else 5  # so that something is left
        sizes.append(least + rng.randint(0, 6 if dims < 3 else 3))
    attrs: dict[str, Any] = {
        **{"stride": text(stride), "padding": text([*low, *high]), "dilation": text(dilation)},
        **{"groups": groups, "activation": rng.choice(ACTIVATIONS) if rng.random() < 0.3 else ""},
    }
    channels, made = groups * each, groups * more
    weight = (made, each, *kernel)
    if op == "conv_transpose":
        weight = (channels, more, *kernel)
        attrs["output_padding"] = text(
            [rng.randrange(max(step, gap)) for step, gap in zip(stride, dilation, strict=True)]
        )
    bias = (made,) if rng.random() < 0.5 else None
    return [(rng.choice((1, 2)), channels, *sizes), weight, bias], attrs


def _pool(op: str, rng: Random) -> tuple[Shapes, dict[str, Any]]:
    dims = rng.randint(1, 3)
    kernel, stride = ([rng.randint(1, 4) for _ in range(dims)] for _ in range(2))
    dilation = [rng.randint(1, 3) if op == "max_pool" else 1 for _ in range(dims)]
    low, high = ([rng.randint(0, n // 2) for n in kernel] for _ in range(2))
    if rng.random() < 0.5:
        high = low
    sizes = [
        max(gap * (n - 1) + 1 - first - last, 1) + rng.randint(0, 9 if dims < 3 else 3)
        for n, gap, first, last in zip(kernel, dilation, low, high, strict=True)
    ]
    attrs: dict[str, Any] = {
        **{"kernel_size": text(kernel), "stride": text(stride), "padding": text([*low, *high])},
        "ceil_mode": rng.random() < 0.5,
    }
    if op == "max_pool":
        attrs["dilation"] = text(dilation)
    else:
        attrs |= {"count_include_pad": rng.random() < 0.5, "divisor": rng.choice((0, 0, 3))}
    return [(rng.choice((1, 2)), rng.choice((1, 3, 16)), *sizes)], attrs


def _adaptive(op: str, rng: Random) -> tuple[Shapes, dict[str, Any]]:
    dims = rng.randint(1, 3)
    sizes, made = ([rng.randint(1, 12 if dims < 3 else 5) for _ in range(dims)] for _ in range(2))
    return [(rng.choice((1, 2)), rng.choice((1, 3, 16)), *sizes)], {"output_size": text(made)}


def _interpolate(op: str, rng: Random) -> tuple[Shapes, dict[str, Any]]:
    dims = rng.randint(1, 3)
    sizes, made = ([rng.randint(1, 20 if dims < 3 else 5) for _ in range(dims)] for _ in range(2))
    scale = ""
    if rng.random() < 0.4:
        factors = [rng.randint(8 // size + 1, 24) / 8 for size in sizes]
        made, scale = [int(n * factor) for n, factor in zip(sizes, factors, strict=True)], ",".join(map(repr, factors))
    mode = rng.choice(("nearest", "nearest_exact", "linear", "linear", *(["cubic"] * 2 if dims == 2 else [])))
    is_weighed = not mode.startswith("nearest")
    attrs = {
        **{"size": text(made), "scale": scale, "mode": mode},
        "align_corners": is_weighed and rng.random() < 0.5,
        "antialias": is_weighed and dims == 2 and rng.random() < 0.5,
    }
    return [(rng.choice((1, 2)), rng.choice((1, 3, 16)), *sizes)], attrs


_MAKERS = {
    **dict.fromkeys(("conv", "conv_transpose"), _conv),
    **dict.fromkeys(("max_pool", "avg_pool"), _pool),
    **dict.fromkeys(("adaptive_max_pool", "adaptive_avg_pool"), _adaptive),
    "interpolate": _interpolate,
}
OPS = tuple(_MAKERS)
