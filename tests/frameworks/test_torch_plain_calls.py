"""Calls of torch.ops.layerzero that go straight to their kernel, and those of which something of torch's must hear."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from tests.frameworks.torch_cases import random
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import layerzero.torch as lzt
from layerzero.torch.calls import is_alone

ops = torch.ops.layerzero
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


class Heard(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class HeardFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_modes_hear_of_calls() -> None:
    x, leaf = random(3, 4), random(3, 4).requires_grad_()
    for make in (Heard, HeardFunctions):
        with make() as mode:
            ops.silu.default(x)
            ops.silu.default(leaf).sum().backward()
            ops.silu.out(x, out=torch.empty_like(x))
        assert [name for name in mode.names if "layerzero" in name][:3] == [
            "layerzero.silu.default",
            "layerzero.silu.default",
            "layerzero.silu.out",
        ]


class Wrapped(torch.Tensor):
    """A subclass that dispatches: it has no data of its own."""

    inner: torch.Tensor
    heard: ClassVar[list[str]] = []

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.heard.append(str(func))
        return cls(func(*(arg.inner if isinstance(arg, cls) else arg for arg in args), **(kwargs or {})))


def test_subclasses_and_fakes_hear_of_calls() -> None:
    x = random(3, 4)
    found = ops.silu.default(Wrapped(x))
    assert type(found) is Wrapped
    assert Wrapped.heard == ["layerzero.silu.default"]
    torch.testing.assert_close(found.inner, F.silu(x))
    with FakeTensorMode() as fakes:
        assert isinstance(ops.silu.default(fakes.from_tensor(x)), FakeTensor)


def test_tracers_hear_of_calls() -> None:
    """Each graph has the op."""

    def call(x: torch.Tensor) -> Any:
        return ops.silu.default(x)

    x = random(3, 4)
    graph = str(make_fx(call)(x).graph)
    assert "layerzero.silu" in graph
    graph = str(make_fx(torch.func.functionalize(call))(x).graph)
    assert "layerzero.silu" in graph
    assert "layerzero::silu" in str(torch.jit.trace(call, (x,), check_trace=False).graph)


def test_lazy_negation_and_conjugation_come_first() -> None:
    x = random(3, 4)
    torch.testing.assert_close(ops.silu.default(torch._neg_view(x)), F.silu(-x))
    leaf = random(3, 4).requires_grad_()
    ops.silu.default(torch._neg_view(leaf)).sum().backward()
    other = leaf.detach().clone().requires_grad_()
    F.silu(-other).sum().backward()
    torch.testing.assert_close(leaf.grad, other.grad)


def test_profilers_hear_of_calls() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ops.silu.default(random(3, 4))
        with lzt.accelerate():
            F.silu(random(3, 4))
    (event,) = (event for event in profile.key_averages() if event.key == "layerzero::silu")
    assert event.count == 2


@pytest.mark.parametrize("which", ["functional", "norm", "linear"])
@pytest.mark.parametrize("needs", [(True, False), (False, True), (True, True)], ids=str)
def test_some_arguments_alone_need_gradients(which: str, needs: tuple[bool, bool]) -> None:
    """Those of the same op with other needs are not mixed up, whichever came first."""
    ours, theirs = {
        "functional": (ops.swiglu.default, lambda a, b: F.silu(a) * b),
        "norm": (lambda a, b: ops.rms_norm.default(a, [6], b[0]), lambda a, b: F.rms_norm(a, [6], b[0])),
        "linear": (ops.linear.default, F.linear),
    }[which]
    found = []
    for call in (ours, theirs):
        args = [random(5, 6, seed=n).requires_grad_(is_needed) for n, is_needed in enumerate(needs)]
        call(*args).square().sum().backward()
        found.append([arg.grad for arg in args])
    assert [grad is not None for grad in found[0]] == list(needs)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def outside_of_all() -> list[Any]:
    """Contexts of the thread in which nobody has a part."""
    return [contextlib.nullcontext, torch.no_grad, torch.inference_mode, torch.enable_grad]


@pytest.mark.parametrize("context", outside_of_all())
def test_plain_calls_are_nobodys_business(context: Any) -> None:
    with context():
        assert is_alone((random(3),))
        assert is_alone((torch.ones(3), [3], None, 1e-5))


@pytest.mark.parametrize(
    "context",
    [
        Heard,
        HeardFunctions,
        FakeTensorMode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        lambda: torch.device("cpu"),
    ],
)
def test_calls_in_a_context_are_its_business(context: Any) -> None:
    x = random(3)
    with context():
        assert not is_alone((x,))
    assert is_alone((x,))


def test_gradients_and_transforms_are_somebodys_business() -> None:
    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(is_alone((x,)))
        return x.sum()

    x = random(3)
    torch.func.grad(look)(x)
    torch.func.vmap(look)(x)
    torch.func.functionalize(look)(x)
    make_fx(look)(x)
    torch.jit.trace(look, (x,), check_trace=False)
    assert seen
    assert not any(seen)
    assert not is_alone((random(3).requires_grad_(),))
    with torch.no_grad():
        assert is_alone((random(3).requires_grad_(),))


# --- accelerate, which asks is_alone -----------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Heard, HeardFunctions])
def test_modes_hear_of_accelerated_calls(make: Any) -> None:
    with torch.no_grad(), make() as mode, lzt.accelerate() as handle:
        F.silu(random(3, 4))
    assert "layerzero.silu.default" in mode.names
    assert handle.report.taken == 1


def test_accelerated_results_can_be_changed_in_place() -> None:
    """They lie in shared memory, of which autograd must not know, with gradients or without."""
    x, w = random(3, 4), random(3, 4, seed=1).requires_grad_()
    with lzt.accelerate() as handle:
        y = F.silu(x)
        assert not y.requires_grad
        y.mul_(w).sum().backward()
        torch.testing.assert_close(w.grad, F.silu(x))
        (F.silu(w) * 2.0).sum().backward()
        other = w.detach().clone().requires_grad_()
    ((F.silu(other) * 2.0).sum() + (other * F.silu(x)).sum()).backward()
    torch.testing.assert_close(w.grad, other.grad)
    assert handle.report.left == 0


def test_accelerated_calls_have_autocasts_dtype() -> None:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), lzt.accelerate() as handle:
        assert F.linear(random(3, 4), random(5, 4)).dtype == torch.bfloat16
    assert handle.report.taken == 1
