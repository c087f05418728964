"""Layers and experts by LayerZero: what Transformers marks as replaceable."""

from __future__ import annotations

from typing import Any

import kernels
import pytest
import torch
from tests.transformer_models import comparing
from tests.transformer_models.architectures import ARCHITECTURES, Architecture
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

import layerzero as lz
import layerzero.transformers as lzt
from layerzero.transformers.kernelizing import has_rotary, mark_of
from layerzero.transformers.layers import LAYERS

BY_NAME = {one.name: one for one in ARCHITECTURES}
LEFT = comparing.padded("left")


def model(name: str, implementation: str = "eager", **only: Any) -> PreTrainedModel:
    known = BY_NAME[name]
    return Architecture(known.name, known.model, known.kind, {**known.only, **only}).build(implementation)


def what() -> dict[str, int]:
    assert lzt.report().handed_over == 0, str(lzt.report())
    found: dict[str, int] = {}
    for row in lzt.report().rows:
        found[row.what] = found.get(row.what, 0) + row.calls
    return found


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "qwen3", "modernbert", "olmo2"])
def test_kernelize_replaces_marked_layers(name: str) -> None:
    """The logits are those of the model as it was; unkernelize brings its layers back."""
    ours, eager = lzt.kernelize(model(name)), model(name)
    found, expected = comparing.logits(ours, LEFT), comparing.logits(eager, LEFT)
    assert comparing.error(found, expected, LEFT["attention_mask"]) <= comparing.LARGEST_ERROR
    served = what()
    assert served["rotary"] == 2  # queries and keys together, of two layers
    assert name == "modernbert" or served["RMSNorm"] >= 5
    lzt.clear()
    comparing.logits(lzt.unkernelize(ours), LEFT)
    assert what() == {}


@pytest.mark.parametrize("heads", [1, 2])
def test_queries_and_keys_are_rotated_by_one_call(heads: int) -> None:
    """With the results of rope of each; and by two calls where their batches differ, or a policy leaves rope alone."""
    rotary = lzt.Repository("rotary_pos_emb").load()()
    generator = torch.Generator().manual_seed(5)
    q, k = (torch.randn(2, 5, each, 8, generator=generator) for each in (4, 2))
    angles = torch.randn(1, 5, 4, generator=generator)
    tables = [torch.cat((table, table), -1) for table in (angles.cos(), angles.sin())]

    def turned(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2) if heads == 1 else x

    def check(q: torch.Tensor, k: torch.Tensor, op: str, calls: int) -> None:
        lzt.clear()
        found = rotary(turned(q), turned(k), *tables, unsqueeze_dim=heads)
        assert lz.last_report().op == op
        assert what() == {"rotary": calls}
        for one, x in zip(found, (q, k), strict=True):
            assert torch.equal(turned(one), lz.rope(x, *(table[..., :4] for table in tables)))

    check(q, k, "rope_qk", 1)
    check(q, k[:1], "rope", 2)
    with lz.avoid("*.rope_qk"):
        check(q, k, "rope", 2)


def test_a_rotated_layer_compiles() -> None:
    """It finds our rotary embedding by a name that torch.compile would look up in the model's file."""
    ours, eager = lzt.kernelize(model("llama"), ["rotary_pos_emb"]), model("llama")
    x = torch.randn(2, 5, 32)
    tables = eager.model.rotary_emb(x, torch.arange(5)[None])
    layers = [one.model.layers[0].self_attn for one in (ours, eager)]
    compiled = torch.compile(layers[0], fullgraph=True, backend="eager")
    with torch.no_grad():
        found, expected = (layer(x, tables, None)[0] for layer in (compiled, layers[1]))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert lz.last_report().op == "rope_qk"


def test_kernelize_leaves_out_what_is_not_named() -> None:
    """And rotary embeddings that pair neighbours, which ours does not."""
    comparing.logits(lzt.kernelize(model("llama"), ["RMSNorm"]), LEFT)
    assert what() == {"RMSNorm": 5}
    assert not has_rotary(type(model("cohere").model.layers[0].self_attn))
    with pytest.raises(lz.InvalidArgument, match=r"^name some of .* there is no layer RmsNorm"):
        lzt.kernelize(model("llama"), ["RmsNorm"])


