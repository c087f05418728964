"""lz.plan of functions and modules of torch, in a client that has torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import layerzero as lz
from layerzero.ipc.errors import InvalidArgument

torch = pytest.importorskip("torch")
F = torch.nn.functional


class Block(torch.nn.Module):  # type: ignore[misc,name-defined]
    """Norm, linear and activation by lz; residuals, reshapes and a softmax are torch's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, x: Any, scale: float = 1.0) -> Any:
        y = lz.layer_norm(x, (x.shape[-1],), self.norm.weight, self.norm.bias)
        y = lz.gelu(lz.linear(y, self.up.weight, self.up.bias))
        x = x + scale * lz.linear(y, self.down.weight, self.down.bias)
        heads = x.reshape(*x.shape[:-1], 2, -1).transpose(-2, -3)
        return torch.softmax(lz.silu(heads), dim=-1), x

    def plain(self, x: Any, scale: float = 1.0) -> Any:
        x = x + scale * self.down(F.gelu(self.up(self.norm(x))))
        heads = x.reshape(*x.shape[:-1], 2, -1).transpose(-2, -3)
        return torch.softmax(F.silu(heads), dim=-1), x


def settled(plan: Any, *args: Any) -> Any:
    for _ in range(200):
        plan(*args)
        assert plan.phase in ("WARM", "FROZEN"), plan.explain()
        if plan.explain().messages:
            return plan
    raise AssertionError(str(plan.explain()))


def agree(got: Any, wanted: Any) -> None:
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert one.is_contiguous() == other.is_contiguous()


@pytest.fixture
def block() -> Any:
    torch.manual_seed(0)
    return Block(16).eval()


def test_a_module_runs_as_a_plan(block: Any) -> None:
    """Tensors in, tensors out; other numbers each time; results that nobody writes to again."""
    with torch.no_grad():
        plan = settled(lz.plan(block), torch.randn(3, 5, 16))
        kept = []
        for _ in range(20):
            x = torch.randn(3, 5, 16)
            kept.append((plan(x), block.plain(x)))
        for got, wanted in kept:
            agree(got, wanted)
        assert "when torch says that it has changed" in str(plan.explain())
        agree(plan(x, scale=2.0), block.plain(x, 2.0))
        assert plan.counters()["plans"] == 2


def test_a_module_in_training_has_another_plan(block: Any) -> None:
    """Dropout, for one, is a matter of its mode, which is no argument."""

    class Dropping(torch.nn.Module):  # type: ignore[misc,name-defined]
        def forward(self, x: Any) -> Any:
            return F.dropout(lz.silu(x), 0.5, self.training)

    x, module = torch.ones(64, 64), Dropping().eval()
    for plan in (lz.plan(module), lz.plan(module.forward)):
        settled(plan, x)
        module.train()
        counts = {int((plan(x) == 0).sum()) for _ in range(6)}
        assert 0 not in counts
        module.eval()
        assert not (plan(x) == 0).any()


def test_parameters_that_are_changed_are_copied_again(block: Any) -> None:
    """An optimizer's step, or a state dict that is loaded, changes them in place."""
    x = torch.randn(4, 16)
    with torch.no_grad():
        plan = settled(lz.plan(block), x)
        for _ in range(3):
            block.up.weight.mul_(1.5)
            block.norm.bias.add_(0.25)
            agree(plan(x), block.plain(x))
        block.load_state_dict(Block(16).state_dict())
        agree(plan(x), block.plain(x))


def test_gradients_are_refused_as_by_calls(block: Any) -> None:
    """A plan that was frozen without is not used with them."""
    x = torch.randn(4, 16)
    with torch.no_grad():
        plan = settled(lz.plan(block), x)
    for argument in (x, x.clone().requires_grad_()):
        with pytest.raises(lz.InvalidArgument, match="requires gradients"):
            plan(argument)


def writes(x: Any) -> Any:
    y = lz.silu(x)
    y.mul_(2).add_(x)
    y[0].zero_()
    torch.exp(y, out=y)
    return lz.silu(y.T)


