"""A torch application: every op against torch's own public entry, in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import layerzero as lz

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = list(TOLERANCE)


def check(result: torch.Tensor, expected: torch.Tensor) -> None:
    assert type(result) is torch.Tensor
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(result, expected, rtol=0, atol=2 * TOLERANCE[expected.dtype] * scale)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("options", "mask"),
    [({}, None), ({"is_causal": True}, None), ({"scale": 0.3}, "bool"), ({}, "float"), ({"enable_gqa": True}, None)],
)
def test_attention_is_torchs(dtype: torch.dtype, options: dict[str, Any], mask: str | None) -> None:
    """The result of an op must not depend on which library served it."""
    heads = 2 if "enable_gqa" in options else 4
    q, k, v = (
        random(2, 4, 9, 16, dtype=dtype),
        random(2, heads, 9, 16, dtype=dtype, seed=1),
        random(2, heads, 9, 16, dtype=dtype, seed=2),
    )
    attn_mask = None
    if mask == "bool":
        attn_mask = random(1, 1, 9, 9, seed=3) > 0
        attn_mask[..., 0] = True
    elif mask == "float":
        attn_mask = random(2, 4, 9, 9, dtype=dtype, seed=3)
    check(lz.attention(q, k, v, attn_mask, **options), F.scaled_dot_product_attention(q, k, v, attn_mask, **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("ours", "theirs", "shapes"),
    [
        (lz.matmul, torch.matmul, [(3, 4, 5), (5, 6)]),
        (lz.linear, F.linear, [(3, 7, 5), (6, 5), (6,)]),
        (lambda x: lz.softmax(x, -2), lambda x: F.softmax(x, -2), [(3, 4, 5)]),
        (
            lambda x, w, b: lz.layer_norm(x, (5,), w, b),
            lambda x, w, b: F.layer_norm(x, (5,), w, b),
            [(3, 4, 5), (5,), (5,)],
        ),
        (lambda x, w: lz.rms_norm(x, (5,), w), lambda x, w: F.rms_norm(x, (5,), w), [(3, 4, 5), (5,)]),
        (lz.gelu, F.gelu, [(3, 4)]),
        (lambda x: lz.gelu(x, "tanh"), lambda x: F.gelu(x, approximate="tanh"), [(3, 4)]),
        (lz.silu, F.silu, [(3, 4)]),
        (lz.silu, F.silu, [()]),
        (lz.silu, F.silu, [(0, 4)]),
        (lz.swiglu, lambda gate, up: F.silu(gate) * up, [(3, 4), (3, 4)]),
    ],
    ids=[
        "matmul",
        "linear",
        "softmax",
        "layer_norm",
        "rms_norm",
        "gelu",
        "gelu-tanh",
        "silu",
        "silu-0d",
        "silu-empty",
        "swiglu",
    ],
)
def test_op_is_torchs(
    dtype: torch.dtype, ours: Callable[..., Any], theirs: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    """All dtypes survive, bfloat16 and float16 bit for bit on the way in."""
    tensors = [random(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]
    check(ours(*tensors), theirs(*tensors))


NARROW = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", [*NARROW, torch.int8], ids=str)
@pytest.mark.parametrize("is_shared", [True, False])
def test_quantized_tensors_cross_and_come_back(dtype: torch.dtype, is_shared: bool) -> None:
    """As torch's own conversion; strided, shared or not, with a scale of each row."""
    x, scale = random(6, 16)[::2] * 9, random(3, 1, seed=1).abs() + 0.5
    x = lz.share(x) if is_shared else x
    name = str(dtype).removeprefix("torch.")
    result = lz.quantize(x, scale, dtype=name)
    expected = (x / scale).round().to(dtype) if dtype == torch.int8 else (x / scale).to(dtype)
    assert (result.dtype, result.shape) == (dtype, x.shape)
    assert torch.equal(result.view(torch.uint8), expected.view(torch.uint8))
    back = lz.dequantize(result.t().contiguous().t(), scale, dtype="bfloat16")
    assert torch.equal(back, (expected.float() * scale).bfloat16())


def test_packed_fp4_is_read_pair_by_pair() -> None:
    """All 256 bytes, in the order of the OCP's table: the first number is in the low bits."""
    x = torch.arange(256, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).view(4, 64)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat((values, -values))
    codes = torch.arange(256)
    expected = torch.stack((values[codes & 15], values[codes >> 4]), -1).view(4, 128)
    scale = random(4, 8, seed=3).abs() + 0.1
    assert torch.equal(lz.dequantize(x, scale), expected * scale.repeat_interleave(16, -1))
    assert torch.equal(lz.dequantize(lz.share(x), 2 * torch.ones(())), 2 * expected)


