"""Models of Diffusers by LayerZero, against their native attention: what is served, what is handed over."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry, dispatch_attention_fn
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0, SlicedAttnProcessor
from tests.diffusion_models.models import BUILD, LARGEST_ERROR, LAYERS, build, error, fed
from torch import Tensor

import layerzero as lz
import layerzero.diffusers as lzd
from layerzero.diffusers.attention import dispatched, sdpa


def served(name: str) -> Any:
    """A model by LayerZero: each asks in one of the two ways."""
    model = lzd.set_processors(build(name))
    model.set_attention_backend("layerzero")
    return model


def native(name: str) -> Any:
    """The same model by Diffusers alone, also where another was given our backend, which changes the default of all."""
    model = build(name)
    model.set_attention_backend("native")
    return model


@torch.no_grad()
def run(model: Any, given: dict[str, Any]) -> Tensor:
    return model(**given).sample


def outcomes() -> set[str]:
    return {row.outcome for row in lzd.report().rows}


# --- models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUILD)
def test_output_is_that_of_native_attention(name: str) -> None:
    """Every layer's attention is served."""
    expected = run(native(name), fed(name))
    found = run(served(name), fed(name))
    assert error(found, expected) <= LARGEST_ERROR
    assert (lzd.report().served, lzd.report().handed_over) == (LAYERS[name], 0), lzd.report()


@pytest.mark.parametrize("name", BUILD)
def test_attention_matters(name: str) -> None:
    """Or the test above would show nothing: where each layer's attention is 0, the output is another."""
    expected = run(native(name), fed(name))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", lambda query, *_, **__: torch.zeros_like(query))
        assert error(run(native(name), fed(name)), expected) > 1e-3


@pytest.mark.parametrize("name", ["flux", "unet", "sd3"])
def test_model_compiles_whole(name: str) -> None:
    """With each layer's attention as one op in the graph."""
    counted = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        counted.append(sum("layerzero.attention" in str(node.target) for node in graph.graph.nodes))
        return graph

    compiled = torch.compile(served(name), fullgraph=True, backend=backend)
    assert error(run(compiled, fed(name)), run(native(name), fed(name))) <= LARGEST_ERROR
    assert counted == [LAYERS[name]]


@pytest.mark.parametrize("name", ["flux", "unet"])
def test_gradients_are_those_of_native_attention(name: str) -> None:
    """By torch.ops.layerzero."""
    grads = []
    for make in (served, native):
        model = make(name)
        model(**fed(name)).sample.square().mean().backward()
        grads.append({key: parameter.grad for key, parameter in model.named_parameters()})
    found, expected = grads
    for key, grad in expected.items():
        assert (found[key] is None) == (grad is None)
        if grad is not None:
            torch.testing.assert_close(found[key], grad, rtol=1e-3, atol=1e-4 * max(1.0, float(grad.abs().max())))
    assert outcomes() == {"served"}


def test_unets_masks_are_kept() -> None:
    """What a mask hides makes no difference, and what it shows does."""
    given = fed("unet")
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    other = {**given, "encoder_hidden_states": given["encoder_hidden_states"].clone()}
    other["encoder_hidden_states"][0, 3:] = 7.0
    model = served("unet")
    found = run(model, {**given, "encoder_attention_mask": mask})
    assert error(found, run(native("unet"), {**given, "encoder_attention_mask": mask})) <= LARGEST_ERROR
    torch.testing.assert_close(run(model, {**other, "encoder_attention_mask": mask}), found)
    assert error(run(model, other), run(model, given)) > 1e-3
    assert outcomes() == {"served"}


# --- the backend ---------------------------------------------------------------------------------------------------


def qkv(heads: int = 4, kv_heads: int = 4, seq: int = 6, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((2, seq, heads, 8), (2, 7, kv_heads, 8), (2, 7, kv_heads, 8))
    return tuple(torch.randn(shape, generator=generator).to(**options) for shape in shapes)  # type: ignore[return-value]


def by(backend: str, *tensors: Tensor, **given: Any) -> Tensor:
    return dispatch_attention_fn(*tensors, backend=AttentionBackendName(backend), **given)


SEEN = torch.rand(2, 1, 6, 7, generator=torch.Generator().manual_seed(4)) > 0.4
SEEN[..., 0] = True


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"attn_mask": SEEN},
        {"attn_mask": SEEN[:, 0, 0]},  # (B, Sk), which Diffusers alone has
        {"attn_mask": SEEN[0, 0]},
        {"attn_mask": torch.randn(2, 4, 6, 7)},
        {"is_causal": True},
        {"scale": 0.5},
    ],
    ids=["plain", "bool", "of keys", "of both", "float", "causal", "scale"],
)
def test_what_is_served_is_what_native_gives(given: dict[str, Any]) -> None:
    """Each argument counts."""
    found, expected = by("layerzero", *qkv(), **given), by("native", *qkv(), **given)
    torch.testing.assert_close(found, expected)
    if given:
        assert not torch.allclose(expected, by("native", *qkv()))
    assert outcomes() == {"served"}


