"""Transformers' attention by LayerZero: what is served, what is handed over, and that nothing is ignored."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import signal
import subprocess
import sys
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.transformer_models import comparing
from tests.transformer_models.architectures import ARCHITECTURES, Architecture
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, ContinuousBatchingConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import layerzero as lz
import layerzero.transformers as lzt
from layerzero.transformers import masks, modeling
from layerzero.transformers.attention import attention

BY_NAME = {one.name: one for one in ARCHITECTURES}
LEFT = comparing.padded("left")


def model(name: str, implementation: str = "layerzero", **only: Any) -> PreTrainedModel:
    known = BY_NAME[name]
    return Architecture(known.name, known.model, known.kind, {**known.only, **only}).build(implementation)


def outcomes() -> set[str]:
    return {row.outcome for row in lzt.report().rows}


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6 * max(1.0, float(expected.abs().max())))


# --- masks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_kept(side: str) -> None:
    """What stands where the text is padded makes no difference. Two calls may be served by two kernels, so bits may."""
    ours, batch = model("llama"), comparing.padded(side)
    other = {**batch, "input_ids": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 7)}
    seen = batch["attention_mask"].bool()
    close(comparing.logits(ours, other)[seen], comparing.logits(ours, batch)[seen])


def test_without_a_mask_function_padding_is_dropped_in_silence() -> None:
    """Why there is one: Transformers passes None where a name has none, and warns of nothing."""
    AttentionInterface.register("layerzero_without_masks", attention)
    eager, ours = model("llama", "eager"), model("llama", "layerzero_without_masks")
    found, expected = comparing.logits(ours, LEFT), comparing.logits(eager, LEFT)
    assert comparing.error(found, expected, LEFT["attention_mask"]) > 0.01


def test_sliding_window_is_kept() -> None:
    """By the mask, whose window is shorter than the text."""
    ours, eager = model("mistral", sliding_window=3), model("mistral", "eager", sliding_window=3)
    everything = model("mistral", "eager", sliding_window=None)
    batch = {"input_ids": comparing.ids(2, 12)}
    expected = comparing.logits(eager, batch)
    assert comparing.error(comparing.logits(ours, batch), expected, None) <= comparing.LARGEST_ERROR
    assert comparing.error(comparing.logits(everything, batch), expected, None) > 0.01
    assert outcomes() == {"served"}


def layer(**attributes: Any) -> torch.nn.Module:
    """A layer of Llama, in whose file the ordinary formula is."""
    found = model("llama").model.layers[0].self_attn
    for name, value in attributes.items():
        setattr(found, name, value)
    return found


def qkv(heads: int = 4, kv_heads: int = 2, seq: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((2, heads, seq, 8), (2, kv_heads, seq, 8), (2, kv_heads, seq, 8))
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)  # type: ignore[return-value]


@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_position_bias_is_added(mask: str | None) -> None:
    """Also where is_causal says what may be seen."""
    q, k, v = qkv()
    bias = torch.randn(1, 4, 6, 6)
    seen = torch.rand(2, 1, 6, 6) > 0.3
    seen[..., 0] = True
    given = {None: None, "bool": seen, "float": torch.where(seen, 0.0, torch.finfo(torch.float32).min)}[mask]
    found, weights = attention(layer(), q, k, v, given, position_bias=bias)
    expected, _ = sdpa_attention_forward(layer(), q, k, v, given, position_bias=bias)
    without, _ = attention(layer(), q, k, v, given)
    close(found, expected)
    assert weights is None
    assert (found - without).abs().max() > 0.01
    assert outcomes() == {"served"}


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_soft_cap_and_sinks_are_served(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SDPA of Transformers refuses the one and ignores the other."""
    only = {"attn_logit_softcapping": 0.5} if name == "gemma2" else {}
    ours, eager = model(name, **only), model(name, "eager", **only)
    if name == "gpt_oss":
        for one in (ours, eager):
            for block in one.model.layers:
                torch.nn.init.constant_(block.self_attn.sinks, 2.0)
    found, expected = comparing.logits(ours, LEFT), comparing.logits(eager, LEFT)
    assert comparing.error(found, expected, LEFT["attention_mask"]) <= comparing.LARGEST_ERROR
    assert outcomes() == {"served"}
    monkeypatch.setattr("layerzero.transformers.running.IS_DISABLED", True)
    assert torch.equal(comparing.logits(ours, LEFT), expected)
    assert "handed to the model's own formula: LAYERZERO_DISABLE" in outcomes()


