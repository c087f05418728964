"""Attention and its gradients as ops: against torch's own in float64, at edges, with large scores, and when something
goes wrong between forward and backward."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from tests.frameworks.torch_cases import random

import layerzero as lz
import layerzero.torch as lzt
from layerzero.client.connection import overlay
from layerzero.torch.attention import LSE_HERE

pytestmark = [  # of torch's own code
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.* is deprecated:FutureWarning"),
]
ops = torch.ops.layerzero
Leaves = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
EPS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
DTYPES = pytest.mark.parametrize("dtype", EPS, ids=str)


def leaves(q: Any, k: Any, v: Any, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Leaves:
    made = [random(*shape, seed=seed, dtype=torch.float64) * scale for seed, shape in enumerate((q, k, v))]
    return tuple(one.to(dtype).requires_grad_() for one in made)  # type: ignore[return-value]


def wide(tensors: Leaves) -> Leaves:
    return tuple(one.detach().double().requires_grad_() for one in tensors)  # type: ignore[return-value]


def expected(tensors: Leaves, grad: torch.Tensor, mask: torch.Tensor | None, **options: Any) -> list[torch.Tensor]:
    """torch's gradients in float64 of the same numbers; 0 for what no row sees, which torch has NaN for."""
    q, k, v = wide(tensors)
    if mask is not None:  # rows that see nothing are left out
        seen = mask if mask.dtype == torch.bool else mask > -math.inf
        blind = ~seen.any(-1, keepdim=True)
        bias = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~seen, -math.inf)
        bias = bias if mask.dtype == torch.bool else torch.where(seen, mask.double(), bias)
        mask = bias.masked_fill(blind, 0.0)
        grad = grad.double().masked_fill(blind, 0.0)
    out = F.scaled_dot_product_attention(q, k, v, mask, **options)
    found = torch.autograd.grad(out, (q, k, v), grad.double())
    return [one.detach() for one in found]


def check(tensors: Leaves, mask: torch.Tensor | None = None, tolerance: float = 0.0, **options: Any) -> None:
    """Forward and backward by ops of ours; the largest error as a share of the largest gradient, or of 1."""
    q = tensors[0]
    out = ops.attention(*tensors, mask, 0.0, **options)
    assert lz.last_report().op == "attention_forward"
    grad = random(*out.shape, seed=7, dtype=q.dtype)
    found = torch.autograd.grad(out, tensors, grad)
    assert lz.last_report().op == "attention_backward"
    for one, right in zip(found, expected(tensors, grad, mask, **options), strict=True):
        assert one.dtype == q.dtype
        scale = max(1.0, float(right.abs().max())) if right.numel() else 1.0
        atol = (tolerance or EPS[q.dtype]) * scale
        torch.testing.assert_close(one.double(), right, rtol=0, atol=atol)


SHAPES = {
    "one query": ((2, 4, 1, 16), (2, 4, 33, 16), (2, 4, 33, 16)),
    "one key": ((1, 2, 5, 8), (1, 2, 1, 8), (1, 2, 1, 8)),
    "odd head_dim": ((1, 3, 5, 13), (1, 3, 7, 13), (1, 3, 7, 13)),
    "head_dim 1": ((1, 2, 5, 1), (1, 2, 6, 1), (1, 2, 6, 1)),
    "narrow values": ((1, 2, 5, 16), (1, 2, 6, 16), (1, 2, 6, 7)),
    "wide values": ((1, 2, 5, 7), (1, 2, 6, 7), (1, 2, 6, 24)),
    "grouped heads": ((2, 6, 5, 16), (2, 2, 9, 16), (2, 2, 9, 16)),
    "one key head": ((1, 4, 9, 16), (1, 1, 4, 16), (1, 1, 4, 16)),
    "several blocks": ((1, 2, 150, 32), (1, 2, 301, 32), (1, 2, 301, 32)),
}


@DTYPES
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_are_torchs_in_float64(name: str, is_causal: bool, dtype: torch.dtype) -> None:
    """Causal with as many queries as keys, more and fewer, too."""
    tensors = leaves(*SHAPES[name], dtype=dtype)
    check(tensors, is_causal=is_causal, enable_gqa=True)


