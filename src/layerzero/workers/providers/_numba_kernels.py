"""Kernels of rows and elements for Numba. Used by numba.py.

They are plain functions that `specialize` compiles once for each kind of numbers: what they call by the names below is
given by the kind. `get` and `put` convert elements, which bfloat16 has as bits, to the `num` that is computed with, and
back. Functions of float32 are polynomials without branches, so that the compiler has them work on whole vectors; those
of float64 are libm's. All of it works on dense memory, from one row or element to another, and lets go of the GIL.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping
from typing import Any

get: Any = None
put: Any = None
num: Any = None
integer: Any = None
exp: Any = None
log: Any = None
tanh: Any = None
erfc: Any = None
sqrt: Any = None
sign: Any = None
pick: Any = None
order: Any = None
unordered: Any = None
bits_of: Any = None
float_of: Any = None
lowest: Any = None
empty: Any = None
apply: Any = None

TILE = 1024  # elements, of what is converted at once
KINDS = ("float32", "float64", "bfloat16")
_SUMS = {"reassoc", "contract"}  # sums may be taken in any order; infinities and NaN stay what they are


def unary(x, out, start, stop):  # type: ignore[no-untyped-def]
    """Slices, as everywhere here: an index of one cannot be below 0, which the compiler would ask for each element."""
    given, made = x[start:stop], out[start:stop]
    for i in range(stop - start):
        made[i] = apply(given[i])


def gated(gate, up, out, start, stop):  # type: ignore[no-untyped-def]
    given, beside, made = gate[start:stop], up[start:stop], out[start:stop]
    for i in range(stop - start):
        made[i] = apply(given[i]) * beside[i]


def unary_half(x, out, start, stop):  # type: ignore[no-untyped-def]
    """In tiles: the compiler has whole vectors of conversions, and of what is computed, but not of both at once."""
    tile = empty(TILE)
    for first in range(start, stop, TILE):
        count = min(TILE, stop - first)
        given, made = x[first : first + count], out[first : first + count]
        for i in range(count):
            tile[i] = get(given[i])
        for i in range(count):
            tile[i] = apply(tile[i])
        for i in range(count):
            made[i] = put(tile[i])


def gated_half(gate, up, out, start, stop):  # type: ignore[no-untyped-def]
    tile = empty(TILE)
    for first in range(start, stop, TILE):
        count = min(TILE, stop - first)
        given, beside, made = gate[first : first + count], up[first : first + count], out[first : first + count]
        for i in range(count):
            tile[i] = get(given[i])
        for i in range(count):
            tile[i] = apply(tile[i])
        for i in range(count):
            made[i] = put(tile[i] * get(beside[i]))


def softmax(x, out, width, inner, is_log, start, stop):  # type: ignore[no-untyped-def]
    """Of `width` elements that lie `inner` apart; start and stop count what lies before that dimension."""
    row = empty(width)
    for number in range(start * inner, stop * inner):
        first = number // inner * width * inner + number % inner
        given, made = x[first : first + (width - 1) * inner + 1], out[first : first + (width - 1) * inner + 1]
        if inner == 1:
            for i in range(width):
                row[i] = get(given[i])
        else:
            for i in range(width):
                row[i] = get(given[i * inner])
        top = lowest
        for i in range(width):
            top = max(top, order(row[i]))
        largest, total = unordered(top), num(0)
        if is_log:
            for i in range(width):
                total += exp(row[i] - largest)
            less = log(total)
            for i in range(width):
                row[i] = (row[i] - largest) - less
        else:
            for i in range(width):
                row[i] = exp(row[i] - largest)
                total += row[i]
            factor = num(1) / total
            for i in range(width):
                row[i] *= factor
        if inner == 1:
            for i in range(width):
                made[i] = put(row[i])
        else:
            for i in range(width):
                made[i * inner] = put(row[i])


def norm(x, weight, bias, out, width, eps, is_centred, has_weight, has_bias, start, stop):  # type: ignore[no-untyped-def]
    """layer_norm of rows, or rms_norm, which subtracts no mean."""
    row = empty(width)
    for first in range(start * width, stop * width, width):
        given, made = x[first : first + width], out[first : first + width]
        for i in range(width):
            row[i] = get(given[i])
        if is_centred:  # twice: a mean has few digits of a deviation where it is large, that of the rest has the others
            for _ in range(2):
                mean = num(0)
                for i in range(width):
                    mean += row[i]
                mean /= num(width)
                for i in range(width):
                    row[i] -= mean
        squares = num(0)
        for i in range(width):
            squares += row[i] * row[i]
        factor = num(1) / sqrt(squares / num(width) + num(eps))
        for i in range(width):
            row[i] *= factor
        if has_weight:
            for i in range(width):
                row[i] *= get(weight[i])
        if has_bias:
            for i in range(width):
                row[i] += get(bias[i])
        for i in range(width):
            made[i] = put(row[i])


def add_rms_norm(x, residual, weight, out, summed, width, eps, has_weight, start, stop):  # type: ignore[no-untyped-def]
    row = empty(width)
    for first in range(start * width, stop * width, width):
        given, beside = x[first : first + width], residual[first : first + width]
        made, total = out[first : first + width], summed[first : first + width]
        squares = num(0)
        for i in range(width):
            row[i] = get(given[i]) + get(beside[i])
        for i in range(width):
            squares += row[i] * row[i]
        factor = num(1) / sqrt(squares / num(width) + num(eps))
        for i in range(width):
            total[i] = put(row[i])
        for i in range(width):
            row[i] *= factor
        if has_weight:
            for i in range(width):
                row[i] *= get(weight[i])
        for i in range(width):
            made[i] = put(row[i])


def rope(x, cos, sin, out, heads, width, half, places, interleaved, start, stop):  # type: ignore[no-untyped-def]
    """Of tokens, each `heads` rows of `width`; the tables have `places` rows, from which tokens start anew."""
    for token in range(start, stop):
        table = token % places * half
        for head in range(heads):
            first = (token * heads + head) * width
            for i in range(half):
                one, other = (first + 2 * i, first + 2 * i + 1) if interleaved else (first + i, first + half + i)
                a, b, c, s = get(x[one]), get(x[other]), get(cos[table + i]), get(sin[table + i])
                out[one] = put(a * c - b * s)
                out[other] = put(b * c + a * s)
            for i in range(first + 2 * half, first + width):
                out[i] = x[i]


def silu(x):  # type: ignore[no-untyped-def]
    return x / (num(1) + exp(-x))


def sigmoid(x):  # type: ignore[no-untyped-def]
    return num(1) / (num(1) + exp(-x))


def relu(x):  # type: ignore[no-untyped-def]
    return pick(x < num(0), num(0), x)


def gelu_none(x):  # type: ignore[no-untyped-def]
    return num(0.5) * x * erfc(x * num(-0.7071067811865476))


def gelu_tanh(x):  # type: ignore[no-untyped-def]
    """x/2 (1 + tanh(u)) is x / (1 + exp(-2u))."""
    return x / (num(1) + exp(num(-1.5957691216057308) * (x + num(0.044715) * x * x * x)))


def quick_gelu(x):  # type: ignore[no-untyped-def]
    return x / (num(1) + exp(num(-1.702) * x))


def hardswish(x):  # type: ignore[no-untyped-def]
    moved = x + num(3)
    moved = pick(moved < num(0), num(0), moved)
    return x * pick(moved > num(6), num(6), moved) * num(1 / 6)


def mish(x):  # type: ignore[no-untyped-def]
    """tanh(log(1 + e)) is n / (n + 2) with n = e (e + 2); beyond 20 it is 1."""
    e = exp(pick(x > num(20), num(20), x))
    n = e * (e + num(2))
    return x * (n / (n + num(2)))


def tanh_of(x):  # type: ignore[no-untyped-def]
    return tanh(x)


UNARY = {
    "silu": silu,
    "sigmoid": sigmoid,
    "relu": relu,
    "gelu_none": gelu_none,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "hardswish": hardswish,
    "mish": mish,
    "tanh": tanh_of,
}
GATED = {"swiglu": silu, "reglu": relu, "geglu_none": gelu_none, "geglu_tanh": gelu_tanh}
_ROWS = {"softmax": softmax, "norm": norm, "add_rms_norm": add_rms_norm, "rope": rope}


# float32. Sources: Cephes (expf, tanhf); Numerical Recipes, 6.2 (erfc, off by 1.2e-7 of it at most).


def exp32(x):  # type: ignore[no-untyped-def]
    held = pick(x < num(-104), num(-104), x)  # both ends are 0 and infinite; so is NaN at the end held, no integer
    held = pick(held > num(89), num(89), held)
    held = pick(x == x, held, num(0))
    t = held * num(1.44269504088896341)
    whole = integer(t + pick(t >= num(0), num(0.5), num(-0.5)))
    n = num(whole)
    r = (held - n * num(0.693359375)) - n * num(-2.12194440e-4)
    p = num(1.9875691500e-4) * r + num(1.3981999507e-3)
    p = p * r + num(8.3334519073e-3)
    p = p * r + num(4.1665795894e-2)
    p = p * r + num(1.6666665459e-1)
    p = p * r + num(5.0000001201e-1)
    p = p * r * r + r + num(1)
    low = integer(whole >> 1)
    found = p * float_of(integer((low + 127) << 23)) * float_of(integer((whole - low + 127) << 23))
    return pick(x == x, found, x)


def sign32(x):  # type: ignore[no-untyped-def]
    """1 or -1. By its bits: a comparison would have the compiler go two ways, and work on one element at a time."""
    return float_of(integer((bits_of(x) & ~0x7FFFFFFF) | 0x3F800000))


def tanh32(x):  # type: ignore[no-untyped-def]
    z = x * x
    p = num(-5.70498872745e-3) * z + num(2.06390887954e-2)
    p = p * z + num(-5.37397155531e-2)
    p = p * z + num(1.33314422036e-1)
    p = p * z + num(-3.33332819422e-1)
    size = float_of(integer(bits_of(x) & 0x7FFFFFFF))
    e = exp(num(-2) * size)
    far = (num(1) - e) / (num(1) + e)
    far = far * sign(x)
    return pick(size <= num(0.625), p * z * x + x, far)


def erfc32(x):  # type: ignore[no-untyped-def]
    z = float_of(integer(bits_of(x) & 0x7FFFFFFF))
    t = num(1) / (num(1) + num(0.5) * z)
    p = num(0.17087277) * t + num(-0.82215223)
    p = p * t + num(1.48851587)
    p = p * t + num(-1.13520398)
    p = p * t + num(0.27886807)
    p = p * t + num(-0.18628806)
    p = p * t + num(0.09678418)
    p = p * t + num(0.37409196)
    p = p * t + num(1.00002368)
    p = p * t + num(-1.26551223)
    found = t * exp(p - z * z)
    of = sign(x)
    return (num(1) - of) + of * found


def order32(x):  # type: ignore[no-untyped-def]
    """Integers in the order of floats, whose largest is found by whole vectors; NaN is above all."""
    bits = bits_of(x)
    return pick(bits >= 0, bits, integer(bits ^ 0x7FFFFFFF))


def unordered32(bits):  # type: ignore[no-untyped-def]
    return float_of(pick(bits >= 0, bits, integer(bits ^ 0x7FFFFFFF)))


def order64(x):  # type: ignore[no-untyped-def]
    bits = bits_of(x)
    return pick(bits >= 0, bits, integer(bits ^ 0x7FFFFFFFFFFFFFFF))


def unordered64(bits):  # type: ignore[no-untyped-def]
    return float_of(pick(bits >= 0, bits, integer(bits ^ 0x7FFFFFFFFFFFFFFF)))


def same(x):  # type: ignore[no-untyped-def]
    return x


def specialize(numba: Any, numpy: Any, kind: str) -> Mapping[str, Callable[..., Any]]:
    """The kernels of a kind of numbers, by name. Each is compiled at its first call, or read from Numba's cache."""
    is_wide = kind == "float64"
    bits_of, float_of, pick = _without_branches(numba, is_wide)
    real, whole = (numpy.float64, numpy.int64) if is_wide else (numpy.float32, numpy.int32)
    names: dict[str, Any] = {"math": math, "num": real, "integer": whole, "pick": pick}
    names |= {"bits_of": bits_of, "float_of": float_of}
    names |= {"TILE": TILE, "log": math.log, "sqrt": math.sqrt, "lowest": numpy.iinfo(whole).min}

    def given(function: Callable[..., Any], name: str, **more: Any) -> Callable[..., Any]:
        """With what it calls. Numba's cache knows it by its name, so each has another one."""
        made = types.FunctionType(function.__code__, names | more | {"__name__": __name__}, name)
        made.__qualname__, made.__module__ = f"{name}_{kind}", __name__
        return made

    def helper(function: Callable[..., Any]) -> Callable[..., Any]:
        found: Callable[..., Any] = numba.njit(fastmath={"contract"}, error_model="numpy")(
            given(function, function.__name__)
        )
        return found

    if is_wide:
        names |= {"exp": math.exp, "tanh": math.tanh, "erfc": math.erfc}
        names |= {"order": helper(order64), "unordered": helper(unordered64)}
    else:
        names["exp"] = helper(exp32)
        names["sign"] = helper(sign32)
        names |= {"tanh": helper(tanh32), "erfc": helper(erfc32)}
        names |= {"order": helper(order32), "unordered": helper(unordered32)}
    if kind == "bfloat16":
        names["get"], names["put"] = _of_bfloat16(numba)
    else:
        names["get"] = names["put"] = helper(same)

    def empty(width):  # type: ignore[no-untyped-def]
        return numpy.empty(width, real)

    names["empty"] = numba.njit(empty)

    def kernel(function: Any, name: str, **more: Any) -> Callable[..., Any]:
        found: Callable[..., Any] = numba.njit(cache=True, nogil=True, fastmath=_SUMS, error_model="numpy")(
            given(function, name, **more)
        )
        return found

    kernels = {name: kernel(function, name) for name, function in _ROWS.items()}
    of_one, of_two = (unary_half, gated_half) if kind == "bfloat16" else (unary, gated)
    kernels |= {name: kernel(of_one, name, apply=helper(function)) for name, function in UNARY.items()}
    kernels |= {name: kernel(of_two, name, apply=helper(function)) for name, function in GATED.items()}
    return kernels


