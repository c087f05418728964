"""Rotary position embedding from the caller's side: both results, arrays of the caller's own, and every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests import reference

import layerzero as lz
from layerzero import rotary

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


def test_tables_keep_the_digits_of_far_positions() -> None:
    """Angles are those of float64: of a position of a million those of float32 are off by hundredths. Tables
    lie where workers reach them."""
    far = np.array([0, 1, 131_071, 1_000_003])
    cos, sin = rotary.tables(far, 64, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096})
    exact = rotary.frequencies(64, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096})
    angles = np.multiply.outer(far.astype(np.longdouble), exact.inverse.astype(np.longdouble))
    for one, other in ((cos, np.cos(angles)), (sin, np.sin(angles))):
        assert one.dtype == np.float32
        assert np.abs(one - other * exact.attention_factor).max() < 1e-7
    lz.rope(lz.share(np.ones((4, 2, 64), np.float32)), cos, sin, backend="torch")
    report = lz.last_report()
    assert report is not None
    assert {copy.arg for copy in report.copies if copy.where == "client"} <= {"out"}
    halves = rotary.tables(4, 64, dtype="float16")
    whole = rotary.tables(np.arange(8).reshape(2, 4), 64, dtype=np.float64)
    assert np.abs(halves.cos - whole.cos[0]).max() <= 2.0**-11
    assert whole.sin.shape == (2, 4, 32)


@pytest.mark.parametrize(
    ("positions", "parameters", "says"),
    [
        (-1, {}, "positions is -1"),
        (np.array([[[1]]]), {}, r"positions has shape \[1, 1, 1\]; allowed: \(sequence\)"),
        (np.array([np.nan]), {}, "finite numbers"),
        (np.arange(4), {"mrope_section": [2, 1, 1]}, "repeat them three times"),
        (np.zeros((3, 4)), {"mrope_section": [2, 1, 2]}, "numbers of pairs that add up to 4"),
        (np.zeros((3, 4)), {"mrope_section": [2, 2], "mrope_interleaved": True}, "three numbers of pairs"),
    ],
)
def test_positions_that_make_no_sense_are_refused(positions: Any, parameters: Any, says: str) -> None:
    with pytest.raises(lz.InvalidArgument, match=says):
        rotary.tables(positions, 8, parameters)


def test_a_number_of_positions_is_the_same_in_all_streams() -> None:
    """Texts without pictures need no streams of their own."""
    found = rotary.tables(5, 8, {"mrope_section": [2, 1, 1]})
    for one, other in zip(found, rotary.tables(np.arange(5), 8), strict=True):
        np.testing.assert_array_equal(one, other)
