"""Blocks of mixtures of experts by the ops: what the gate's scores and the experts' weights of tiny models give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import layerzero as lz

SMALL = {
    "num_attention_heads": 4,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 3,
}
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "n_shared_experts": 1}
OF_GROUPS = {"num_groups": 4, "top_groups": 2, "scale": 2.5}
# A model's names, what its configuration says beside SMALL, and what moe_route is told.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mixtral": ("MixtralSparseMoeBlock", {"num_local_experts": 8}, {}),
    "qwen2_moe": ("Qwen2MoeSparseMoeBlock", {"num_experts": 8}, {"normalize": False}),
    "qwen3_moe": ("Qwen3MoeSparseMoeBlock", {"num_experts": 8, "norm_topk_prob": True}, {}),
    "deepseek_v2": (
        "DeepseekV2Moe",
        {"n_routed_experts": 8, "topk_method": "group_limited_greedy", **GROUPS},
        {"normalize": False, "group_score": "max", **OF_GROUPS},
    ),
    "deepseek_v3": ("DeepseekV3MoE", {"n_routed_experts": 8, **GROUPS}, {"scoring": "sigmoid", **OF_GROUPS}),
}


def block_of(name: str) -> Any:
    """With random weights."""
    kind, options, _ = MODELS[name]
    module = __import__(f"transformers.models.{name}.modeling_{name}", fromlist=[kind])
    config = transformers.AutoConfig.for_model(name, **SMALL, **options)
    config._experts_implementation = "eager"
    torch.manual_seed(3)
    block = getattr(module, kind)(config).eval()
    for tensor in (*block.parameters(), *block.buffers()):
        torch.nn.init.normal_(tensor, std=0.3)
    return block


@pytest.mark.parametrize("backend", ["torch", "mlx"])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_block_is_its_ops(name: str, backend: str) -> None:
    block = block_of(name)
    x = torch.randn(21, 16, generator=torch.Generator().manual_seed(4))
    logits, shares, chosen = block.gate(x)
    bias = getattr(block.gate, "e_score_correction_bias", None)
    weights, ids = lz.moe_route(logits, bias, top_k=3, **MODELS[name][2], backend=backend)
    by_expert = [torch.zeros(21, 8).scatter(1, i.long(), w.float()) for i, w in ((ids, weights), (chosen, shares))]
    torch.testing.assert_close(*by_expert, rtol=1e-5, atol=1e-6)  # Transformers does not sort them
    experts = block.experts
    found = lz.moe_mlp(x, experts.gate_up_proj, experts.down_proj, ids, weights, backend=backend)
    torch.testing.assert_close(found, experts(x, chosen, shares), rtol=1e-5, atol=1e-5)
    if name in ("mixtral", "qwen3_moe"):  # which have nothing beside their experts
        whole: Tensor = block(x.view(3, 7, 16))
        torch.testing.assert_close(found.view(3, 7, 16), whole, rtol=1e-5, atol=1e-5)
