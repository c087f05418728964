"""Norms of channels and add_rms_norm in programs that torch traces, and in pairs of tensors of the caller's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.frameworks.torch_cases import random

import layerzero as lz

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
