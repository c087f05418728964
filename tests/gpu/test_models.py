"""Models of torch and Transformers on a real GPU: one line has LayerZero serve them, and their results stay theirs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from tests.gpu.gpu_site import gpu_site
from tests.process.harness import Site, wait_until

import layerzero as lz

pytest.importorskip("torch")
from tests.gpu.test_calls import F, randn, report, torch

lzt = pytest.importorskip("layerzero.torch")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One backend, whose calls are lifted when they repeat: silu, gelu, layer_norm, matmul, attention, gradients."""
    site = gpu_site(tmp_path_factory.mktemp("store"), "one", isolation="lifted")
    try:
        yield site.start()
    finally:
        site.stop()


@pytest.fixture
def connected(broker: Site) -> Iterator[Site]:
    broker.connect()
    yield broker
    lz.disconnect()


class Block(torch.nn.Module):
    """Attention of four heads, and a gated activation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(256)
        self.qkv, self.up, self.down = torch.nn.Linear(256, 768), torch.nn.Linear(256, 512), torch.nn.Linear(512, 256)

    def forward(self, x: Any) -> Any:
        q, k, v = (part.unflatten(-1, (4, 64)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.down(F.silu(self.up(x)))


@pytest.fixture
def block() -> Any:
    torch.manual_seed(0)
    return Block().to("cuda", torch.float16)


def test_accelerate_serves_a_model(connected: Site, block: Any) -> None:
    """First by a worker, then lifted."""
    x = torch.randn(2, 96, 256, device="cuda", dtype=torch.float16)
    with torch.no_grad():
        wanted = block(x)
        accelerated = lzt.accelerate(block, ops=["attention", "silu"])

        def is_lifted() -> bool:
            torch.testing.assert_close(block(x), wanted, rtol=5e-3, atol=5e-3)
            return (report().kernel_id, report().path) == ("one.silu", "lifted")

        wait_until(is_lifted)
        said = str(lzt.report(block))
        accelerated.remove()
    assert "one.attention" in said, said
    assert "one.silu" in said, said


@pytest.mark.parametrize("needs_grad", [False, True])
def test_if_faster_is_found_out_by_the_gpus_clock(connected: Site, block: Any, needs_grad: bool) -> None:
    """By whole calls, or steps of training. Results are torch's in each; what was slower is not looked at any more."""
    x = torch.randn(2, 96, 256, device="cuda", dtype=torch.float16)
    with torch.set_grad_enabled(needs_grad):
        wanted = block(x).detach()
        with lzt.accelerate(block, ops=["attention", "silu"], if_faster=True) as accelerated:

            def step() -> None:
                found = block(x)
                torch.testing.assert_close(found.detach(), wanted, rtol=5e-3, atol=5e-3)
                if needs_grad:
                    block.zero_grad()
                    found.float().sum().backward()

            def is_settled() -> bool:
                step()
                return bool(accelerated.report.comparisons)

            wait_until(is_settled)
            (found,) = accelerated.report.comparisons
            assert found.is_step is needs_grad
            assert found.alone_us > 0
            assert {"attention", "silu"} <= found.with_us.keys()
            step()
            assert set(accelerated.report.resting) == {"attention", "silu"} - set(found.chosen)


