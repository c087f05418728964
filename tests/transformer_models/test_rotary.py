"""layerzero.rotary beside Transformers: frequencies of each scaling, tables of Qwen's three position streams, and
what lz.rope_qk makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, Qwen2VLTextConfig, Qwen3VLTextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

import layerzero as lz
from layerzero import rotary

TRAINED = {"original_max_position_embeddings": 4096}
LISTS = {"short_factor": [1.0 + i / 40 for i in range(32)], "long_factor": [1.5 + i for i in range(32)]}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 8.0, **TRAINED},
    {"rope_type": "yarn", "factor": 40.0, "beta_fast": 16.0, "mscale": 0.7, "mscale_all_dim": 1.0, **TRAINED},
    {"rope_type": "yarn", "factor": 8.0, "truncate": False, "attention_factor": 1.25, **TRAINED},
    {"rope_type": "yarn", "factor": 2.0, "partial_rotary_factor": 0.5, **TRAINED},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **TRAINED},
    {"rope_type": "longrope", **LISTS, **TRAINED},
    {"rope_type": "longrope", "factor": 32.0, **LISTS, **TRAINED},
    {"rope_type": "proportional", "partial_rotary_factor": 0.25},
]


def test_every_scaling_of_transformers_is_one_of_ours() -> None:
    """One that is new there would be refused as unknown."""
    assert {one["rope_type"] for one in SCALINGS} == set(ROPE_INIT_FUNCTIONS)


@pytest.mark.parametrize("seq_len", [None, 4096, 70000])
def test_frequencies_are_transformers(seq_len: int | None) -> None:
    """Theirs are computed in float32: equal to 3e-6 of each; attention factors are equal."""
    for parameters in SCALINGS:
        config = LlamaConfig(
            hidden_size=512,
            num_attention_heads=8,
            max_position_embeddings=32768,
            rope_parameters={"rope_theta": 5e5, **parameters},
        )
        said = dict(config.rope_parameters)
        wanted, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, seq_len=seq_len)
        found = rotary.frequencies(64, said, max_position_embeddings=32768, seq_len=seq_len)
        np.testing.assert_allclose(found.inverse, wanted.double().numpy(), rtol=3e-6, err_msg=str(parameters))
        assert found.attention_factor == pytest.approx(factor, rel=1e-12)


def test_tables_are_those_of_a_model() -> None:
    """At positions that float32 angles are right for; with the attention factor, in the model's dtype."""
    parameters = {"rope_theta": 1e4, **SCALINGS[3]}
    config = LlamaConfig(
        hidden_size=512, num_attention_heads=8, max_position_embeddings=32768, rope_parameters=parameters
    )
    positions = torch.tensor([[0, 1, 2, 70], [5, 6, 7, 8]])
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 8e-3)):
        wanted = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=dtype), positions)
        found = rotary.tables(positions, 64, dict(config.rope_parameters), dtype=dtype)
        for one, other in zip(found, wanted, strict=True):
            assert one.dtype == dtype
            torch.testing.assert_close(one, other[..., :32], rtol=0, atol=tolerance)


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_three_position_streams_are_those_of_qwen(is_interleaved: bool) -> None:
    """Qwen2-VL has sections of pairs, Qwen3-VL takes streams in turns: of the tables, and of queries and keys."""
    parameters: dict[str, Any] = {"rope_theta": 1e6, "rope_type": "default", "mrope_section": [12, 10, 10]}
    if is_interleaved:
        parameters["mrope_interleaved"] = True
    shape = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": parameters}
    module = Qwen3VLTextRotaryEmbedding if is_interleaved else Qwen2VLRotaryEmbedding
    made = Qwen3VLTextConfig(head_dim=64, **shape) if is_interleaved else Qwen2VLTextConfig(**shape)
    generator = torch.Generator().manual_seed(3)
    positions = torch.randint(0, 60, (3, 2, 7), generator=generator)
    q, k = (torch.randn(2, 7, heads, 64, generator=generator) for heads in (4, 2))
    cos, sin = module(made)(q, positions)
    found = rotary.tables(positions, 64, parameters, dtype=torch.float32)
    for one, other in zip(found, (cos, sin), strict=True):
        torch.testing.assert_close(one, other[..., :32], rtol=0, atol=2e-5)
    wanted = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    for one, other in zip(lz.rope_qk(q, k, *found), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