@pytest.mark.parametrize("name", ["gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "silu"])
def test_activations(name: str) -> None:
    """Those that Transformers marks."""
    x = torch.randn(3, 5)
    module = ACT2FN[name]
    expected = module(x)
    assert mark_of(type(module)) in LAYERS
    found = lzt.kernelize(nn.Sequential(module))(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert sum(what().values()) == 1


def test_kernelized_layers_have_gradients() -> None:
    """Of weights and of what came before."""
    grads = []
    for change in (lzt.kernelize, lambda one: one):
        one = change(model("llama"))
        (one(**LEFT).logits.square() * LEFT["attention_mask"][..., None]).mean().backward()
        grads.append([parameter.grad for parameter in one.parameters()])
        assert lz.last_report().op == "rms_norm_backward"  # of the first layer's; the other model makes no calls
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * max(1.0, float(expected.abs().max())))


def test_half_precision_weights_of_another_dtype_are_handed_over() -> None:
    """RMSNorm with float32 weights gives float32 there, and here."""
    norm = model("llama").model.norm
    x = torch.randn(2, 32, dtype=torch.bfloat16)
    expected = norm(x)
    assert torch.equal(lzt.kernelize(nn.Sequential(norm))(x), expected)
    assert [row.outcome for row in lzt.report().rows] == ["handed to torch: dtypes"]


def test_repositories_are_what_hf_kernels_take() -> None:
    """Its kernelize validates them and puts them in. Transformers marks nothing for the version that can be had, so
    the layers here are marked as it would mark them."""

    @kernels.use_kernel_forward_from_hub("RMSNorm")
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16))
            self.variance_epsilon = 1e-6

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            variance = hidden_states.pow(2).mean(-1, keepdim=True)
            return self.weight * hidden_states * torch.rsqrt(variance + self.variance_epsilon)

    @kernels.use_kernel_forward_from_hub("SiLU")
    class Act(nn.Module):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return nn.functional.silu(input)

    layers = nn.Sequential(Norm(), Act())
    x = torch.randn(3, 16)
    expected = layers(x)
    for mode in (kernels.Mode.INFERENCE, kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE):
        lzt.clear()
        with kernels.use_kernel_mapping(lzt.kernel_mapping()):
            kernels.kernelize(layers, mode=mode, device="cpu", use_fallback=False)
        torch.testing.assert_close(layers(x), expected)
        assert what() == {"RMSNorm": 1, "SiLU": 1}
    assert lzt.Repository("SiLU") == lzt.Repository("SiLU") != lzt.Repository("GeLU")


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "olmoe", "gpt_oss", "deepseek_v3"])
def test_experts(name: str) -> None:
    """Also with biases and transposed weights (gpt_oss), and tokens that no expert has."""
    ours, eager = model(name), model(name)
    ours.set_experts_implementation("layerzero")
    eager.set_experts_implementation("eager")
    found, expected = comparing.logits(ours, LEFT), comparing.logits(eager, LEFT)
    assert comparing.error(found, expected, LEFT["attention_mask"]) <= comparing.LARGEST_ERROR
    served = what()
    assert set(served) == {"experts"}
    assert lz.last_report().op == "grouped_linear"  # of all experts
    lz.share(ours)  # then no weights are picked
    assert torch.equal(comparing.logits(ours, LEFT), found)
    assert (
        comparing.tokens(ours, LEFT, **comparing.GREEDY).tolist()
        == comparing.tokens(eager, LEFT, **comparing.GREEDY).tolist()
    )


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_experts_without_a_kernel_for_groups(name: str) -> None:
    """Each has calls of its own, with the same result; as where few have rows, and in a layer without tokens."""
    block = model(name).model.layers[0].mlp.experts
    block.config._experts_implementation = "layerzero"
    generator = torch.Generator().manual_seed(6)
    x, shares = torch.randn(4, 32, generator=generator), torch.rand(4, 2, generator=generator)
    ids, own = torch.tensor([[0, 2], [2, 3], [0, 3], [3, 0]]), "linear" if name == "mixtral" else "matmul"
    with torch.no_grad():
        for count, op in ((4, "grouped_linear"), (1, own), (0, own)):
            given = (x[:count], ids[:count], shares[:count])
            expected = block(*given)
            assert lz.last_report().op == op
            with lz.avoid("*.grouped_linear"):
                torch.testing.assert_close(block(*given), expected, rtol=1e-5, atol=1e-6)
            assert lz.last_report().op == own
            assert expected.shape == (count, 32)
    assert what() == {"experts": 6}


def test_experts_have_gradients() -> None:
    """Of weights, of inputs and of the router."""
    grads = []
    for implementation in ("layerzero", "eager"):
        one = model("mixtral")
        one.set_experts_implementation(implementation)
        (one(**LEFT).logits.square() * LEFT["attention_mask"][..., None]).mean().backward()
        grads.append([parameter.grad for parameter in one.parameters()])
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * max(1.0, float(expected.abs().max())))
