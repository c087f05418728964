"""The problems of ops on quantized numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from layerzero.ipc.vocabulary.numerics import nearest
from layerzero.ipc.vocabulary.ops import BLOCKS, QUANTIZED_FORMATS
from layerzero.workers.certify.claims import Claims
from layerzero.workers.certify.number_generator import Numbers
from layerzero.workers.certify.problem import Problem
from layerzero.workers.certify.values import Shape, Values

_RESULTS = ("float32", "bfloat16", "float16")


def _steps(shape: Shape, greatest: int = 2) -> Values:
    """Powers of two, so that products with them are exact."""
    return Values(shape, [2.0 ** (greatest - i % 12) for i in range(math.prod(shape))])


def _points(shape: Shape) -> Values:
    return Values(shape, [i % 5 * 3 - 6 for i in range(math.prod(shape))])


def _quantization(op: str, dtypes: Sequence[str]) -> Callable[[Claims], Iterator[Problem]]:
    def problems(_: Claims) -> Iterator[Problem]:
        numbers = Numbers(16)
        shapes: list[Shape] = [(3, 8), (2, 3, 36), (2, 272), (0, 4)]
        kinds = ("", "float32", "int32")
        for dtype in dtypes:
            for shape in shapes:
                for extents in ((*shape[:-1], 1), (1,) * len(shape), (*shape[:-1], 4)):
                    title = f"{list(shape)} by {list(extents)} to {dtype}"
                    x, scale = numbers(*shape), _steps(extents)
                    yield Problem(op, title, {"dtype": dtype}, (x, scale, None), kinds)
                    if op == "dequantize" or dtype in ("int8", "uint8"):
                        families = ("int", "uint") if op == "dequantize" else ()
                        inputs = (x, scale, _points(extents))
                        yield Problem(op, f"{title}, zero points", {"dtype": dtype}, inputs, kinds, families)

    return problems


def _dynamic(_: Claims) -> Iterator[Problem]:
    """Rows of zeros, and of the least differences, are among them."""
    numbers = Numbers(28)
    for kind in QUANTIZED_FORMATS:
        for shape, part in (((2, 3, 64), 32), ((3, 96), 16), ((2, 64), 32), ((0, 64), 64)):
            extents = (shape[-1] // BLOCKS[kind],) if kind in BLOCKS else (1, 0, shape[-1] // part)
            for groups in extents:
                for is_symmetric in [False] if kind == "uint8" else [True, False] if kind == "int8" else [True]:
                    attrs = {"format": kind, "groups": groups, "symmetric": is_symmetric}
                    name = f"{list(shape)} in {groups} groups to {kind}{'' if is_symmetric else ', zero points'}"
                    x = numbers(*shape)
                    if shape == (3, 96):
                        x = Values(shape, [*[0.0] * 96, *[-(2.0**-9)] * 96, *x.flat[192:]])
                    yield Problem("dynamic_quantize", name, attrs, (x,))


def _int_matmul(_: Claims) -> Iterator[Problem]:
    """Sums of the greatest products, which go beyond 16 bits in a pair."""
    numbers = Numbers(29)
    for other in ("", "int8", "uint8"):
        families = () if not other else ("uint",) if other == "int8" else ("int",)
        kinds = ("", other, "int32", "int32")
        for m, k, n in ((3, 8, 5), (16, 32, 16), (17, 33, 7), (2, 300, 5)):
            for left, right in (((), ()), ((2,), (2,)) if k == 300 else ((2, 1), (3,))):
                for has_zeros in (False, True):
                    b = _whole(numbers(*right, k, n), other)
                    zeros = (_points((m, 1)), _points((1, n))) if has_zeros else (None, None)
                    name = f"{[*left, m, k]} @ {[*right, k, n]}{', zero points' if has_zeros else ''} {other}"
                    yield Problem("int_matmul", name, {}, (numbers(*left, m, k), b, *zeros), kinds, families)
    for family, other in (("int", ""), ("uint", ""), ("int", "uint8"), ("uint", "int8")):
        one, two = _most(family == "int", 0), _most((other or f"{family}8") == "int8", 1)
        inputs = (Values((2, 64), one * 2), _whole(Values((64, 3), two * 3), other), None, None)
        yield Problem("int_matmul", f"the greatest, {family} {other}", {}, inputs, ("", other, "", ""), (family,))
    empties: list[tuple[Shape, Shape]] = [((3, 0), (0, 5)), ((0, 4), (4, 5))]
    for shape, more in empties:
        yield Problem("int_matmul", f"{shape} @ {more}", {}, (numbers(*shape), numbers(*more), None, None))


def _most(is_signed: bool, first: int) -> list[float]:
    """As sixteenths, which numbers of integers are made of."""
    return [((-128, 127) if is_signed else (255, 254))[(i + first) % 2] / 16 for i in range(64)]


def _whole(values: Values, dtype: str) -> Values:
    """The numbers that a problem's conversion would make, of one whose dtype does not follow the one under test."""
    if not dtype:
        return values
    signs = abs if dtype == "uint8" else int
    return Values(values.shape, [signs(round(v * 16)) for v in values.flat])


