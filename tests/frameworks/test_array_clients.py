"""JAX, MLX and NumPy with bfloat16 as applications: the result is of the caller's kind and dtype."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest

import layerzero as lz

VALUES = np.linspace(-3, 3, 24, dtype=np.float32).reshape(4, 6)
SILU = VALUES / (1 + np.exp(-VALUES))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_jax_in_jax_out(dtype: Any) -> None:
    """bfloat16 has no NumPy type of its own, so it takes a path of its own."""
    result = lz.silu(jnp.asarray(VALUES, dtype))
    assert isinstance(result, jax.Array)
    assert result.dtype == dtype
    np.testing.assert_allclose(np.asarray(result, np.float32), SILU, atol=0.03 if dtype != jnp.float32 else 1e-6)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_mlx_in_mlx_out(dtype: Any) -> None:
    """MLX owns its arrays' memory: the copy shows in the report."""
    result = lz.silu(mx.array(VALUES.tolist(), dtype))
    assert isinstance(result, mx.array)
    assert result.dtype == dtype
    report = lz.last_report()
    assert report is not None
    assert {copy.arg for copy in report.copies} >= {"x", "out"}
    np.testing.assert_allclose(np.array(result.astype(mx.float32)), SILU, atol=0.03 if dtype != mx.float32 else 1e-6)


def test_numpy_bfloat16() -> None:
    """With ml_dtypes, NumPy arrays have bfloat16 too."""
    result = lz.silu(VALUES.astype(ml_dtypes.bfloat16))
    assert result.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(result.astype(np.float32), SILU, atol=0.03)


def test_kinds_may_be_mixed() -> None:
    """The first array decides the kind of the result."""
    result = lz.linear(jnp.asarray(VALUES), np.eye(6, dtype=np.float32))
    assert isinstance(result, jax.Array)
    np.testing.assert_allclose(np.asarray(result), VALUES, atol=1e-6)
