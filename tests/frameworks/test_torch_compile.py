"""Programs that torch traces: torch.compile, torch.export and AOT see ops of ours as single ones, also where a program
calls lz.silu and not torch.ops.layerzero.silu."""

from __future__ import annotations

import gc
import io
import os
import shutil
import signal
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
from layerzero.client.connection.arena import pool

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


# --- accelerate --------------------------------------------------------------------------------------------------


def graphs_of(backend: str = "aot_eager") -> Any:
    return torch._dynamo.testing.CompileCounterWithBackend(backend)


def ours(graphs: Any) -> int:
    """Nodes that are our ops, in all graphs."""
    nodes = [node for graph in graphs.graphs for node in graph.graph.nodes]
    return sum(str(node.target).startswith("layerzero.") for node in nodes if node.op == "call_function")


class Model(torch.nn.Module):
    """Unchanged code: every function that accelerate takes over, and a method that torch cannot trace under modes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.scale = torch.nn.LayerNorm(16), torch.nn.RMSNorm(16)
        self.into, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)
        self.dropout_p = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.into(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout_p)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        return F.softmax(F.gelu(F.silu(self.scale(x))), -1)


TAKEN = 8


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
def test_compiled_inside_of_accelerate(backend: str) -> None:
    """One graph for all blocks, however often one is entered; without one torch's own."""
    model, x, graphs = Model(), inputs()[0], graphs_of(backend)
    expected = model(x)
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    for _ in range(3):
        with lzt.accelerate() as handle:
            found = compiled(x)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (graphs.frame_count, ours(graphs)) == (1, TAKEN)
    weights = list(model.parameters())
    grads = [torch.autograd.grad(y.square().sum(), weights) for y in (found, expected)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    compiled(x)
    assert (graphs.frame_count, ours(graphs)) == (2, TAKEN)
    assert handle.report.left == 0


@pytest.mark.parametrize("way", ["accelerated, compiled", "compiled, accelerated", "compiled in place", "a part"])
def test_models_that_are_compiled_and_accelerated(way: str) -> None:
    """In both orders; what is removed is gone from compiled code, too."""
    model, x, graphs = Model(), inputs()[0], graphs_of()
    expected = model(x)
    options: dict[str, Any] = {"fullgraph": True, "backend": graphs}
    call: Any = model
    if way == "accelerated, compiled":
        handle = lzt.accelerate(model)
        call = torch.compile(model, **options)
    elif way == "compiled, accelerated":
        call = torch.compile(model, **options)
        call(x)
        handle = lzt.accelerate(call)
    elif way == "compiled in place":
        model.compile(**options)
        handle = lzt.accelerate(model)
    else:
        handle = lzt.accelerate(model)
        call = torch.compile(torch.nn.Sequential(model, torch.nn.Identity()), **options)
    torch.testing.assert_close(call(x), expected)
    call(x)
    assert ours(graphs) == TAKEN
    report = handle.report
    assert (report.taken, report.left) == (TAKEN, 0)
    assert {line.layer for line in report.lines} == {"(compiled)"}
    handle.remove()
    torch.testing.assert_close(call(x), expected)
    assert ours(graphs) == TAKEN


def test_compiled_calls_are_left_with_reasons() -> None:
    """Those that eager mode leaves, and what does not reach into a graph."""
    model, x = Model(), inputs()[0]
    model.dropout_p = 0.5
    with lzt.accelerate() as handle:
        torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    assert handle.report.reasons == {"dropout_p above 0": 1}
    with lzt.accelerate(policy={"rules": [{"allow": ["torch"]}]}) as handle:
        torch.compile(model, fullgraph=True, backend=graphs_of())(x)
    assert (handle.report.taken, handle.report.left) == (0, TAKEN)
    torch.use_deterministic_algorithms(True)
    try:
        with lzt.accelerate() as handle:
            torch.compile(model, fullgraph=True, backend=graphs_of())(x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert handle.report.reasons == {"dropout_p above 0": 1}  # each run of the graph asks for such kernels
    assert handle.report.taken == TAKEN - 1


def test_compiled_under_accelerate_and_autocast() -> None:
    model, x, graphs = Model(), inputs()[0], graphs_of()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
        with lzt.accelerate():
            found = torch.compile(model, fullgraph=True, backend=graphs)(x)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05)
    assert ours(graphs) == TAKEN


def test_accelerated_lengths_share_a_graph() -> None:
    model, graphs = Model(), graphs_of()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=graphs)
    with lzt.accelerate():
        for length in (5, 6, 9):
            x = inputs(length=length)[0]
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
    assert graphs.frame_count <= 2


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning")  # the mode, on and off
@pytest.mark.parametrize("strict", [False, True])
def test_an_accelerated_model_is_exported_with_our_ops(strict: bool) -> None:
    model, x = Model(), inputs()[0]
    with lzt.accelerate(model):
        program = torch.export.export(model, (x,), strict=strict)
    called = [str(node.target) for node in program.graph.nodes if "layerzero" in str(node.target)]
    assert len(called) == TAKEN
    torch.testing.assert_close(program.module()(x), model(x), rtol=1e-5, atol=1e-5)


