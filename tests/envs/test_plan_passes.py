"""Passes of execution plans that put one call in the place of several steps: only where a certified kernel serves it,
it gives the same, and it pays."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.process.harness import Site, wait_until

import layerzero as lz

B, S, H, D = 2, 8, 2, 16
pytestmark = [pytest.mark.usefixtures("installation"), pytest.mark.timeout(1200)]
Arrays = dict[str, Any]


def numbers(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.fixture
def weights(installation: Site) -> Arrays:
    return {name: lz.share(numbers(n, H * D, H * D) / 6) for n, name in enumerate("qkvo")}


def split(x: Any, w: Any) -> Any:
    return lz.linear(x, w).reshape(-1, S, H, D).transpose(0, 2, 1, 3)


def joined(y: Any) -> Any:
    return y.transpose(0, 2, 1, 3).reshape(-1, S, H * D)


def by_lz(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return lz.matmul(lz.softmax(lz.matmul(q, k.swapaxes(-1, -2)) * 0.25 + mask, -1), v)


def by_numpy(q: Any, k: Any, v: Any, mask: Any) -> Any:
    scores = np.matmul(q, np.swapaxes(k, -1, -2)) / 4
    scores += mask
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (powers / np.sum(powers, axis=-1, keepdims=True)) @ v


def in_place(q: Any, k: Any, v: Any, mask: Any) -> Any:
    scores = 0.25 * (q @ k.transpose(0, 1, 3, 2))
    scores = np.where(mask > -1, scores, -np.inf)
    scores -= np.amax(scores, -1, keepdims=True)
    powers = np.exp(scores)
    powers /= powers.sum(-1, keepdims=True)
    return np.matmul(powers, v)


def run(plan: lz.ExecutionPlan, *args: Any) -> lz.ExecutionPlan:
    """Until all is chosen."""

    def is_done() -> bool:
        plan(*args)
        told = plan.explain()
        assert plan.phase in ("WARM", "FROZEN"), told
        return plan.phase == "FROZEN" and bool(told.messages) and "being timed" not in told.choice

    wait_until(is_done, timeout_s=60)
    return plan


def passes_of(plan: lz.ExecutionPlan) -> str:
    """What the passes did in the program that has all of them."""
    return "\n".join(plan._latest.programs[0].done)  # type: ignore[union-attr]


def steps_of(plan: lz.ExecutionPlan) -> list[str]:
    return [step.name for step in plan._latest.programs[0].steps]  # type: ignore[union-attr]


@pytest.mark.parametrize("written", [by_lz, by_numpy, in_place])
def test_attention_that_is_written_out_is_one_call(weights: Arrays, written: Callable[..., Any]) -> None:
    """Scores, scale, mask and softmax by lz's ops, by NumPy's, and changed in place; each run with other numbers."""
    mask = np.where(np.tri(S, dtype=bool), np.float32(0), np.float32(-30 if written is not in_place else -2))

    def block(x: Any, mask: Any) -> Any:
        return lz.linear(joined(written(*(split(x, weights[n]) for n in "qkv"), mask)), weights["o"])

    plan = lz.plan(block, keep_choice=False)
    for seed in range(4):
        x = numbers(seed, B, S, H * D)
        np.testing.assert_allclose(plan(x, mask), block(x, mask), rtol=1e-3, atol=1e-4)
    told = plan.explain()
    assert plan.phase == "FROZEN", told
    assert "attention fusion: 1, off by" in passes_of(plan), told
    assert [name for name in steps_of(plan) if name in ("softmax", "exp", "attention")] == ["attention"]


def scores_are_taken(q: Any, k: Any, v: Any) -> Any:
    scores = lz.matmul(q, k.swapaxes(-1, -2))
    return lz.matmul(lz.softmax(scores, -1), v) + scores.mean()


def in_double(q: Any, k: Any, v: Any) -> Any:
    scores = lz.matmul(q, k.swapaxes(-1, -2))
    return lz.matmul(lz.softmax(scores, -1, dtype="float64"), v.astype(np.float64))


def along_keys(q: Any, k: Any, v: Any) -> Any:
    return lz.matmul(lz.softmax(lz.matmul(q, k.swapaxes(-1, -2)), -2), v)


def scaled_mask(q: Any, k: Any, v: Any) -> Any:
    return lz.matmul(lz.softmax((lz.matmul(q, k.swapaxes(-1, -2)) + MASK) * 0.5, -1), v)


def written_between(q: Any, k: Any, v: Any) -> Any:
    scores = lz.matmul(q, k.swapaxes(-1, -2))
    q *= 2
    return lz.matmul(lz.softmax(scores, -1), v) + q


def pinned(q: Any, k: Any, v: Any) -> Any:
    return lz.matmul(lz.softmax(lz.matmul(q, k.swapaxes(-1, -2)), -1, backend="torch"), v)


MASK = np.zeros((S, S), np.float32)


@pytest.mark.parametrize("function", [scores_are_taken, along_keys, scaled_mask, written_between, pinned, in_double])
def test_what_only_looks_like_attention_stays(weights: Arrays, function: Callable[..., Any]) -> None:
    """Results used elsewhere, another dimension, a mask that is scaled, keys written to, a backend that was named."""

    def block(x: Any) -> Any:
        return function(*(split(x, weights[n]) * 1.5 for n in "qkv"))

    plan = lz.plan(block, keep_choice=False)
    for seed in range(3):
        x = numbers(seed, B, S, H * D)
        np.testing.assert_allclose(plan(x), block(x), rtol=1e-3, atol=1e-4)
    assert plan.phase == "FROZEN", plan.explain()
    assert "lz.attention" not in passes_of(plan)


@pytest.mark.parametrize("batch", [B, 1])
def test_projections_of_one_array_are_one_where_weights_are_fixed(weights: Arrays, batch: int) -> None:
    """Their results are parts of one array; weights that may change are not laid side by side, and it is said."""

    def block(x: Any) -> Any:
        return lz.linear(joined(by_lz(*(split(x, weights[n]) for n in "qkv"), MASK)), weights["o"])

    x = numbers(1, batch, S, H * D)
    loose, fixed = lz.plan(block, keep_choice=False), lz.plan(block, fixed_weights=True, keep_choice=False)
    for plan in (loose, fixed):
        for _ in range(3):
            np.testing.assert_allclose(plan(x), block(x), rtol=1e-3, atol=1e-4)
    assert "fixed_weights=True says that they do not" in passes_of(loose)
    assert "projection fusion: 1, off by" in passes_of(fixed)
    assert steps_of(fixed).count("linear") == 2
    run(fixed, x)
    assert re.search(r"fusions: .*\(all \d", fixed.explain().choice)  # timed: so all of it has crossed in chains
    for seed in range(5):
        x = numbers(seed, batch, S, H * D)
        np.testing.assert_allclose(fixed(x), block(x), rtol=1e-3, atol=1e-4)
    weights["q"] *= 2  # the caller's word was that this does not happen
    fixed.reset()
    for _ in range(3):
        np.testing.assert_allclose(fixed(x), block(x), rtol=1e-3, atol=1e-4)


def test_read_only_weights_need_no_word(weights: Arrays) -> None:
    """Bias and no bias are two groups; results that are the caller's stay arrays of their own."""
    fixed = [np.frombuffer(numbers(n, H * D, H * D).tobytes(), np.float32).reshape(H * D, H * D) for n in range(4)]
    x = numbers(1, S, H * D)

    def gated(x: Any) -> Any:
        gate, up = lz.linear(x, fixed[0]), lz.linear(x, fixed[1])
        return lz.silu(gate) * up

    plan = lz.plan(gated, keep_choice=False)
    for _ in range(3):
        np.testing.assert_allclose(plan(x), gated(x), rtol=1e-3, atol=1e-3)
    assert "projection fusion: 1" in passes_of(plan)
    assert "gating fusion: 1" in passes_of(plan)
    own = lz.plan(lambda x: (lz.linear(x, fixed[2]), lz.matmul(x, fixed[3]), lz.matmul(x, fixed[2])), keep_choice=False)
    for _ in range(3):
        own(x)
    assert "a result is the caller's" in passes_of(own)


