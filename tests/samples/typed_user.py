"""What users write, for test_types.py: mypy --strict must complain where a line says `# E: part of the message`, and
nowhere else. Not run."""

from collections.abc import Callable
from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import layerzero as lz

Floats = NDArray[np.float32]


class Tensor:
    """As torch.Tensor looks to a type checker."""

    def __dlpack__(self, *, stream: Any | None = None, max_version: tuple[int, int] | None = None) -> object: ...


# --- what goes in comes out


def block(x: Floats, weight: Floats) -> Floats:
    return lz.silu(lz.linear(x, weight))


def head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return lz.attention(q, k, v, is_causal=True)


def kinds(x: Floats, t: Tensor, ids: NDArray[np.int64], half: NDArray[np.float16]) -> None:
    assert_type(lz.silu(x), Floats)
    assert_type(lz.silu(t), Tensor)
    assert_type(lz.silu(half, out=lz.empty_like(half)), NDArray[np.float16])
    assert_type(lz.matmul(x, x), Floats)
    assert_type(lz.embedding(ids, x), Floats)  # of the rows, not of the indices
    assert_type(lz.embedding(t, t), Tensor)
    assert_type(lz.quantize(x, x), NDArray[Any])  # of another dtype than x
    assert_type(lz.empty((2, 3)), Floats)
    assert_type(lz.empty(3, np.float16), NDArray[np.float16])
    assert_type(lz.share({"w": x, "b": [x]}), dict[str, object])
    assert_type(lz.share(t), Tensor)
    assert_type(lz.jit("silu", x).export("silu.json"), None)
    assert_type(lz.write_bundle(lz.jit("silu", x), "silu.lzb"), None)
    assert_type(lz.load_bundle("silu.lzb", any_lock=True).inputs, dict[str, lz.TensorSpec])


def untyped(x: Any) -> Any:
    return lz.softmax(x, -1)


def views(x: bytearray, y: memoryview) -> memoryview:
    return lz.matmul(y, x)


# --- mistakes


def wrong(x: Floats) -> int:
    number: int = lz.silu(x)  # E: Incompatible types in assignment
    none = lz.append_kv(x, x, x, x, x)  # E: "append_kv" does not return a value
    lz.silu([1.0, 2.0])  # E: Value of type variable "ArrayT" of "silu" cannot be "list[float]"
    lz.silu(None)  # E: Value of type variable "ArrayT" of "silu" cannot be "None"
    lz.linear(x, 3.0)  # E: Argument 2 to "linear" has incompatible type "float"
    lz.silu(x=x)  # E: Unexpected keyword argument "x"
    lz.nosuch(x)  # E: Module has no attribute "nosuch"
    return number if none is None else 0


# --- reports, specs, calls that are not ops


def reports(x: Floats) -> str:
    lz.silu(x)
    report = lz.last_report()
    assert_type(report, lz.SelectionReport)
    return f"{report.backend} {report.kernel_us}"


def specs() -> list[lz.Call]:
    return [lz.Call.of("silu", lz.TensorSpec.contiguous("float32", (n, 64))) for n in (1, 128)]


def ops() -> list[Callable[..., Any]]:
    return [lz.silu, lz.gelu]