@pytest.mark.parametrize("argument", ["s_aux", "sinks", "softcap", "slope"])
def test_arguments_that_no_kernel_has_are_not_ignored(argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's formula gets them, and may name one that we have not heard of."""
    got = []

    def formula(module: Any, query: Tensor, *args: Any, slope: Any = None, **kwargs: Any) -> tuple[Tensor, None]:
        got.append({"slope": slope, **kwargs}[argument])
        return query.transpose(1, 2), None

    one, value = layer(), torch.zeros(1, 4)
    file = replace(modeling.file_of(one), eager=formula, arguments=frozenset(inspect.signature(formula).parameters))
    monkeypatch.setattr("layerzero.transformers.attention.file_of", lambda module: file)
    attention(one, *qkv(), None, scaling=1.0, **{argument: value})
    assert got == [value]
    assert lzt.report().handed_over == 1


def test_arguments_that_concern_nobody_change_nothing() -> None:
    """Layers pass on whatever the model was called with."""
    attention(layer(), *qkv(), None, position_ids=torch.zeros(1), logits_indices=torch.zeros(1))
    assert outcomes() == {"served"}


def test_sparse_layers_see_what_they_have_selected() -> None:
    """DeepSeek V3.2 makes the mask for SDPA and its own formula only; others get the indices."""
    q, k, v = qkv()
    indices = torch.tensor([0, 2]).expand(2, 6, 2)
    found, _ = attention(layer(), q, k, v, None, scaling=1.0, is_causal=False, indices=indices)
    seen = torch.zeros(2, 1, 6, 6, dtype=torch.bool)
    seen[..., [0, 2]] = True
    close(found, sdpa_attention_forward(layer(), q, k, v, seen, scaling=1.0)[0])


# --- what else is handed over --------------------------------------------------------------------------------------


def test_weights_are_there_where_they_are_asked_for() -> None:
    """SDPA of Transformers gives none."""
    ours, eager = model("bert"), model("bert", "eager")
    found, expected = (one(comparing.ids(), output_attentions=True) for one in (ours, eager))
    for mine, wanted in zip(found.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(mine, wanted)
    assert "handed to the model's own formula: output_attentions" in outcomes()


def test_dropout_in_training_is_handed_over() -> None:
    """Kernels have none. Nothing is dropped in evaluation."""
    ours, sdpa = (model("llama", one, attention_dropout=0.5) for one in ("layerzero", "sdpa"))
    found = []
    for one in (ours, sdpa):
        torch.manual_seed(5)
        found.append(one.train()(comparing.ids()).logits)
    torch.testing.assert_close(*found)
    assert outcomes() == {"handed to SDPA: dropout"}
    lzt.clear()
    comparing.logits(ours.eval(), {"input_ids": comparing.ids()})
    assert outcomes() == {"served"}


def test_calls_that_no_backend_serves_are_handed_over(caplog: pytest.LogCaptureFixture) -> None:
    """And said once."""
    q, k, v = qkv()
    with lz.avoid("torch", "zentorch", "mlx"):
        found, _ = attention(layer(), q, k, v, None)
        attention(layer(), q, k, v, None)
    close(found, sdpa_attention_forward(layer(), q, k, v, None)[0])
    assert outcomes() == {"handed to SDPA: error NO_BACKEND"}
    assert [record.message.startswith("attention is computed by Transformers:") for record in caplog.records] == [True]


# --- gradients, compilation ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "t5", "mixtral"])
def test_gradients_are_those_of_the_models_formula(name: str) -> None:
    """By torch.ops.layerzero, with padding, grouped heads and, of T5, a position bias that learns."""
    grads = []
    for implementation in ("layerzero", "eager"):
        one = model(name, implementation)
        batch = comparing.fed(BY_NAME[name])[1]
        seen = torch.ones(2, 1) if name == "t5" else batch["attention_mask"]  # rows of padding see nothing, or all
        (one(**batch).logits.square() * seen[..., None]).mean().backward()
        grads.append({key: parameter.grad for key, parameter in one.named_parameters()})
    found, expected = grads
    assert found.keys() == expected.keys()
    assert all((grad is None) == (expected[key] is None) for key, grad in found.items())
    for key, grad in expected.items():
        if grad is not None:
            torch.testing.assert_close(found[key], grad, rtol=1e-3, atol=1e-4 * max(1.0, float(grad.abs().max())))
    assert outcomes() == {"served"}


def test_model_compiles_whole() -> None:
    """With each layer's attention as one op in the graph, and without a warning for its caller."""
    ours, eager = model("llama"), model("llama", "eager")
    counted = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        counted.append(sum("layerzero.attention" in str(node.target) for node in graph.graph.nodes))
        return graph

    compiled = torch.compile(ours, fullgraph=True, backend=backend)
    batch = {**LEFT, "use_cache": False}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = comparing.logits(compiled, batch)
    assert [str(one.message) for one in warned if "modeling.py" in str(one.message)] == []
    expected = comparing.logits(eager, batch)
    assert comparing.error(found, expected, LEFT["attention_mask"]) <= comparing.LARGEST_ERROR
    assert counted == [2]


# --- caches --------------------------------------------------------------------------------------------------------


class Stream(contextlib.nullcontext[None]):
    """In the place of a GPU's."""

    def wait_stream(self, other: Any) -> None:
        pass


class Unpacks:
    """In the place of quanto's C++, which it would compile for half a minute."""

    @staticmethod
    def unpack(packed: Tensor, bits: int) -> Tensor:
        return torch.cat([packed >> place & 2**bits - 1 for place in range(0, 8, bits)])


@pytest.mark.parametrize("cache", ["dynamic", "static", "offloaded", "offloaded_static", "quantized"])
def test_every_cache_gives_the_same_tokens(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A static cache is longer than what it has; a quantized one loses the same in both."""
    options: dict[str, Any] = {**comparing.GREEDY, "cache_implementation": cache}
    if cache == "quantized":
        options["cache_config"] = {"backend": "quanto", "nbits": 4}
        monkeypatch.setattr(importlib.import_module("optimum.quanto.library.extensions.cpp").ext, "_lib", Unpacks)
    if "offloaded" in cache:  # from the CPU to the CPU, on a stream that does nothing: the way of the keys is the same
        options["disable_compile"] = True
        monkeypatch.setattr(torch, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "default_stream", Stream)
    ours, eager = model("llama", head_dim=64), model("llama", "eager", head_dim=64)
    found, expected = (comparing.tokens(one, LEFT, **options) for one in (ours, eager))
    assert found.tolist() == expected.tolist()
    assert outcomes() <= {"served"}  # nothing is counted where a static cache is compiled


def test_continuous_batching_runs_on_its_paged_cache() -> None:
    """It takes the names paged|eager, sdpa and flash alone: so in SDPA's place."""
    prompts = [ids.tolist() for ids in (comparing.ids(1, 5, 7)[0], comparing.ids(1, 9, 8)[0])]
    config = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=32, block_size=32)
    answers = []
    for implementation in ("paged|eager", "sdpa"):
        one = model("llama", "eager")
        one.set_attn_implementation(implementation)
        one.generation_config.eos_token_id, one.generation_config.pad_token_id = 98, 0
        one.generation_config.max_new_tokens, one.generation_config.do_sample = 5, False
        with lzt.instead_of_sdpa():
            found = one.generate_batch(prompts, continuous_batching_config=config, warmup=False)
        answers.append(sorted(tuple(answer.generated_tokens) for answer in found.values()))
    assert answers[0] == answers[1]
    assert outcomes() == {"served"}
    assert {row.what for row in lzt.report().rows} == {"attention"}


# --- switches ------------------------------------------------------------------------------------------------------


def test_in_the_place_of_sdpa_until_removed() -> None:
    """Models that are loaded already, too."""
    one = model("llama", "sdpa")
    with lzt.instead_of_sdpa():
        comparing.logits(one, LEFT)
        assert lzt.report().served == 2
    comparing.logits(one, LEFT)
    assert lzt.report().served == 2
    assert AttentionInterface()["sdpa"] is sdpa_attention_forward


def test_models_that_are_loaded_can_change() -> None:
    """There and back."""
    one = model("llama", "eager")
    one.set_attn_implementation("layerzero")
    comparing.logits(one, LEFT)
    one.set_attn_implementation("eager")
    comparing.logits(one, LEFT)
    assert lzt.report().served == 2
    assert AttentionMaskInterface()["layerzero"] is masks.mask


PROGRAM = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import layerzero.transformers as lzt
small = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
model = LlamaForCausalLM._from_config(LlamaConfig(**small), attn_implementation={implementation!r})
model(torch.tensor([[1, 2, 3]]))
print([(row.outcome, row.calls) for row in lzt.report().rows])
"""


@pytest.mark.parametrize(
    ("variable", "implementation", "printed"),
    [
        ("TRANSFORMERS", "sdpa", "[('served', 1)]"),
        ("TRANSFORMERS", "eager", "[]"),
        ("DISABLE", "layerzero", "[('handed to SDPA: LAYERZERO_DISABLE', 1)]"),
    ],
)
def test_variables(variable: str, implementation: str, printed: str) -> None:
    """LAYERZERO_TRANSFORMERS puts ours in SDPA's place, LAYERZERO_DISABLE takes it out. Nobody has connected."""
    environ = {**os.environ, f"LAYERZERO_{variable}": "1"}
    command = [sys.executable, "-c", PROGRAM.format(implementation=implementation)]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, env=environ)
    assert ran.stdout.strip() == printed, ran.stderr[-2000:]


# --- deaths --------------------------------------------------------------------------------------------------------


def test_worker_that_dies_in_the_middle_of_generate_changes_no_token() -> None:
    """The next kernel serves the call; the report says what was tried."""
    ours, eager = model("llama"), model("llama", "eager")
    expected = comparing.tokens(eager, LEFT, max_new_tokens=12, do_sample=False)
    comparing.tokens(ours, LEFT, **comparing.GREEDY)
    victims: list[int] = []
    reports = []

    def kill(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Before the layer's fifth call."""
        reports.append(lz.last_report())
        if len(reports) == 5:
            victims.append(reports[-1].worker_pid)
            os.kill(victims[0], signal.SIGKILL)

    handle = ours.model.layers[0].register_forward_pre_hook(kill, with_kwargs=True)
    found = comparing.tokens(ours, LEFT, max_new_tokens=12, do_sample=False)
    handle.remove()
    assert found.tolist() == expected.tolist()
    assert len(reports) == 12
    assert victims
    assert all(report.op == "attention" for report in reports)
    assert victims[0] not in {report.worker_pid for report in reports[6:]}
    assert outcomes() == {"served"}