def test_gating_in_place_is_one_call_and_a_used_gate_is_none(weights: Arrays) -> None:
    """`gate *= up` gives the memory of silu's result; what reads that in between keeps it two steps."""

    def inside(x: Any, y: Any) -> Any:
        gate = lz.silu(lz.gelu(x))
        gate *= lz.gelu(y)
        return lz.gelu(gate)

    def used(x: Any, y: Any) -> Any:
        gate = lz.silu(lz.gelu(x))
        total = gate.sum()
        gate *= lz.gelu(y)
        return lz.gelu(gate) + total

    def by_mul(x: Any, y: Any) -> Any:
        return lz.gelu(lz.mul(lz.gelu(y), lz.silu(lz.gelu(x))))

    def pinned(x: Any, y: Any) -> Any:
        return lz.gelu(lz.mul(lz.silu(x), lz.gelu(y), backend="torch"))

    x, y = numbers(1, S, D), numbers(2, S, D)
    for function, is_fused in ((inside, True), (by_mul, True), (pinned, False), (used, False)):
        plan = lz.plan(function, keep_choice=False)
        for _ in range(4):
            np.testing.assert_allclose(plan(x, y), function(x, y), rtol=1e-3, atol=1e-4)
        assert plan.phase == "FROZEN", plan.explain()
        assert ("gating fusion: 1, off by" in passes_of(plan)) is is_fused, plan.explain()
        x = x + 1


