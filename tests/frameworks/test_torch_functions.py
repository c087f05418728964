"""Functions of other environments as ops of torch: eagerly, with gradients, traced, and when their worker dies."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.frameworks import isolated_ops as fn
from tests.frameworks import op_at_the_top

import layerzero as lz

pytestmark = [  # of torch's own code
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.* is deprecated:FutureWarning"),
]


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is taken from an earlier run's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _rows(x: Any, ids: Any, w: Any = None, *, plus: float) -> Any:
    return x.new_empty(ids.shape[0], x.shape[1]), ids.new_empty(ids.shape[0])


SCALED = fn.scaled.as_torch_op(
    "lzfn::scaled", fake=lambda x, scale: torch.empty_like(x), backward=lambda grad, x, scale: grad * scale
)
CUBE = fn.cube.as_torch_op("lzfn::cube", fake=torch.empty_like, backward=fn.cube_backward)
WEIGHTED = fn.weighted.as_torch_op("lzfn::weighted", fake=_rows, backward=fn.weighted_backward)
PLAIN = fn.cube.as_torch_op("lzfn::cube_only", fake=torch.empty_like)
FOUND = fn.found.as_torch_op("lzfn::found", fake=lambda x: x.new_empty(torch.library.get_ctx().new_dynamic_size()))
WRONG = fn.wrong.as_torch_op("lzfn::wrong", fake=lambda x, how: torch.empty_like(x))


def random(*shape: int, **options: Any) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64, **options)


def kill_worker() -> None:
    rows = {row["name"]: row["pid"] for row in lz.status()["backends"]}
    os.kill(rows[fn.ENV.backend], signal.SIGKILL)


def test_an_op_is_the_function_and_lends_what_is_shared() -> None:
    """Its schema comes from the annotations, and the arrays of the function are the tensors of the op."""
    assert str(SCALED._schema) == "lzfn::scaled(Tensor x, float scale=2.) -> Tensor"
    x = lz.share(torch.arange(6.0).reshape(2, 3))
    assert torch.equal(SCALED(x), x * 2)
    assert torch.ops.lzfn.scaled(x.T, scale=3.0).tolist() == (x.T * 3).tolist()
    assert fn.scaled.last_report().uncopied_bytes == x.nbytes
    y = SCALED(x[:0])
    assert (y.shape, y.dtype) == (x[:0].shape, x.dtype)
    y = SCALED(SCALED(x, 1.0))
    assert fn.scaled.last_report().uncopied_bytes == x.nbytes
    y += 1  # a result is the program's own
    assert torch.equal(y, x * 2 + 1)


def test_a_module_may_define_an_op_at_its_top() -> None:
    """Its worker imports the module, too; there the op is the function."""
    x = torch.ones(3)
    assert op_at_the_top.HALVED(x).tolist() == [0.5] * 3
    quartered = op_at_the_top.quartered.as_torch_op("lzfn::quartered", fake=torch.empty_like)
    assert quartered(x).tolist() == [0.25] * 3


def test_gradients_by_torch_and_by_an_isolated_function() -> None:
    x = random(4, 3, requires_grad=True)
    assert torch.autograd.gradcheck(SCALED, (x, 2.5))
    assert torch.autograd.gradcheck(CUBE, (x,))
    w, ids = random(3, requires_grad=True), torch.tensor([2, 0, 2])
    assert torch.autograd.gradcheck(lambda x, w: WEIGHTED(x, ids, w, plus=0.5)[0], (x, w))
    assert torch.autograd.gradcheck(lambda x: WEIGHTED(x, ids, plus=0.5)[0], (x,))
    rows, largest = WEIGHTED(x, ids, w, plus=1.0)
    assert torch.equal(rows, x[ids] * w + 1)
    assert (largest.requires_grad, largest.dtype) == (False, torch.int64)
    assert torch.equal(torch.func.grad(lambda x: CUBE(x).sum())(x.detach()), 3 * x.detach() ** 2)
    assert torch.allclose(torch.vmap(CUBE)(x.detach()), x.detach() ** 3)  # one call for each row


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_programs_have_it_as_one_node(backend: str, dynamic: bool) -> None:
    """With gradients through both kinds of backward."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return (CUBE(x.sin()) + SCALED(x, scale=3.0)).sum()

    compiled = torch.compile(program, fullgraph=True, backend=backend, dynamic=dynamic)
    for count in (3, 5):
        x, y = random(count, 4, requires_grad=True), random(count, 4, requires_grad=True)
        a, b = compiled(x), program(y)
        a.backward()
        b.backward()
        assert torch.allclose(a, b)
        assert torch.allclose(x.grad, y.grad)  # type: ignore[arg-type]


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler")
def test_inductor_calls_it() -> None:
    """With what it makes of the rest around it, and gradients."""
    x, y = random(4, 3, requires_grad=True), random(4, 3, requires_grad=True)
    a = torch.compile(lambda x: (CUBE(x.T + 1) * 2).sum(), fullgraph=True)(x)
    b = ((y + 1) ** 3 * 2).sum()
    a.backward()
    b.backward()
    assert torch.allclose(a, b)
    assert torch.allclose(x.grad, y.grad)  # type: ignore[arg-type]


