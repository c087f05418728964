"""lz.tune and `lz tune` with toy backends: who is measured, who wins, what ends it."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.process.harness import BACKENDS, PATIENCE_S, Site, wait_until
from tests.process.test_cli import command, data
from tests.process.test_cli import lz as run_lz

import layerzero as lz
from layerzero.client.arrays.recognition import describe
from layerzero.client.tools import tune as tuning
from layerzero.client.tools.calls import DEFAULTS, Call
from layerzero.client.tools.inputs import random_inputs
from layerzero.client.tools.tune_report import Times, TunedCall, TunedKernel, TuneReport
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec

SPEC = TensorSpec.contiguous("float32", (4, 8))
SILU = Call("silu", {"input": SPEC})
TOYS = ["alpha.silu", "beta.silu", "gamma.silu"]
FORMULA = "write(x / (1 + np.exp(-x)))"


def provider(statement: str) -> str:
    """The toy with something else for its silu to do first."""
    source = (BACKENDS / "toy.py").read_text()
    assert source.count(FORMULA) == 1
    return source.replace(FORMULA, f"{statement}; {FORMULA}")


def waiting(seconds: float) -> str:
    return provider(f"threading.Event().wait({seconds})")


@pytest.mark.usefixtures("connected")
def test_every_backend_that_accepts_the_call_is_measured() -> None:
    """The one with the highest priority is the only one that ordinary calls measure."""
    report = lz.tune("silu", np.zeros((4, 8), np.float32), budget_s=20.0)
    [call] = report.calls
    assert (call.op, call.label, call.previous) == ("silu", "silu(4x8:float32)", "alpha.silu")
    assert sorted(k.kernel_id for k in call.kernels) == TOYS
    for kernel in call.kernels:
        assert kernel.kernel is not None
        assert kernel.call is not None
        assert kernel.kernel.count == kernel.call.count >= tuning.MIN_ROUNDS
        assert 0 < kernel.kernel.median_us <= kernel.kernel.p95_us
        assert kernel.kernel.median_us < kernel.call.median_us
        assert kernel.first_ms > 0
    medians = [k.kernel.median_us for k in call.kernels if k.kernel]
    assert medians == sorted(medians)
    assert call.fastest is call.kernels[0]


def test_a_faster_kernel_than_the_chosen_one_is_found(new_site: Callable[..., Site]) -> None:
    """That is what it is for."""
    site = new_site()
    site.add_backend("slow", priority=90, provider=waiting(0.005))
    site.start().connect()
    [call] = lz.tune(lz.silu, SPEC, budget_s=20.0).calls
    assert call.previous == "slow.silu"
    assert call.fastest is not None
    assert call.fastest.kernel_id in TOYS
    assert call.speedup is not None
    assert call.speedup > 2
    text = str(TuneReport((call,), 1.0, 2.0))
    assert f"{call.fastest.kernel_id} is {call.speedup:.2f} times as fast as slow.silu" in text


def test_a_backend_that_fails_is_a_line_of_the_report(new_site: Callable[..., Site]) -> None:
    """The others are measured all the same."""
    site = new_site()
    site.add_backend("broken", provider=provider("raise RuntimeError('never')"))
    site.start().connect()
    [call] = lz.tune("silu", SPEC, budget_s=20.0).calls
    assert sorted(k.kernel_id for k in call.kernels if k.kernel is not None) == TOYS
    broken = call.kernels[-1]
    assert (broken.kernel_id, broken.kernel) == ("broken.silu", None)
    assert "never" in broken.note
    assert call.speedup is None


@pytest.mark.usefixtures("connected")
def test_a_spent_budget_ends_it_with_one_run_of_each_kernel_at_least() -> None:
    """A call that was begun must tell something; one that was not must say so."""
    report = lz.tune(["silu", "matmul"], budget_s=1e-6)
    begun, other = report.calls
    assert sorted(k.kernel_id for k in begun.kernels) == TOYS
    assert [k.kernel is not None and k.kernel.count for k in begun.kernels] == [1, 1, 1]
    assert other.kernels == ()
    assert "budget" in other.note


@pytest.mark.usefixtures("connected")
def test_an_interrupt_leaves_what_was_measured() -> None:
    """Minutes of measuring must not go with one key."""

    def interrupt(progress: tuning.Progress) -> None:
        if progress.rounds == 3:
            raise KeyboardInterrupt

    report = tuning.tune_calls([SILU, SILU], budget_s=20.0, on_progress=interrupt)
    assert report.was_interrupted
    begun, other = report.calls
    assert [k.kernel is not None and k.kernel.count for k in begun.kernels] == [3, 3, 3]
    assert other.note == "not measured: interrupted"
    assert report.to_dict()["calls"][0]["fastest"] in TOYS


@pytest.mark.usefixtures("connected")
def test_a_call_that_nobody_accepts_says_so() -> None:
    """Not every machine has a backend for every op."""
    [call] = lz.tune("softmax", SPEC, dim=0, budget_s=5.0).calls
    assert (call.kernels, call.fastest, call.previous) == ((), None, None)
    assert "lz explain" in call.note


@pytest.mark.usefixtures("connected")
@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        (("sillu",), {}, "did you mean 'silu'"),
        ((print,), {}, "no op is called"),
        (("silu",), {"input": SPEC, "backend": "alpha"}, "leave out backend"),
        (("silu",), {"inpt": SPEC}, "missing a required argument: 'input'"),
        (("silu", SPEC), {"budget_s": 0}, "budget_s is 0"),
        (("tokenize",), {}, "no typical shapes"),
        ((["silu"], SPEC), {}, "need its op"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple[Any, ...], options: dict[str, Any], text: str) -> None:
    """Before anything is started for them."""
    with pytest.raises(lz.InvalidArgument, match=text):
        lz.tune(*arguments, **options)


def test_random_arrays_have_the_strides_that_were_asked_for() -> None:
    """A transposed matrix is another call: other kernels accept it, and they take other times."""
    specs = {"a": SPEC.permute(1, 0), "b": None, "c": TensorSpec("int64", (3, 4), (8, 2))}
    arrays = random_inputs("matmul", specs, seed=0)
    assert arrays["b"] is None
    assert {name: describe(arrays[name]).spec for name in "ac"} == {name: specs[name] for name in "ac"}
    assert np.array_equal(arrays["a"], random_inputs("matmul", specs, seed=0)["a"])


@pytest.mark.parametrize("call", [call for calls in DEFAULTS.values() for call in calls], ids=lambda c: c.label)
@pytest.mark.usefixtures("connected")
def test_typical_calls_are_calls(call: Call) -> None:
    """A wrong name or shape there would show only where a backend has the op."""
    assert call.op in OPS
    assert lz.explain(call.op, **call.arrays, **call.params).op == call.op


def test_the_report_tells_who_won_and_what_is_left_open() -> None:
    """What a person reads first."""

    def kernel(name: str, us: float, **more: Any) -> TunedKernel:
        return TunedKernel(name, name[0], Times.of([us]), Times.of([us + 100]), 1.0, **more)

    failed = TunedKernel("c.op", "c", note="BACKEND_ERROR: it broke")
    same = TunedCall(
        "op", "op(1)", "a.op", "a.op", (kernel("a.op", 10.0, is_stable=True), kernel("b.op", 20.0), failed)
    )
    other = TunedCall("op", "op(2)", "b.op", "b.op", (kernel("a.op", 10.0), kernel("b.op", 20.0)))
    new = TunedCall("op", "op(3)", None, None, (kernel("a.op", 10.0),))
    text = str(TuneReport((same, other, new, TunedCall("op", "op(4)", None, None, (), "nobody")), 3.0, 5.0, True))
    assert "3 of 4 calls measured in 3.0 s, interrupted" in text
    assert "op(1): a.op was chosen before and is the fastest" in text
    assert "op(2): a.op is 2.00 times as fast as b.op" in text
    assert "op(3): a.op is the fastest measured" in text
    assert "op(4): nobody" in text
    assert "BACKEND_ERROR: it broke" in text
    assert "not settled" in text


# --- the command


def test_the_command_prints_a_table(broker: Site) -> None:
    """Data on stdout; on a pipe no bar on stderr."""
    done = run_lz(broker, "tune", "silu", "4x8:float32", "--budget", "10")
    assert done.returncode == 0, done.stderr
    assert "silu(4x8:float32): " in done.stdout
    assert all(name in done.stdout for name in (*TOYS, "kernel median", "p95", "1 of 1 calls measured"))
    assert done.stderr == ""


def test_the_command_takes_ops_and_prints_json(broker: Site) -> None:
    """For scripts."""
    report = data(run_lz(broker, "tune", "null", "matmul", "--budget", "2", "--json"))
    assert [call["op"] for call in report["calls"]] == ["null", "matmul"]
    for call in report["calls"]:
        assert call["fastest"] in {k["kernel_id"] for k in call["kernels"] if k["kernel"]["count"]}
        assert call["speedup"] is not None
    assert not report["was_interrupted"]


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("sillu",), 2, "did you mean 'silu'"),
        (("silu", "-p", "dim=1"), 2, "belong to one call"),
        (("silu", "4:float33"), 2, "did you mean 'float32'"),
        (("tokenize", "a"), 2, "--tokenizer"),
        (("softmax", "4:float32", "-p", "dim=0"), 1, ""),
    ],
)
def test_the_command_refuses_with_a_reason(broker: Site, words: tuple[str, ...], code: int, text: str) -> None:
    """Exit codes as everywhere: 2 for wrong usage, 1 when nothing could be measured."""
    done = run_lz(broker, "tune", *words)
    assert done.returncode == code, done.stdout
    assert text in done.stderr


def test_ctrl_c_prints_what_was_measured(new_site: Callable[..., Site]) -> None:
    """And says so by its exit code."""
    site = new_site()
    site.add_backend("slow", priority=90, provider=waiting(0.1))
    site.start()
    with subprocess.Popen(
        **command(site, ("tune", "silu", "4x8:float32", "--budget", "600", "--json")), stdout=subprocess.PIPE
    ) as process:
        site.connect()
        wait_until(lambda: site.backend("slow")["answered"] > tuning.WARM_UPS + 1, 100)  # one round is complete
        process.send_signal(signal.SIGINT)
        stdout, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    report = json.loads(stdout)
    assert report["was_interrupted"]
    assert {k["kernel_id"] for k in report["calls"][0]["kernels"] if k["kernel"]} == {"slow.silu", *TOYS}


def test_tokenizing_is_tuned_with_the_text_that_was_given(tmp_path: Path) -> None:
    """There are no random texts."""
    from layerzero.client.cli.tune import parse_calls

    file = tmp_path / "tokenizer.json"
    [call] = parse_calls(["tokenize", "hello"], [], file)
    assert (call.op, call.arrays) == ("tokenize", {})
    assert call.params == {"text": "hello", "tokenizer": str(file)}
