"""Calls of norms through the public API to the backends of an ordinary installation: values at the edges of what
numbers can hold, and results in arrays of the caller's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests import reference
from tests.process.harness import Site

import layerzero as lz

pytestmark = [pytest.mark.usefixtures("installation"), pytest.mark.timeout(1200)]
BACKENDS = {
    "log_softmax": ("torch", "mlx", "numba", "onnxruntime"),
    "group_norm": ("torch", "mlx", "onnxruntime"),
    "instance_norm": ("torch", "mlx", "onnxruntime"),
    "batch_norm": ("torch", "mlx", "onnxruntime"),
    "add_rms_norm": ("torch", "mlx", "numba", "onnxruntime", "zentorch"),
}
PAIRS = [(op, backend) for op, backends in BACKENDS.items() for backend in backends]


def numbers(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def close(found: Any, expected: Any) -> None:
    assert found.shape == expected.shape
    assert reference.error(np.asarray(found, np.float64), expected) <= 1e-5


@st.composite
def problems(draw: st.DrawFn) -> tuple[Any, Any, int]:
    """x of 3 or 4 dimensions with an offset and a scale, of each channel another one, and groups."""
    groups, each = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    rest = draw(st.lists(st.integers(1, 20), min_size=1, max_size=2))
    seed, offset, scale = draw(st.integers(0, 99)), draw(st.sampled_from([0.0, 3.0, -500.0])), draw(st.floats(0.1, 10))
    x = numbers(seed, draw(st.integers(1, 3)), groups * each, *rest) * np.float32(scale) + np.float32(offset)
    return x, numbers(seed + 1, groups * each), groups


@pytest.mark.parametrize(("op", "backend"), PAIRS)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=problems())
def test_any_shape_offset_and_scale(op: str, backend: str, problem: tuple[Any, Any, int]) -> None:
    x, w, groups = problem
    if op == "log_softmax":
        close(lz.log_softmax(x, 1, backend=backend), reference.log_softmax(x, dim=1))
    elif op == "group_norm":
        close(lz.group_norm(x, groups, w, backend=backend), reference.group_norm(x, w, num_groups=groups, eps=1e-5))
    elif op == "instance_norm":
        close(lz.instance_norm(x, bias=w, backend=backend), reference.group_norm(x, None, w, eps=1e-5))
    elif op == "batch_norm":
        mean, var = x.mean(axis=(0, *range(2, x.ndim))), w * w + np.float32(0.1)
        expected = reference.batch_norm(x, mean, var, w, None, eps=1e-5)
        close(lz.batch_norm(x, mean, var, w, backend=backend), expected)
    else:
        residual, weight = np.flip(x, 0), numbers(9, x.shape[-1])
        for found, expected in zip(
            lz.add_rms_norm(x, residual, x.shape[-1], weight, 1e-5, backend=backend),
            reference.add_rms_norm(x, residual, weight, ndim=1, eps=1e-5),
            strict=True,
        ):
            close(found, expected)


@pytest.mark.parametrize("backend", BACKENDS["group_norm"])
def test_a_large_mean_costs_no_digits(backend: str) -> None:
    """torch's own kernel is off by 6e-4 here, 60 times what is allowed."""
    x = np.round(numbers(1, 2, 4, 64) * 16) / 16 + np.float32(1e4)
    close(lz.group_norm(x, 2, backend=backend), reference.group_norm(x, num_groups=2, eps=1e-5))
    mean = np.full(4, 1e4, np.float32)
    close(
        lz.batch_norm(x, mean, np.ones_like(mean), backend=backend),
        reference.batch_norm(x, mean, np.ones_like(mean), eps=1e-5),
    )


@pytest.mark.parametrize(("groups", "same"), [(1, "layer"), (6, "instance")])
def test_one_group_and_one_for_each_channel_are_other_norms(groups: int, same: str) -> None:
    x = numbers(2, 3, 6, 5)
    other = lz.layer_norm(x, (6, 5)) if same == "layer" else lz.instance_norm(x)
    close(lz.group_norm(x, groups), np.asarray(other, np.float64))