def test_grouped_heads() -> None:
    """Where they are asked for."""
    found, expected = (by(name, *qkv(4, 2), enable_gqa=True) for name in ("layerzero", "native"))
    torch.testing.assert_close(found, expected)
    assert outcomes() == {"served"}


@pytest.mark.parametrize(
    ("tensors", "given", "reason"),
    [
        (qkv(), {"dropout_p": 0.5}, "dropout"),
        (qkv(), {"attention_kwargs": {"window_size": 3}}, "argument window_size"),
        (qkv(), {"is_causal": True, "attn_mask": SEEN}, "mask and is_causal"),
        (qkv(), {"attn_mask": SEEN.double()}, "dtype of mask"),
        (qkv(dtype=torch.float8_e4m3fn), {}, "dtypes"),
        (qkv(device="meta"), {}, "device meta"),
        ((qkv()[0], *(tensor[:1] for tensor in qkv()[1:])), {}, "shapes"),
        (qkv(4, 2), {}, "shapes"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_what_no_kernel_has_is_handed_over(tensors: Any, given: dict[str, Any], reason: str) -> None:
    """The outcome is native attention's, also where that refuses."""
    torch.manual_seed(5)
    expected: Any
    try:
        expected = by("native", *tensors, **given)
    except Exception as error:
        expected = error
    torch.manual_seed(5)
    if isinstance(expected, Exception):
        with pytest.raises(type(expected)) as raised:
            by("layerzero", *tensors, **given)
        assert str(raised.value) == str(expected)
    else:
        found = by("layerzero", *tensors, **given)
        assert found.device.type == "meta" or torch.equal(found, expected)
    assert outcomes() == {f"handed to native: {reason}"}


def test_checks_of_the_dispatcher_warn_as_of_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """DIFFUSERS_ATTN_CHECKS=1 names what native attention does not take, and no more."""
    warnings: list[str] = []
    monkeypatch.setattr(_AttentionBackendRegistry, "_checks_enabled", True)
    monkeypatch.setattr(attention_dispatch.logger, "warning", warnings.append)
    by("layerzero", *qkv())
    assert warnings == []
    by("layerzero", *qkv(), attention_kwargs={"window_size": 3})
    by("native", *qkv(), attention_kwargs={"window_size": 3})
    assert [warning.partition("{")[2] for warning in warnings] == ["'window_size'}."] * 2
    assert outcomes() == {"served", "handed to native: argument window_size"}


def test_log_sum_exp_is_refused_as_native_refuses_it() -> None:
    """It is not ignored."""
    with pytest.raises(ValueError, match="return_lse"):
        dispatched(*qkv(), return_lse=True)
    assert outcomes() == {"handed to native: return_lse"}


def test_calls_that_no_backend_serves_are_handed_over(caplog: pytest.LogCaptureFixture) -> None:
    """By both ways, and said once."""
    with lz.avoid("torch", "zentorch", "mlx"):
        found = by("layerzero", *qkv())
        q, k, v = (tensor.transpose(1, 2) for tensor in qkv())
        other = sdpa(torch.nn.Identity(), q, k, v)
    assert torch.equal(found, by("native", *qkv()))
    assert torch.equal(other.transpose(1, 2), found)
    assert outcomes() == {"handed to native: error NO_BACKEND", "handed to SDPA: error NO_BACKEND"}
    assert [record.message.startswith("attention is computed by Diffusers:") for record in caplog.records] == [True]


def test_the_name_can_be_taken_back() -> None:
    """Models that have it go on; everything that Diffusers had is as it was."""
    ours, given = served("flux"), fed("flux")
    expected = run(native("flux"), given)
    lzd.unregister()
    lzd.unregister()
    assert "LAYERZERO" not in AttentionBackendName.__members__
    assert not hasattr(AttentionBackendName, "LAYERZERO")
    assert _AttentionBackendRegistry.get_active_backend()[0] is AttentionBackendName.NATIVE
    with pytest.raises(ValueError, match="must be one of"):
        build("flux").set_attention_backend("layerzero")
    assert torch.equal(run(ours, given), expected)
    assert lzd.report().rows == ()
    lzd.register()
    assert error(run(ours, given), expected) <= LARGEST_ERROR
    assert lzd.report().served == LAYERS["flux"]


def test_as_the_default_of_a_block() -> None:
    """Diffusers' own context manager takes the name, and a model may be copied."""
    given, model = fed("flux"), copy.deepcopy(build("flux"))
    with attention_dispatch.attention_backend("layerzero"):
        run(model, given)
    run(model, given)
    assert lzd.report().served == LAYERS["flux"]


@pytest.mark.parametrize(
    ("given", "node"),
    [({}, "layerzero.attention"), ({"window_size": None}, "layerzero.attention"), ({"window_size": 3}, "scaled_dot")],
)
def test_dispatcher_compiles_whole(given: dict[str, Any], node: str) -> None:
    """What is handed over is so in the graph, too."""
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(str(graph.graph))
        return graph

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return by("layerzero", q, k, v, attention_kwargs=given)

    compiled = torch.compile(call, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(*qkv()), by("native", *qkv()))
    assert [node in graph for graph in graphs] == [True]


# --- processors ----------------------------------------------------------------------------------------------------


def test_processors_of_diffusers_are_set_by_hand() -> None:
    """By the model's own methods."""
    model, ours = native("unet"), lzd.processor(AttnProcessor2_0)
    expected = run(model, fed("unet"))
    assert ours.__name__ == "LayerZeroAttnProcessor2_0"
    assert issubclass(ours, AttnProcessor2_0)  # pipelines ask
    model.set_attn_processor(ours())
    assert error(run(model, fed("unet")), expected) <= LARGEST_ERROR
    assert {(row.layer, row.what, row.outcome) for row in lzd.report().rows} == {("Attention", "attention", "served")}


def test_processors_are_there_and_back() -> None:
    """The same objects; those that call no SDPA, and those that ask the dispatcher, are left alone."""
    model = build("unet")
    first = next(module for module in model.modules() if hasattr(module, "set_processor"))
    first.set_processor(AttnProcessor())
    before = {key: (one, type(one)) for key, one in model.attn_processors.items()}
    assert lzd.set_processors(lzd.set_processors(model)) is model
    run(model, fed("unet"))
    assert lzd.report().served == LAYERS["unet"] - 1
    lzd.unset_processors(model)
    assert {key: (one, type(one)) for key, one in model.attn_processors.items()} == before
    flux = build("flux")
    kinds = [type(one) for one in flux.attn_processors.values()]
    assert [type(one) for one in lzd.set_processors(flux).attn_processors.values()] == kinds


@pytest.mark.parametrize("cls", [AttnProcessor, SlicedAttnProcessor, int, lzd.processor(AttnProcessor2_0)])
def test_classes_that_call_no_sdpa_are_refused(cls: Any) -> None:
    """Rather than be as they are under another name."""
    with pytest.raises(lz.InvalidArgument, match=cls.__name__):
        lzd.processor(cls)


@pytest.mark.parametrize(
    ("given", "reason"), [({"dropout_p": 0.5}, "dropout"), ({"attn_mask": SEEN.double()}, "dtype of mask")]
)
def test_processors_hand_over_to_sdpa(given: dict[str, Any], reason: str) -> None:
    """The outcome is torch's."""
    q, k, v = (tensor.transpose(1, 2) for tensor in qkv())
    results = []
    for call in (F.scaled_dot_product_attention, lambda *args, **kwargs: sdpa("a layer", *args, **kwargs)):
        torch.manual_seed(5)
        try:
            results.append(call(q, k, v, **given))
        except RuntimeError as error:
            results.append(str(error))
    expected, found = results
    assert found == expected if isinstance(expected, str) else torch.equal(found, expected)
    assert outcomes() == {f"handed to SDPA: {reason}"}


# --- sessions, deaths ----------------------------------------------------------------------------------------------


PROGRAM = """
import layerzero.diffusers as lzd
from tests.diffusion_models.test_models import fed, run, served
run(served("flux"), fed("flux"))
run(served("vae"), fed("vae"))
print(sorted((row.outcome, row.calls) for row in lzd.report().rows))
"""


def test_program_that_lays_us_aside() -> None:
    """LAYERZERO_DISABLE takes it out."""
    command, environ = [sys.executable, "-c", PROGRAM], {**os.environ, "LAYERZERO_DISABLE": "1"}
    ran = subprocess.run(command, check=False, capture_output=True, text=True, env=environ)
    printed = "[('handed to SDPA: LAYERZERO_DISABLE', 2), ('handed to native: LAYERZERO_DISABLE', 2)]"
    assert ran.stdout.strip() == printed, ran.stderr[-2000:]


def test_the_first_call_connects() -> None:
    """Where nobody has, or no longer."""
    expected = by("native", *qkv())
    lz.disconnect()
    torch.testing.assert_close(by("layerzero", *qkv()), expected)
    assert lz.last_report().op == "attention"
    assert outcomes() == {"served"}


def test_worker_that_dies_in_the_middle_changes_no_picture() -> None:
    """The next kernel serves the call; the report says what was tried."""
    ours, given = served("flux"), fed("flux")
    expected = run(native("flux"), given)
    run(ours, given)
    killed, reports = [], []

    def kill(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Between the first layer and the second."""
        if not killed:
            killed.append(lz.last_report().worker_pid)
            os.kill(killed[0], signal.SIGKILL)

    handle = ours.single_transformer_blocks[0].register_forward_pre_hook(kill, with_kwargs=True)
    for _ in range(3):
        assert error(run(ours, given), expected) <= LARGEST_ERROR
        reports.append(lz.last_report())
    handle.remove()
    assert killed
    assert all(report.op == "attention" and report.worker_pid != killed[0] for report in reports)
    assert outcomes() == {"served"}
    assert lzd.report().served == 4 * LAYERS["flux"]
