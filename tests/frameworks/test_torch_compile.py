"""Programs that torch traces: torch.compile, torch.export and AOT see ops of ours as single ones, also where a program
calls lz.silu and not torch.ops.layerzero.silu."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from tests.frameworks.torch_cases import random

import layerzero as lz
import layerzero.torch as lzt

ops = torch.ops.layerzero
pytestmark = [  # of torch's own code
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.* is deprecated:FutureWarning"),
]
COMPILER = shutil.which("g++") or shutil.which("clang++")
INDUCTOR = pytest.param("inductor", marks=pytest.mark.skipif(not COMPILER, reason="inductor needs a C++ compiler"))


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is taken from an earlier run's cache, whose ops may have had other schemas."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Block(torch.nn.Module):
    """A layer of a decoder, of nine ops."""

    def __init__(self, f: Any, width: int = 16) -> None:
        super().__init__()
        self.f = f
        for n, name in enumerate(("query", "key", "value", "gate", "up", "down")):
            self.register_parameter(name, torch.nn.Parameter(random(width, width, seed=n) / 4))
        self.scale = torch.nn.Parameter(1.0 + random(width, seed=9) / 8)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        f = self.f
        n = f.rms_norm(x, (x.shape[-1],), self.scale)
        heads = [f.linear(n, w).unflatten(-1, (2, -1)) for w in (self.query, self.key, self.value)]
        q, k = (f.rope(h, cos, sin) for h in heads[:2])
        y = f.attention(q.transpose(1, 2), k.transpose(1, 2), heads[2].transpose(1, 2), is_causal=True)
        x = x + y.transpose(1, 2).flatten(-2)
        n = f.layer_norm(x, x.shape[-1], eps=1e-4)
        x = x + f.linear(f.swiglu(f.linear(n, self.gate), f.linear(n, self.up)), self.down)
        return f.softmax(f.gelu(x, "tanh") + f.silu(x), -1)


class Native:
    """The same functions in torch."""

    rms_norm, linear, attention = F.rms_norm, F.linear, staticmethod(F.scaled_dot_product_attention)
    rms_norm, linear, silu, softmax = map(staticmethod, (F.rms_norm, F.linear, F.silu, F.softmax))

    @staticmethod
    def layer_norm(x: torch.Tensor, width: int, eps: float) -> torch.Tensor:
        return F.layer_norm(x, (width,), eps=eps)

    @staticmethod
    def gelu(x: torch.Tensor, approximate: str) -> torch.Tensor:
        return F.gelu(x, approximate=approximate)

    @staticmethod
    def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(gate) * up

    @staticmethod
    def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        (a, b), (c, s) = x.chunk(2, -1), (cos.unsqueeze(1), sin.unsqueeze(1))
        return torch.cat((a * c - b * s, b * c + a * s), -1)


def inputs(batch: int = 2, length: int = 5) -> tuple[torch.Tensor, ...]:
    angles = torch.arange(length).unsqueeze(-1) * torch.tensor([1.0, 0.5, 0.25, 0.125])
    return random(batch, length, 16, seed=batch + length), angles.cos(), angles.sin()


@pytest.mark.parametrize(
    ("backend", "dynamic"),
    [("aot_eager", False), ("aot_eager", True), pytest.param(*INDUCTOR.values, True, marks=INDUCTOR.marks)],
)
def test_compiled_block_is_torchs(backend: str, dynamic: bool) -> None:
    """fullgraph: nothing is left to Python; one compilation for all sizes when dynamic; gradients of every weight."""
    block, native = Block(lz), Block(Native)
    graphs = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic, backend=graphs)
    counts = []
    for length in (5, 6, 9) if dynamic else (5,):
        given = inputs(length=length)
        found, expected = compiled(*given), native(*given)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        grads = [
            torch.autograd.grad(y[..., 0].sum(), tuple(m.parameters())) for y, m in ((found, block), (expected, native))
        ]
        for one, other in zip(*grads, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        counts.append(graphs.frame_count)
    assert len(set(counts)) == 1  # what the first length was compiled to serves the others
    nodes = [node for graph in graphs.graphs for node in graph.graph.nodes]
    assert sum(str(node.target).startswith("layerzero.") for node in nodes if node.op == "call_function") == 15


def test_compiled_under_autocast_and_no_grad() -> None:
    block, native = Block(lzt_like()), Block(Native)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = compiled(*inputs()), native(*inputs())
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05)
    found.float().sum().backward()
    assert block.down.grad is not None
    with torch.inference_mode():
        torch.testing.assert_close(compiled(*inputs()), native(*inputs()), rtol=1e-5, atol=1e-5)


def lzt_like() -> Any:
    """The functions of layerzero.torch, with attention by its other name."""

    class Functions:
        rms_norm, linear, rope, layer_norm = map(staticmethod, (lzt.rms_norm, lzt.linear, lzt.rope, lzt.layer_norm))
        swiglu, softmax, gelu, silu = map(staticmethod, (lzt.swiglu, lzt.softmax, lzt.gelu, lzt.silu))
        attention = staticmethod(lzt.scaled_dot_product_attention)

    return Functions


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
def test_compiled_code_may_write_in_place(backend: str) -> None:
    """append_kv changes its caches, out= its out, and nothing else does."""

    def step(key: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lz.append_kv(key, key, cache[0], cache[1], slots)
        out = torch.empty_like(key)
        lz.silu(key, out=out)
        return cache.sum((1, 2, 3, 4)), out + 1.0

    key, slots = random(3, 2, 4), torch.tensor([5, -1, 2])
    caches = [torch.zeros(2, 2, 4, 2, 4) for _ in range(2)]
    found = torch.compile(step, fullgraph=True, backend=backend)(key, caches[0], slots)
    expected = step(key, caches[1], slots)
    torch.testing.assert_close(caches[0], caches[1])
    torch.testing.assert_close(found, expected)
    assert caches[0].count_nonzero() == 2 * 2 * 8


@pytest.mark.parametrize("strict", [False, True])
def test_exported_program_has_our_ops(strict: bool) -> None:
    """With a length that is free; saved, and loaded by a process that imports layerzero.torch."""
    block = Block(lz)
    length = torch.export.Dim("length", min=2, max=64)
    shapes = {"x": {1: length}, "cos": {0: length}, "sin": {0: length}}
    program = torch.export.export(block, inputs(), dynamic_shapes=shapes, strict=strict)
    called = [str(node.target) for node in program.graph.nodes if "layerzero" in str(node.target)]
    assert len(called) == 15
    given = inputs(length=9)
    torch.testing.assert_close(program.module()(*given), Block(Native)(*given), rtol=1e-5, atol=1e-5)
    decomposed = program.run_decompositions()
    torch.testing.assert_close(decomposed.module()(*given), Block(Native)(*given), rtol=1e-5, atol=1e-5)


def test_exported_program_is_loaded_elsewhere(tmp_path: Path) -> None:
    """The file holds names of ops; whoever loads it imports what defines them."""
    path = tmp_path / "block.pt2"
    torch.export.save(torch.export.export(Block(lz), inputs()), path)
    code = (
        "import sys, torch, layerzero as lz, layerzero.torch\n"
        "program = torch.export.load(sys.argv[1])\n"
        "lz.connect()\n"
        "given = torch.load(sys.argv[2], weights_only=True)\n"
        "torch.save(program.module()(*given), sys.argv[3])\n"
    )
    torch.save(inputs(), tmp_path / "in.pt")
    subprocess.run([sys.executable, "-c", code, path, tmp_path / "in.pt", tmp_path / "out.pt"], check=True)
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    torch.testing.assert_close(found, Block(Native)(*inputs()), rtol=1e-5, atol=1e-5)


def test_make_fx_and_fake_tensors() -> None:
    """Ahead of time: a graph with our ops, made from tensors that hold nothing."""
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(lambda x, w: lzt.silu(lzt.linear(x, w)), tracing_mode="symbolic")(random(3, 4), random(5, 4))
    assert [str(n.target) for n in graph.graph.nodes if "layerzero" in str(n.target)] == [
        "layerzero.linear.default",
        "layerzero.silu.default",
    ]
    with pytest.raises(lz.InvalidArgument, match=r"torch\.ops\.layerzero"):
        make_fx(lambda x: 2.0 * lz.silu(x), tracing_mode="fake")(random(3, 4))


def test_bad_shapes_are_told_while_compiling() -> None:
    """Before anything runs."""
    compiled = torch.compile(lz.linear, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"linear: input has shape \[3, 4\], weight has shape \[5, 6\]"):
        compiled(random(3, 4), random(5, 6))


def test_ops_that_are_not_of_tensors_are_refused() -> None:
    with pytest.raises(Exception, match=r"lz\.null cannot be traced"):
        torch.compile(lambda x: (lz.null(), x + 1), fullgraph=True, backend="aot_eager")(random(3))


def test_results_can_be_saved() -> None:
    """torch.save of what lies in shared memory."""
    file = io.BytesIO()
    torch.save(lzt.silu(random(3, 4)), file)
    file.seek(0)
    torch.testing.assert_close(torch.load(file, weights_only=True), F.silu(random(3, 4)))
