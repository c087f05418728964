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
from layerzero.client.connection.report import SelectionReport
from layerzero.torch.acceleration import interception, looking
from layerzero.torch.acceleration.report import AccelerationReport
from layerzero.torch.acceleration.tally import Tally

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


def test_one_tensor_given_twice_is_another_call_than_two() -> None:
    """Which of torch's arguments is which of ours is found by what they are."""
    q, k, v = random(1, 2, 3, 4), random(1, 2, 3, 4, seed=1), random(1, 2, 3, 4, seed=2)
    with lzt.accelerate() as handle:
        for given in ((q, q, q), (q, k, v), (q, k, k), (k, q, k), (q, q, v)):
            for _ in range(3):
                found = F.scaled_dot_product_attention(*given)
                query, key, value = given
                torch.testing.assert_close(found, torch.softmax(query @ key.mT / 2, -1) @ value, atol=2e-6, rtol=0)
        F.layer_norm(X, [4], W[0], W[0])
        torch.testing.assert_close(F.layer_norm(X, [4], W[0], W[1]), F.layer_norm(X, [4]) * W[0] + W[1])
    assert handle.report.taken == 33  # softmax of what is expected, too


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


@contextlib.contextmanager
def of_cuda() -> Iterator[None]:
    """Autocast is on, but not where the tensors are."""
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


def to(dtype: torch.dtype, enabled: bool = True) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    return lambda: torch.autocast("cpu", dtype, enabled=enabled)


AUTOCASTS: list[list[Callable[[], contextlib.AbstractContextManager[Any]]]] = [
    [],
    [to(torch.bfloat16)],
    [to(torch.float16)],
    [of_cuda],
    [to(torch.bfloat16), to(torch.bfloat16, enabled=False)],
    [to(torch.bfloat16), to(torch.float16)],
    [to(torch.float16), to(torch.float16, enabled=False), to(torch.bfloat16)],
    [to(torch.bfloat16), lambda: torch.autocast("cpu", cache_enabled=False)],
]


def under_autocasts(rounds: int, *, is_model: bool) -> tuple[list[Any], list[Any], list[int]]:
    """Results and gradients, report, and looks that the Python has made in each round."""
    half = random(3, 4, dtype=torch.bfloat16)
    beside = (lambda x: F.layer_norm(x, [4], W[0]), half)  # of two dtypes, which torch takes under autocast alone
    found: list[Any] = []
    looks, model = [0], Model(lambda x: x)
    with pytest.MonkeyPatch.context() as patch:
        before = interception.Takeover.look

        def look(self: Any, *args: Any, above: int = 0, **options: Any) -> Any:
            looks[-1] += 1
            return before(self, *args, above=above + 1, **options)

        def anew(
            self: Any, rule: Any, function: Any, args: Any, kwargs: Any, keys: Any, key: Any, is_plain: Any, above: int
        ) -> Any:
            looks[-1] += 1
            return before(self, rule, function, args, kwargs, keys, key, is_plain, above + 1)

        patch.setattr(interception.Takeover, "look", anew if interception.library is not None else look)
        with lzt.accelerate(model if is_model else None) as handle:
            for _ in range(rounds):
                for blocks in AUTOCASTS:
                    with contextlib.ExitStack() as stack:
                        for block in blocks:
                            stack.enter_context(block())
                        for call, given in (*CALLS.values(), beside):
                            if call is beside[0] and not torch.is_autocast_enabled("cpu"):
                                continue  # torch refuses it
                            model.call = call if is_model else lambda x: x
                            run: Call = model if is_model else call
                            found.append(run(given).clone())
                            leaf = given.clone().requires_grad_()
                            made = run(leaf)
                            found.append((made.detach().clone(), torch.autograd.grad(made.sum(), leaf)[0]))
                looks.append(0)
    lines = sorted(copy.copy(handle.report.lines), key=repr)
    return found, [(one.layer, one.op, one.calls, one.why) for one in lines], looks[:rounds]


@pytest.mark.parametrize("is_model", [False, True], ids=["by a mode", "in a model"])
def test_autocast_is_part_of_what_is_remembered(is_model: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nested, switched off within, of another device, of other dtypes: and the second time looked at in C."""
    found, lines, looks = under_autocasts(2, is_model=is_model)
    assert looks[0] > 0
    assert looks[1] == 0
    monkeypatch.setattr(interception, "library", None)
    wanted, expected, _ = under_autocasts(2, is_model=is_model)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert lines == expected


class OnGpu:
    """A session whose calls of a GPU's worker have their reports later."""

    last_record = object()

    def report_of(self, record: object) -> SelectionReport:
        return SelectionReport(
            "attention_backward", "a.b", "a", 1, "express", notes=("not lifted: TOO_LARGE: so much",)
        )


def test_the_report_says_why_calls_of_a_gpus_worker_are_not_lifted() -> None:
    tally, session = Tally(None), OnGpu()
    for layer in ("layers.0", "layers.1", "layers.1"):
        tally.took(layer, "attention_backward", session)  # type: ignore[arg-type]
    report = AccelerationReport.of(tally, ("attention",), "")
    assert [(one.calls, one.kernel, one.paths, len(one.notes)) for one in report.lines] == [
        (1, "a.b", ("express",), 1),
        (2, "a.b", ("express",), 1),
    ]
    text = " ".join(str(report).split())
    assert "layers.* attention_backward 3 a.b; not lifted: TOO_LARGE: so much" in text