# --- faults ------------------------------------------------------------------------------------------------------

VICTIMS: list[int] = []


@torch.library.custom_op("lztest::fault", mutates_args=())
def fault(x: torch.Tensor, in_forward: bool, is_now: bool) -> torch.Tensor:
    """x. The worker of the last call dies, where that is now: in forward or in backward."""
    report = lz.last_report()
    if in_forward == is_now and not VICTIMS and report is not None and report.worker_pid not in (None, os.getpid()):
        VICTIMS.append(report.worker_pid)
        os.kill(report.worker_pid, signal.SIGKILL)
    return x.clone()


@fault.register_fake
def _(x: torch.Tensor, in_forward: bool, is_now: bool) -> torch.Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[torch.Tensor, bool, bool], output: torch.Tensor) -> None:
    ctx.in_forward = inputs[1]


def _back(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return torch.ops.lztest.fault(grad, ctx.in_forward, False), None, None


fault.register_autograd(_back, setup_context=_keep)


@pytest.mark.long
@pytest.mark.parametrize("in_forward", [True, False], ids=["forward", "backward"])
def test_a_worker_dies_in_the_middle_of_a_compiled_model(in_forward: bool) -> None:
    """Between two nodes of the graph. The results are torch's, and no memory of a call stays behind."""
    compiled = torch.compile(Halves(ops), fullgraph=True, backend="aot_eager")
    weights = [random(16, 16, seed=n, needs_grad=True) for n in range(2)]
    x = random(4, 6, 16, seed=3, needs_grad=True)
    doubles = [one.detach().double().requires_grad_() for one in (x, *weights)]
    expected = Halves(F)(*doubles, in_forward, kills=False)
    right = torch.autograd.grad(expected.pow(3).sum(), doubles)
    VICTIMS.clear()
    slots = []
    for _ in range(3):
        found = compiled(x, *weights, in_forward)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
        grads = torch.autograd.grad(found.pow(3).sum(), (x, *weights))
        for one, other in zip(grads, right, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)
        assert lz.last_report().worker_pid not in VICTIMS
        del found, grads, one
        gc.collect()
        slots.append(pool.stats()["slots"])
    assert len(VICTIMS) == 1
    assert slots[-1] <= slots[0]


class Halves(torch.nn.Module):
    """Attention and a norm, and between them whatever happens."""

    def __init__(self, f: Any) -> None:
        super().__init__()
        self.f = f

    def forward(
        self, x: torch.Tensor, one: torch.Tensor, other: torch.Tensor, in_forward: bool, kills: bool = True
    ) -> torch.Tensor:
        attend = getattr(self.f, "attention", None) or self.f.scaled_dot_product_attention
        y = self.f.linear(x, one)
        y = attend(y, y, y)
        y = torch.ops.lztest.fault(y, in_forward, True) if kills else y
        return self.f.layer_norm(self.f.linear(self.f.silu(y), other), (16,))
