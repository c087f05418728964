"""Weights of fp4 as checkpoints store them, against what Transformers makes of gpt-oss's, and what the formats say."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import layerzero as lz

SEED = torch.Generator().manual_seed(2)
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def codes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=SEED)


def check(packed: lz.PackedWeight, numbers: torch.Tensor, backend: str) -> None:
    """A product, and the numbers alone."""
    x = torch.randn(3, numbers.shape[1], generator=SEED)
    found, expected = lz.packed_linear(x, packed, backend=backend).double(), x.double() @ numbers.T
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    plain = lz.dequantize(packed.weight, torch.from_numpy(packed.scale), backend=backend)
    torch.testing.assert_close(plain.double(), numbers, rtol=1e-6, atol=0)


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_mxfp4_is_what_transformers_reads(backend: str) -> None:
    """Blocks of 16 bytes with a scale each, as gpt-oss stores an expert's."""
    blocks, scales = codes(6, 3, 16), torch.randint(120, 131, (6, 3), dtype=torch.uint8, generator=SEED)
    expected = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0].T.double()
    packed = lz.pack_weight(blocks, scales, layout="mxfp4")
    assert (packed.out_features, packed.in_features, packed.group_size) == (6, 96, 32)
    check(packed, expected, backend)
    flat = blocks.view(6, 48).view(torch.float4_e2m1fn_x2)
    assert lz.pack_weight(flat, scales.view(torch.float8_e8m0fnu), layout="mxfp4") is packed


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_nvfp4_has_two_scales(backend: str) -> None:
    words, scales = codes(5, 32), (torch.rand(5, 4, generator=SEED) * 100).to(torch.float8_e4m3fn)
    numbers = FP4[torch.stack((words & 15, words >> 4), -1).flatten(1).long()]
    expected = (numbers.view(5, 4, 16) * scales.double()[..., None] * 0.0625).view(5, 64)
    packed = lz.pack_weight(words, scales, layout="nvfp4", global_scale=0.0625)
    check(packed, expected, backend)
    packed.weight.view(torch.uint8)[1, 2] ^= 1
    with pytest.raises(lz.InvalidArgument, match="has changed"):
        packed.check()


def test_what_is_no_fp4_is_refused() -> None:
    words, scales = codes(4, 16), torch.full((4, 1), 127, dtype=torch.uint8)
    for args, options, says in (
        ((words.numpy(), scales), {"layout": "mxfp4"}, r"qweight is a ndarray .* allowed: a tensor of torch"),
        ((words, scales.float()), {"layout": "mxfp4"}, r"scales is torch.float32\[4, 1\]; allowed: exponents in uint8"),
        ((words, scales), {"layout": "nvfp4"}, r"scales is torch.uint8\[4, 1\]; allowed: floats \[4, 2\]"),
        ((words[:, :9], scales), {"layout": "mxfp4"}, r"qweight is uint8\[4, 9\]; .* whole blocks of 32 numbers"),
        ((words, scales, scales), {"layout": "mxfp4"}, "qzeros is given for layout 'mxfp4'"),
        ((words, scales), {"layout": "mxfp4", "global_scale": 1.0}, "global_scale is given for layout 'mxfp4'"),
        ((words, scales), {"layout": "awq", "global_scale": 1.0}, "global_scale is given for layout 'awq'"),
    ):
        with pytest.raises(lz.InvalidArgument, match=says):
            lz.pack_weight(*args, **options)  # type: ignore[arg-type]
