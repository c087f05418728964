"""Activations through the public API to the backends of an ordinary installation: any shape, numbers at the edges of
what they can hold, and memory of the caller's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests import reference

import layerzero as lz
from layerzero.ipc.vocabulary.ops import ACTIVATIONS

pytestmark = [pytest.mark.usefixtures("installation"), pytest.mark.timeout(600)]
OPS = {**{op: {} for op in (*ACTIVATIONS, "silu")}, "gelu": {"approximate": "tanh"}}
GATED = {"swiglu": {}, "reglu": {}, "geglu": {"approximate": "none"}}
BACKENDS = ["torch", "mlx", "onnxruntime"]


def close(found: Any, expected: Any, unit: float = 1.0) -> None:
    """`unit`: what float32's error is multiplied by, where an activation's small number is the rest of 1 - 1."""
    assert found.shape == expected.shape
    assert reference.error(np.asarray(found, np.float64) / unit, expected / unit) <= 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), st.floats(0.01, 100), st.integers(0, 99))
def test_any_shape_and_scale(backend: str, shape: list[int], scale: float, seed: int) -> None:
    x, up = (np.random.default_rng(seed + n).standard_normal(shape).astype(np.float32) * scale for n in range(2))
    for op, options in OPS.items():
        close(getattr(lz, op)(x, **options, backend=backend), reference.TENSOR_OPS[op](x, **options))
    for op, options in GATED.items():
        expected, unit = reference.TENSOR_OPS[op](x, up, **options), max(1.0, float(abs(up).max()))
        close(getattr(lz, op)(x, up, **options, backend=backend), expected, unit)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", [*OPS, *GATED])
def test_what_is_no_number_stays_none_and_concerns_no_other(op: str, backend: str) -> None:
    """In and behind the blocks that kernels compute at once."""
    x = np.linspace(-3, 3, 37, dtype=np.float32)
    given, clean = x.copy(), x.copy()
    given[[0, 20, 36]] = np.nan
    more = (np.ones_like(x),) if op in GATED else ()
    found, other = (getattr(lz, op)(one, *more, backend=backend) for one in (given, clean))
    assert np.isnan(found[[0, 20, 36]]).all()
    kept = ~np.isnan(given)
    np.testing.assert_allclose(found[kept], other[kept], rtol=1e-6, atol=1e-7)  # blocks and rests may round otherwise


@pytest.mark.parametrize("op", [*OPS, *GATED])
@pytest.mark.parametrize("backend", BACKENDS)
def test_out_may_be_the_argument(op: str, backend: str) -> None:
    x = lz.share(np.linspace(-3, 3, 64, dtype=np.float32).reshape(4, 16))
    more = (np.ones_like(x),) if op in GATED else ()
    expected = getattr(lz, op)(x.copy(), *more, backend=backend)
    getattr(lz, op)(x, *more, out=x, backend=backend)
    np.testing.assert_array_equal(x, expected)