def test_exported_programs_have_it() -> None:
    """Also one whose result has a size that its shape function leaves open."""
    x = random(4, 3)

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return CUBE(x) + FOUND(x).sum()

    exported = torch.export.export(Model(), (x,), dynamic_shapes=({0: torch.export.Dim("n")},))
    assert "lzfn.cube.default" in exported.graph_module.code
    wider = random(7, 3)
    assert torch.allclose(exported.module()(wider), wider**3 + wider[wider > 0].sum())


def test_opcheck_finds_nothing() -> None:
    x = random(4, 3, requires_grad=True)
    torch.library.opcheck(SCALED, (x, 2.0))
    torch.library.opcheck(CUBE, (x,))
    torch.library.opcheck(PLAIN, (x.detach(),))
    ids = torch.tensor([2, 0, 2])
    torch.library.opcheck(WEIGHTED, (x, ids, random(3, requires_grad=True)), {"plus": 1.0})
    torch.library.opcheck(FOUND, (x.detach(),))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("dtype", "its result is torch.float64 \\[2\\], and fake= says torch.float32 \\[2\\]"),
        ("shape", "its result is torch.float32 \\[1\\], and fake= says torch.float32 \\[2\\]"),
        ("count", "it has given 2 results, and the schema says 1"),
        ("kind", "its result is float, no array"),
    ],
)
def test_results_that_are_not_what_was_said(how: str, said: str) -> None:
    with pytest.raises(lz.InvalidArgument, match=f"lzfn::wrong .*wrong.*: {said}"):
        WRONG(torch.ones(2), how)


def test_definitions_that_cannot_be() -> None:
    """Each says what to pass."""
    op: Any = fn.cube.as_torch_op
    like = torch.empty_like
    for name, options, said in [
        ("lzfn::a", {}, "pass fake="),
        ("a", {"fake": like}, 'allowed: "mylib::name"'),
        ("aten::a", {"fake": like}, 'allowed: "mylib::name"'),
        ("lzfn::cube", {"fake": like}, "there is an op lzfn::cube already"),
        ("lzfn::a", {"fake": like, "arrays": "jax"}, 'allowed: "torch", "numpy"'),
        ("lzfn::a", {"fake": like, "schema": "(Tensor x"}, "cannot be read"),
        ("lzfn::a", {"fake": like, "schema": "(Tensor(a!) x) -> Tensor"}, "writes into x"),
        ("lzfn::a", {"fake": like, "schema": "(Tensor[] x) -> Tensor"}, "the argument x of the schema"),
        ("lzfn::a", {"fake": like, "schema": "(Tensor x) -> float"}, "results are not Tensors"),
        ("lzfn::a", {"fake": like, "schema": "(Tensor x, int y) -> Tensor"}, "does not fit the function"),
    ]:
        with pytest.raises(lz.InvalidArgument) as refused:
            op(name, **options)
        assert said in str(refused.value)
    with pytest.raises(lz.InvalidArgument, match="pass schema="):
        fn.weighted_backward.as_torch_op("lzfn::a", fake=like)


def test_gradients_that_cannot_be() -> None:
    x = random(3, requires_grad=True)
    with pytest.raises(lz.InvalidArgument, match=r"lzfn::cube_only has no gradient formula"):
        PLAIN(x).sum().backward()
    assert not PLAIN(x.detach()).requires_grad
    for op in (CUBE, SCALED):
        (grad,) = torch.autograd.grad(op(x).sum(), x, create_graph=True)
        with pytest.raises(lz.InvalidArgument, match=rf"{op._schema.name} has no second derivative"):
            grad.sum().backward()
    with pytest.raises(lz.InvalidArgument, match="lzfn::cube has no forward-mode derivative"):
        torch.func.jvp(CUBE, (x.detach(),), (x.detach(),))


def test_its_worker_may_die_between_forward_and_backward() -> None:
    x = random(3, requires_grad=True)
    y = CUBE(x).sum()
    kill_worker()
    y.backward()
    assert torch.allclose(x.grad, 3 * x.detach() ** 2)  # type: ignore[arg-type]


def test_its_worker_dies_in_mid_call(tmp_path: Path) -> None:
    """An idempotent one runs once more, also in a compiled program; any other raises, with torch none the wiser."""
    once = fn.dies_once.as_torch_op("lzfn::dies_once", fake=lambda x, mark: torch.empty_like(x))
    x = torch.ones(3)
    compiled = torch.compile(lambda x: once(x, str(tmp_path / "mark")) * 2, fullgraph=True, backend="aot_eager")
    assert compiled(x).tolist() == [4, 4, 4]
    assert fn.dies_once.last_report().attempts == 2
    dies = fn.dies.as_torch_op("lzfn::dies", fake=torch.empty_like)
    with pytest.raises(lz.BackendError, match="dies in ops-numpy"):
        dies(x)
    assert torch.equal(CUBE(x), x)
