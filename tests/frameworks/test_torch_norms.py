"""Gradients of norms as ops: against torch's own in float64, told by reports, and when something goes wrong between
forward and backward."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from tests.frameworks.torch_cases import random

import layerzero as lz
import layerzero.torch as lzt

pytestmark = [  # of torch's own code
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.* is deprecated:FutureWarning"),
]
ops = torch.ops.layerzero
EPS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
NORMS = pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
OUTSIDE = "gradients that are differentiated once more, or torch.func"


def arguments(norm: str, x: torch.Tensor, width: int, *, is_alone: bool = False) -> tuple[Any, ...]:
    """x, what is normalized over, weight, and of layer_norm bias; leaves of their own."""
    count = 0 if is_alone else 2 if norm == "layer_norm" else 1
    params = [random(width, seed=n + 1, dtype=torch.float64).to(x.dtype).requires_grad_() for n in range(count)]
    return x.detach().requires_grad_(), [width], *params


def leaves(args: tuple[Any, ...]) -> list[torch.Tensor]:
    return [arg for arg in args if isinstance(arg, torch.Tensor)]


def expected(norm: str, args: tuple[Any, ...], grad: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    wide = tuple(a.detach().double().requires_grad_() if isinstance(a, torch.Tensor) else a for a in args)
    return list(torch.autograd.grad(getattr(F, norm)(*wide, **options), leaves(wide), grad.double()))


def assert_right(found: Any, right: list[torch.Tensor], dtype: torch.dtype) -> None:
    for one, exact in zip(found, right, strict=True):
        assert one.dtype == dtype
        scale = max(1.0, float(exact.abs().max()))
        torch.testing.assert_close(one.double(), exact, rtol=0, atol=EPS[dtype] * scale)


@NORMS
@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("shape", [(3, 8), (5,), (2, 3, 7), (300, 33), (1, 1, 1000)], ids=str)
@pytest.mark.parametrize("is_alone", [False, True])
def test_gradients_are_torchs_in_float64(norm: str, dtype: torch.dtype, shape: Any, is_alone: bool) -> None:
    """With weight and bias, and of x alone; in half precision, too, sums over rows are in float32."""
    x = random(*shape, seed=9, dtype=torch.float64).to(dtype)
    args = arguments(norm, x, shape[-1], is_alone=is_alone)
    grad = random(*shape, seed=7, dtype=dtype)
    out = getattr(ops, norm)(*args, eps=1e-4)
    found = torch.autograd.grad(out, leaves(args), grad)
    report = lz.last_report()
    assert report.op == f"{norm}_backward"
    assert report.worker_pid is not None, str(report)
    assert_right(found, expected(norm, args, grad, eps=1e-4), dtype)


@NORMS
def test_gradients_lie_in_any_strides(norm: str) -> None:
    """Of a sum they are one number for all."""
    args = arguments(norm, random(8, 4).t(), 8)
    found = torch.autograd.grad(getattr(ops, norm)(*args).sum(), leaves(args))
    assert_right(found, expected(norm, args, torch.ones(4, 8)), torch.float32)


def test_a_worker_may_be_killed_between_forward_and_backward() -> None:
    """Once, since tests share a broker, which starts a worker again three times in 30 s and then no more."""
    args = arguments("rms_norm", random(6, 16), 16)
    out = ops.rms_norm(*args, backend="torch")
    pid = lz.last_report().worker_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    grad = random(6, 16, seed=7)
    found = torch.autograd.grad(out, leaves(args), grad)
    assert lz.last_report().op == "rms_norm_backward"
    assert_right(found, expected("rms_norm", args, grad), torch.float32)


@NORMS
def test_without_a_kernel_this_process_computes_it_and_says_so(norm: str) -> None:
    args = arguments(norm, random(6, 16), 16)
    out, grad = getattr(ops, norm)(*args), random(6, 16, seed=7)
    with lz.prefer("mlx", only=True):  # which has no such kernel
        found = torch.autograd.grad(out, leaves(args), grad)
        report = lz.last_report()
        alone = getattr(ops, f"{norm}_backward")(grad, args[0].detach().t().contiguous().t(), [16], args[2].detach())
    assert (report.op, report.path, report.kernel_id) == (f"{norm}_backward", "in_process", "layerzero.torch.norms")
    assert "computed in this process: NO_BACKEND" in report.notes[0]
    assert report.candidates
    right = expected(norm, args, grad)
    assert_right(found, right, torch.float32)
    assert_right(alone, right, torch.float32)
    assert all(one.is_contiguous() for one in alone)


@NORMS
def test_gradients_of_gradients_and_maps_are_by_formula(norm: str) -> None:
    """torch.func differentiates the formula, and maps over it; create_graph is refused by name."""
    x, shape, *params = arguments(norm, random(3, 4, dtype=torch.float64), 4)

    def of(call: Any) -> Any:
        def loss(x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = call(x, shape, *(one.detach() for one in params)).square().sum()
            return found

        return loss

    ours, theirs = of(getattr(ops, norm)), of(getattr(F, norm))
    torch.testing.assert_close(torch.func.grad(ours)(x), torch.func.grad(theirs)(x))
    torch.testing.assert_close(torch.func.hessian(theirs)(x), torch.func.jacrev(torch.func.grad(ours))(x))
    out = getattr(ops, norm)(x, shape, *params)
    batch = random(5, 3, 4, seed=3, dtype=torch.float64)
    (found,) = torch.autograd.grad(out, x, batch, is_grads_batched=True, retain_graph=True)
    right = [torch.autograd.grad(out, x, one, retain_graph=True)[0] for one in batch]
    torch.testing.assert_close(found, torch.stack(right))
    with pytest.raises(lz.InvalidArgument, match="no second derivative"):
        torch.autograd.gradgradcheck(getattr(ops, norm), (x, shape, *params))


@NORMS
def test_compiled_forward_and_backward_are_one_node_each(norm: str) -> None:
    from torch._dynamo.backends.common import aot_autograd

    seen: list[str] = []

    def inspect(graph: Any, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if "layerzero" in str(node.target))
        return make_boxed_func(graph.forward)

    args = arguments(norm, random(6, 16), 16)
    call = getattr(ops, norm).default
    right = torch.autograd.grad(call(*args).square().sum(), leaves(args))
    compiled = torch.compile(call, backend=aot_autograd(fw_compiler=inspect, bw_compiler=inspect), fullgraph=True)
    found = torch.autograd.grad(compiled(*args).square().sum(), leaves(args))
    torch.testing.assert_close(found, right)
    assert seen == [f"layerzero.{norm}.default", f"layerzero.{norm}_backward.default"]


@NORMS
def test_accelerate_counts_backward_passes(norm: str) -> None:
    args = arguments(norm, random(6, 16), 16)
    call = getattr(F, norm)

    def run(**options: Any) -> dict[str, str]:
        with lzt.accelerate(ops=[norm]) as accelerated:
            torch.autograd.grad(call(*args).square().sum(), leaves(args), **options)
        assert accelerated.report.taken == 1
        return {line.op: line.kernel.partition(".")[2] or line.why for line in accelerated.report.lines}

    assert run() == {norm: norm, f"{norm}_backward": f"{norm}_backward"}
    assert run(create_graph=True) == {norm: norm, f"{norm}_backward": OUTSIDE}
    with lz.prefer("mlx", only=True):
        assert run()[f"{norm}_backward"].startswith("NO_BACKEND")


# --- without torch -----------------------------------------------------------------------------------------------


def test_numpy_arrays_futures_and_plans() -> None:
    import numpy as np

    grad, x, weight = (random(3, 8, seed=n).numpy() for n in range(3))
    grads = lz.rms_norm_backward(grad, x, 8, weight[0], eps=1e-5)
    assert [type(one) for one in grads] == [np.ndarray] * 2
    later = lz.submit(lz.rms_norm_backward, grad, x, 8, weight[0], eps=1e-5).result()
    args = tuple(map(torch.from_numpy, (x, weight[0])))
    right = expected("rms_norm", (args[0], [8], args[1]), torch.from_numpy(grad), eps=1e-5)
    for one, other, exact in zip(grads, later, right, strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(one, exact, rtol=0, atol=1e-5)
    plan = lz.dry_run(lambda x: lz.layer_norm_backward(grad, x, 8), x)
    assert [call.op for call in plan.calls] == ["layer_norm_backward"]
    assert lz.explain("layer_norm_backward", grad, x, 8).kernel_id == "torch.layer_norm_backward"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"grad_out": torch.zeros(2, 8)}, r"grad_out has shape \[2, 8\]; allowed: \[3, 8\], that of the result"),
        ({"grad_out": torch.zeros(3, 8).half()}, "grad_out is float16, x is float32"),
        ({"weight": torch.zeros(3)}, r"weight has shape \[3\]; allowed: normalized_shape, \[8\]"),
        ({"normalized_shape": 3}, r"normalized_shape is \[3\] and x has shape \[3, 8\]"),
        ({"eps": -1.0}, r"eps is -1\.0; allowed: 0\.0 or more"),
    ],
)
@NORMS
def test_what_does_not_belong_together_is_named(norm: str, change: dict[str, Any], says: str) -> None:
    call = {"grad_out": random(3, 8), "input": random(3, 8), "normalized_shape": 8, "weight": random(8)}
    with pytest.raises(lz.InvalidArgument, match=f"{norm}_backward: {says}"):
        getattr(lz, f"{norm}_backward")(**{**call, **change})
