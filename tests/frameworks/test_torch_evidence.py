"""accelerate(if_faster=True): calls of a kind go both ways in turns, and then where they were faster."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.frameworks.torch_cases import random
from torch.overrides import TorchFunctionMode

import layerzero.torch as lzt
from layerzero.torch import evidence
from layerzero.torch.acceleration import resting
from layerzero.torch.acceleration.interception import CHOSEN_TRACED
from layerzero.torch.evidence import HOLDS, SAMPLES, SLOWER, TRYING, WARM, Evidence, Trial, Turn

TRIED = WARM + 2 * SAMPLES


class Slow(TorchFunctionMode):
    """A torch whose silu takes longer than any of ours."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.silu:
            until_s = time.perf_counter() + 0.02
            while time.perf_counter() < until_s:
                pass
        return func(*args, **(kwargs or {}))


def counts(accelerated: Any) -> dict[str, int]:
    """Of the lines of silu: calls that were taken over, as "", and left, by the reason."""
    found: dict[str, int] = {}
    for line in accelerated.report.lines:
        assert line.op == "silu"
        found[line.why] = found.get(line.why, 0) + line.calls
    return found


def settle(trial: Trial, ours_ns: int, native_ns: int) -> list[Turn]:
    """All turns of a trial whose calls take so long."""
    turns = []
    while (turn := trial.turn()) in (Turn.TRY_OURS, Turn.TRY_NATIVE):
        turns.append(turn)
        trial.add(turn, ours_ns if turn is Turn.TRY_OURS else native_ns)
    return turns


def test_calls_that_ours_are_slower_for_are_torchs() -> None:
    """And all of them have torch's result; each was made once."""
    x = random(2, 8)
    expected = F.silu(x)
    with lzt.accelerate(ops=["silu"], if_faster=True) as accelerated:
        for _ in range(TRIED + 10):
            torch.testing.assert_close(F.silu(x), expected)
    assert counts(accelerated) == {"": WARM + SAMPLES, TRYING: SAMPLES, SLOWER: 10}
    (found,) = accelerated.report.comparisons
    assert (found.op, found.dtype, found.sizes, found.is_ours) == ("silu", "float32", "2-3x8-15", False)
    assert found.our_us > found.native_us > 0
    text = str(accelerated.report)
    assert f"torch's: {SLOWER}" in text
    assert "silu of float32 2-3x8-15: ours " in text
    assert max(map(len, text.splitlines())) <= 80
    assert accelerated.report.to_dict()["comparisons"][0]["sizes"] == "2-3x8-15"


def test_calls_that_ours_are_faster_for_are_ours() -> None:
    with Slow(), lzt.accelerate(ops=["silu"], if_faster=True) as accelerated:
        for _ in range(TRIED + 10):
            F.silu(random(2, 8))
    assert counts(accelerated) == {"": WARM + SAMPLES + 10, TRYING: SAMPLES}
    assert [one.is_ours for one in accelerated.report.comparisons] == [True]


def test_sizes_of_as_many_bits_are_of_one_kind() -> None:
    """So that lengths that grow are not compared anew, each of them."""
    known = Evidence()
    small, other, large = (known.trial("silu", [torch.empty(rows, 8)]) for rows in (64, 127, 128))
    assert small is not None
    assert small is other
    assert small is not large
    assert known.trial("gelu", [torch.empty(64, 8), "tanh"]) is not known.trial("gelu", [torch.empty(64, 8), "none"])
    assert known.trial("layer_norm", [torch.empty(64, 8), [8]]) is known.trial("layer_norm", [torch.empty(65, 8), [8]])
    assert known.comparisons() == ()
    known.clear()
    assert known.trial("silu", [torch.empty(64, 8)]) is not small