@DTYPES
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape", [(2, 4, 7, 9), (2, 1, 7, 9), (1, 4, 7, 9), (1, 1, 1, 9), (7, 9)], ids=str)
def test_masks_with_rows_that_see_nothing(shape: Any, kind: str, dtype: torch.dtype) -> None:
    """Such a row is 0, its log-sum-exp -inf, and it adds nothing to any gradient."""
    mask: torch.Tensor = random(*shape, seed=5) > -0.3
    mask[..., 0, :] = shape[-2] == 1
    if kind == "float":
        mask = random(*shape, seed=6).masked_fill(~mask, -math.inf).to(dtype)
    tensors = leaves((2, 4, 7, 16), (2, 2, 9, 16), (2, 2, 9, 16), dtype=dtype)
    check(tensors, mask, enable_gqa=True)
    with torch.no_grad():
        out, lse = ops.attention_forward(*tensors, mask, enable_gqa=True)
    if shape[-2] > 1:
        assert lse.view(2, 4, 7)[..., 0].eq(-math.inf).all()
        assert out[..., 0, :].eq(0).all()


@pytest.mark.parametrize("logits", [30.0, 300.0, 3000.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_large_scores_lose_no_more_than_their_rounding(logits: float, dtype: torch.dtype) -> None:
    """exp(s - lse) is off by what s is rounded by, |s| eps of its dtype: so much is allowed beyond the tolerance."""
    tensors = leaves((1, 2, 17, 16), (1, 2, 33, 16), (1, 2, 33, 16), dtype=dtype)
    with torch.no_grad():
        top = float((tensors[0] @ tensors[1].mT).abs().max())
    allowed = EPS[dtype] + 8 * logits * torch.finfo(dtype).eps
    check(tensors, scale=logits / top, tolerance=allowed)


def test_lse_is_the_natural_log_sum_exp() -> None:
    for layout in ("BHSD", "BSHD"):
        q, k, v = (random(2, 3, 4, 8, seed=n) for n in range(3))
        out, lse = lz.attention_forward(q, k, v, layout=layout)
        if layout == "BSHD":
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        right = (q.double() @ k.double().mT / math.sqrt(8)).logsumexp(-1)
        assert lse.dtype == torch.float32
        torch.testing.assert_close(lse.double(), right, rtol=0, atol=1e-5)
        assert out.shape == v.shape
    _, lse = lz.attention_forward(v[0, 0], v[0, 0], v[0, 0])
    assert lse.shape == v.shape[2:3]


def test_gradcheck_and_no_second_derivative() -> None:
    q, k, v = leaves((1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 4), dtype=torch.float64)
    assert torch.autograd.gradcheck(ops.attention, (q, k, v), fast_mode=False)
    with pytest.raises(lz.InvalidArgument, match=r"layerzero::attention has no second derivative; call backward"):
        torch.autograd.gradgradcheck(ops.attention, (q, k, v))


def test_a_float_mask_has_its_gradient_in_this_process() -> None:
    q, k, v = leaves((1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 4), dtype=torch.float64)
    mask = random(1, 1, 3, 5, seed=3, dtype=torch.float64, needs_grad=True)
    grads = [
        torch.autograd.grad(call(q, k, v, mask).square().sum(), (q, k, v, mask))
        for call in (ops.attention, F.scaled_dot_product_attention)
    ]
    torch.testing.assert_close(*grads)


# --- when something goes wrong -----------------------------------------------------------------------------------


def test_a_worker_may_be_killed_between_forward_and_backward() -> None:
    """Twice: what backward needs is the program's own, so another worker, or this process, computes it."""
    tensors = leaves((2, 4, 7, 16), (2, 4, 9, 16), (2, 4, 9, 16))
    for _ in range(2):
        out = ops.attention(*tensors)
        report = lz.last_report()
        assert report.op == "attention_forward"
        assert report.worker_pid is not None
        os.kill(report.worker_pid, signal.SIGKILL)
        grad = random(*out.shape, seed=7)
        found = torch.autograd.grad(out, tensors, grad)
        for one, right in zip(found, expected(tensors, grad, None), strict=True):
            torch.testing.assert_close(one.double(), right, rtol=0, atol=1e-5)


@pytest.fixture
def locked_to_mlx() -> Iterator[None]:
    lz.lock("attention", "mlx.attention")
    yield
    lz.unlock("attention")


def test_without_a_kernel_this_process_computes_it_and_says_so() -> None:
    tensors = leaves((2, 4, 7, 16), (2, 2, 9, 16), (2, 2, 9, 16))
    out = ops.attention(*tensors, None, 0.0, True, None, True)
    grad = random(*out.shape, seed=7)
    with lz.prefer("mlx", only=True):  # which has no such kernel
        found = torch.autograd.grad(out, tensors, grad)
    report = lz.last_report()
    assert (report.op, report.path, report.kernel_id) == (
        "attention_backward",
        "in_process",
        "layerzero.torch.attention",
    )
    assert "computed in this process: NO_BACKEND" in report.notes[0]
    assert report.candidates
    for one, right in zip(found, expected(tensors, grad, None, is_causal=True, enable_gqa=True), strict=True):
        torch.testing.assert_close(one.double(), right, rtol=0, atol=1e-5)


def test_a_lock_on_attention_holds_where_gradients_are_wanted(locked_to_mlx: None) -> None:
    """A backend without attention_forward serves attention; what the backward pass needs is computed here."""
    tensors = leaves((2, 4, 7, 16), (2, 4, 9, 16), (2, 4, 9, 16))
    out = ops.attention(*tensors)
    assert LSE_HERE in lz.last_report().notes
    assert lz.last_report().kernel_id == "mlx.attention"
    grad = random(*out.shape, seed=7)
    for one, right in zip(torch.autograd.grad(out, tensors, grad), expected(tensors, grad, None), strict=True):
        torch.testing.assert_close(one.double(), right, rtol=0, atol=1e-5)


def test_deterministic_algorithms_ask_for_deterministic_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, also in a graph that was compiled before."""
    asked: list[Any] = []

    def spy(call: Any) -> Any:
        def called(*args: Any, **options: Any) -> Any:
            current = overlay.current()
            asked.append(None if current is None else current.layers[-1]["values"])
            return call(*args, **options)

        return called

    for name in ("attention_forward", "attention_backward"):
        monkeypatch.setattr(lz, name, spy(getattr(lz, name)))

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ops.attention(q, k, v)

    tensors = leaves((2, 4, 7, 16), (2, 4, 9, 16), (2, 4, 9, 16))
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    right = [torch.autograd.grad(call(*tensors).sum(), tensors) for call in (ops.attention, compiled)]
    assert asked == [None] * 4
    torch.use_deterministic_algorithms(True)
    try:
        found = [torch.autograd.grad(call(*tensors).sum(), tensors) for call in (ops.attention, compiled)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked[4:] == [{"requires_deterministic": True}] * 4
    torch.testing.assert_close(found, right, rtol=0, atol=1e-5)  # maybe by another kernel


@pytest.mark.parametrize("needs_grad", [False, True])
def test_dropout_is_torchs_and_the_report_says_so(needs_grad: bool) -> None:
    q = random(2, 3, 5, 4, needs_grad=needs_grad)
    for call in (ops.attention, lzt.scaled_dot_product_attention):
        torch.manual_seed(3)
        found = call(q, q, q, dropout_p=0.5)
        report = lz.last_report()
        assert (report.op, report.path) == ("attention", "in_process")
        assert report.notes == ("dropout_p above 0: torch's own kernel, in this process",)
        torch.manual_seed(3)
        torch.testing.assert_close(found, F.scaled_dot_product_attention(q, q, q, dropout_p=0.5))
        if needs_grad:
            found.sum().backward()
    with pytest.raises(lz.InvalidArgument, match=r"dropout_p is 1\.5"):
        ops.attention(q, q, q, None, 1.5)


# --- compiled, and under accelerate ------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_forward_and_backward_are_one_node_each(backend: str) -> None:
    seen: list[str] = []

    def inspect(graph: Any, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if "layerzero" in str(node.target))
        return make_boxed_func(graph.forward)

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ops.attention(q, k, v, is_causal=True).square()

    tensors = leaves((2, 4, 7, 16), (2, 4, 7, 16), (2, 4, 7, 16))
    right = torch.autograd.grad(function(*tensors).sum(), tensors)
    if backend == "aot_eager":
        from torch._dynamo.backends.common import aot_autograd

        compiled = torch.compile(
            function, backend=aot_autograd(fw_compiler=inspect, bw_compiler=inspect), fullgraph=True
        )
        torch.autograd.grad(compiled(*tensors).sum(), tensors)
        assert seen == ["layerzero.attention_forward.default", "layerzero.attention_backward.default"]
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(*tensors).sum(), tensors), right)


def test_accelerate_counts_backward_passes() -> None:
    q, k, v = leaves((2, 4, 7, 16), (2, 4, 9, 16), (2, 4, 9, 16))
    with lzt.accelerate(ops=["attention"]) as accelerated:
        F.scaled_dot_product_attention(q, k, v).sum().backward()
    lines = {line.op: (line.kernel.partition(".")[2], line.why) for line in accelerated.report.lines}
    assert lines == {"attention": ("attention_forward", ""), "attention_backward": ("attention_backward", "")}
    with lzt.accelerate(ops=["attention"]) as accelerated:
        out = F.scaled_dot_product_attention(q, k, v)
        with lz.prefer("mlx", only=True):
            out.sum().backward()
    (line,) = [line for line in accelerated.report.lines if line.op == "attention_backward"]
    assert line.why.startswith("NO_BACKEND")
    with lzt.accelerate(ops=["attention"], policy={"rules": [{"allow": ["mlx"]}]}) as accelerated:
        out = F.scaled_dot_product_attention(q, k, v)
    out.sum().backward()  # the policy of the block holds for what follows from it
    served = {line.op: line.kernel or line.why[:10] for line in accelerated.report.lines}
    assert served == {"attention": "mlx.attention", "attention_backward": "NO_BACKEND"}


# --- without torch -----------------------------------------------------------------------------------------------


def test_numpy_arrays_futures_and_plans() -> None:
    """Several results are a tuple of arrays of the caller's kind, however the call is made."""
    import numpy as np

    q, k, v = (random(2, 3, 4, 8, seed=n).numpy() for n in range(3))
    out, lse = lz.attention_forward(q, k, v, is_causal=True)
    assert type(out) is type(lse) is np.ndarray
    grads = lz.attention_backward(out, q, k, v, out, lse, is_causal=True)
    later = lz.submit(lz.attention_backward, out, q, k, v, out, lse, is_causal=True).result()
    right = expected(tuple(map(torch.from_numpy, (q, k, v))), torch.from_numpy(out), None, is_causal=True)  # type: ignore[arg-type]
    for one, other, exact in zip(grads, later, right, strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(one, exact, rtol=0, atol=1e-5)

    def step(q: Any) -> Any:
        out, lse = lz.attention_forward(q, k, v)
        return lz.attention_backward(out, q, k, v, out, lse)

    plan = lz.dry_run(step, q)
    assert [call.op for call in plan.calls] == ["attention_forward", "attention_backward"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lse": torch.zeros(2, 3, 5)}, r"lse is float32\[2, 3, 5\]; allowed: float32\[2, 3, 4\]"),
        ({"lse": torch.zeros(2, 3, 4, dtype=torch.float64)}, r"lse is float64\[2, 3, 4\]; allowed: float32"),
        ({"output": torch.zeros(2, 3, 5, 8)}, r"output has shape \[2, 3, 5, 8\]; allowed: \[2, 3, 4, 8\]"),
        ({"grad_out": torch.zeros(2, 3, 4, 8).half()}, "grad_out is float16, q is float32"),
    ],
)
def test_what_does_not_belong_together_is_named(change: dict[str, torch.Tensor], says: str) -> None:
    names = ("grad_out", "q", "k", "v", "output")
    call = {**{name: random(2, 3, 4, 8, seed=n) for n, name in enumerate(names)}, "lse": torch.zeros(2, 3, 4)}
    with pytest.raises(lz.InvalidArgument, match=f"attention_backward: {says}"):
        lz.attention_backward(**{**call, **change})