def test_a_graph_is_captured_before_anything_is_timed(connected: Site, block: Any) -> None:
    """Events in a graph have no times: such a call takes over what it has then."""
    x = torch.randn(2, 96, 256, device="cuda", dtype=torch.float16)
    with torch.no_grad(), lzt.accelerate(block, ops=["silu"]):

        def is_lifted() -> bool:
            block(x)
            return (report().kernel_id, report().path) == ("one.silu", "lifted")

        wait_until(is_lifted)
    with torch.no_grad(), lzt.accelerate(block, ops=["silu"], if_faster=True) as timed:
        for _ in range(3):
            wanted = block(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = block(x)
        assert not timed.report.comparisons
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(y, wanted, rtol=5e-3, atol=5e-3)


def test_what_a_backend_lacks_is_left_to_torch_with_the_reason(connected: Site, block: Any) -> None:
    x = torch.randn(2, 96, 256, device="cuda", dtype=torch.float16)
    with torch.no_grad():
        wanted = block(x)
        accelerated = lzt.accelerate(block)
        torch.testing.assert_close(block(x), wanted, rtol=5e-3, atol=5e-3)
        said = str(lzt.report(block))
        accelerated.remove()
    assert "NO_BACKEND: linear" in said, said


def test_gradients_of_an_accelerated_model_are_torchs(connected: Site, block: Any) -> None:
    x = torch.randn(2, 96, 256, device="cuda", dtype=torch.float16)

    def gradients() -> list[Any]:
        block.zero_grad()
        block(x).float().square().mean().backward()
        return [weight.grad.clone() for weight in block.parameters() if weight.grad is not None]

    wanted = gradients()
    accelerated = lzt.accelerate(block)
    for _ in range(40):  # by workers first, then lifted
        found = gradients()
        assert len(found) == len(wanted) > 4
        for mine, torchs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, torchs, rtol=2e-2, atol=2e-3)
    said = str(lzt.report(block))
    accelerated.remove()
    assert "one.attention_forward" in said, said
    assert "attention_backward" in said, said


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_attentions_gradients_are_kernels_too(connected: Site, dtype: str) -> None:
    """Both passes, beside torch's own; the worker may die in between."""
    made = [randn(2, 4, 96, 64, dtype=getattr(torch, dtype)).requires_grad_() for _ in "qkv"]
    torchs = F.scaled_dot_product_attention(*made, is_causal=True)
    grad = torch.randn_like(torchs)
    wanted = torch.autograd.grad(torchs, made, grad)
    for round_ in range(4):
        out = torch.ops.layerzero.attention(*made, is_causal=True)
        assert report().kernel_id == "one.attention_forward"
        if round_ == 3 and (pid := connected.backend("one")["pid"]):
            os.kill(pid, signal.SIGKILL)
        found = torch.autograd.grad(out, made, grad)  # on a thread of torch's
        tolerance = 2e-2 if dtype == "float16" else 1e-4
        for mine, its in zip((out, *found), (torchs, *wanted), strict=True):
            torch.testing.assert_close(mine, its, rtol=tolerance, atol=tolerance)
    q, k, v = (one.detach() for one in made)
    out, lse = lz.attention_forward(q, k, v, is_causal=True)
    lz.attention_backward(grad, q, k, v, out, lse, is_causal=True)
    assert report().kernel_id == "one.attention_backward"


def test_norms_gradients_are_kernels_too(connected: Site) -> None:
    """By a worker, then lifted; the worker may die in between."""
    x = randn(64, 256).half().requires_grad_()
    torchs = F.layer_norm(x, (256,))
    grad = torch.randn_like(torchs)
    (wanted,) = torch.autograd.grad(torchs, x, grad)
    for round_ in range(40):
        out = torch.ops.layerzero.layer_norm(x, [256])
        assert report().kernel_id == "one.layer_norm"
        if round_ == 3 and (pid := connected.backend("one")["pid"]):
            os.kill(pid, signal.SIGKILL)
        (found,) = torch.autograd.grad(out, x, grad)  # on a thread of torch's
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)
    _, by_weight, by_bias = torch.ops.layerzero.layer_norm_backward(grad, x.detach(), [256])
    assert report().kernel_id == "one.layer_norm_backward"
    for kept in (by_weight, by_bias):  # as gradients of parameters are, without that of x
        assert kept.untyped_storage().nbytes() < x.numel()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # Inductor's own, of 2.11
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # the one that it begins its pool with
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_models_call_it_from_their_graphs(connected: Site, mode: str) -> None:
    """Inductor's CUDA graphs hold calls as their own nodes, or as replays of graph slots."""
    weight = torch.randn(256, 256, device="cuda", dtype=torch.float16) / 16

    def function(x: Any) -> Any:
        return torch.ops.layerzero.silu(x @ weight) @ weight

    compiled = torch.compile(function, fullgraph=True, mode=mode)
    with torch.no_grad():
        for seed in range(8):
            x = torch.full((64, 256), 0.1 * seed, device="cuda", dtype=torch.float16)
            torch.testing.assert_close(compiled(x).clone(), F.silu(x @ weight) @ weight, rtol=5e-3, atol=5e-3)
        lz.synchronize()


def test_transformers_generates_the_same(connected: Site) -> None:
    pytest.importorskip("transformers")
    models = pytest.importorskip("layerzero.transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=512,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).to("cuda").eval()
    ids = torch.randint(1, 512, (2, 24), device="cuda")
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    made, logits = {}, {}
    for name in ("eager", "layerzero"):
        model.set_attn_implementation(name)
        made[name] = model.generate(ids, **options)
        with torch.no_grad():
            logits[name] = model(ids).logits
    largest = logits["eager"].abs().max()
    assert (logits["layerzero"] - logits["eager"]).abs().max() <= 2e-5 * largest
    assert torch.equal(made["layerzero"], made["eager"])
    assert {row.outcome for row in models.report().rows} == {"served"}