def test_turns_alternate_and_are_taken_again_after_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was slower may be faster by now."""
    monkeypatch.setattr(evidence, "HOLDS", 5)
    trial = Trial("silu", "float32", "8")
    turns = settle(trial, 2000, 1000)
    assert turns == [Turn.TRY_OURS] * WARM + [Turn.TRY_OURS, Turn.TRY_NATIVE] * SAMPLES
    assert trial.found is not None
    assert (trial.found.our_us, trial.found.native_us) == (2.0, 1.0)
    assert [trial.turn() for _ in range(3)] == [Turn.NATIVE] * 3
    assert len(settle(trial, 1000, 2000)) == TRIED
    assert trial.turn() is Turn.OURS
    assert HOLDS > 100 * TRIED


def test_one_long_call_decides_nothing() -> None:
    trial = Trial("silu", "float32", "8")
    calls = 0
    while (turn := trial.turn()) in (Turn.TRY_OURS, Turn.TRY_NATIVE):
        calls += 1
        trial.add(turn, 1000 if turn is Turn.TRY_OURS else 2000 if calls < TRIED - 2 else 1)
        if calls == WARM + 1:
            trial.add(Turn.TRY_OURS, 10**9)
    assert trial.turn() is Turn.OURS


def test_calls_whose_times_say_nothing_are_ours() -> None:
    """Of a call that needs gradients the backward pass comes later; on a CPU that may be the longer one."""
    x = random(2, 8).requires_grad_()
    with lzt.accelerate(ops=["silu"], if_faster=True) as accelerated:
        for _ in range(TRIED + 10):
            F.silu(x)
    assert counts(accelerated) == {"": TRIED + 10}
    assert accelerated.report.comparisons == ()


def test_ops_that_stay_with_torch_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not looked at, nor counted, and looked at again later, for twice as long each time. gelu is ours on:
    its calls need gradients, which says nothing of times."""
    x, weight = random(2, 8), random(8).requires_grad_()

    class Both(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.silu(x) + F.gelu(x * weight)

    model = Both()
    expected = model(x).detach()
    with lzt.accelerate(model, ["silu", "gelu"], if_faster=True) as accelerated:

        def left(times: int) -> int:
            """Calls of silu that were looked at and left, of so many of the model."""
            before = [line.calls for line in accelerated.report.lines if line.why == SLOWER]
            for _ in range(times):
                torch.testing.assert_close(model(x).detach(), expected)
            after = [line.calls for line in accelerated.report.lines if line.why == SLOWER]
            return sum(after) - sum(before)

        assert left(TRIED + resting.QUIET) == resting.QUIET
        assert accelerated.report.resting == ("silu",)
        text = str(accelerated.report)
        assert "torch's for now, uncounted, since no call was ours for a while: silu" in text
        assert max(map(len, text.splitlines())) <= 80
        assert left(resting.FIRST) == 0
        assert left(1 + 2 * resting.FIRST) == 1
        assert left(1) == 1
        taken = [line.calls for line in accelerated.report.lines if line.op == "gelu" and line.is_taken]
    assert sum(taken) == TRIED + resting.QUIET + 3 * resting.FIRST + 2
    assert accelerated.report.to_dict()["resting"] == ["silu"]


def test_what_is_ours_by_then_rests_no_more() -> None:
    one = resting.Resting(("silu", "gelu"))
    for _ in range(resting.QUIET):
        one.note("gelu")
        is_other = one.end()
    assert is_other
    assert (one.awake, one.ops) == (frozenset(["gelu"]), ("silu",))
    assert [one.end() for _ in range(resting.FIRST)].index(True) == resting.QUIET - 1  # gelu, too
    assert "silu" in one.awake
    one.note("silu")
    for _ in range(resting.QUIET):
        assert "silu" in one.awake
        one.end()


def test_compiled_calls_are_torchs() -> None:
    with lzt.accelerate(ops=["silu"], if_faster=True) as accelerated:
        compiled = torch.compile(torch.nn.SiLU(), backend="aot_eager", fullgraph=True)
        compiled(random(2, 8))
    assert counts(accelerated) == {CHOSEN_TRACED: 1}
