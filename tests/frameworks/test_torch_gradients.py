"""Gradients of torch.ops.layerzero: against finite differences in float64, and torch's own in the other dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.frameworks.torch_cases import NATIVE, cases, joined, random
from torch.utils.checkpoint import checkpoint

import layerzero as lz
import layerzero.torch as lzt
from layerzero.torch.table import TABLE

ops = torch.ops.layerzero
DIFFERENTIABLE = [name for name, entry in TABLE.items() if entry.formula is not None]
CASES = [(name, index) for name in DIFFERENTIABLE for index in range(len(cases()[name]))]


def leaves(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.detach().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args)


@pytest.mark.parametrize(("name", "index"), CASES)
def test_gradients_are_those_of_finite_differences(name: str, index: int) -> None:
    """torch.autograd.gradcheck, float64: every argument, of an op's first case every element, else a projection."""
    args, options = cases(torch.float64, needs_grad=True)[name][index]
    options = {**options, "scale_grad_by_freq": False, "padding_idx": -1} if name == "embedding" else options
    call = getattr(ops, name).default
    is_long = index > 0 or name in ("conv", "conv_transpose")
    assert torch.autograd.gradcheck(lambda *given: call(*given, **options), leaves(args), fast_mode=is_long)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "index"), CASES)
def test_gradients_are_torchs(name: str, index: int, dtype: torch.dtype) -> None:
    """In each dtype against torch's in float64 of the same inputs, at the dtype's tolerance, which is larger than one
    rounding because the forward result that it starts from is rounded, too."""
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]
    args, options = cases(dtype, needs_grad=True)[name][index]
    args = leaves(args)
    wide = leaves(tuple(a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args))
    out, expected = joined(getattr(ops, name)(*args, **options)), joined(NATIVE[name](*wide, **options))
    grad = random(*expected.shape, seed=7, dtype=dtype)
    is_empty_row = expected.isnan()
    expected = expected.masked_fill(is_empty_row, 0.0)
    out.backward(grad)
    expected.backward(grad.double())
    for one, other in zip(args, wide, strict=True):
        if isinstance(one, torch.Tensor) and one.requires_grad:
            assert one.grad is not None
            assert one.grad.dtype == dtype
            right = other.grad.nan_to_num()  # of rows that see nothing
            scale = max(1.0, float(right.abs().max())) if right.numel() else 1.0
            torch.testing.assert_close(one.grad.double(), right, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_only_what_is_needed_is_saved_and_returned(name: str) -> None:
    """Frozen weights keep no activations alive."""
    args, options = cases(torch.float64)[name][0]
    for place, given in enumerate(args):
        if not isinstance(given, torch.Tensor) or not given.is_floating_point():
            continue
        alone = tuple(
            a.clone().requires_grad_(n == place) if isinstance(a, torch.Tensor) and a.is_floating_point() else a
            for n, a in enumerate(args)
        )
        every = tuple(
            a.clone().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args
        )
        for tensors in (alone, every):
            joined(getattr(ops, name)(*tensors, **options)).square().sum().backward()
        torch.testing.assert_close(alone[place].grad, every[place].grad)
    if name == "linear":
        x, w = random(3, 4, needs_grad=True), random(5, 4)
        assert [tensor.shape for tensor in ops.linear(x, w).grad_fn.saved_tensors] == [w.shape]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_weights_of_moe_combine_have_gradients_in_float32(dtype: torch.dtype) -> None:
    """Where gradcheck does not look: weights are float32 beside rows of any dtype, and orders may be int32."""
    rows, weights = random(6, 4, dtype=dtype, needs_grad=True), random(3, 2, seed=1, dtype=torch.float32)
    order = torch.tensor([5, 1, 0, 2, 4, 3], dtype=torch.int32)
    wide, wanted = rows.detach().double().requires_grad_(), weights.double().requires_grad_()
    grad = random(3, 4, seed=2, dtype=dtype)
    ops.moe_combine(rows, order, weights.requires_grad_()).backward(grad)
    NATIVE["moe_combine"](wide, order, wanted).backward(grad.double())
    torch.testing.assert_close(weights.grad, wanted.grad.float())
    torch.testing.assert_close(rows.grad, wide.grad.to(dtype))


def test_checkpointing_computes_the_same() -> None:
    """The call is made again in backward."""
    x, w = random(3, 4, needs_grad=True), random(4, 4, seed=1, needs_grad=True)

    def block(x: torch.Tensor) -> torch.Tensor:
        return ops.silu(ops.linear(x, w)) + x

    grads = []
    for use_reentrant in (None, True, False):
        y = block(x) if use_reentrant is None else checkpoint(block, x, use_reentrant=use_reentrant)
        grads.append(torch.autograd.grad(y.square().sum(), (x, w)) if use_reentrant is not True else None)
        if use_reentrant is True:  # which torch.autograd.grad does not support
            y.square().sum().backward()
            grads[-1] = (x.grad, w.grad)
    for found in grads[1:]:
        for one, other in zip(grads[0], found, strict=True):
            torch.testing.assert_close(one, other)


# --- layerzero.torch, the functions ------------------------------------------------------------------------------


@pytest.mark.parametrize("padding_idx", [None, 0, -1, 2])
@pytest.mark.parametrize("scale_grad_by_freq", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_embedding_has_torchs_arguments(padding_idx: int | None, scale_grad_by_freq: bool, sparse: bool) -> None:
    ids, table = torch.tensor([[1, 2, 2], [3, 0, 1]]), random(4, 3)
    if sparse and scale_grad_by_freq:  # torch refuses it in backward
        with pytest.raises(lz.InvalidArgument, match="both given"):
            lzt.embedding(ids, table.requires_grad_(), padding_idx, None, 2.0, True, True).sum().backward()
        return
    found = []
    for function in (lzt.embedding, F.embedding):
        weight = table.clone().requires_grad_()
        function(ids, weight, padding_idx, None, 2.0, scale_grad_by_freq, sparse).square().sum().backward()
        assert weight.grad is not None
        assert weight.grad.is_sparse == sparse
        found.append(weight.grad.to_dense())
    torch.testing.assert_close(*found)


def test_embedding_renormalizes_rows_in_place() -> None:
    ids = torch.tensor([1, 2])
    ours, theirs = random(4, 3), random(4, 3)
    torch.testing.assert_close(lzt.embedding(ids, ours, max_norm=0.5), F.embedding(ids, theirs, max_norm=0.5))
    torch.testing.assert_close(ours, theirs)
    with pytest.raises(lz.InvalidArgument, match="padding_idx is 4; allowed: -4 to 3"):
        lzt.embedding(ids, ours, 4)


def test_softmax_converts_first() -> None:
    x = random(3, 4, dtype=torch.bfloat16, needs_grad=True)
    found = lzt.softmax(x, -1, torch.float64)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, F.softmax(x, -1, dtype=torch.float64))
    found[:, 0].sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16


def test_functions_are_torchs() -> None:
    """Called as those of torch.nn.functional are."""
    x, w, b = random(3, 4), random(4, 4, seed=1), random(4, seed=2)
    q = random(2, 3, 5, 4)
    pairs = [
        (lzt.silu(x), F.silu(x)),
        (lzt.gelu(x, approximate="tanh"), F.gelu(x, approximate="tanh")),
        (lzt.swiglu(x, x), F.silu(x) * x),
        (lzt.layer_norm(x, (4,), w[0], b, eps=1e-3), F.layer_norm(x, (4,), w[0], b, eps=1e-3)),
        (lzt.layer_norm(x, 4), F.layer_norm(x, (4,))),
        (lzt.rms_norm(x, [4], w[0]), F.rms_norm(x, [4], w[0])),
        (lzt.linear(x, w, bias=b), F.linear(x, w, bias=b)),
        (lzt.matmul(x, w), x @ w),
        (
            lzt.scaled_dot_product_attention(q, q, q, is_causal=True, scale=0.2),
            F.scaled_dot_product_attention(q, q, q, is_causal=True, scale=0.2),
        ),
    ]
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    turned = lzt.rope(q, random(3, 2), random(3, 2, seed=1))
    torch.testing.assert_close(turned, NATIVE["rope"](q, random(3, 2), random(3, 2, seed=1)))
    with pytest.raises(lz.InvalidArgument, match=r"dropout_p is 1\.5"):
        lzt.scaled_dot_product_attention(q, q, q, dropout_p=1.5)
