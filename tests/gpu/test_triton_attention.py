"""What the shapes of test_providers.py do not reach: other widths of heads, keys that are split, long prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.workers.provider import Block, Bound, Call, DeviceMemory, Loaded

torch = pytest.importorskip("torch", reason="the backend's tensors are torch's")
pytest.importorskip("triton", reason="triton is not installed")
ALLOWED = {"float16": 2e-3, "bfloat16": 1.6e-2}  # docs/ops.md


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are for Hopper")
    from layerzero.workers.providers import triton

    return triton.load()


def block(tensor: Any) -> Block:
    spec = TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(tensor.stride()))
    return Block(DeviceMemory(tensor.data_ptr(), spec.span_bytes, tensor.device.index), spec)


Bind = Callable[..., Bound]


def binder(loaded: Loaded) -> Bind:
    def make(
        kernel: str, tensors: list[Any], out: Any, alignment: str | None = None, scale: float | None = None
    ) -> Bound:
        inputs, outputs = [block(tensor) for tensor in tensors], [block(out)]
        attrs = {
            "is_causal": alignment is not None,
            "scale": tensors[0].shape[3] ** -0.5 if scale is None else scale,
            "causal_alignment": alignment or "top_left",
            "layout": "BHSD",
        }
        specs = (*(given.spec for given in inputs), None, None, None)
        call = Call("attention", f"triton.attention.{kernel}", specs, (outputs[0].spec,), attrs)
        return loaded.kernels[f"triton.attention.{kernel}"](call, [*inputs, None, None, None], outputs)

    return make


@pytest.fixture
def bind(loaded: Loaded) -> Bind:
    return binder(loaded)


def random(*shape: int, dtype: str = "bfloat16") -> Any:
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(getattr(torch, dtype))


def expected(q: Any, k: Any, v: Any, alignment: str | None, scale: float | None = None) -> Any:
    queries, keys, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    k, v = (tensor.double().repeat_interleave(group, 1) for tensor in (k, v))
    scores = q.double() @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    if alignment:
        visible = torch.ones(queries, keys, dtype=torch.bool, device="cuda")
        scores.masked_fill_(~visible.tril(keys - queries if alignment == "bottom_right" else 0), -torch.inf)
    return scores.softmax(-1).nan_to_num(0) @ v


def check(out: Any, wanted: Any) -> None:
    error = (out.double() - wanted).abs().max().item() / max(wanted.abs().max().item(), 1)
    assert error <= ALLOWED[str(out.dtype).removeprefix("torch.")]


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize(("kernel", "queries"), [("decode", 1), ("decode", 5), ("prefill", 5), ("prefill", 1111)])
def test_lengths_groups_and_widths(bind: Bind, kernel: str, queries: int, dim: int, dtype: str) -> None:
    """No length is a multiple of a tile, and 7 heads a group fill none. 33 keys are a part or two, 40000 more than one
    program adds up."""
    lengths = (33, 1000, 5000, 40000) if queries < 1000 else (500, 1500)
    for keys in lengths:
        for alignment in (None, "top_left", "bottom_right"):
            q, k, v = (random(1, heads, n, dim, dtype=dtype) for heads, n in ((7, queries), (1, keys), (1, keys)))
            out = torch.full_like(q, float("nan"))
            bind(kernel, [q, k, v], out, alignment)()
            check(out, expected(q, k, v, alignment))


@pytest.mark.parametrize("batch", [1, 16, 300])
def test_every_replay_of_decode_is_right(bind: Bind, batch: int) -> None:
    """The kernel that adds the parts up is launched before they are there."""
    q, k, v = (random(batch, heads, n, 64) for heads, n in ((16, 1), (2, 3000), (2, 3000)))
    out = torch.empty_like(q)
    bound = bind("decode", [q, k, v], out)
    bound()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bound()
        bound()
    first = None
    for _ in range(20):
        for tensor in (q, k, v):
            tensor.copy_(random(*tensor.shape))
        out.fill_(float("nan"))
        graph.replay()
        check(out, expected(q, k, v, None))
    for _ in range(3):
        graph.replay()
        first = out.clone() if first is None else first
        assert torch.equal(out, first)


def test_calls_on_two_streams_do_not_share_parts(bind: Bind, loaded: Loaded) -> None:
    """They may run at the same time."""
    q, k, v = (random(1, heads, n, 128) for heads, n in ((32, 1), (4, 4096), (4, 4096)))
    out = torch.empty_like(q)
    bound, wanted = bind("decode", [q, k, v], out), expected(q, k, v, None)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    assert loaded.on_stream is not None
    for _ in range(50):
        for stream in streams:
            with loaded.on_stream(stream.cuda_stream):
                bound()
    torch.cuda.synchronize()
    check(out, wanted)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("is_bshd", [False, True])
def test_prefill_writes_in_place(bind: Bind, dim: int, is_bshd: bool) -> None:
    """A copy of the result, or of an input, would take memory."""
    q, k, v = (random(2, 8, 300, dim) for _ in "qkv")
    out = torch.zeros_like(q)
    if is_bshd:
        q, k, v, out = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v, out))
    bound = bind("prefill", [q, k, v], out, "top_left")
    bound()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    bound()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    check(out, expected(q, k, v, "top_left"))


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("kernel", ["decode", "prefill"])
def test_what_lies_as_tma_does_not_take_it(bind: Bind, kernel: str, dim: int) -> None:
    """Keys that all batches and heads share, an output that starts between two words, and scores whose largest was the
    smallest."""
    q, v = random(2, 4, 70, dim), random(2, 4, 300, dim)
    k = random(1, 1, 300, dim).expand(2, 4, 300, dim)
    out = torch.empty(q.numel() + 1, device="cuda", dtype=q.dtype)[1:].view(q.shape)
    for scale in (0.1, -0.1):
        bind(kernel, [q, k, v], out, "bottom_right", scale)()
        check(out, expected(q, k, v, "bottom_right", scale))


def test_nothing_is_compiled_for_another_length(loaded: Loaded) -> None:
    """What `compiled_for` promises: of a dtype and head_dim nothing that a call changes makes Triton compile."""
    import triton

    from layerzero.workers.providers import triton as provider

    bind = binder(provider.load())  # one that has compiled nothing
    seen: list[str] = []

    def tell(*, fn: Any, **_: Any) -> None:
        seen.append(fn.name)

    def run(
        heads: int, kv_heads: int, queries: int, keys: int, extra: int = 0, *, is_causal: bool = True, start: int = 0
    ) -> None:
        q, k, v = (
            random(1, n, length, 64 + extra)[..., :64]
            for n, length in ((heads, queries), (kv_heads, keys), (kv_heads, keys))
        )
        out = torch.empty(q.numel() + start, device="cuda", dtype=q.dtype)[start:].view(q.shape)
        bind("prefill" if queries > 20 else "decode", [q, k, v], out, "bottom_right" if is_causal else None)()

    run(32, 4, 128, 1024)
    run(32, 4, 1, 100)  # in one part
    triton.knobs.runtime.jit_cache_hook = tell  # called for what this process has not loaded yet
    try:
        run(31, 1, 100, 513, 8)
        run(17, 17, 65, 1000, 16, is_causal=False)
        run(64, 4, 1024, 1024, start=1)
        for heads, keys in ((1, 1), (7, 100), (32, 4096), (32, 50000)):
            run(heads, 1, 1, keys, 8)
            run(heads, heads, 16, keys, is_causal=False, start=1)
    finally:
        triton.knobs.runtime.jit_cache_hook = None
    assert seen == []
