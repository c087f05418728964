"""F.cross_entropy under layerzero.torch.accelerate: torch's losses and gradients, and the reason where torch computes
them itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.frameworks.torch_cases import random
from torch import nn

import layerzero.torch as lzt

X, T, W = random(6, 5), torch.tensor([0, 4, -100, 2, 2, 1]), random(5).abs() + 0.5
PLACES = random(2, 5, 3)
SMOOTHED = {"weight": W, "label_smoothing": 0.1}


class Scored(nn.Module):
    """A head and its loss."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.loss = nn.Linear(5, 5, dtype=X.dtype), nn.CrossEntropyLoss(**options)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.loss(self.head(x), target)


@pytest.mark.parametrize("is_model", [False, True], ids=["function", "model"])
@pytest.mark.parametrize(
    ("reduction", "options"),
    [("mean", {}), ("mean", SMOOTHED), ("sum", SMOOTHED), ("none", SMOOTHED), ("none", {"ignore_index": 2})],
    ids=["mean", "smoothed", "sum", "none", "ignored"],
)
def test_losses_and_gradients_are_torchs(reduction: str, is_model: bool, options: dict[str, Any]) -> None:
    """Seen by a function mode, and in a model by torch's op."""
    found = []
    target = T.where(T >= 0, options.get("ignore_index", -100)) if "ignore_index" in options else T
    for ops in ([], ["cross_entropy"]):
        model, x = Scored(reduction=reduction, **options), X.clone().requires_grad_()
        with lzt.accelerate(model if is_model else None, ops) as handle:
            loss = model(x, target)
        loss.square().sum().backward()
        assert model.head.weight.grad is not None
        found.append((loss.detach(), x.grad, model.head.weight.grad))
        assert (handle.report.taken, handle.report.left) == (len(ops), 0), handle.report
    torch.testing.assert_close(*found)


def test_places_and_second_derivatives() -> None:
    """Of predictions for each place, which lie as a transposed result of a model does; although our op refuses them."""
    found = []
    for ops in ([], ["cross_entropy"]):
        x = PLACES.mT.contiguous().requires_grad_()
        with lzt.accelerate(ops=ops) as handle:
            loss = F.cross_entropy(x.mT, torch.tensor([[0, 1, 4], [-100, 2, 2]]))
            (first,) = torch.autograd.grad(loss, x, create_graph=True)
            found.append((loss, torch.autograd.grad(first.square().sum(), x)[0]))
        assert handle.report.taken == len(ops)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("is_model", [False, True], ids=["function", "model"])
@pytest.mark.parametrize("is_autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes_are_torchs(dtype: torch.dtype, is_autocast: bool, is_model: bool) -> None:
    """Under autocast a CPU has float32 losses, too."""
    x, loss = X.to(dtype), nn.CrossEntropyLoss()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        expected = loss(x, T)
        with lzt.accelerate(loss if is_model else None) as handle:
            found = loss(x, T)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-6)
    assert handle.report.taken == 1


def test_compiled() -> None:
    compiled = torch.compile(F.cross_entropy, fullgraph=True, backend="eager")
    with lzt.accelerate(ops=["cross_entropy"]) as handle:
        torch.testing.assert_close(compiled(X, T), F.nll_loss(X.log_softmax(1), T))
    assert [(line.op, line.calls) for line in handle.report.lines] == [("cross_entropy", 1)]


LEFT: dict[str, tuple[Callable[[], Any], str]] = {
    "probabilities": (lambda: F.cross_entropy(X, X.softmax(-1)), "class probabilities"),
    "uint8": (lambda: F.cross_entropy(X, T.clamp(0).byte()), "not int64"),
    "deprecated": (lambda: F.cross_entropy(X, T, size_average=False), "size_average"),
    "weights' gradients": (lambda: F.cross_entropy(X, T, W.clone().requires_grad_()), "gradients of the weights"),
    "two dtypes": (lambda: F.cross_entropy(X.double(), T, W.half()), "several dtypes"),
    "strides": (lambda: F.cross_entropy(X.t()[:, :5], T[1:2].expand(6), reduction="none"), "not row-major"),
    "an index of no class": (lambda: F.cross_entropy(X, T + 3), "INVALID_ARGUMENT"),
    "another reduction": (lambda: F.cross_entropy(X, T, reduction="most"), "INVALID_ARGUMENT"),
}


@pytest.mark.parametrize("name", LEFT)
@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
def test_what_is_not_for_us_is_torchs(name: str) -> None:
    """With torch's result or error, and the reason in the report."""
    call, why = LEFT[name]
    found: list[Any] = []
    for ops in ([], ["cross_entropy"]):
        with lzt.accelerate(ops=ops) as handle, contextlib.suppress(AssertionError):
            try:
                found.append(call())
            except (RuntimeError, IndexError, ValueError) as error:
                found.append(repr(error))
    assert handle.report.taken == 0, handle.report
    assert any(why in reason for reason in handle.report.reasons), handle.report
    assert type(found[0]) is type(found[1])
    if isinstance(found[0], str):
        assert found[0] == found[1]
    else:
        torch.testing.assert_close(*found, rtol=0, atol=0)
