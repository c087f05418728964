"""What the shapes of test_providers.py do not reach: long rows, many rows, and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from layerzero.ipc.errors import BackendError
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.workers.provider import Block, Bound, Call, DeviceMemory, Loaded

torch = pytest.importorskip("torch", reason="the backend's tensors are torch's")
pytest.importorskip("triton", reason="triton is not installed")
ALLOWED = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}  # docs/ops.md
NORMS = pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    from layerzero.workers.providers import triton

    return triton.load()


def block(tensor: Any) -> Block:
    spec = TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(tensor.stride()))
    return Block(DeviceMemory(tensor.data_ptr(), spec.span_bytes, tensor.device.index), spec)


def bind(loaded: Loaded, norm: str, grad: Any, x: Any, weight: Any, ndim: int = 1) -> tuple[Bound, list[Any]]:
    shape = x.shape[x.ndim - ndim :]
    shapes = [x.shape, *[shape] * (2 if norm == "layer_norm" else 1)]
    outs = [torch.full(tuple(s), torch.nan, dtype=x.dtype, device="cuda") for s in shapes]
    inputs = [None if one is None else block(one) for one in (grad, x, weight)]
    blocks = [block(out) for out in outs]
    kernel, specs = f"triton.{norm}_backward", tuple(None if one is None else one.spec for one in inputs)
    attrs = {"ndim": ndim, "eps": 1e-5}
    call = Call(f"{norm}_backward", kernel, specs, tuple(one.spec for one in blocks), attrs)
    return loaded.kernels[kernel](call, inputs, blocks), outs


def expected(norm: str, grad: Any, x: Any, weight: Any, ndim: int = 1) -> Any:
    shape = x.shape[x.ndim - ndim :]
    wide = x.double().requires_grad_()
    scale = (torch.ones(shape, device="cuda") if weight is None else weight).double().requires_grad_()
    added = torch.zeros_like(scale).requires_grad_()
    with torch.enable_grad():
        if norm == "layer_norm":
            out = torch.nn.functional.layer_norm(wide, shape, scale, added, 1e-5)
            return torch.autograd.grad(out, (wide, scale, added), grad.double())
        out = torch.nn.functional.rms_norm(wide, shape, scale, 1e-5)
        return torch.autograd.grad(out, (wide, scale), grad.double())


def check(outs: list[Any], right: Any) -> None:
    for out, wanted in zip(outs, right, strict=True):
        error = (out.double() - wanted).abs().max().item() / max(wanted.abs().max().item(), 1)
        assert error <= ALLOWED[str(out.dtype).removeprefix("torch.")]


def random(*shape: int, dtype: str = "bfloat16") -> Any:
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(getattr(torch, dtype))


@NORMS
@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize(
    "shape",
    [
        (1024, 4096),
        (3, 8192),
        (700, 5001),
        (17, 16384),
        (9000, 100),
        (33000, 128),
        (1, 12289),
        (40000, 1),
        (2, 3, 5, 7),
    ],
    ids=str,
)
@pytest.mark.parametrize("has_weight", [True, False])
def test_long_rows_and_many(loaded: Loaded, norm: str, dtype: str, shape: tuple[int, ...], has_weight: bool) -> None:
    """More rows than programs, rows of one element, and of the most that there may be; twice the same bits."""
    if norm == "layer_norm" and shape[-1] == 1:
        pytest.skip("a row of one element has no deviation")
    grad, x = random(*shape, dtype=dtype), random(*shape, dtype=dtype)
    weight = random(shape[-1], dtype=dtype) if has_weight else None
    bound, outs = bind(loaded, norm, grad, x, weight)
    bound()
    check(outs, expected(norm, grad, x, weight))
    before = [out.clone() for out in outs]
    bound()
    assert all(torch.equal(one, other) for one, other in zip(before, outs, strict=True))


@NORMS
def test_rows_that_lie_apart_and_in_columns(loaded: Loaded, norm: str) -> None:
    """Rows are read where they lie; of several dimensions whose last has one element, elements may lie apart."""
    grad, x = random(300, 2056)[:, :2048], random(300, 4096)[:, 2048:]
    weight = random(2048)
    bound, outs = bind(loaded, norm, grad, x, weight)
    bound()
    check(outs, expected(norm, grad, x, weight))
    grad, x = random(300, 64, 2)[..., :1], random(300, 64, 3)[..., 1:2]
    weight = random(64, 1)
    bound, outs = bind(loaded, norm, grad, x, weight, ndim=2)
    bound()
    check(outs, expected(norm, grad, x, weight, ndim=2))


@NORMS
def test_a_graph_holds_both_kernels(loaded: Loaded, norm: str) -> None:
    grad, x, weight = random(1024, 4096), random(1024, 4096), random(4096)
    bound, outs = bind(loaded, norm, grad, x, weight)
    bound()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bound()
    x.copy_(random(1024, 4096))
    grad.copy_(random(1024, 4096))
    for out in outs:
        out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    check(outs, expected(norm, grad, x, weight))


@NORMS
def test_rows_that_no_program_holds_are_refused(loaded: Loaded, norm: str) -> None:
    x = random(2, 16385)
    with pytest.raises(BackendError, match="rows of 16385 elements; allowed: 16384"):
        bind(loaded, norm, x, x, None)
