"""Norms of channels and add_rms_norm in programs that torch traces, and in pairs of tensors of the caller's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.frameworks.torch_cases import random

import layerzero as lz
import layerzero.torch as lzt

pytestmark = [  # of torch's own code
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.* is deprecated:FutureWarning"),
]


def into_a_pair(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out = torch.empty_like(x), torch.empty_like(x)
    return lz.add_rms_norm(x, x, 8, w, out=out)


FUNCTIONS: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (lambda x, w: lz.group_norm(x, 2, w[:4], eps=1e-3), lambda x, w: F.group_norm(x, 2, w[:4], eps=1e-3)),
    (lambda x, w: lz.instance_norm(x, weight=w[:4]), lambda x, w: F.instance_norm(x, weight=w[:4])),
    (
        lambda x, w: lz.batch_norm(x, w[:4], w[:4].abs() + 1, None, w[4:]),
        lambda x, w: F.batch_norm(x, w[:4], w[:4].abs() + 1, None, w[4:]),
    ),
    (lambda x, w: lz.log_softmax(x, 1), lambda x, w: F.log_softmax(x, 1)),
    (lambda x, w: lz.add_rms_norm(x, x, 8, w, 1e-5)[0], lambda x, w: F.rms_norm(x + x, (8,), w, 1e-5)),
    (lambda x, w: lz.add_rms_norm(x, x, 8)[1], lambda x, w: x + x),
    (lambda x, w: into_a_pair(x, w)[0], lambda x, w: F.rms_norm(x + x, (8,), w)),
    (lambda x, w: into_a_pair(x, w)[1], lambda x, w: x + x),
]


@pytest.mark.parametrize(("ours", "theirs"), FUNCTIONS)
def test_traced_and_not_they_are_torchs(ours: Callable[..., Any], theirs: Callable[..., Any]) -> None:
    """One graph, of any number of rows."""
    torch.compiler.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (2, 5):
        x, w = random(rows, 4, 8), random(8, seed=1)
        expected = theirs(x, w)
        for found in (ours(x, w), compiled(x, w)):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_an_unused_result_adds_nothing_to_gradients() -> None:
    """Of the norm alone, of the sum alone, and of both."""
    for take in ((1.0, 0.0), (0.0, 1.0), (1.0, 2.0)):
        grads = []
        for ours in (True, False):
            x, r, w = (random(3, 8, seed=n).requires_grad_() for n in range(3))
            op = torch.ops.layerzero.add_rms_norm
            out, total = op(x, r, [8], w[0], 1e-5) if ours else (F.rms_norm(x + r, (8,), w[0], 1e-5), x + r)
            pairs = zip(take, (out, total), strict=True)
            sum(factor * one.square().sum() for factor, one in pairs if factor).backward()
            grads.append([one.grad for one in (x, r, w)])
        for one, other in zip(*grads, strict=True):
            if other is None:
                assert one is None or not one.any()
            else:
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_plain_call_refuses_what_needs_gradients() -> None:
    x = random(3, 8, needs_grad=True)
    with pytest.raises(lz.InvalidArgument, match=r"call torch\.ops\.layerzero\.add_rms_norm"):
        lz.add_rms_norm(x, x, 8)
    with pytest.raises(lz.InvalidArgument, match="out= requires gradients"), torch.no_grad():
        lz.add_rms_norm(random(3, 8), random(3, 8), 8, out=(x, torch.empty(3, 8)))


@pytest.mark.parametrize("has_weight", [True, False])
def test_a_pair_of_tensors_is_written_by_the_op(has_weight: bool) -> None:
    """Eager, into strided tensors, too, and compiled; both count as changed. torch's own test of the op passes."""
    x, r, w = random(3, 8), random(3, 8, seed=1), random(8, seed=2) if has_weight else None
    op = torch.ops.layerzero.add_rms_norm
    expected = op(x, r, [8], w, 1e-5)

    def call(out: torch.Tensor, summed: torch.Tensor) -> None:
        op(x, r, [8], w, 1e-5, out=out, summed=summed)

    torch.compiler.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)  # Dynamo takes no strided out=
    for one, stride in ((call, 1), (call, 2), (compiled, 1)):
        pair = [torch.empty(3, 8, stride)[..., 0] for _ in range(2)]
        before = [tensor._version for tensor in pair]
        one(*pair)
        assert all(tensor._version > version for tensor, version in zip(pair, before, strict=True))
        for found, wanted in zip(pair, expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.library.opcheck(op.out, (x, r, [8], w), {"out": torch.empty(3, 8), "summed": torch.empty(3, 8)})


def test_a_pair_that_does_not_fit_is_refused_by_name() -> None:
    op, x = torch.ops.layerzero.add_rms_norm, torch.empty(3, 8, device="meta")
    with pytest.raises(lz.InvalidArgument, match=r"summed is torch\.float64"):
        op(x, x, [8], out=torch.empty_like(x), summed=x.double())
    x = random(3, 8)
    with pytest.raises(lz.InvalidArgument, match="out= has no gradient"):
        op(x.requires_grad_(), x, [8], out=torch.empty(3, 8), summed=torch.empty(3, 8))


# --- accelerate --------------------------------------------------------------------------------------------------

TAKEN: list[tuple[str, Callable[..., Any]]] = [
    ("group_norm", lambda x, w, m, v: F.group_norm(x, 2, w, m, 1e-3)),
    ("group_norm", lambda x, w, m, v: torch.group_norm(x, 2, w, m)),
    ("instance_norm", lambda x, w, m, v: F.instance_norm(x, weight=w, bias=m, eps=1e-3)),
    ("batch_norm", lambda x, w, m, v: F.batch_norm(x, m, v, w, None, eps=1e-3)),
    ("log_softmax", lambda x, w, m, v: F.log_softmax(x, 1)),
    ("log_softmax", lambda x, w, m, v: torch.log_softmax(x, -1)),
    ("log_softmax", lambda x, w, m, v: x.log_softmax(0)),
    ("log_softmax", lambda x, w, m, v: F.log_softmax(x, -1, dtype=torch.float32)),
]


def operands(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """x, weight, mean, variance: of 4 channels."""
    x, w, m = random(2, 4, 3, dtype=dtype), random(4, seed=1, dtype=dtype), random(4, seed=2, dtype=dtype)
    return [x, w, m, random(4, seed=3, dtype=dtype).abs() + 1]


@pytest.mark.parametrize(("name", "call"), TAKEN)
def test_accelerate_has_torchs_results(name: str, call: Callable[..., Any]) -> None:
    """Values and first gradients, of all that has any, and compiled in one graph."""
    results = []
    for ops in ([], [name]):
        given = operands()
        for one in given[: 2 if name == "batch_norm" else None]:  # torch has no gradients of running statistics
            one.requires_grad_()
        with lzt.accelerate(ops=ops) as handle:
            out = call(*given)
            grads = torch.autograd.grad(
                out.square().sum(), [one for one in given if one.requires_grad], allow_unused=True
            )
        results.append([out, *grads])
        assert (handle.report.taken, handle.report.left) == (len(ops), 0), handle.report
    for one, other in zip(*results, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert (one.dtype, one.stride()) == (other.dtype, other.stride())
            torch.testing.assert_close(other, one)
    torch.compiler.reset()
    with torch.no_grad(), lzt.accelerate(ops=[name]) as handle:
        found = torch.compile(call, backend="eager", fullgraph=True)(*operands())
    torch.testing.assert_close(found, results[0][0].detach())
    assert [line.op for line in handle.report.lines] == [name], handle.report
    assert handle.report.left == 0


KEPT: list[tuple[str, Callable[..., Any], str]] = [
    ("group_norm", lambda x, w, m, v: F.group_norm(x.transpose(0, 2).transpose(0, 2)[..., ::2], 2), "row-major"),
    ("group_norm", lambda x, w, m, v: torch.group_norm(x[:1, :, 0].contiguous(), 4), "one number"),
    ("instance_norm", lambda x, w, m, v: F.instance_norm(x, m.clone(), v.clone()), "running statistics"),
    ("instance_norm", lambda x, w, m, v: F.instance_norm(x, m, v, use_input_stats=False), "running statistics"),
    ("batch_norm", lambda x, w, m, v: F.batch_norm(x, m.clone(), v.clone(), training=True), "training"),
    ("batch_norm", lambda x, w, m, v: F.batch_norm(x, None, None, w, training=True), "training"),
    ("log_softmax", lambda x, w, m, v: F.log_softmax(x, _stacklevel=5), "dim is not a number"),
]


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.parametrize(("name", "call", "why"), KEPT)
def test_accelerate_leaves_the_rest_with_its_reason(name: str, call: Callable[..., Any], why: str) -> None:
    expected = call(*operands())
    with lzt.accelerate(ops=[name]) as handle:
        found = call(*operands())
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert (handle.report.taken, handle.report.left) == (0, 1), handle.report
    assert any(why in reason for reason in handle.report.reasons), handle.report


def test_running_statistics_change_as_torch_changes_them() -> None:
    """Of a module in training under accelerate; evaluated it is ours."""
    ours, theirs = torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4)
    x = operands(torch.float32)[0]
    with lzt.accelerate(ops=["batch_norm"]) as handle:
        ours(x)
        found = ours.eval()(x)
    theirs(x)
    torch.testing.assert_close(found, theirs.eval()(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.running_var, theirs.running_var, rtol=0, atol=0)
    assert (handle.report.taken, handle.report.left) == (1, 1)


def test_wrong_calls_are_torchs_errors() -> None:
    x = random(1, 4)
    with lzt.accelerate() as handle:
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            F.group_norm(x, 4)
        with pytest.raises(ValueError, match="Expected more than 1 spatial element"):
            F.instance_norm(random(2, 4, 1))
        with pytest.raises(RuntimeError, match="divisible"):
            F.group_norm(random(2, 4, 3), 3)
        with pytest.raises(RuntimeError, match="not differentiable with respect to argument 'running_mean'"):
            F.batch_norm(random(2, 4, 3), random(4, needs_grad=True), torch.ones(4))
    assert handle.report.taken == 0


def test_autocast_leaves_the_dtypes_of_torch() -> None:
    x, w, m, v = operands(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        for _, call in TAKEN:
            for given in (x, x.bfloat16()):
                expected = call(given, w, m, v)
                with lzt.accelerate():
                    found = call(given, w, m, v)
                assert found.dtype == expected.dtype
                torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("ours", "theirs"), [(lz.softmax, F.softmax), (lz.log_softmax, F.log_softmax)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_gradients_of_softmax_in_another_dtype_are_of_the_inputs(ours: Any, theirs: Any, dtype: torch.dtype) -> None:
    """Logits of half precision to float32, and back; and of more than that."""
    x = torch.randn(4, 9, generator=torch.Generator().manual_seed(1)).to(dtype)
    grad = torch.randn(4, 9, generator=torch.Generator().manual_seed(2))
    one, other = (x.clone().requires_grad_() for _ in range(2))
    op = getattr(torch.ops.layerzero, ours.__name__)
    found, expected = op(one, -1, dtype="float32"), theirs(other, -1, dtype=torch.float32)
    torch.testing.assert_close(found, expected)
    found.backward(grad)
    expected.backward(grad)
    assert one.grad is not None
    torch.testing.assert_close(one.grad, other.grad)
    torch.testing.assert_close(torch.compile(lambda y: ours(y, -1, dtype="float32"), backend="eager")(x), expected)