def _scaled_linear(claims: Claims) -> Iterator[Problem]:
    yield from _both_quantized()
    yield from _weight_alone()


# Rows, numbers in each, and results.
_SIZES = ((3, 8, 5), (16, 32, 16), (17, 40, 6), (2, 320, 4))


def _ways(is_whole: bool, *, is_pair: bool = False) -> Iterator[tuple[tuple[int, int, int], int, bool]]:
    """Extents, groups of a row, and whether there are zero points, which come with groups as well. A long row of pairs
    has twice as many numbers."""
    for m, k, n in _SIZES:
        extents = (m, 2 * k if is_pair and k == 320 else k, n)
        yield extents, 1, False
        yield extents, 4, False
        if is_whole:
            yield extents, 1, True
            if extents[1] > 32:
                yield extents, 4, True


def _both_quantized() -> Iterator[Problem]:
    numbers = Numbers(30)
    # The family of x, and the weight's dtype, "" for x's.
    pairs = [("int", ""), ("uint", ""), ("int", "uint8"), ("uint", "int8"), ("float8_e4m3fn", "")]
    pairs += [("float8_e5m2", ""), ("float8_e4m3fn", "float8_e5m2"), ("float8_e5m2", "float8_e4m3fn")]
    pairs += [("float4_e2m1fn_x2", ""), ("int", "int4"), ("uint", "int4")]
    for family, kind in pairs:
        halves = 2 if family == "float4_e2m1fn_x2" else 1
        for number, ((m, k, n), groups, has_zeros) in enumerate(
            _ways(family in ("int", "uint"), is_pair=halves == 2 or kind == "int4")
        ):
            both = numbers(m, k // halves), _stored(numbers, n, k // halves, kind)
            for dtype in ("float32", _RESULTS[1 + number // 2 % 2]):
                yield _linear(
                    f"{family} by {kind or 'the same'}", both, (m, k, n), groups, kind=kind, dtype=dtype,
                    is_fine=(dtype == "float32") != bool(number % 2), has_zeros=has_zeros, families=(family,),
                )  # fmt: skip
    kinds = ("", "", "float32", "float32", "", "", "")
    for one in (((0, 4), (5, 4)), ((3, 4), (0, 4))):
        x, weight = (numbers(*shape) for shape in one)
        inputs = (x, weight, _steps((1, 1)), _steps((1, 1)), None, None, None)
        yield Problem("scaled_linear", f"{one}", {"dtype": "float32", "weight_format": ""}, inputs, kinds, ("int",))


def _weight_alone() -> Iterator[Problem]:
    """Of x in floats, whose dtype is that of the result."""
    numbers = Numbers(31)
    for kind in ("int8", "uint8", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2", "int4"):
        for number, ((m, k, n), groups, has_zeros) in enumerate(
            _ways(kind in ("int8", "uint8", "int4"), is_pair=kind in ("float4_e2m1fn_x2", "int4"))
        ):
            both = numbers(m, k), _stored(numbers, n, k // 2 if kind == "float4_e2m1fn_x2" else k, kind)
            yield _linear(
                f"float by {kind}", both, (m, k, n), groups, kind=kind, dtype="", is_fine=bool(number // 2 % 2),
                has_zeros=has_zeros, families=("float",), is_quantized=False,
            )  # fmt: skip

    for m, k, n, groups in ((3, 48, 5, 3), (33, 96, 16, 3)):  # zero points as libraries pack them, two in a byte
        both = numbers(m, k), _stored(numbers, n, k, "int4")
        inputs = (*both, _steps((n, groups), -4), None, None, None, Values((n, groups), _nibbles(n * groups)))
        kinds = ("", "uint8", "float32", "float32", "float32", "int32", "int32")
        title, attrs = f"float by int4, [{m}, {k}] to {n}, zeros from 0 to 15", {"dtype": "", "weight_format": "int4"}
        yield Problem("scaled_linear", title, attrs, inputs, kinds, ("float",))
    for n, is_fine in ((6, True), (16, True), (6, False)):  # groups of powers of 2, which libraries have kernels for
        for has_zeros in (False, True):
            both = numbers(3, 128), _stored(numbers, n, 128, "int4")
            yield _linear(
                "float by int4", both, (3, 128, n), 4, kind="int4", dtype="", is_fine=is_fine, has_zeros=has_zeros,
                families=("float",), is_quantized=False,
            )  # fmt: skip


def _nibbles(count: int) -> list[float]:
    """Numbers of 4 bits, the least and the greatest first."""
    return [0, 15, *(i * 7 % 16 for i in range(count - 2))]


def _linear(
    name: str,
    both: tuple[Values, Values],
    extents: tuple[int, int, int],
    groups: int,
    *,
    kind: str,
    dtype: str,
    is_fine: bool,
    has_zeros: bool,
    families: tuple[str, ...],
    is_quantized: bool = True,
) -> Problem:
    """A fine one has a scale for each row, and a bias; another one scale, or of groups one for a block of a weight."""
    m, k, n = extents
    x_steps = _steps((m if is_fine else 1, groups), -4) if is_quantized else None
    rows = n if is_fine else n // 2 if groups > 1 and n % 2 == 0 else 1
    steps = _steps((rows, groups), -4)
    bias = Values((n,), [i / 4 - 1 for i in range(n)]) if is_fine else None
    zeros = (_points(x_steps.shape) if x_steps and has_zeros else None, _points(steps.shape) if has_zeros else None)
    attrs: dict[str, Any] = {"dtype": dtype, "weight_format": "int4" if kind == "int4" else ""}
    kinds = ("", "uint8" if kind == "int4" else kind, "float32", "float32", "float32", "int32", "int32")
    title = f"{name}, [{m}, {k}] to {n} in {groups}, {'rows' if is_fine else 'one'} {dtype}{' zeros' * has_zeros}"
    return Problem("scaled_linear", title, attrs, (*both, steps, x_steps, bias, *zeros), kinds, families)


def _stored(numbers: Numbers, n: int, k: int, kind: str) -> Values:
    """A weight whose dtype does not follow the one under test."""
    made = numbers(n, k // 2 if kind == "int4" else k)
    if kind in ("", "int8", "uint8"):
        return _whole(made, kind)
    if kind in ("float8_e4m3fn", "float8_e5m2"):
        return Values(made.shape, [nearest(v, kind) for v in made.flat])
    return Values(made.shape, [round(v * 16) * 37 % 256 for v in made.flat])


PROBLEMS: dict[str, Callable[[Claims], Iterator[Problem]]] = {
    "quantize": _quantization("quantize", ("float8_e4m3fn", "float8_e5m2", "int8", "uint8")),
    "dequantize": _quantization("dequantize", _RESULTS),
    "dynamic_quantize": _dynamic,
    "int_matmul": _int_matmul,
    "scaled_linear": _scaled_linear,
}