@pytest.mark.parametrize("backend", BACKENDS["group_norm"])
def test_no_variance_and_no_eps_is_not_a_number(backend: str) -> None:
    x = np.ones((1, 4, 3), np.float32)
    x[0, 3] = [1, 2, 3]
    found = lz.group_norm(x, 2, eps=0.0, backend=backend)
    assert np.isnan(found[0, :2]).all()
    assert np.isfinite(found[0, 2:]).all()


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 4, 0), (2, 0, 3)])
def test_nothing_in_is_nothing_out(shape: tuple[int, ...]) -> None:
    x, w = np.ones(shape, np.float32), np.ones(shape[1], np.float32)
    for found in (
        lz.group_norm(x, 1, w),
        lz.instance_norm(x, weight=w),
        lz.batch_norm(x, w, w),
        *lz.add_rms_norm(x, x, shape[-1:]),
        lz.log_softmax(x, -1),
    ):
        assert found.shape == shape


@pytest.mark.parametrize("op", [lz.softmax, lz.log_softmax])
@pytest.mark.parametrize("backend", ["torch", "mlx", "onnxruntime"])
def test_softmax_in_a_wider_dtype_is_more_exact_than_converted_after(op: Callable[..., Any], backend: str) -> None:
    """Half-precision logits, as attention has them; into strided memory and into new."""
    x = numbers(3, 4, 33).astype(np.float16)
    expected = getattr(reference, op.__name__)(x, dim=1)
    found = op(x, -1, dtype="float32", backend=backend)
    assert found.dtype == np.float32
    close(found, expected)
    assert op(x, -1, dtype="float16", backend=backend).dtype == np.float16  # its own: a plain call
    target = np.zeros((4, 66), np.float32)[:, ::2]
    op(x, -1, dtype="float32", out=target)
    close(target, expected)
    with pytest.raises(lz.InvalidArgument, match="out is"):
        op(x, -1, dtype="float32", out=np.zeros_like(x))


@pytest.mark.parametrize("op", [lz.softmax, lz.log_softmax])
def test_softmax_in_another_dtype_converts_before_it_computes(op: Callable[..., Any]) -> None:
    """2049 has no place in float16: with 2048 it is two equal logits; and what is too large becomes infinite."""
    x = np.array([[2048, 2049, 0], [1e5, 0, 0]], np.float32)
    found = op(x, 1, dtype="float16", backend="torch").astype(np.float64)
    np.testing.assert_allclose(np.exp(found[0]) if op is lz.log_softmax else found[0], [0.5, 0.5, 0], atol=1e-3)
    assert np.isnan(found[1]).all()


def test_out_of_softmax_may_be_the_memory_of_its_input() -> None:
    """Wider elements over narrower ones: a kernel that wrote as it read would read what it has written."""
    memory = lz.share(np.zeros((8, 64), np.float32))
    x = memory.view(np.float16)[:, :64]
    x[...] = numbers(4, 8, 64).astype(np.float16)
    expected = reference.softmax(x.copy(), dim=1)
    lz.softmax(x, -1, dtype="float32", out=memory, backend="torch")
    close(memory, expected)


# --- results in arrays of the caller's own


def pair(seed: int) -> tuple[Any, Any, Any]:
    return numbers(seed, 8, 32), numbers(seed + 1, 8, 32), numbers(seed + 2, 32)


@pytest.mark.parametrize("place", [lz.share, np.copy], ids=["arena", "elsewhere"])
def test_out_is_a_pair(place: Callable[[Any], Any]) -> None:
    """Many times, so that the later ones go over an express lane."""
    for seed in range(12):
        x, residual, w = map(place, pair(seed))
        out = place(np.zeros_like(x)), place(np.zeros_like(x))
        found = lz.add_rms_norm(x, residual, 32, w, 1e-5, out=out, backend="torch")
        assert found[0] is out[0]
        assert found[1] is out[1]
        for one, expected in zip(out, reference.add_rms_norm(x, residual, w, ndim=1, eps=1e-5), strict=True):
            close(one, expected)
        report = lz.last_report()
        assert report is not None
        names = {copy.arg for copy in report.copies if copy.where == "client"}
        assert names == (set() if place is lz.share else {"x", "residual", "weight", "out", "summed"})