def splits(x: Any) -> Any:
    a, b = lz.silu(x).chunk(2, dim=-1)
    return torch.cat([lz.silu(b), lz.silu(a)]), torch.stack((a, b)).sum(0)


@pytest.mark.parametrize("function", [writes, splits])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_what_torch_does_between_calls_is_part_of_a_plan(function: Callable[[Any], Any], dtype: str) -> None:
    """In-place methods, out=, views of results, results that are several tensors."""
    plan = lz.plan(function)
    for _ in range(12):
        x = torch.randn(4, 6, dtype=getattr(torch, dtype))
        before = x.clone()
        got, wanted = plan(x), function(x)
        torch.testing.assert_close(got, wanted)
        torch.testing.assert_close(x, before)
    assert plan.phase == "FROZEN", plan.explain()


def test_values_that_are_looked_at_make_no_plan() -> None:
    """`item`, a branch, an index by a tensor of another size at each run."""
    for function in (
        lambda x: lz.silu(x) * x.sum().item(),
        lambda x: lz.silu(x) if bool((x > 0).all()) else x,
        lambda x: lz.silu(x).tolist(),
    ):
        plan = lz.plan(function)
        for _ in range(3):
            x = torch.randn(3, 4)
            got, wanted = plan(x), function(x)
            assert got == wanted if isinstance(got, list) else torch.equal(got, wanted)
        assert plan.phase == "CALLS"


def test_torchs_activations_of_our_projections_are_part_of_them() -> None:
    """F.gelu, F.relu and F.silu on what lz.linear gives, by their options; not in place, where another writes to it."""
    torch.manual_seed(1)
    w, b = torch.randn(16, 16) / 4, torch.randn(16)

    def block(x: Any) -> Any:
        y = lz.linear(F.silu(lz.linear(x, w)), w, b)
        return lz.linear(F.relu(lz.linear(F.gelu(y, approximate="tanh"), w)), w, b)

    def in_place(x: Any) -> Any:
        return lz.linear(F.relu(lz.linear(x, w, b), inplace=True), w)

    with torch.no_grad():
        for function, fused in ((block, 3), (in_place, 0)):
            plan = lz.plan(function, keep_choice=False)
            for _ in range(4):
                x = torch.randn(5, 16)
                torch.testing.assert_close(plan(x), function(x), rtol=1e-4, atol=1e-4)
            told = "\n".join(plan._latest.programs[0].done)
            assert (f"activation fusion: {fused}, off by" in told) is bool(fused), told


def test_a_bundle_of_a_module_has_its_weights(tmp_path: Path) -> None:
    """Tensors in, tensors out, with the bits of the plan; bfloat16, and views of what steps have made, too."""

    class Two(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(32, 64, dtype=torch.bfloat16)
            self.down = torch.nn.Linear(64, 32, dtype=torch.bfloat16)

        def forward(self, x: Any) -> Any:
            h = lz.silu(lz.linear(x, self.up.weight, self.up.bias))
            y = lz.linear(h.reshape(2, 4, 64), self.down.weight, self.down.bias)
            return {"y": y, "heads": y.view(2, 4, 4, 8).transpose(1, 2)}

    torch.manual_seed(0)
    model, path = Two(), tmp_path / "block.lzb"
    with torch.no_grad():
        x = torch.randn(8, 32, dtype=torch.bfloat16)
        plan = settled(lz.plan(model), x)
        wanted = plan(x)
        lz.write_bundle(plan, path)
        bundle = lz.load_bundle(path)
        for name, one in bundle(x).items():
            assert torch.equal(one, wanted[name])
            assert one.dtype == torch.bfloat16
        assert (bundle.name, [*bundle.inputs], [*bundle.outputs]) == ("Two", ["x"], ["y", "heads"])
    with pytest.raises(InvalidArgument, match=r"pass x.detach\(\)"):
        bundle(x.clone().requires_grad_())
