"""Tiny models with random weights, one of each kind that Diffusers has, and what they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel, SD3Transformer2DModel, UNet2DConditionModel
from torch import Tensor, nn

LARGEST_ERROR = 2e-5  # of the largest value, in float32


def unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=2,
        norm_num_groups=4,
    )


def sd3() -> SD3Transformer2DModel:
    """As of 3.5, whose first layers have a second attention."""
    return SD3Transformer2DModel(
        sample_size=8,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=16,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )


def flux() -> FluxTransformer2DModel:
    return FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 4, 8),
    )


def vae() -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
    )


BUILD: dict[str, Callable[[], Any]] = {"unet": unet, "sd3": sd3, "flux": flux, "vae": vae}
LAYERS = {"unet": 8, "sd3": 3, "flux": 2, "vae": 2}
"""How many calls of attention one forward pass is."""


def build(name: str) -> Any:
    """The same weights each time, large enough to make attention count."""
    torch.manual_seed(0)
    model = BUILD[name]().eval()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.3)
    return model


def fed(name: str) -> dict[str, Any]:
    """What a model's forward call is given."""
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    match name:
        case "unet":
            return {"sample": randn(2, 4, 8, 8), "timestep": 3, "encoder_hidden_states": randn(2, 5, 8)}
        case "sd3":
            return {
                "hidden_states": randn(2, 16, 8, 8),
                "timestep": torch.tensor([3.0, 3.0]),
                "encoder_hidden_states": randn(2, 5, 16),
                "pooled_projections": randn(2, 16),
            }
        case "flux":
            return {
                "hidden_states": randn(2, 6, 4),
                "timestep": torch.tensor([0.5, 0.5]),
                "encoder_hidden_states": randn(2, 5, 16),
                "pooled_projections": randn(2, 16),
                "img_ids": torch.arange(18.0).view(6, 3),
                "txt_ids": torch.zeros(5, 3),
            }
        case "vae":
            return {"sample": randn(1, 3, 16, 16)}
    raise ValueError(name)


def error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, by the largest expected value."""
    assert found.shape == expected.shape
    assert torch.isfinite(found).all()
    return float((found - expected).abs().max() / expected.abs().max())
