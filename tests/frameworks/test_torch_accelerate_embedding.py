"""F.embedding under layerzero.torch.accelerate: torch's results and gradients where the table is shared, and the reason
where torch looks up itself."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.frameworks.torch_cases import random
from torch.utils.checkpoint import checkpoint

import layerzero as lz
import layerzero.torch as lzt

IDS = torch.tensor([[1, 2, 2], [3, 0, 1]])


def shared(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return lz.share(random(4, 3, dtype=dtype))


class Texts(torch.nn.Module):
    """Words and places, as models begin."""

    def __init__(self, dtype: torch.dtype = torch.float64, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = torch.nn.Embedding(4, 8, **options), torch.nn.Embedding(3, 8)
        self.to(dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.words(ids) + self.places(torch.arange(ids.shape[-1]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64], ids=str)
@pytest.mark.parametrize("ids", [IDS, IDS.int(), IDS.t(), torch.tensor(2)], ids=["int64", "int32", "strided", "one"])
def test_rows_are_torchs(dtype: torch.dtype, ids: torch.Tensor) -> None:
    """To the bit: nothing is computed."""
    table = lz.share(torch.arange(12).view(4, 3).to(dtype))
    expected = F.embedding(ids, table)
    with lzt.accelerate() as handle:
        found = F.embedding(ids, table)
    assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert (handle.report.taken, handle.report.left) == (1, 0)


@pytest.mark.parametrize("padding_idx", [None, 0, -1, 2])
@pytest.mark.parametrize(("scale_grad_by_freq", "sparse"), [(False, False), (True, False), (False, True)])
def test_gradients_are_torchs(padding_idx: int | None, scale_grad_by_freq: bool, sparse: bool) -> None:
    """With every argument that a gradient depends on."""
    found = []
    for is_ours in (True, False):
        weight = shared().requires_grad_()
        with lzt.accelerate(ops=["embedding"] if is_ours else []) as handle:
            rows = F.embedding(IDS, weight, padding_idx, None, 2.0, scale_grad_by_freq, sparse)
            rows.square().sum().backward()
        assert handle.report.taken == is_ours
        assert weight.grad is not None
        assert weight.grad.is_sparse == sparse
        found.append(weight.grad.to_dense())
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_second_derivatives_are_there() -> None:
    """As of torch's own function, although our op refuses them."""
    found = []
    for ops in ([], ["embedding"]):
        weight = shared().requires_grad_()
        with lzt.accelerate(ops=ops):
            (first,) = torch.autograd.grad(F.embedding(IDS, weight).pow(3).sum(), weight, create_graph=True)
            found.append(torch.autograd.grad(first.square().sum(), weight)[0])
    torch.testing.assert_close(*found)


def test_a_models_tables_are_taken_by_layer() -> None:
    model = Texts()
    expected = copy.deepcopy(model)(IDS)
    with lzt.accelerate(lz.share(model)) as handle:
        found = model(IDS)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert [(line.layer, line.op, line.calls) for line in handle.report.lines] == [
        ("words", "embedding", 1),
        ("places", "embedding", 1),
    ]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any) -> None:
    table = shared().requires_grad_()
    with mode(), lzt.accelerate() as handle:
        found = F.embedding(IDS, table)
        assert found.is_inference() == (mode is torch.inference_mode)
    assert not found.requires_grad
    assert handle.report.taken == 1


def test_autocast_leaves_its_dtype() -> None:
    """As torch does."""
    table = shared(torch.float32)
    with torch.autocast("cpu", torch.bfloat16), lzt.accelerate() as handle:
        assert F.embedding(IDS, table).dtype == torch.float32
    assert handle.report.taken == 1


LEFT: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "max_norm": (lambda table: F.embedding(IDS, table, max_norm=0.5), "max_norm"),
    "sparse by count": (
        lambda table: F.embedding(IDS, table, scale_grad_by_freq=True, sparse=True),
        "sparse and scale_grad_by_freq",
    ),
    "no row": (lambda table: F.embedding(IDS[:0], table), "without elements"),
    "integers of one byte": (lambda table: F.embedding(IDS, table.to(torch.int8)), "int8"),
    "a table that is not shared": (lambda table: F.embedding(IDS, table.clone()), "lz.share(model)"),
    "vmap": (lambda table: torch.func.vmap(lambda ids: F.embedding(ids, table))(IDS), "torch.func"),
    "a checkpoint": (
        lambda table: checkpoint(F.embedding, IDS, table.requires_grad_(), use_reentrant=False),
        "checkpoint",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_for_us_is_torchs(name: str) -> None:
    """With torch's result, the change of the table included, and the reason in the report."""
    call, why = LEFT[name]
    theirs, ours = shared(), shared()
    expected = call(theirs)
    with lzt.accelerate() as handle:
        found = call(ours)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert (handle.report.taken, handle.report.left) == (0, 1), handle.report
    assert any(why in reason for reason in handle.report.reasons), handle.report


def test_wrong_calls_are_torchs_errors() -> None:
    table = shared()
    with lzt.accelerate() as handle:
        with pytest.raises(IndexError, match="index out of range"):
            F.embedding(torch.tensor([4]), table)
        with pytest.raises(AssertionError, match="Padding_idx"):
            F.embedding(IDS, table, padding_idx=4)
        with pytest.raises(RuntimeError, match="2-D"):
            F.embedding(IDS, table[0])
        with pytest.raises(RuntimeError, match="Long, Int"):
            F.embedding(IDS.double(), table)
        with pytest.raises(TypeError):
            F.embedding(IDS)
    assert handle.report.taken == 0


def test_a_compiled_model_looks_up_itself() -> None:
    """A graph is for tables wherever they lie."""
    model = lz.share(Texts())
    expected = model(IDS)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with lzt.accelerate(compiled) as handle:
        torch.testing.assert_close(compiled(IDS), expected, rtol=0, atol=0)
    assert handle.report.reasons == {"compiled, where it cannot be seen whether its table lies in shared memory": 2}


def test_a_worker_that_dies_costs_no_row() -> None:
    """The call goes on elsewhere, or is torch's."""
    table = shared()
    expected = F.embedding(IDS, table)
    with lzt.accelerate() as handle:
        F.embedding(IDS, table)
        backend = handle.report.lines[0].kernel.partition(".")[0]
        pid = next(one["pid"] for one in lz.status()["backends"] if one["name"] == backend)
        os.kill(pid, signal.SIGKILL)
        torch.testing.assert_close(F.embedding(IDS, table), expected, rtol=0, atol=0)
    assert handle.report.taken + handle.report.left == 2
