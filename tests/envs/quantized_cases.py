"""The calls of ops on quantized numbers that test_conformance.py makes. As tests/envs/cases.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from tests.envs.case import Case, normal

Rng = np.random.Generator
LAYOUTS = ("transposed", "gaps", "rows")
EDGES = [0.0, -0.0, 6e4, -6e4, np.inf, -np.inf, np.nan, 2.5, 3.5, -2.5, 17, 19, 2.0**-20, 448, 464]


def _steps(rng: Rng, *shape: int) -> Any:
    return np.exp(normal(rng, *shape) - 3).astype(np.float32)


def _points(rng: Rng, *shape: int) -> Any:
    return rng.integers(-20, 20, shape).astype(np.int32)


def quantize_cases(rng: Rng) -> Iterator[Case]:
    for made in ("float8_e4m3fn", "float8_e5m2", "int8", "uint8"):
        is_whole = made in ("int8", "uint8")
        for scale in ((1, 1), (5, 1), (5, 4)):
            steps = np.exp(normal(rng, *scale)).astype(np.float32)
            for zero in (None, _points(rng, *scale)) if is_whole else (None,):
                yield Case(
                    f"{scale} to {made}{'' if zero is None else ', zero points'}",
                    (normal(rng, 5, 24) * 200, steps, zero),
                    {"dtype": made},
                )
        one = np.ones((1, 1), np.float32)
        yield Case(f"edges to {made}", (np.array([EDGES]), one, None), {"dtype": made})
        yield Case(f"a scale of 0 to {made}", (np.array([[1.0, -1.0, 0.0]]), 0 * one, None), {"dtype": made})
        for layout in LAYOUTS:
            given = (normal(rng, 3, 4, 8) * 9, np.ones((3, 4, 2), np.float32), None)
            yield Case(f"{layout} to {made}", given, {"dtype": made}, (layout, layout), layout)


def dequantize_cases(rng: Rng) -> Iterator[Case]:
    for made in ("float32", "bfloat16", "float16"):
        for scale in ((1, 1), (5, 1), (5, 4)):
            steps = np.exp(normal(rng, *scale)).astype(np.float32)
            for zero in (None, _points(rng, *scale)):
                name = f"{scale} to {made}{'' if zero is None else ', zero points'}"
                yield Case(name, (normal(rng, 5, 24) * 3, steps, zero), {"dtype": made})
        for layout in LAYOUTS:
            given = (normal(rng, 3, 4, 8) * 3, np.ones((3, 4, 2), np.float32), None)
            yield Case(f"{layout} to {made}", given, {"dtype": made}, (layout, layout), layout)


def dynamic_cases(rng: Rng) -> Iterator[Case]:
    """Rows of zeros, of one sign, of the least and the greatest numbers, and of what is not finite."""
    for kind in ("int8", "uint8", "float8_e4m3fn", "float8_e5m2", "mxfp4", "nvfp4"):
        block = {"mxfp4": 32, "nvfp4": 16}.get(kind)
        for is_symmetric in (True, False) if kind == "int8" else (kind != "uint8",):
            for groups in (0, 1, 6) if block is None else (192 // block,):
                attrs = {"format": kind, "groups": groups, "symmetric": is_symmetric}
                name = f"{kind} in {groups}{'' if is_symmetric else ', zero points'}"
                yield Case(name, (normal(rng, 5, 192),), attrs)
                yield Case(f"{name}, three dimensions", (normal(rng, 2, 3, 192) * 40,), attrs)
                rows = normal(rng, 6, 192)
                rows[0] = 0
                rows[1] = abs(rows[1])
                rows[2] = -abs(rows[2]) - 1
                rows[3] *= 1e-4
                rows[4, 7] = 6e4
                yield Case(f"{name}, odd rows", (rows,), attrs)
                if kind != "nvfp4":  # where one is not finite, no scale is
                    rows = normal(rng, 4, 192)
                    rows[0, 3], rows[1, 5], rows[2, 9] = np.nan, np.inf, -np.inf
                    yield Case(f"{name}, not finite", (rows,), attrs)
                for layout in LAYOUTS:
                    yield Case(f"{name}, {layout}", (normal(rng, 4, 192),), attrs, (layout,))


def int_matmul_cases(rng: Rng) -> Iterator[Case]:
    """With numbers of the whole range, which saturate 16 bits in pairs."""
    kinds: list[Any] = [None, np.int8, np.uint8]
    for kind in kinds:
        name = "same" if kind is None else kind.__name__
        for m, k, n in ((1, 1, 1), (3, 5, 7), (16, 64, 32), (5, 300, 9), (1, 1000, 3), (40, 7, 33)):
            b = normal(rng, k, n) if kind is None else rng.integers(*_range(kind), (k, n)).astype(kind)
            for zeros in ((None, None), (_points(rng, m, 1), _points(rng, 1, n)), (_points(rng, 1, 1), None)):
                given = sum(zero is not None for zero in zeros)
                yield Case(f"{m}x{k}x{n} {name} {given}", (normal(rng, m, k), b, *zeros))
        extreme = np.full((64, 5), 127 if kind is not np.uint8 else 255, kind or np.float64) / (
            16 if kind is None else 1
        )
        if kind is not None:
            extreme = extreme.astype(kind)
        yield Case(f"the greatest {name}", (np.full((3, 64), 127 / 16), extreme, None, None))
        yield Case(f"the least {name}", (np.full((3, 64), -8.0), extreme, None, None))
        b = normal(rng, 3, 8, 5) if kind is None else rng.integers(*_range(kind), (3, 8, 5)).astype(kind)
        yield Case(f"batched {name}", (normal(rng, 2, 1, 4, 8), b, _points(rng, 4, 1), None))
        for layout in LAYOUTS:
            given = (normal(rng, 4, 8), b[0], None, None)
            yield Case(f"{layout} {name}", given, {}, (layout, layout), layout)


def _range(kind: Any) -> tuple[int, int]:
    return int(np.iinfo(kind).min), int(np.iinfo(kind).max) + 1


def scaled_linear_cases(rng: Rng) -> Iterator[Case]:
    """Of x quantized, and of x in floats: check() leaves those out whose dtypes do not belong together."""
    for is_quantized in (True, False):
        for kind in (None, np.int8, np.uint8, "int4"):
            for number, (m, k, n) in enumerate(((1, 16, 1), (3, 64, 5), (17, 48, 6), (2, 320, 16))):
                for groups, rows in ((1, n), (1, 1), (4, n), (2, 1)):
                    for has_zeros in (False, True):
                        dtype = ("float32", "bfloat16", "float16")[number % 3] if is_quantized else ""
                        attrs = {"dtype": dtype, "weight_format": "int4" if kind == "int4" else ""}
                        x, weight = _weight(rng, m, n, k, kind)
                        steps = _steps(rng, rows, groups), _steps(rng, m, groups) if is_quantized else None
                        bias = normal(rng, n).astype(np.float32) if number % 2 else None
                        zeros = (
                            _points(rng, m, groups) if has_zeros and is_quantized else None,
                            _points(rng, rows, groups) if has_zeros else None,
                        )
                        name = f"{m}x{k}x{n} by {kind} in {groups} of {rows} {dtype}{' zeros' * has_zeros}"
                        yield Case(name, (x, weight, *steps, bias, *zeros), attrs)
            x, weight = _weight(rng, 4, 6, 32, kind)
            attrs = {"dtype": "float32" if is_quantized else "", "weight_format": "int4" if kind == "int4" else ""}
            given = (x, weight, _steps(rng, 6, 1), _steps(rng, 4, 1) if is_quantized else None, None, None, None)
            for layout in LAYOUTS:
                yield Case(f"{layout} by {kind} {is_quantized}", given, attrs, (layout, layout), layout)


def _weight(rng: Rng, m: int, n: int, k: int, kind: Any) -> tuple[Any, Any]:
    """x, and a weight of its dtype or of another."""
    if kind is None:
        return normal(rng, m, k) / 2, normal(rng, n, k) / 2
    if kind == "int4":
        return normal(rng, m, k), rng.integers(0, 256, (n, k // 2)).astype(np.uint8)
    return normal(rng, m, k), rng.integers(*_range(kind), (n, k)).astype(kind)


CASES: dict[str, Callable[[Rng], Iterator[Case]]] = {
    "quantize": quantize_cases,
    "dequantize": dequantize_cases,
    "dynamic_quantize": dynamic_cases,
    "int_matmul": int_matmul_cases,
    "scaled_linear": scaled_linear_cases,
}