@pytest.mark.parametrize("dtype", [torch.float32, *NARROW], ids=str)
def test_caches_of_torch_are_written(dtype: torch.dtype) -> None:
    """Of 8-bit floats, too, as engines keep them; shared ones as they lie."""
    rows, slots = random(3, 2, 8).to(dtype), torch.tensor([5, -1, 2])
    for cache in (torch.zeros(2, 4, 2, 8, dtype=dtype), lz.share(torch.zeros(2, 4, 2, 8, dtype=dtype))):
        other = cache.clone()
        lz.append_kv(rows, rows, cache, other, slots)
        expected = torch.zeros(8, 2, 8)
        expected[5], expected[2] = rows[0].float(), rows[2].float()
        for written in (cache, other):
            assert torch.equal(written.float().view(8, 2, 8), expected)


def test_embedding_is_torchs() -> None:
    """Index dtypes are their own; the result follows the weight."""
    ids, weight = torch.tensor([[0, 3], [2, 2]]), random(4, 6)
    check(lz.embedding(ids, weight), F.embedding(ids, weight))
    with pytest.raises(lz.InvalidArgument, match="7"):
        lz.embedding(torch.tensor([7]), weight)


@pytest.mark.parametrize("view", [lambda x: x.T, lambda x: x[::2], lambda x: x[:, 1:3], lambda x: x[:1].expand(5, 4)])
def test_any_strides(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Copied or shared, a strided tensor means the same."""
    plain = random(4, 4)
    for base in (plain, lz.share(plain)):
        check(lz.silu(view(base)), F.silu(view(base)))


def test_shared_tensors_cross_without_a_copy() -> None:
    """The point of lz.share, lz.empty and out=: the report has no copies, the memory is the caller's."""
    x, out = lz.share(random(64, 64)), lz.empty((64, 64), torch.float32)
    result = lz.silu(x, out=out, backend="torch")
    report = lz.last_report()
    assert report is not None
    assert report.copies == ()
    assert result.data_ptr() == out.data_ptr()
    check(out, F.silu(x))
    again = lz.silu(result, backend="torch")  # a result lies in an arena too
    report = lz.last_report()
    assert report is not None
    assert report.copies == ()
    check(again, F.silu(out))


def test_share_moves_a_module_in_place() -> None:
    """Weights are shared once; the module goes on working by itself."""
    layer = lz.share(torch.nn.Linear(8, 4))
    x = lz.share(random(3, 8))
    with torch.no_grad():
        result = lz.linear(x, layer.weight, layer.bias)
        report = lz.last_report()
        check(result, layer(x))
    assert report is not None
    assert not [copy for copy in report.copies if copy.where == "client"]


def test_gradients_are_refused() -> None:
    """A kernel in another process has no backward; silence would give wrong training."""
    weight = torch.nn.Parameter(random(4, 4))
    with pytest.raises(lz.InvalidArgument, match=r"weight requires gradients.*no_grad"):
        lz.linear(random(2, 4), weight)
    with torch.no_grad():
        check(lz.linear(random(2, 4), weight), F.linear(random(2, 4), weight))


def test_out_that_is_an_input() -> None:
    """In-place use is right, through a temporary that the report shows."""
    x = lz.share(random(8, 8))
    expected = F.silu(x.clone())
    lz.silu(x, out=x)
    check(x, expected)
    report = lz.last_report()
    assert report is not None
    assert [copy.arg for copy in report.copies] == ["out"]


def test_empty_with_a_torch_dtype_is_a_torch_tensor() -> None:
    """The dtype says which library the caller works with."""
    out = lz.empty((2, 3), torch.bfloat16)
    assert lz.silu(torch.ones(2, 3, dtype=torch.bfloat16), out=out) is out
    check(out, F.silu(torch.ones_like(out)))


def test_a_transposed_shared_weight_crosses_as_it_is() -> None:
    """Strides travel with the call: a view of shared memory is no reason to copy."""
    layer, x = lz.share(torch.nn.Linear(4, 3, bias=False)), lz.share(random(2, 4))
    with torch.no_grad():
        check(lz.matmul(x, layer.weight.T, backend="torch"), layer(x))
    report = lz.last_report()
    assert report is not None
    assert report.copies == ()


def test_layers_of_4_bits_are_packed_from_tensors_of_torch() -> None:
    """With scales in bfloat16, which NumPy has not, and inputs that do not lie by group."""
    numbers = torch.arange(32 * 8).view(32, 8) * 7 % 16
    words = sum((numbers.view(4, 8, 8)[:, i] << 4 * i for i in range(8)), torch.zeros(4, 8, dtype=torch.int64))
    scales, groups = torch.tensor([[0.5] * 8, [0.25] * 8], dtype=torch.bfloat16), torch.arange(32) % 2
    packed = lz.pack_weight(words.to(torch.int32), scales, None, groups, layout="gptq")
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(1), dtype=torch.bfloat16)
    found = lz.packed_linear(x, packed)
    expected = x.double() @ ((numbers.double() - 8) * scales.double()[groups])
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max()))