def test_out_may_be_the_arguments() -> None:
    """As in place: the report says what that takes."""
    x, residual, w = map(lz.share, pair(5))
    expected = reference.add_rms_norm(x.copy(), residual.copy(), w, ndim=1, eps=1e-5)
    lz.add_rms_norm(x, residual, 32, w, 1e-5, out=(x, residual))
    close(x, expected[0])
    close(residual, expected[1])
    report = lz.last_report()
    assert report is not None
    assert [copy.arg for copy in report.copies if copy.where == "client"] == ["out", "summed"]


def test_out_may_have_strides() -> None:
    x, residual, w = pair(7)
    whole = lz.empty((8, 2, 32), "float32")
    lz.add_rms_norm(x, residual, 32, w, 1e-5, out=(whole[:, 0], whole[:, 1]))
    for number, expected in enumerate(reference.add_rms_norm(x, residual, w, ndim=1, eps=1e-5)):
        close(whole[:, number], expected)


WHOLE = np.zeros((9, 32), np.float32)


@pytest.mark.parametrize(
    ("out", "says"),
    [
        ((WHOLE[:8], WHOLE[1:]), "two arrays of out= share memory"),
        (np.zeros((8, 32), np.float32), r"out= is a ndarray; pass a tuple of 2 arrays, \(out, summed\)"),
        ((np.zeros((8, 32), np.float32),), r"out= is a tuple; pass a tuple of 2 arrays"),
        ((np.zeros((8, 32), np.float32),) * 2, "two arrays of out= share memory"),
        ((np.zeros((8, 32), np.float32), np.zeros((8, 31), np.float32)), r"summed is float32\[8, 31\]"),
        ((np.zeros((8, 32), np.float32), np.zeros((8, 32), np.float16)), r"summed is float16\[8, 32\]"),
        ((np.zeros((8, 32), np.float32), [1.0]), "out=: builtins.list is no array"),
        ((np.zeros((8, 32), np.float32), np.broadcast_to(np.float32(0), (8, 32))), "out= is read-only"),
    ],
)
def test_what_is_no_pair_for_results_is_refused(out: Any, says: str) -> None:
    x, residual, w = pair(8)
    with pytest.raises(lz.InvalidArgument, match=says):
        lz.add_rms_norm(x, residual, 32, w, out=out)


def test_an_execution_plan_writes_the_pair(installation: Site) -> None:
    """A step whose two results are the function's own arrays."""

    def block(x: Any, residual: Any, w: Any, out: Any, summed: Any) -> Any:
        lz.add_rms_norm(x, residual, 32, w, 1e-5, out=(out, summed))
        return lz.silu(out), summed

    plan, arrays = lz.plan(block), [lz.share(one) for one in pair(9)]
    out = [lz.share(np.zeros((8, 32), np.float32)) for _ in "ab"]
    for _ in range(6):
        made = plan(*arrays, *out)
    expected = reference.add_rms_norm(*arrays, ndim=1, eps=1e-5)
    close(made[0], reference.silu(expected[0]))
    close(made[1], expected[1])
    assert plan.phase in ("WARM", "FROZEN"), plan.explain()


def test_a_future_and_a_dry_run_take_it() -> None:
    x, residual, w = map(lz.share, pair(10))
    out = (lz.empty((8, 32), "float32"), lz.empty((8, 32), "float32"))
    assert lz.submit(lz.add_rms_norm, x, residual, 32, w, out=out).result() == out
    close(out[1], np.asarray(x + residual, np.float64))
    told = lz.dry_run(lambda x: lz.add_rms_norm(x, residual, 32, w, out=out), x)
    assert [call.op for call in told.calls] == ["add_rms_norm"]
    assert lz.explain("add_rms_norm", x, residual, 32, w).kernel_id