def layers(x: Any, w: Any, norm: Any) -> Any:
    """Two blocks of a transformer in short: the sum goes on, its norm is what the next part reads."""
    total = x + lz.linear(lz.rms_norm(x, D, norm), w)
    total = total + lz.linear(lz.rms_norm(total, D, norm), w)
    return lz.gelu(lz.rms_norm(total, D, norm)), total


def by_lz_add(x: Any, w: Any, norm: Any) -> Any:
    total = lz.add(x, lz.linear(x, w))
    return lz.gelu(lz.rms_norm(total, D, norm)), total


def pinned_sum(x: Any, w: Any, norm: Any) -> Any:
    return lz.rms_norm(lz.add(x, lz.gelu(x), backend="torch"), D, norm)


def sum_between(x: Any, w: Any, norm: Any) -> Any:
    total = lz.gelu(x) + x
    other = lz.linear(total, w)  # reads the sum before its norm is made
    return lz.rms_norm(total, D, norm), other


def broadcast_sum(x: Any, w: Any, norm: Any) -> Any:
    return lz.rms_norm(lz.gelu(x) + norm, D, norm)


def sum_written(x: Any, w: Any, norm: Any) -> Any:
    total = lz.gelu(x) + x
    normed = lz.rms_norm(total, D, norm)
    total *= 2
    return normed, total


def pinned_norm(x: Any, w: Any, norm: Any) -> Any:
    return lz.rms_norm(lz.gelu(x) + x, D, norm, backend="torch")


def made_weight(x: Any, w: Any, norm: Any) -> Any:
    total = lz.gelu(x) + x
    return lz.rms_norm(total, D, lz.gelu(norm))


