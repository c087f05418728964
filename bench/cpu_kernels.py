"""Backends beside torch, on the CPU: numba and openblas on small and large arrays, onnxruntime and MLX by weights of 4
bits. Writes results/cpu_kernels.md.

    python bench/cpu_kernels.py [--quick]

Both are called through their workers, in turn, on arrays in shared memory with a place for the result, and so
share what a call costs. The last column: what the engine takes, unpinned, once it has measured all backends.
"""

from __future__ import annotations

import operator
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from common import backend_versions, finish, own_broker, parser

import layerzero as lz

SIZES = ((8, 1024), (2048, 1024))
TOKENS, FEATURES, GROUP = (1, 16, 128), 2048, 128
LEAD = 3  # rounds that do not count


def arrays(*shape: int) -> Any:
    return lz.share(np.random.default_rng(0).standard_normal(shape, dtype=np.float32))


def calls(rows: int, width: int) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """Backends, ops and their arguments, of which the first has the shape of the result."""
    x, y, weight = arrays(rows, width), arrays(rows, width), arrays(width)
    yield "numba", "add", (x, y)
    for op in ("relu", "silu", "gelu", "mish"):
        yield "numba", op, (x,)
    yield "numba", "swiglu", (x, y)
    yield "numba", "geglu", (x, y)
    yield "numba", "softmax", (x, -1)
    yield "numba", "layer_norm", (x, (width,), weight, weight)
    yield "numba", "rms_norm", (x, (width,), weight)
    square = arrays(width, width)
    yield "openblas", "matmul", (x, square)
    yield "openblas", "linear", (x, square, weight)


def packed_calls(tokens: int) -> Iterator[tuple[str, str, tuple[Any, ...], dict[str, Any]]]:
    """Of one layer, with a weight of 4 bits and one of float32."""
    rng, groups = np.random.default_rng(0), (FEATURES, FEATURES // GROUP)
    codes, zeros = rng.integers(0, 256, (FEATURES, FEATURES // 2)), rng.integers(0, 16, groups)
    packed = lz.pack_weight(codes.astype(np.uint8), rng.random(groups, np.float32) / 8, zeros, layout="int4")
    x = arrays(tokens, FEATURES)
    given = (x, packed.weight, packed.scale, None, None, None, packed.zero_point)
    for backend in ("onnxruntime", "mlx"):
        if backend == "onnxruntime" or tokens == 1:  # it takes a hundred times as long as the others by more rows
            yield backend, "scaled_linear", given, {"weight_format": "int4"}
    yield "onnxruntime", "linear", (x, arrays(FEATURES, FEATURES)), {}


def rows(rounds: int) -> Iterator[list[str]]:
    for height, width in SIZES:
        for backend, op, given in calls(height, width):
            yield row(rounds, f"{op}, {height:,} x {width:,}", backend, op, given, {})
    for tokens in TOKENS:
        for backend, op, given, more in packed_calls(tokens):
            kind = "4 bits" if more else "float32"
            yield row(rounds, f"{op}, {tokens} x {FEATURES:,} by {kind}", backend, op, given, more)


def row(rounds: int, name: str, backend: str, op: str, given: tuple[Any, ...], more: dict[str, Any]) -> list[str]:
    call, out = getattr(lz, op), arrays(*given[0].shape)
    times: dict[str, list[float]] = {backend: [], "torch": []}
    for number in range(rounds + LEAD):
        for one, found in times.items():
            began_ns = time.perf_counter_ns()
            call(*given, out=out, backend=one, **more)
            if number >= LEAD:
                found.append((time.perf_counter_ns() - began_ns) / 1e3)
    lz.tune(op, *given, budget_s=0.5, **more)
    ours_us, torchs_us = map(statistics.median, times.values())
    ratio = statistics.median(map(operator.truediv, times["torch"], times[backend]))
    chosen = lz.explain(op, *given, **more).kernel_id
    return [name, backend, f"{ours_us:,.0f} us", f"{torchs_us:,.0f} us", f"{ratio:.2f}", chosen]


def main() -> None:
    args = parser(__doc__, "ten rounds").parse_args()
    with own_broker():
        found = list(rows(10 if args.quick else 50))
        versions = backend_versions()
    finish(
        "cpu_kernels",
        "Backends beside torch, on the CPU, in float32",
        versions,
        ["call", "by", "its", "torch's", "torch's / its", "chosen after tuning"],
        found,
        [
            "Medians; the ratio is the median of those of the rounds. Below 1 torch is faster.",
            "4 bits: `scaled_linear` by int4 weights in groups of 128, as `packed_linear` calls it; torch keeps them "
            "in float32, onnxruntime packed (docs/ops.md).",
        ],
        is_quick=args.quick,
    )


if __name__ == "__main__":
    main()
