"""layerzero.torch.accelerate: torch's own functions served by LayerZero, with torch's results, or left to torch with a
reason."""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.frameworks.torch_cases import random
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import layerzero as lz
import layerzero.torch as lzt
from layerzero.client.facade import default_session

# of torch's own code
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
OPS = ["attention", "linear", "layer_norm", "rms_norm", "silu", "gelu", "softmax"]


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    """No test leaves a mode or an override behind."""
    yield
    assert _get_current_function_mode_stack() == []
    assert torch.nn.attention.current_flash_attention_impl() is None
    q = random(1, 2, 3, 4)
    F.scaled_dot_product_attention(q, q, q)


class Block(torch.nn.Module):
    """Of a decoder: every function that is taken over, once."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.scale = torch.nn.LayerNorm(width), torch.nn.RMSNorm(width)
        self.into, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.act = torch.nn.GELU(approximate="tanh")
        self.dropout_p = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.into(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout_p, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        return F.softmax(F.silu(self.act(self.scale(x))), -1)


class Net(torch.nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.to(dtype)

    def forward(self, x: torch.Tensor, /, *, scale: float = 1.0) -> torch.Tensor:
        for block in self.blocks:
            x = scale * block(x)
        return x


def given(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return random(2, 5, 16, dtype=dtype)


def native(model: torch.nn.Module, *args: Any) -> torch.Tensor:
    """The result of torch alone; its math kernel has second derivatives."""
    with sdpa_kernel(SDPBackend.MATH):
        found: torch.Tensor = copy.deepcopy(model)(*args)
    return found


def ops_taken(report: lzt.AccelerationReport) -> set[str]:
    return {line.op for line in report.lines if line.is_taken}


# --- results -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)],
    ids=str,
)
def test_a_model_has_torchs_results(dtype: torch.dtype, tolerance: float) -> None:
    """Forward and gradients, against float64 of the same weights."""
    model = Net(dtype)
    wide, x = copy.deepcopy(model).double(), given(dtype)
    expected = wide(x.double())
    with lzt.accelerate(model) as handle:
        found = model(x)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)
        found.double().square().sum().backward()
    expected.square().sum().backward()
    for one, other in zip(model.parameters(), wide.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=0, atol=20 * tolerance)
    assert ops_taken(handle.report) == {*OPS, "attention_backward", "layer_norm_backward", "rms_norm_backward"}
    assert handle.report.left == 0
    assert handle.report.taken == 16


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any) -> None:
    model, x = Net(), given()
    with mode(), lzt.accelerate() as handle:
        found = model(x)
        assert not found.requires_grad
        assert found.is_inference() == (mode is torch.inference_mode)
    torch.testing.assert_close(found.clone(), native(model, x).detach())
    assert handle.report.taken == 16


def test_autocast_is_torchs() -> None:
    model, x = Net(torch.float32), given(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
        with lzt.accelerate() as handle:
            found = model(x)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05)
    assert ops_taken(handle.report) == set(OPS)


def test_second_derivatives_are_there() -> None:
    """As of torch's own functions, although our ops refuse them."""
    model, x = Net(), given()

    def penalty(out: torch.Tensor, weights: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        first = torch.autograd.grad(out.square().sum(), weights, create_graph=True)
        return torch.autograd.grad(sum(one.square().sum() for one in first), weights)

    plain = copy.deepcopy(model)
    with sdpa_kernel(SDPBackend.MATH):
        expected = penalty(plain(x), list(plain.parameters()))
    with lzt.accelerate(model) as handle:
        found = penalty(model(x), list(model.parameters()))
    assert handle.report.taken == 16
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_results_lie_in_memory_as_torchs_do() -> None:
    """A model may view what its heads, laid side by side, came to."""
    q = random(2, 5, 4, 8).transpose(1, 2)
    expected = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    with lzt.accelerate() as handle:
        found = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        assert found.transpose(1, 2).view(2, 5, 32).shape == (2, 5, 32)
    assert found.stride() == expected.stride()
    torch.testing.assert_close(found, expected)
    assert handle.report.taken == 1


# --- where it holds ----------------------------------------------------------------------------------------------


def test_only_a_models_calls_are_taken() -> None:
    model, other, x = Net(), Net(), given()
    handle = lzt.accelerate(model)
    other(x)
    F.silu(x)
    assert handle.report.lines == ()
    model(x, scale=2.0)
    assert handle.report.taken == 16
    handle.remove()
    model(x)
    assert handle.report.taken == 16
    assert lzt.report(model).taken == 16
    handle.remove()


def test_a_models_calls_are_taken_in_every_thread() -> None:
    model, x = Net(), given()
    expected = native(model, x).detach()
    found: list[torch.Tensor] = []

    def call() -> None:
        with torch.no_grad():
            found.append(model(x))

    with lzt.accelerate(model) as handle:
        threads = [threading.Thread(target=call) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 6
    for one in found:
        torch.testing.assert_close(one, expected)
    assert handle.report.taken == 6 * 16
    assert handle.report.left == 0


class Inner(torch.nn.Module):
    """Keeps what is said while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.modes: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.modes = _get_current_function_mode_stack()
        return F.silu(x.relu())


def overrides(op: str) -> bool:
    """Whether torch's op is ours in this process."""
    return "seam.py" in torch._C._dispatch_dump(f"aten::{op}")


def test_functions_of_a_model_that_are_none_of_ours_cost_nothing() -> None:
    """No function mode is asked about each of them: torch's ops that are ours come here by themselves, in the model's
    calls alone, and are torch's again at the end."""
    model = Inner()
    accelerated, other = lzt.accelerate(model), lzt.accelerate(Inner())
    try:
        torch.testing.assert_close(model(X), torch.ops.aten.silu(X.relu()))
        assert model.modes == []
        assert (accelerated.report.taken, accelerated.report.left, other.report.taken) == (1, 0, 0)
        F.silu(X)
        with ThreadPoolExecutor(1) as threads:
            torch.testing.assert_close(threads.submit(F.silu, X).result(), F.silu(X))
        assert accelerated.report.taken == 1
        accelerated.remove()
        assert overrides("silu")
    finally:
        accelerated.remove()
        other.remove()
    assert not any(overrides(op) for op in ("silu", "linear", "softmax", "scaled_dot_product_attention"))


class Function(torch.nn.Module):
    """A model of one function."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> torch.Tensor:
        return self.function(*args)


def by_formula(q: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, q, q)


@pytest.mark.parametrize(
    ("function", "within"),
    [
        (by_formula, "softmax"),
        (lambda x: F.cross_entropy(x[0, 0], torch.tensor([1, 0, 2])), "log_softmax"),
        (lambda x: F.instance_norm(x[0]), "batch_norm"),
    ],
    ids=["attention", "cross_entropy", "instance_norm"],
)
def test_an_op_within_another_is_not_taken_over(function: Callable[..., torch.Tensor], within: str) -> None:
    """It is a step of torch's, no call of the program."""
    x = random(1, 2, 3, 4)
    model = Function(function)
    with lzt.accelerate(model, [within]) as handle:
        torch.testing.assert_close(model(x), function(x))
    assert (handle.report.taken, handle.report.left) == (0, 0)


def test_each_function_of_a_model_is_seen_by_its_op() -> None:
    """As a function mode sees it: taken over as often, with the same results."""
    x, w = random(2, 4, 6), torch.ones(4)
    ids, table = torch.tensor([[1, 0]]), lz.share(torch.arange(24.0).reshape(6, 4))
    cases: list[tuple[Callable[..., torch.Tensor], tuple[Any, ...]]] = [
        (F.linear, (x, random(5, 6))),
        (F.layer_norm, (x, (6,))),
        (F.rms_norm, (x, (6,))),
        (F.group_norm, (x, 2, w, w)),
        (F.instance_norm, (x,)),
        (lambda x: F.batch_norm(x, w, w, w, w), (x,)),
        (F.silu, (x,)),
        (lambda x: F.gelu(x, approximate="tanh"), (x,)),
        (lambda ids: F.embedding(ids, table, padding_idx=-1), (ids,)),
        (F.softmax, (x, 1)),
        (lambda x: x.softmax(-1, torch.float64), (x,)),
        (F.log_softmax, (x, 1)),
        (lambda x: F.cross_entropy(x, ids.t().expand(2, 6), reduction="sum", label_smoothing=0.1), (x,)),
        (lambda x: F.scaled_dot_product_attention(x, x, x), (x,)),
    ]
    for function, args in cases:
        with lzt.accelerate() as by_mode:
            expected = function(*args)
        model = Function(function)
        with lzt.accelerate(model) as by_op:
            torch.testing.assert_close(model(*args), expected)
        for report in (by_mode.report, by_op.report):
            assert (report.taken, report.left) == (1, 0), report


@torch.no_grad()
@pytest.mark.parametrize("kind", ["compiled", "recurrent", "in a mode"])
def test_models_with_calls_that_ops_do_not_show(kind: str) -> None:
    """A function mode sees those in a compiled layer, and does not see the steps of torch's own recurrent layers."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.SiLU())
    x = random(3, 4)
    expected, taken = model(x), 2
    if kind == "compiled":
        model[1].compile(backend="aot_eager")
    elif kind == "recurrent":
        model = torch.nn.Sequential(torch.nn.LSTM(4, 4))
        expected, taken = model(x)[0], 0
    with lzt.accelerate(model) as handle, torch.device("cpu") if kind == "in a mode" else contextlib.nullcontext():
        found = model(x)
    torch.testing.assert_close(found[0] if kind == "recurrent" else found, expected)
    assert handle.report.taken == taken


def test_calls_in_place_of_a_model_are_left() -> None:
    """With the reason."""
    model = torch.nn.Sequential(torch.nn.SiLU(inplace=True))
    with lzt.accelerate(model) as handle:
        x = X.clone()
        assert model(x) is x
    torch.testing.assert_close(x, F.silu(X))
    assert handle.report.reasons == {"inplace=True": 1}


def test_without_a_model_one_thread_alone() -> None:
    x = given()
    with lzt.accelerate() as handle:
        thread = threading.Thread(target=F.silu, args=(x,))
        thread.start()
        thread.join()
        assert handle.report.lines == ()
        F.silu(x)
    F.silu(x)
    assert handle.report.taken == 1
    assert lzt.report().taken == 1


def test_removed_below_another_mode_and_by_another_thread() -> None:
    """Modes are a stack; ours may be removed from its middle, and is off even where it cannot be taken out."""

    class Above(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    x, handle, elsewhere = given(), lzt.accelerate(), lzt.accelerate()
    with Above() as above:
        handle.remove()
        assert above in _get_current_function_mode_stack()
        thread = threading.Thread(target=elsewhere.remove)
        thread.start()
        thread.join()
        F.silu(x)
        assert elsewhere.report.lines == ()
    assert len(_get_current_function_mode_stack()) == 1  # the one that another thread has switched off
    torch.overrides._pop_mode()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_inside_leaves_nothing_behind(error: type[BaseException]) -> None:
    class Failing(Net):
        def forward(self, x: torch.Tensor, /, *, scale: float = 1.0) -> torch.Tensor:
            super().forward(x)
            raise error

    model, x = Failing(), given()
    with lzt.accelerate(model) as handle:
        with pytest.raises(error):
            model(x)
        assert _get_current_function_mode_stack() == []
    with pytest.raises(error), lzt.accelerate():
        raise error
    assert handle.report.taken == 16


def test_a_model_in_a_block_is_counted_once() -> None:
    """The innermost takes a call; the model inside of itself is one."""
    model, x = Net(), given()
    with lzt.accelerate() as outer, lzt.accelerate(model) as inner:
        model(x)
    assert (inner.report.taken, outer.report.taken) == (16, 0)


def test_copies_and_files_have_the_model_as_it_was() -> None:
    model, x = Net(), given()
    expected = native(model, x)
    with lzt.accelerate(model) as handle:
        again = pickle.loads(pickle.dumps(model))  # noqa: S301  # our own
        copied = copy.deepcopy(model)
        assert isinstance(model, Net)
        assert str(inspect.signature(model.forward)) == str(inspect.signature(Net.forward)).replace("self, ", "")
        for one in (again, copied):
            assert type(one) is Net
            torch.testing.assert_close(one(x), expected)
        assert handle.report.lines == ()
    assert type(model) is Net


def test_a_second_accelerate_of_a_model_replaces_the_first() -> None:
    model, x = Net(), given()
    first = lzt.accelerate(model)
    with lzt.accelerate(model, ops=["linear"]) as second:
        model(x)
        first.remove()
        model(x)
    assert type(model) is Net
    assert first.report.lines == ()
    assert ops_taken(second.report) == {"linear"}
    assert lzt.report(model).taken == 8


# --- what stays with torch ---------------------------------------------------------------------------------------


class Named(torch.Tensor):
    """A subclass that does nothing."""


X, Q = random(3, 4), random(1, 2, 3, 4)
LEFT: dict[str, tuple[Callable[[], Any], str]] = {
    "dropout": (lambda: F.scaled_dot_product_attention(Q, Q, Q, dropout_p=0.5), "dropout_p above 0"),
    "both masks": (
        lambda: F.scaled_dot_product_attention(Q, Q, Q, torch.ones(3, 3), 0.0, True),
        "attn_mask and is_causal",
    ),
    "one head": (lambda: F.scaled_dot_product_attention(Q, Q[:, :1], Q[:, :1]), "other heads"),
    "five dimensions": (lambda: F.scaled_dot_product_attention(Q[None], Q[None], Q[None]), "2 to 4 dimensions"),
    "batches": (lambda: F.scaled_dot_product_attention(Q.expand(2, 2, 3, 4), Q, Q), "batches of several sizes"),
    "math": (lambda: sdpa_kernel(SDPBackend.MATH)(F.scaled_dot_product_attention)(Q, Q, Q), "sdpa_kernel"),
    "math first": (
        lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True)(
            F.scaled_dot_product_attention
        )(Q, Q, Q),
        "sdpa_kernel",
    ),
    "integers": (lambda: F.linear(torch.ones(2, 3, dtype=torch.int64), torch.ones(4, 3, dtype=torch.int64)), "int64"),
    "complex": (lambda: F.linear(X.to(torch.complex64), X.to(torch.complex64)), "complex64"),
    "in place": (lambda: F.silu(X.clone(), inplace=True), "inplace=True"),
    "strides": (lambda: F.silu(X.t()), "not row-major"),
    "two dtypes": (lambda: F.layer_norm(X.bfloat16(), (4,), X[0]), "several dtypes"),
    "subclass": (lambda: F.silu(X.as_subclass(Named)), "a Named"),
    "meta": (lambda: F.silu(X.to("meta")), "meta"),
    "sparse": (lambda: F.linear(X.to_sparse(), X), "sparse"),
    "empty": (lambda: F.silu(X[:0]), "without elements"),
    "vmap": (lambda: torch.func.vmap(F.silu)(X), "torch.func"),
    "grad": (lambda: torch.func.grad(lambda x: F.silu(x).sum())(X), "torch.func"),
    "jvp": (lambda: torch.func.jvp(F.silu, (X,), (X,))[1], "torch.func"),
    "a negated view": (lambda: F.silu(torch.complex(X, X).conj().imag), "not row-major"),
}


@pytest.mark.parametrize("is_autocast", [False, True])
def test_softmax_in_another_dtype_is_served(is_autocast: bool) -> None:
    """It converts first; autocast has no say in it."""
    x, expected = X.clone().requires_grad_(), torch.softmax(X.double(), -1)
    with lzt.accelerate(ops=["softmax"]) as handle, torch.autocast("cpu", enabled=is_autocast):
        for call in (F.softmax, torch.softmax, torch.Tensor.softmax):
            found = call(x, -1, dtype=torch.float64)
            assert found.dtype == torch.float64
            torch.testing.assert_close(found, expected)
            (grad,) = torch.autograd.grad(found[:, 0].sum(), x)
            assert grad.dtype == torch.float32
    assert (handle.report.taken, handle.report.left) == (3, 0)


@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_for_us_is_torchs(name: str) -> None:
    """With torch's result, and the reason in the report."""
    call, why = LEFT[name]
    torch.manual_seed(0)
    expected = call()
    torch.manual_seed(0)
    with lzt.accelerate() as handle:
        found = call()
    assert type(found) is type(expected)
    if not found.is_meta:
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    report = handle.report
    assert report.taken == 0, report
    assert report.left == 1, report
    assert any(why in reason for reason in report.reasons), report


def test_forward_mode_is_torchs() -> None:
    from torch.autograd import forward_ad

    with forward_ad.dual_level():
        x = forward_ad.make_dual(X, X)
        expected = forward_ad.unpack_dual(F.silu(x)).tangent
        with lzt.accelerate() as handle:
            found = forward_ad.unpack_dual(F.silu(x)).tangent
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert handle.report.taken == 0


def test_wrong_calls_are_torchs_errors() -> None:
    with lzt.accelerate() as handle:
        with pytest.raises(TypeError, match="linear"):
            F.linear(X)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            F.linear(X, X.t())
    assert handle.report.taken == 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints(use_reentrant: bool) -> None:
    """Their second pass is in backward, where nothing is taken over; torch compares what both passes save."""
    model, x = Net(), given().requires_grad_()
    plain = copy.deepcopy(model)
    grads = []
    for one in (plain, model):
        with lzt.accelerate(model):
            y = checkpoint(one.blocks[0] if one is plain else one, x, use_reentrant=use_reentrant)
            if one is plain:
                y = one.blocks[1](y)
            y.square().sum().backward()
        grads.append([p.grad for p in one.parameters()])
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected)


def test_checkpoint_inside_of_a_model() -> None:
    class Saving(Net):
        def forward(self, x: torch.Tensor, /, *, scale: float = 1.0) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    model, x = Saving(), given()
    plain = copy.deepcopy(model)
    plain(x).square().sum().backward()
    with lzt.accelerate(model) as handle:
        model(x).square().sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert handle.report.taken == 0
    assert any("checkpoint" in why for why in handle.report.reasons)


def test_multi_head_attention_gives_its_attention_alone() -> None:
    """torch's function hides what it calls from modes; with weights it calls no attention."""
    layer, x = torch.nn.MultiheadAttention(16, 2, batch_first=True, dtype=torch.float64), given()
    expected = layer(x, x, x, need_weights=False)[0]
    with lzt.accelerate(layer) as handle:
        found = layer(x, x, x, need_weights=False)[0]
        found.sum().backward()
        assert handle.report.taken == 1
        layer(x, x, x)
        F.silu(x)
    torch.testing.assert_close(found, expected)
    assert handle.report.reasons == {"multi_head_attention_forward that returns its weights": 1}


def test_torchs_registry_of_attention_has_ours() -> None:
    """For all threads, and for callers that no mode sees."""
    assert "LAYERZERO" in torch.nn.attention.list_flash_attention_impls()
    q = random(1, 2, 3, 4, needs_grad=True)
    expected = F.scaled_dot_product_attention(q, q, q)
    torch.nn.attention.activate_flash_attention_impl("LAYERZERO")
    try:
        found = []
        thread = threading.Thread(target=lambda: found.append(F.scaled_dot_product_attention(q, q, q)))
        thread.start()
        thread.join()
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        with sdpa_kernel(SDPBackend.MATH):
            F.scaled_dot_product_attention(q, q, q)
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    F.scaled_dot_product_attention(q, q, q)
    torch.testing.assert_close(found[0], expected)
    grads = [torch.autograd.grad(y.square().sum(), q)[0] for y in (found[0], expected)]
    torch.testing.assert_close(*grads)
    report = lzt.report()
    assert (report.taken, report.left) == (1, 2)


def test_torchs_own_order_on_a_hopper_gpu_is_no_wish_of_the_program() -> None:
    """There torch puts cuDNN first, for the whole process, once it has computed attention; seen on an H200."""
    own = torch._C._get_sdp_priority_order()
    names = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
    q = random(1, 2, 3, 4)
    try:
        torch._C._set_sdp_priority_order([int(one.value) for one in names])
        with lzt.accelerate() as handle:
            F.scaled_dot_product_attention(q, q, q)
    finally:
        torch._C._set_sdp_priority_order(own)
    assert handle.report.taken == 1


# --- options -----------------------------------------------------------------------------------------------------


def test_ops_and_policy() -> None:
    model, x, before = Net(), given(), lz.policy()
    with lzt.accelerate(model, ops=["linear"], policy={"rules": [{"allow": ["torch"]}]}) as handle:
        model(x)
    assert {line.kernel for line in handle.report.lines} == {"torch.linear"}
    assert handle.report.taken == 4
    assert lz.policy() == before


def test_wrong_options_are_told() -> None:
    with pytest.raises(lz.InvalidArgument, match="did you mean rms_norm"):
        lzt.accelerate(ops=["rmsnorm"])
    with pytest.raises(lz.InvalidArgument, match="nosuch"):
        lzt.accelerate(policy={"nosuch": 1})
    with pytest.raises(lz.InvalidArgument, match=r"torch\.nn\.Module"):
        lzt.accelerate(F.silu)  # type: ignore[arg-type]
    with pytest.raises(lz.InvalidArgument, match="nothing was accelerated"):
        lzt.report(Net())


def test_no_kernel_leaves_the_call_to_torch() -> None:
    """The reason has the error's code."""
    with lzt.accelerate(policy={"rules": [{"allow": ["tokenizers-0.23"]}]}) as handle:
        found = F.silu(X)
    torch.testing.assert_close(found, F.silu(X))
    assert [why.partition(":")[0] for why in handle.report.reasons] == ["NO_BACKEND"]


def test_calls_that_no_kernel_takes_are_not_asked_for_one_by_one() -> None:
    """Those alike are not, for a while; they are once the program asks for something else."""
    with lzt.accelerate(ops=["silu"]) as handle:
        lz.configure(rules=[{"allow": ["tokenizers-0.23"]}])
        try:
            F.silu(X)
            asked = lz.last_report()
            for _ in range(20):
                torch.testing.assert_close(F.silu(X), -F.silu(X) + 2 * F.silu(X))
            assert lz.last_report() == asked
            assert (handle.report.taken, handle.report.left) == (0, 61)
            F.silu(X.double())
            assert lz.last_report() != asked
        finally:
            lz.configure(rules=None)
        torch.testing.assert_close(F.silu(X), torch.ops.aten.silu(X))
        assert handle.report.taken == 1


def test_deterministic_algorithms_are_asked_for() -> None:
    """Of the kernels, by policy; what is computed here does so by torch's own switch."""
    from layerzero.client.connection import overlay
    from layerzero.client.facade.running import handler

    asked: list[str] = []

    def listen(request: Any) -> Any:
        now = overlay.current()
        asked.append("" if now is None else now.text)
        return torch.zeros_like(request.args[0])

    F.silu(X)
    lz.silu(X)
    token = handler.set(listen)
    torch.use_deterministic_algorithms(True)
    try:
        with lzt.accelerate():
            F.silu(X)
            torch.use_deterministic_algorithms(False)
            F.silu(X)
    finally:
        torch.use_deterministic_algorithms(False)
        handler.reset(token)
    assert ["requires_deterministic" in text for text in asked] == [True, False]


def test_disabled_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is changed, and the report says why."""
    monkeypatch.setenv("LAYERZERO_DISABLE", "1")
    model, x = Net(), given()
    with lzt.accelerate(model) as handle, lzt.accelerate() as everywhere:
        assert type(model) is Net
        model(x)
        assert _get_current_function_mode_stack() == []
    for report in (handle.report, everywhere.report, lzt.report(model)):
        assert report.lines == ()
        assert "LAYERZERO_DISABLE" in str(report)
    monkeypatch.setenv("LAYERZERO_DISABLE", "0")
    with lzt.accelerate(model):
        model(x)
    assert lzt.report(model).taken == 16


# --- the report --------------------------------------------------------------------------------------------------


def test_report_is_a_table_of_80_columns() -> None:
    model, x = Net(), given()
    model.blocks[1].dropout_p = 0.5  # type: ignore[union-attr]
    with lzt.accelerate(model) as handle:
        for _ in range(3):
            model(x)
    report = handle.report
    text = str(report)
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith("accelerate: 45 calls taken over, 3 left to torch\n")
    rows = {(line.layer, line.op): line for line in report.lines}
    assert rows["blocks.1", "attention"].why == "dropout_p above 0"
    assert rows["blocks.0", "attention"].calls == 3
    assert rows["blocks.0.into", "linear"].kernel
    assert "blocks.*.into" in text
    assert "blocks.0.into" in report.text(verbose=True)
    assert report.to_dict()["taken"] == 45


# --- faults ------------------------------------------------------------------------------------------------------


class Killing(torch.nn.Module):
    """Ends the worker that has served the last call, in forward or in backward."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when
        self.is_armed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_armed and self.when == "forward":
            kill()
        if self.is_armed and self.when == "backward" and x.requires_grad:
            x.register_hook(lambda grad: kill())
        return x


def kill() -> None:
    """Only the worker of this test's broker: the pid is that of the last call's report."""
    lz.silu(X, backend="torch")
    report = lz.last_report()
    assert report is not None
    assert report.worker_pid is not None
    if report.worker_pid != os.getpid():
        os.kill(report.worker_pid, signal.SIGKILL)


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_worker_dies_in_the_middle(when: str) -> None:
    """Forward: its calls go elsewhere, or to its successor. Backward is computed here, but attention's, which goes to
    the successor, too."""
    model, x = torch.nn.Sequential(Net(), Killing(when), Net()), given()
    expected = model(x)
    expected.square().sum().backward()
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    policy = {"rules": [{"allow": ["torch"]}]}
    with lzt.accelerate(model, policy=policy) as handle:
        model(x)
        model[1].is_armed = True
        found = model(x)
        torch.testing.assert_close(found, expected)
        found.square().sum().backward()
        for p, grad in zip(model.parameters(), grads, strict=True):
            torch.testing.assert_close(p.grad, grad)
        model[1].is_armed = False
        torch.testing.assert_close(model(x), expected)
    report = handle.report
    assert report.taken + report.left == 3 * 32
    assert report.left == 0, report


def test_the_programs_session_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of another broker than that of the variables, too."""
    session = lz.connect()
    monkeypatch.setenv("LAYERZERO_RUNTIME_DIR", str(tmp_path))
    with lzt.accelerate():
        F.silu(random(4))
    assert default_session.session() is session
    assert not list(tmp_path.iterdir())