@pytest.mark.parametrize(
    ("function", "fused"),
    [(layers, 2), (by_lz_add, 1), (pinned_sum, 0), (sum_between, 1), (broadcast_sum, 0), (sum_written, 0),
     (pinned_norm, 0), (made_weight, 0)],
)  # fmt: skip
def test_a_sum_and_its_norm_are_one_call(installation: Site, function: Callable[..., Any], fused: int) -> None:
    """Where the sum is used elsewhere, too; not where it is written to, or the weight is not there yet."""
    w, norm = lz.share(numbers(1, D, D) / 4), lz.share(numbers(2, D))
    plan = lz.plan(function, keep_choice=False)
    for seed in range(5):
        x = numbers(seed, S, D)
        expected, found = function(x.copy(), w, norm), plan(x.copy(), w, norm)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    assert plan.phase == "FROZEN", plan.explain()
    assert steps_of(plan).count("add_rms_norm") == fused, passes_of(plan)
    assert (f"residual fusion: {fused}, off by" in passes_of(plan)) is bool(fused)
    if function is layers:
        run(plan, numbers(9, S, D), w, norm)  # timed: so all of it has crossed in chains
        x = numbers(10, S, D)
        for one, other in zip(plan(x, w, norm), function(x, w, norm), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def by_ops(x: Any, w: Any, b: Any) -> Any:
    y = lz.silu(lz.linear(lz.gelu(lz.linear(x, w, b)), w))
    return lz.gelu(lz.linear(lz.relu(lz.linear(y, w, b)), w), "tanh")


def by_numpy_maximum(x: Any, w: Any, b: Any) -> Any:
    return lz.linear(np.maximum(lz.linear(x, w, b), 0), w)


def result_is_used(x: Any, w: Any, b: Any) -> Any:
    y = lz.linear(x, w, b)
    return lz.gelu(y) + y


def changed_between(x: Any, w: Any, b: Any) -> Any:
    y = lz.linear(x, w, b)
    y += 1
    return lz.linear(lz.silu(y), w)


def pinned_activation(x: Any, w: Any, b: Any) -> Any:
    return lz.gelu(lz.linear(x, w, b), backend="torch")


def another_one(x: Any, w: Any, b: Any) -> Any:
    return lz.tanh(lz.linear(lz.mish(lz.linear(x, w, b, "relu")), w)) + np.maximum(lz.linear(x, w), 1)


@pytest.mark.parametrize(
    ("function", "fused"),
    [(by_ops, 4), (by_numpy_maximum, 1), (result_is_used, 0), (changed_between, 0), (pinned_activation, 0),
     (another_one, 0)],
)  # fmt: skip
def test_a_projection_and_its_activation_are_one_call(
    installation: Site, function: Callable[..., Any], fused: int
) -> None:
    """Of those that linear has, by whom they are written; not where its result is used elsewhere, or is changed."""
    w, b = lz.share(numbers(1, D, D) / 4), lz.share(numbers(2, D))
    plan = lz.plan(function, keep_choice=False)
    for seed in range(4):
        x = numbers(seed, S, D)
        np.testing.assert_allclose(plan(x, w, b), function(x, w, b), rtol=1e-4, atol=1e-4)
    assert plan.phase == "FROZEN", plan.explain()
    assert (f"activation fusion: {fused}, off by" in passes_of(plan)) is bool(fused), passes_of(plan)
    assert len(steps_of(plan)) == {by_ops: 4, by_numpy_maximum: 2}.get(function, len(steps_of(plan)))
    if function is another_one:
        assert "linear + another activation: 2 seen, no backend has" in passes_of(plan)


def test_passes_can_be_left_out_and_named(weights: Arrays) -> None:
    """What is not made is said, and so is what no backend has a kernel for."""

    def block(x: Any) -> Any:
        y = by_lz(*(split(x, weights[n]) for n in "qkv"), MASK)
        return lz.layer_norm(lz.gelu(lz.matmul(joined(y), weights["o"])) + x, (H * D,)) * 1

    x = numbers(1, B, S, H * D)
    plan = lz.plan(block, passes=["constants", "common", "unused"], keep_choice=False)
    for _ in range(3):
        np.testing.assert_allclose(plan(x), block(x), rtol=1e-3, atol=1e-4)
    assert "passes left out: identities, attention, projections, residuals, gating, activ" in str(plan.explain())
    plan = lz.plan(block, keep_choice=False)
    for _ in range(3):
        plan(x)
    assert "matmul + activation: 1 seen, no backend has a certified kernel" in passes_of(plan)
    assert "residual + layer_norm: 1 seen" in passes_of(plan)
    with pytest.raises(lz.InvalidArgument, match="passes has 'fuse'; allowed: constants"):
        lz.plan(block, passes=["fuse"])
    with pytest.raises(lz.InvalidArgument, match="allowed: names"):
        lz.plan(block, passes="attention")


def test_a_fusion_that_gives_something_else_is_none(weights: Arrays) -> None:
    """Compared on the first use: scores beyond float32's range are no numbers there, and are by another kernel."""

    def block(x: Any) -> Any:
        q, k, v = (lz.gelu(x * f) for f in (1.0, 2.0, 3.0))
        return lz.matmul(lz.softmax(lz.matmul(q, k.swapaxes(-1, -2)) + HIDDEN, -1), v)

    x = np.abs(numbers(1, B, H, S, D))
    plan = lz.plan(block, keep_choice=False)
    with np.errstate(invalid="ignore"):
        for _ in range(4):
            np.testing.assert_allclose(plan(x), block(x), rtol=1e-3, atol=1e-4)
    assert plan.phase == "FROZEN", plan.explain()
    assert "attention fusion: 1 left as it is: float32[2, 2, 8, 16] differ" in passes_of(plan)


HIDDEN = np.zeros((S, S), np.float32)
HIDDEN[0] = -np.inf  # a row that sees nothing is not a number by softmax, and zero by lz.attention
