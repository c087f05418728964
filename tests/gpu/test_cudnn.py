"""What the cudnn backend is for: results are written where the call wants them. That they are right, and the same in
replayed graphs, is in test_providers.py."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.workers.provider import Block, Bound, Call, DeviceMemory, Loaded

torch = pytest.importorskip("torch", reason="the backend's tensors are torch's")
pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")
SHAPE = (2, 8, 256, 128)


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    from layerzero.workers.providers import cudnn

    return cudnn.load()


def block(tensor: Any) -> Block:
    spec = TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(tensor.stride()))
    return Block(DeviceMemory(tensor.data_ptr(), spec.span_bytes, tensor.device.index), spec)


@pytest.fixture
def bind(loaded: Loaded) -> Callable[..., Bound]:
    def make(tensors: list[Any], out: Any, *, is_causal: bool, alignment: str = "top_left") -> Bound:
        inputs, outputs = [block(tensor) for tensor in tensors], [block(out)]
        scale = tensors[0].shape[3] ** -0.5
        attrs = {"is_causal": is_causal, "scale": scale, "causal_alignment": alignment, "layout": "BHSD"}
        kernel = "cudnn.attention"
        specs = (*(given.spec for given in inputs), None, None, None)
        call = Call("attention", kernel, specs, (outputs[0].spec,), attrs)
        return loaded.kernels[kernel](call, [*inputs, None, None, None], outputs)

    return make


def random(*shape: int, dtype: Any = None) -> Any:
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype or torch.bfloat16)


def expected(q: Any, k: Any, v: Any, *, is_causal: bool) -> Any:
    doubles = [tensor.double() for tensor in (q, k, v)]
    attention = torch.nn.functional.scaled_dot_product_attention
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
        return attention(*doubles, is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1])


def allocations() -> int:
    """How often torch's allocator was asked for memory so far."""
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


def test_a_graph_outlives_the_memory_of_plans(bind: Callable[..., Bound], monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN unloads a plan's code with the plan, and graphs do not keep it: the Bound that was captured does."""
    from layerzero.workers.providers import cudnn

    monkeypatch.setattr(cudnn, "MAX_KEPT", 1)
    tensors = [random(*SHAPE) for _ in "qkv"]
    out = torch.zeros_like(tensors[0])
    bound = bind(tensors, out, is_causal=True)
    bound()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bound()
    for rows in (32, 48, 64):
        others = [random(1, 1, rows, 64) for _ in "qkv"]
        bind(others, torch.empty_like(others[0]), is_causal=True)()
    gc.collect()
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert (out.double() - expected(*tensors, is_causal=True)).abs().max().item() < 0.03


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("is_bshd", [False, True])
def test_call_allocates_nothing_after_the_first(bind: Callable[..., Bound], dim: int, is_bshd: bool) -> None:
    """A result that is copied, or inputs that are, would take memory: this is the copy that torch's own call needs."""
    batch, heads, rows, _ = SHAPE
    tensors = [random(batch, heads, rows, dim) for _ in "qkv"]
    out = torch.zeros_like(tensors[0])
    if is_bshd:
        *tensors, out = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (*tensors, out))
    bound = bind(tensors, out, is_causal=True)
    bound()
    before = allocations()
    out.zero_()
    bound()
    assert allocations() == before
    error = (out.double() - expected(*tensors, is_causal=True)).abs().max().item()
    assert error < 0.03  # a bfloat16 near 4 has steps of 0.03


def test_work_is_ordered_in_the_stream_that_is_current(bind: Callable[..., Bound], loaded: Loaded) -> None:
    """cuDNN's handle remembers a stream; a call on another one must not run on the one of the call before."""
    tensors = [random(*SHAPE) for _ in "qkv"]
    out = torch.zeros_like(tensors[0])
    bound = bind(tensors, out, is_causal=False)
    bound()
    torch.cuda.synchronize()
    other = [random(*SHAPE) for _ in "qkv"]
    wanted = expected(*other, is_causal=False)
    torch.cuda.synchronize()
    assert loaded.on_stream is not None
    for _ in range(3):
        stream = torch.cuda.Stream()
        with loaded.on_stream(stream.cuda_stream):
            torch.cuda._sleep(20_000_000)  # cycles; what does not wait for it reads the old inputs
            for target, source in zip(tensors, other, strict=True):
                target.copy_(source)
            bound()
            held = out.clone()
            for target in (*tensors, out):
                target.zero_()
        stream.synchronize()
        assert (held.double() - wanted).abs().max().item() < 0.03


def test_calls_of_one_signature_share_a_plan(bind: Callable[..., Bound], monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is compiled; a client that rotates its buffers would otherwise wait for the compiler each time."""
    from layerzero.workers.providers import cudnn

    built: list[object] = []
    build = cudnn.Attention.graph

    def counted(self: Any, *given: Any) -> Any:
        built.append(given)
        return build(self, *given)

    monkeypatch.setattr(cudnn.Attention, "graph", counted)
    for _ in range(3):
        tensors = [random(1, 4, 77, 64, dtype=torch.float16) for _ in "qkv"]
        bind(tensors, torch.empty_like(tensors[0]), is_causal=False)()
    assert len(built) == 1


def test_one_kernel_serves_lengths_that_it_was_not_compiled_for(bind: Callable[..., Bound]) -> None:
    """Plans share kernels, so a second length runs what the first one compiled."""
    for keys in (64, 65, 200, 1, 1023):
        q, k, v = random(2, 4, 33, 128), random(2, 4, keys, 128), random(2, 4, keys, 128)
        out = torch.full_like(q, float("nan"))
        bind([q, k, v], out, is_causal=False)()
        assert (out.double() - expected(q, k, v, is_causal=False)).abs().max().item() < 0.03


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 300), (300, 1), (5, 3), (3, 5)])
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
def test_causal_rows_at_the_edges(bind: Callable[..., Bound], queries: int, keys: int, alignment: str) -> None:
    """The provider leaves masks out that hide nothing, and keys and rows that see nothing: with grouped heads, since a
    causal mask over one query is where cuDNN was wrong."""
    q, k, v = random(2, 8, queries, 64), random(2, 2, keys, 64), random(2, 2, keys, 64)
    out = torch.full_like(q, float("nan"))
    bind([q, k, v], out, is_causal=True, alignment=alignment)()
    shift = keys - queries if alignment == "bottom_right" else 0
    visible = torch.ones(queries, keys, dtype=torch.bool, device="cuda").tril(shift)
    k, v = (tensor.double().repeat_interleave(4, 1) for tensor in (k, v))
    scores = (q.double() @ k.transpose(2, 3) * 64**-0.5).masked_fill(~visible, -torch.inf)
    wanted = scores.softmax(-1).nan_to_num(0) @ v
    assert (out.double() - wanted).abs().max().item() < 0.03
