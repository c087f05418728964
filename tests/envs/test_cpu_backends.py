"""What certification's small cases cannot show of the backends with kernels of our own: work that all cores share, and
what is compiled once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tests.envs.harness import STORE, Harness, Harnesses

from layerzero.envs.build.build import find, resolve
from layerzero.ipc.vocabulary.tensors import TensorSpec, contiguous_strides

ROWS, WIDTH = 700, 601  # beyond the least that is shared, and no multiple of anything


def spec(*shape: int) -> TensorSpec:
    return TensorSpec("float32", shape, contiguous_strides(shape))


def numbers(*shape: int) -> Any:
    return np.random.default_rng(4).standard_normal(shape).astype(np.float32)


def run(harness: Harness, op: str, arrays: list[Any], shape: tuple[int, ...], **attrs: Any) -> Any:
    inputs = [spec(*array.shape) for array in arrays]
    kernel = next(kernel for kernel in harness.kernels if kernel.endswith(f".{op}"))
    _, (made,) = harness.run(kernel, op, inputs, [spec(*shape)], attrs, [[array.tobytes() for array in arrays]])
    return np.frombuffer(made, np.float32).reshape(shape)


def test_rows_that_cores_share_come_out_once_each_and_right(harnesses: Harnesses) -> None:
    """A seam between two cores' rows is in no case of a few hundred elements."""
    x, weight = numbers(ROWS, WIDTH), numbers(WIDTH)
    wide, harness = x.astype(np.float64), harnesses["numba"]
    powers = np.exp(wide - wide.max(1, keepdims=True))
    found = {
        "silu": (run(harness, "silu", [x], x.shape), wide / (1 + np.exp(-wide))),
        "softmax": (run(harness, "softmax", [x], x.shape, dim=1, dtype=""), powers / powers.sum(1, keepdims=True)),
        "rms_norm": (
            run(harness, "rms_norm", [x, weight], x.shape, ndim=1, eps=1e-5),
            wide / np.sqrt((wide * wide).mean(1, keepdims=True) + 1e-5) * weight,
        ),
    }
    for got, expected in found.values():
        assert np.abs(got - expected).max() < 1e-5


def test_products_on_one_core_and_on_all_are_right(harnesses: Harnesses) -> None:
    """Which of both OpenBLAS has is set before each product, so one after the other must not keep the last one's."""
    for rows in (ROWS, 3, ROWS):
        x, weight, bias = numbers(rows, WIDTH), numbers(WIDTH, WIDTH), numbers(WIDTH)
        got = run(harnesses["openblas"], "linear", [x, weight, bias], (rows, WIDTH), activation="")
        expected = x.astype(np.float64) @ weight.T.astype(np.float64) + bias
        assert np.abs(got - expected).max() < 1e-5 * np.abs(expected).max()


def test_a_process_reads_what_an_earlier_one_has_compiled(harnesses: Harnesses) -> None:
    """Compiling takes the first calls of each worker half a second, and the cache would grow by each."""
    folder = Path(find(resolve("numba"), store=STORE).environ["NUMBA_CACHE_DIR"])

    def compiled(harness: Harness) -> dict[Path, int]:
        run(harness, "gelu", [numbers(3, 5)], (3, 5), approximate="tanh")
        run(harness, "log_softmax", [numbers(3, 5)], (3, 5), dim=0, dtype="")
        return {path: path.stat().st_mtime_ns for path in folder.rglob("*.nb?")}

    before, another = compiled(harnesses["numba"]), Harness("numba")
    try:
        assert before
        assert compiled(another) == before
    finally:
        another.close()
