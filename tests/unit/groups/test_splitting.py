"""Recorded functions split over ranks: what is split how, where ranks meet, and that the numbers are the same."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.unit.groups.layers import HEADS, HIDDEN, INNER, TOKENS, Layer, Unsummed, agree, recorded, some

import layerzero as lz
from layerzero.client.plans.execution_plan import ExecutionPlan
from layerzero.client.plans.graph_steps import NotCapturable
from layerzero.groups import products
from layerzero.groups.joint import Captured
from layerzero.groups.products import Product, Summed, with_products
from layerzero.groups.split_plan import SplitPlan, _explained, _Variant, what_of
from layerzero.groups.splitting import JOINED_BYTES, Collective, Split, split
from layerzero.groups.stretches import Weights
from layerzero.ipc.errors import BackendError, CudaGraphUnsafe, InvalidArgument

X = some(TOKENS, HIDDEN)
UP, DOWN = some(INNER, HIDDEN), some(HIDDEN, INNER)
BIAS_UP, BIAS_DOWN = some(INNER), some(HIDDEN)


def hows(made: Split) -> list[str]:
    return [f"{one.step.name} {one.applied.how}" for one in made.steps() if one.applied.how]


def collectives(made: Split) -> list[tuple[int, int | None]]:
    """Of each, how many values and along which dimension."""
    return [(len(item.values), item.dim) for item in made.items if isinstance(item, Collective)]


@pytest.mark.parametrize("size", [1, 2])
def test_a_llama_layer_has_two_sums_and_each_weight_in_parts(size: int) -> None:
    """Heads of queries, keys and values, with fewer of the latter; the sum comes where rows end, nowhere else."""
    made = agree(Layer(), size, X)
    column, row = "linear by column", "linear by row"
    assert hows(made) == [column] * 3 + [row] + [column] * 2 + [row]
    assert collectives(made) == [(1, None), (1, None)]
    assert not made.whole


def test_products_of_a_layer_that_are_added_up_are_made_apart() -> None:
    """As one item with their sum: each where that wants it."""
    made = agree(Layer(), 2, X)
    kinds = [type(item).__name__ for item in with_products(made)]
    assert kinds == ["Stretch", "Summed", "Stretch", "Summed", "Stretch"]
    assert sum(isinstance(item, Collective) for item in made.items) == kinds.count("Summed")


def test_a_product_that_a_capture_refuses_leaves_the_run_to_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a step of a plan does; in steps themselves the error is the caller's."""
    made = agree(Layer(), 2, X)
    summed = next(item for item in with_products(made) if isinstance(item, Summed))
    product = Product(made, summed, Weights(made.recording, 0, 2), 0)
    known = {number: np.ones((TOKENS, HIDDEN // 2)) for number in summed.step.step.reads}
    monkeypatch.setattr(products, "_new", lambda like, dtype, shape: np.empty(shape, dtype))
    error = CudaGraphUnsafe("make the call once outside of the capture")

    def refuse(request: Any) -> Any:
        raise error

    monkeypatch.setattr(products, "perform", refuse)
    with pytest.raises(CudaGraphUnsafe):
        product(known, Unsummed())
    with pytest.raises(NotCapturable, match=r"linear: no CUDA graph can hold it: make the call once outside"):
        product(known, Captured(None))  # type: ignore[arg-type]
    assert (product.runs_here, str(product)) == (False, f"{summed.step.step.number} linear: not run yet")


@pytest.mark.parametrize(("size", "options", "apart"), [(2, {}, 2), (2, {"keep_choice": True}, 0), (4, {}, 0)])
def test_products_are_apart_for_two_gpus_and_no_options_of_plans(
    monkeypatch: pytest.MonkeyPatch, size: int, options: dict[str, Any], apart: int
) -> None:
    """Which say how a plan's calls are chosen, and a product is in none; of more ranks no sum wants a place."""
    made = agree(Layer(HEADS, HEADS), size, X)
    monkeypatch.setattr(made.recording, "device", 0)
    group = SimpleNamespace(rank=0, size=size, _libraries=SimpleNamespace(numbers=itertools.count(1)))
    plan, variant = SplitPlan(Layer(), group, options), _Variant("x")  # type: ignore[arg-type]
    variant.split = made
    plan._freeze(variant)
    monkeypatch.setattr(ExecutionPlan, "explain", lambda _: "FROZEN")  # none has run
    assert sum(isinstance(item, Product) for item in variant.items) == apart
    assert len(_explained(variant, group).products) == apart  # type: ignore[arg-type]
    assert str(_explained(variant, group)).count("\n  product ") == apart  # type: ignore[arg-type]


def test_what_ranks_do_not_divide_stays_whole_and_says_why() -> None:
    """Two heads of keys over four ranks: attention is every rank's own, the MLP is split."""
    made = agree(Layer(), 4, X)
    assert hows(made) == ["linear by column"] * 2 + ["linear by row"]
    reasons = set(made.whole.values())
    assert any("the parts of [5, 8] along dimension 1 are none of [1, 5, 2, 4]" in one for one in reasons), reasons
    assert collectives(made) == [(1, None)]


def test_a_rank_that_fails_in_the_first_split_run_tells_the_others() -> None:
    """They are in a call of all ranks, and would wait for their deadline."""

    class Group:
        gave_up = False

        @contextlib.contextmanager
        def giving_up(self) -> Iterator[None]:
            try:
                yield
            except BackendError:
                self.gave_up = True
                raise

    def fails(*_: Any) -> Any:
        raise BackendError("its worker has ended", backend="torch")

    group = Group()
    plan = SplitPlan(Layer(), group, {})  # type: ignore[arg-type]
    plan._run = fails  # type: ignore[method-assign]
    with pytest.raises(BackendError):
        plan._check(None, None, [])  # type: ignore[arg-type]
    assert group.gave_up


def test_ranks_that_run_splits_of_other_arguments_are_told_apart() -> None:
    """Also where the first argument is the same: graphs of two splits would wait for each other."""

    def block(x: Any, y: Any) -> Any:
        return lz.linear(lz.linear(x, UP), DOWN) + lz.linear(lz.linear(y, UP), DOWN)

    one, other, again = (split(recorded(block, X, some(rows, HIDDEN)), 2) for rows in (TOKENS, 1, TOKENS))
    assert what_of(one, "block", 1)[1:] == what_of(other, "block", 1)[1:] == ("float64", (TOKENS, HIDDEN))
    assert what_of(one, "block", 1) == what_of(again, "block", 1) != what_of(other, "block", 1)
    assert what_of(one, "block", 1) != what_of(one, "block", 2), "as of arrays that lie otherwise, or another layer"


def test_sums_that_could_be_one_are() -> None:
    """Of a block whose attention and MLP take the same array: they wait for one another, not for their sums."""
    layer = Layer()
    assert collectives(agree(lambda x: x + layer.attention(x) + layer.mlp(x), 2, X)) == [(2, None)]
    added = agree(lambda x: x + (layer.attention(x) + layer.mlp(x)), 2, X)
    assert collectives(added) == [(1, None)]  # summands are added up first
    many = some(JOINED_BYTES // 8 // HIDDEN + 1, HIDDEN)
    large = agree(lambda x: x + layer.mlp(x) + layer.mlp(x * 2), 2, many)
    assert collectives(large) == [(1, None), (1, None)]  # to copy them costs more than a call


def _mlp(x: Any) -> Any:
    return lz.linear(lz.silu(lz.linear(x, UP, BIAS_UP)), DOWN, BIAS_DOWN)


def _by_operators(x: Any) -> Any:
    h = x @ UP.T + BIAS_UP
    return np.maximum(lz.silu(h), 0.5 * h) @ DOWN.T


def _heads_by_hand(x: Any) -> Any:
    q, k, v = ((x @ w.T).reshape(TOKENS, 4, 6).transpose(1, 0, 2) for w in (UP, UP + 0, UP))
    p = lz.softmax(lz.matmul(q, np.swapaxes(k, -1, -2)) * 0.3, -1)
    return (lz.matmul(p, v)[:, None][:, 0].transpose(1, 0, 2)).reshape(TOKENS, -1) @ DOWN.T


def _by_heads_of_a_mask(x: Any) -> Any:
    q = (x @ UP.T).reshape(TOKENS, 4, 6).transpose(1, 0, 2)
    return lz.attention(q, q, q, MASK).transpose(1, 0, 2).reshape(TOKENS, 24) @ DOWN.T


def _gated(x: Any) -> Any:
    return lz.gated_mlp(x, GATE_UP, DOWN) * 2


def _logits(x: Any) -> Any:
    return _mlp(x), lz.linear(x, UP)


def _times_a_whole_array(x: Any) -> Any:
    return (lz.linear(x, UP) * np.concatenate([x, x[:, :8]], 1)) @ DOWN.T


MASK, GATE_UP = some(4, TOKENS, TOKENS), some(2 * INNER, HIDDEN)
COLUMN, ROW, SUM = "by column", "by row", (1, None)


@pytest.mark.parametrize(
    ("function", "split_by", "meets"),
    [
        (_mlp, [COLUMN, ROW], [SUM]),
        (_by_operators, [COLUMN, ROW], [SUM]),
        (_heads_by_hand, [COLUMN, COLUMN, COLUMN, ROW], [SUM]),
        (_by_heads_of_a_mask, [COLUMN, ROW], [SUM]),
        (_gated, ["gate and up by column, down by row"], [SUM]),
        (_times_a_whole_array, [COLUMN, ROW], [SUM]),
        (_logits, [COLUMN, COLUMN, ROW], [SUM, (1, 1)]),
    ],
)
def test_functions_give_the_same_split_and_whole(
    function: Callable[[Any], Any], split_by: list[str], meets: Any
) -> None:
    """A bias is added once; arrays of the function's own, and masks by heads, go in parts; what comes out in parts is
    put together."""
    made = agree(function, 2, X)
    assert sorted(one.applied.how for one in made.steps() if one.applied.how) == split_by
    assert collectives(made) == meets


def _refused(function: Callable[[Any], Any]) -> str:
    with pytest.raises(InvalidArgument) as found:
        split(recorded(function, X), 2)
    return found.value.message


def test_a_step_without_a_rule_is_refused_by_name() -> None:
    """With file and line, and the array that it would get."""
    text = _refused(lambda x: lz.linear(np.cumsum(lz.linear(x, UP), axis=1), DOWN))
    assert text.startswith("leave cumsum at test_splitting.py:")
    assert "it has no rule for an array in parts, float64[5, 24] along dimension 1" in text


def test_an_activation_does_not_come_before_the_sum() -> None:
    """The weight before it stays whole, and its own goes by column."""
    made = agree(lambda x: lz.linear(lz.linear(x, UP), DOWN, activation="silu"), 2, X)
    assert list(made.whole.values()) == ["its silu comes after the sum over ranks: call that by itself"]
    assert collectives(made) == [(1, 1)]


def test_what_cannot_be_split_at_all_says_why() -> None:
    odd = some(7, HIDDEN)
    assert "2 ranks do not divide 7 columns" in _refused(lambda x: lz.linear(x, odd))
    assert "nothing of it can be split over 2 ranks" in _refused(lz.silu)
    text = _refused(lambda x: lz.softmax(lz.linear(x, UP), 1))
    assert "it takes all of dimension 1, which is in parts" in text

    def writes(x: Any) -> Any:
        y = lz.linear(x, UP)
        y += 1
        return y

    assert "it writes in place, which has no rule" in _refused(writes)
