"""What accelerate remembers of calls (torch/acceleration/looking.py): a call like one before fares as that did, as long
as nothing else has changed. By the C, which remembers, and by the Python alone: the same results, the same report."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.frameworks.torch_cases import random
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import layerzero.torch as lzt
from layerzero.torch.acceleration import interception, looking

# of torch's own code
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
X, W, Q = random(3, 4), random(5, 4), random(1, 2, 3, 4)
Call = Callable[[torch.Tensor], torch.Tensor]


class Asked(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def dual(call: Call) -> Call:
    def of(x: torch.Tensor) -> torch.Tensor:
        with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):  # the others have none
            return forward_ad.unpack_dual(call(forward_ad.make_dual(x, x))).primal

    return of


def within(block: Callable[[], contextlib.AbstractContextManager[Any]]) -> Callable[[Call], Call]:
    def wrap(call: Call) -> Call:
        def of(x: torch.Tensor) -> torch.Tensor:
            with block():
                return call(x)

        return of

    return wrap


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
        ctx.call, ctx.x = call, x.detach()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.call(ctx.x).sum() * grads[0], None


def backward_of(call: Call) -> Call:
    def of(x: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().clone().requires_grad_()
        InBackward.apply(leaf, call).sum().backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        return leaf.grad

    return of


def checkpointed(call: Call) -> Call:
    def of(x: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().clone().requires_grad_()
        found: torch.Tensor = checkpoint(call, leaf, use_reentrant=False)
        found.sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    return of


def with_gradients(call: Call) -> Call:
    def of(x: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().clone().requires_grad_()
        return torch.autograd.grad(call(leaf).square().sum(), leaf)[0]

    return of


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


STATES: dict[str, Callable[[Call], Call]] = {
    "autocast": within(lambda: torch.autocast("cpu", torch.bfloat16)),
    "no_grad": within(torch.no_grad),
    "inference": within(torch.inference_mode),
    "math first": within(lambda: sdpa_kernel(SDPBackend.MATH)),
    "another mode": within(Asked),
    "deterministic": within(deterministic),
    "torch.func": torch.func.vmap,
    "forward mode": dual,
    "backward": backward_of,
    "checkpoint": checkpointed,
    "gradients": with_gradients,
}


CALLS: dict[str, tuple[Call, torch.Tensor]] = {
    "silu": (F.silu, X),
    "strided": (lambda x: F.gelu(x.transpose(-1, -2)), random(2, 3, 4)),
    "linear": (lambda x: F.linear(x, W.to(x.dtype)), X),
    "integers": (lambda x: F.linear(x.int(), W.int()).double() + x.sum(), X),
    "softmax": (lambda x: F.softmax(x, -1, dtype=torch.float64), X),
    "layer_norm": (lambda x: F.layer_norm(x, [4], eps=1e-3), X),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), Q),
}


class Model(torch.nn.Module):
    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x)


def twice_in_between(state: Callable[[Call], Call], *, is_model: bool) -> tuple[list[torch.Tensor], Any]:
    """Each call twice, twice in that state, and once more."""
    found, model = [], Model(lambda x: x)
    with lzt.accelerate(model if is_model else None) as handle:
        for call, given in CALLS.values():
            model.call = call if is_model else lambda x: x
            run: Call = model if is_model else call
            for one in (run, run, state(run), state(run), run):
                found.append(one(given).detach().clone())
    return found, sorted(copy.copy(handle.report.lines), key=repr)


@pytest.mark.parametrize("is_model", [False, True], ids=["by a mode", "in a model"])
@pytest.mark.parametrize("state", STATES)
def test_what_is_remembered_holds_while_all_else_is_as_it_was(
    state: str, is_model: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert looking.library is not None
    found, lines = twice_in_between(STATES[state], is_model=is_model)
    monkeypatch.setattr(interception, "library", None)
    wanted, expected = twice_in_between(STATES[state], is_model=is_model)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert [(one.layer, one.op, one.calls, one.why) for one in lines] == [
        (one.layer, one.op, one.calls, one.why) for one in expected
    ]


def test_calls_of_other_sizes_are_alike_unless_a_rule_asks_for_sizes() -> None:
    """Of attention which sizes are equal; of a group's norm how many numbers are in one."""
    x = random(2, 4, 3)
    with lzt.accelerate() as handle:
        for tokens in (3, 7, 9):
            q, kv = random(1, 2, 3, 4), random(1, 2, tokens, 4)
            torch.testing.assert_close(
                F.scaled_dot_product_attention(q, kv, kv), torch.softmax(q @ kv.mT / 2, -1) @ kv, atol=2e-6, rtol=0
            )
        taken = handle.report.taken
        F.scaled_dot_product_attention(random(1, 3, 3, 4), random(1, 1, 3, 4), random(1, 1, 3, 4))
        F.scaled_dot_product_attention(random(2, 2, 3, 4), random(1, 2, 3, 4), random(1, 2, 3, 4))
        F.group_norm(x, 2)
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            F.group_norm(random(1, 2, 1), 2)
        F.silu(random(2, 3))
        F.silu(random(2, 0))
    assert taken == 6
    assert handle.report.taken == taken + 2
    reasons = {why.partition(",")[0] for why in handle.report.reasons}
    assert {"batches of several sizes", "a tensor without elements"} < reasons


def test_lists_are_remembered_as_they_are_given() -> None:
    """The program may change one afterwards."""
    shape = [4]
    with lzt.accelerate() as handle:
        F.layer_norm(X, shape)
        shape[:] = [3, 4]
        torch.testing.assert_close(F.layer_norm(X, shape), (X - X.mean()) / (X.var(correction=0) + 1e-5).sqrt())
        shape[:] = [4]
        torch.testing.assert_close(F.layer_norm(X, shape), F.layer_norm(X, (4,)))
    assert handle.report.taken == 4
