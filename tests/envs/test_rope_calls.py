"""Rotary position embedding from the caller's side: both results, arrays of the caller's own, and every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests import reference

import layerzero as lz

pytestmark = [pytest.mark.usefixtures("installation"), pytest.mark.timeout(1200)]


def problem(seed: int, *, batched: bool) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    q, k = (rng.standard_normal((2, 5, heads, 12)).astype(np.float32) for heads in (6, 2))
    angles = rng.uniform(-1e4, 1e4, (2, 5, 4) if batched else (5, 4))
    return q, k, np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def expected_of(q: Any, k: Any, cos: Any, sin: Any, interleaved: bool) -> tuple[Any, ...]:
    tables = (cos, sin) if cos.ndim == 3 else (cos[None], sin[None])
    return reference.rope_qk(q, k, *tables, interleaved=interleaved)


@pytest.mark.parametrize("backend", ["torch", "mlx", "onnxruntime"])
def test_queries_and_keys_in_one_call(backend: str) -> None:
    """In each order of pairs, with tables for all and of each batch; rope of one is the same."""
    for seed, (batched, interleaved) in enumerate([(False, False), (True, True), (True, False), (False, True)]):
        q, k, cos, sin = problem(seed, batched=batched)
        found = lz.rope_qk(q, k, cos, sin, interleaved=interleaved, backend=backend)
        wanted = expected_of(q, k, cos, sin, interleaved)
        alone = lz.rope(k, cos, sin, interleaved=interleaved, backend=backend)
        for one, other in zip((*found, alone), (*wanted, wanted[1]), strict=True):
            assert one.shape == other.shape
            assert reference.error(np.asarray(one, np.float64), other) <= 1e-6


def test_out_may_be_the_arguments_or_have_strides() -> None:
    """As in place, which the report tells; and parts of a projection's result, where nothing is copied."""
    q, k, cos, sin = map(lz.share, problem(7, batched=False))
    wanted = expected_of(q.copy(), k.copy(), cos, sin, False)
    whole = lz.empty((2, 5, 8, 12), "float32")
    whole[...] = 0
    lz.rope_qk(q, k, cos, sin, out=(whole[:, :, :6], whole[:, :, 6:]), backend="torch")
    report = lz.last_report()
    assert report is not None
    assert not [copy for copy in report.copies if copy.where == "client"]
    found = lz.rope_qk(q, k, cos, sin, out=(q, k))
    assert found[0] is q
    assert found[1] is k
    report = lz.last_report()
    assert report is not None
    assert [copy.arg for copy in report.copies if copy.where == "client"] == ["q_out", "k_out"]
    for one, two, other in zip((q, k), (whole[:, :, :6], whole[:, :, 6:]), wanted, strict=True):
        assert reference.error(np.asarray(one, np.float64), other) <= 1e-6
        assert reference.error(np.asarray(two, np.float64), other) <= 1e-6
    with pytest.raises(lz.InvalidArgument, match="two arrays of out= share memory"):
        lz.rope_qk(q, k, cos, sin, out=(whole[:, :, :6], whole[:, :, 5:7]))
    with pytest.raises(lz.InvalidArgument, match="differ in their heads alone"):
        lz.rope_qk(q, k[:, :4], cos, sin)