def _of_bfloat16(numba: Any) -> tuple[Any, Any]:
    """To float32 and back, rounded to nearest, ties to even. In LLVM's words, since Numba's integers are of 64 bits:
    the processor would convert half as many at once."""
    from llvmlite import ir
    from numba.core import types as numba_types
    from numba.extending import intrinsic

    word, real, short = ir.IntType(32), ir.FloatType(), ir.IntType(16)

    @intrinsic
    def get(typing, value):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            return builder.bitcast(builder.shl(builder.zext(args[0], word), word(16)), real)

        return numba_types.float32(numba_types.uint16), generate

    @intrinsic
    def put(typing, value):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            bits = builder.bitcast(args[0], word)
            odd = builder.and_(builder.lshr(bits, word(16)), word(1))
            rounded = builder.lshr(builder.add(builder.add(bits, word(0x7FFF)), odd), word(16))
            is_nan = builder.fcmp_unordered("uno", args[0], args[0])
            return builder.trunc(builder.select(is_nan, word(0x7FC0), rounded), short)

        return numba_types.uint16(numba_types.float32), generate

    return get, put


def _without_branches(numba: Any, is_wide: bool) -> tuple[Any, Any, Any]:
    """A float's bits as an integer, the float of such bits, and one of two values: Python's own choice is a branch."""
    from numba.core import types as numba_types
    from numba.extending import intrinsic

    real, whole = (numba_types.float64, numba_types.int64) if is_wide else (numba_types.float32, numba_types.int32)

    def cast(of: Any, to: Any) -> Any:
        def typed(typing: Any, value: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                return builder.bitcast(args[0], context.get_value_type(to))

            return to(of), generate

        return intrinsic(typed)

    @intrinsic
    def pick(typing, is_first, one, other):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            return builder.select(*args)

        return one(numba_types.boolean, one, one), generate

    return cast(real, whole), cast(whole, real), pick
