"""layerzero.engines.flashinfer: calls of flashinfer through its own trace_apply, against float64, and what happens to
those that are not ours."""

from __future__ import annotations

import collections
import functools
import inspect
import logging
import math
import re
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flashinfer
import pytest
import torch
from flashinfer import trace_apply
from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper as Decode
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper as Paged
from flashinfer.prefill import BatchPrefillWithRaggedKVCacheWrapper as Ragged
from tests.serving_engines import flashinfer_kernels as kernels
from torch import Tensor

import layerzero as lz
from layerzero.engines import flashinfer as ours
from layerzero.engines import guard
from layerzero.engines.flashinfer import applying, definitions
from layerzero.torch import running
from layerzero.torch.running import HandedOver

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    kernels.replace(monkeypatch)
    ours.clear()
    yield
    ours.disable()
    assert not trace_apply.is_enabled()


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def indptr(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def batch(cls: type, dtype: torch.dtype, kv_layout: str = "NHD", **planned: Any) -> tuple[Any, Tensor, Any]:
    """A wrapper, queries and caches: sequences of 11, 0 and 4 keys in pages of 4, in one tensor."""
    heads, size, page = (4, 16, 4)
    queries = (5, 0, 1) if cls is not Decode else (1, 1, 1)
    cache = random(7, 2, page, 2, size, dtype=dtype)
    made = kernels.wrapper(
        cls,
        kv_layout,
        paged_kv_indptr_buf=indptr(3, 0, 1),
        paged_kv_indices_buf=torch.tensor([6, 2, 3, 0, 5], dtype=torch.int32),  # a buffer may be longer
        paged_kv_last_page_len_buf=torch.tensor([3, 0, 4], dtype=torch.int32),
        qo_indptr_buf=indptr(*queries),
        kv_indptr_buf=indptr(11, 0, 4),
        **planned,
    )
    caches = cache if kv_layout == "NHD" else (cache[:, 0].transpose(1, 2), cache[:, 1].transpose(1, 2))
    return made, random(sum(queries), heads, size, dtype=dtype), caches


def calls(dtype: torch.dtype) -> dict[str, Any]:
    """A call of each kind."""
    x, weight = random(6, 32, dtype=dtype), random(32, dtype=dtype)
    table = torch.cat((random(9, 4).cos(), random(9, 4).sin()), -1)
    q, k, v = (random(length, heads, 16, dtype=dtype) for length, heads in ((3, 4), (7, 2), (7, 2)))
    decode, prefill, ragged = (batch(cls, dtype, causal=True) for cls in (Decode, Paged, Ragged))
    positions = torch.tensor([0, 8, 3, 3, 1, 2])
    keys, values = random(15, 2, 16, dtype=dtype), random(15, 2, 16, dtype=dtype)
    return {
        "rmsnorm": lambda: flashinfer.rmsnorm(x, weight, 1e-5),
        "fused_add_rmsnorm": lambda: _added(x, weight),
        "silu_and_mul": lambda: flashinfer.silu_and_mul(x),
        "rope_cos_sin_cache": lambda: flashinfer.apply_rope_with_cos_sin_cache(positions, x, x[:, :16], 16, table),
        "single_decode": lambda: flashinfer.single_decode_with_kv_cache(q[0], k, v),
        "single_prefill": lambda: flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True),
        "gqa_paged_decode": lambda: decode[0].run(*decode[1:]),
        "gqa_paged_prefill": lambda: prefill[0].run(*prefill[1:]),
        "gqa_ragged": lambda: ragged[0].run(ragged[1], keys, values),
    }


def _added(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both tensors that are written, which are the result."""
    out, residual = x.clone(), x.flip(0).clone()
    assert flashinfer.fused_add_rmsnorm(out, residual, weight, eps=1e-5) is None
    return out, residual


def outcomes() -> dict[str, int]:
    return {row.outcome: row.calls for row in ours.report().rows}


def check(found: Any, expected: Any) -> None:
    pairs = zip(found, expected, strict=True) if isinstance(expected, tuple) else [(found, expected)]
    for a, b in pairs:
        assert guard.difference([a], [b]) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ours.KINDS)
def test_a_call_of_each_kind_is_served(kind: str, dtype: torch.dtype) -> None:
    """The first call of a shape tells which definition it is; those that follow are ours."""
    call = calls(dtype)[kind]
    expected = call()
    with ours.enable([kind]):
        kernels.called.clear()
        check(call(), expected)
        assert kernels.called == [kind]
        check(call(), expected)
        assert kernels.called == [kind]
    assert ours.report().served == 1
    check(call(), expected)
    assert kernels.called == [kind, kind]


def test_all_kinds_at_once() -> None:
    """Learning a definition does not lose those that are known."""
    expected = {kind: call() for kind, call in calls(torch.float32).items()}
    with ours.enable() as switch:
        for call in calls(torch.float32).values():
            call()
        kernels.called.clear()
        for kind, call in calls(torch.float32).items():
            check(call(), expected[kind])
    assert kernels.called == []
    assert len(switch.definitions()) == len(ours.KINDS)
    assert ours.report().served == len(ours.KINDS)


def test_a_definition_that_is_given_is_served_at_once() -> None:
    """Who has a graph to capture names what is in it."""
    x, weight = random(3, 32), random(32)
    expected = flashinfer.rmsnorm(x, weight)
    kernels.called.clear()
    with ours.enable([], definitions=["rmsnorm_h32"]):
        check(flashinfer.rmsnorm(x, weight), expected)
        flashinfer.silu_and_mul(x)
    assert kernels.called == ["silu_and_mul"]


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.5])
def test_epsilon_is_that_of_the_call(eps: float) -> None:
    """flashinfer's definitions fix it at 1e-6, and do not hand it on."""
    x, weight = random(3, 32) / 100, random(32)
    expected = flashinfer.rmsnorm(x, weight, eps=eps)
    with ours.enable([], definitions=["rmsnorm_h32"]):
        check(flashinfer.rmsnorm(x, weight, eps=eps), expected)
    assert ours.report().served == 1


@pytest.mark.parametrize("kind", ["rmsnorm", "silu_and_mul", "gqa_paged_decode"])
def test_out_is_written_and_returned(kind: str) -> None:
    """So engines call them."""
    wrapper, q, cache = batch(Decode, torch.float32)
    x, weight = random(6, 32), random(32)
    run: dict[str, Any] = {
        "rmsnorm": lambda out: flashinfer.rmsnorm(x, weight, out=out),
        "silu_and_mul": lambda out: flashinfer.silu_and_mul(x, out),
        "gqa_paged_decode": lambda out: wrapper.run(q, cache, out=out),
    }
    expected = run[kind](None)
    with ours.enable([kind]):
        run[kind](None)
        out = torch.full_like(expected, math.nan)
        assert run[kind](out) is out
        check(out, expected)
    assert ours.report().served == 1


@pytest.mark.parametrize("cls", [Decode, Paged])
def test_heads_before_slots(cls: type) -> None:
    """HND: the other layout of pages."""
    wrapper, q, caches = batch(cls, torch.float32, "HND", sm_scale=0.3)
    expected = wrapper.run(q, caches)
    with ours.enable():
        wrapper.run(q, caches)
        check(wrapper.run(q, caches), expected)
    assert ours.report().served == 1


@pytest.mark.parametrize("kind", ["single_decode", "single_prefill"])
def test_heads_before_keys(kind: str) -> None:
    """HND of one sequence."""
    q, k, v = random(3, 4, 16), random(2, 7, 16), random(2, 7, 16)
    decode, prefill = flashinfer.single_decode_with_kv_cache, flashinfer.single_prefill_with_kv_cache
    function, given = (decode, q[0]) if kind == "single_decode" else (prefill, q)
    expected = function(given, k, v, kv_layout="HND", sm_scale=0.2)
    with ours.enable([kind]):
        function = getattr(flashinfer, function.__name__)
        function(given, k, v, kv_layout="HND", sm_scale=0.2)
        check(function(given, k, v, kv_layout="HND", sm_scale=0.2), expected)
    assert ours.report().served == 1


def test_rope_of_neighbours() -> None:
    """is_neox=False pairs them, and elements after the table's stay as they are."""
    x, positions = random(6, 32), torch.tensor([0, 8, 3, 3, 1, 2])
    table = torch.cat((random(9, 4).cos(), random(9, 4).sin()), -1)
    arguments = (positions, x, x[:, :16].contiguous(), 16, table, False)
    expected = flashinfer.apply_rope_with_cos_sin_cache(*arguments)
    with ours.enable():
        flashinfer.apply_rope_with_cos_sin_cache(*arguments)
        check(flashinfer.apply_rope_with_cos_sin_cache(*arguments), expected)
    assert ours.report().served == 1


def test_an_argument_that_we_do_not_know_is_flashinfers() -> None:
    """A later release may add one to any function."""
    for kind in ours.KINDS.values():
        with pytest.raises(HandedOver, match="argument gain"):
            kind.serve(collections.defaultdict(lambda: torch.ones(2, 2), gain=2.0))


ASKED: dict[str, tuple[type | None, dict[str, Any], dict[str, Any]]] = {
    "argument logits_soft_cap": (None, {}, {"logits_soft_cap": 3.0}),
    "argument window_left": (None, {}, {"window_left": 2}),
    "argument return_lse": (Decode, {}, {"return_lse": True}),
    "argument k_scale": (Decode, {}, {"k_scale": 0.5}),
    "argument sinks": (Paged, {}, {"sinks": torch.zeros(4)}),
    "plan with logits_soft_cap": (Decode, {"logits_soft_cap": 3.0}, {}),
    "plan with window_left": (Paged, {"window_left": 3}, {}),
    "plan with pos_encoding_mode": (Decode, {"pos_encoding_mode": "ROPE_LLAMA"}, {}),
    "plan with custom_mask_buf": (Paged, {"custom_mask_buf": torch.ones(4)}, {}),
    "padded queries": (Paged, {"qo_indptr_last": 5}, {}),
    "plan with o_data_type": (Paged, {"cached_o_data_type": torch.float16}, {}),
}


@pytest.mark.parametrize("reason", ASKED)
def test_what_no_op_has_is_flashinfers(reason: str) -> None:
    """Never ignored: definitions do not say a word of it, so a solution that knows no more would be wrong in
    silence."""
    cls, planned, options = ASKED[reason]
    if cls is None:
        q, k, v = random(4, 16), random(7, 2, 16), random(7, 2, 16)
        run: Any = lambda: flashinfer.single_decode_with_kv_cache(q, k, v, **options)  # noqa: E731
    else:
        wrapper, queries, caches = batch(cls, torch.float32, **planned)
        run = lambda: wrapper.run(queries, caches, **options)  # noqa: E731
    expected = run()
    with ours.enable():
        run()
        check(run(), expected)
    assert outcomes()[f"handed to flashinfer: {reason}"] == 1
    assert ours.report().served == 0


def test_a_solution_that_breaks_does_not_reach_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    """trace_apply raises what a solution raises. Ours computes the original's result, and says so once."""
    x, weight = random(3, 32), random(32)
    expected = flashinfer.rmsnorm(x, weight)

    def broken(**inputs: Tensor) -> Tensor:
        raise ZeroDivisionError("a bug")

    with caplog.at_level(logging.WARNING, "layerzero.flashinfer"), ours.enable([], solutions={"rmsnorm_h32": broken}):
        for _ in range(3):
            check(flashinfer.rmsnorm(x, weight), expected)
    assert outcomes() == {"handed to flashinfer: ZeroDivisionError": 3}
    assert caplog.text.count("rmsnorm_h32 is computed by flashinfer") == 1
    assert "a bug" in caplog.text


def test_no_backend_is_flashinfers_call() -> None:
    """A call that our broker refuses has its result."""
    x, weight = random(3, 32), random(32)
    expected = flashinfer.rmsnorm(x, weight)
    with ours.enable([], definitions=["rmsnorm_h32"]), lz.avoid("*"):
        check(flashinfer.rmsnorm(x, weight), expected)
    assert outcomes() == {"handed to flashinfer: error NO_BACKEND": 1}


def test_a_solution_of_ones_own_is_served() -> None:
    """It gets what trace_apply gives: the inputs of the definition."""
    with ours.enable([], solutions={"rmsnorm_h32": lambda hidden_states, weight: hidden_states + weight}):
        assert torch.equal(flashinfer.rmsnorm(torch.ones(2, 32), torch.ones(32)), torch.full((2, 32), 2.0))
    assert outcomes() == {"served": 1}


@pytest.mark.parametrize("kind", ours.KINDS)
def test_a_shadow_computes_both_and_returns_flashinfers(kind: str) -> None:
    """So does what is written in place: ours reads it first."""
    call = calls(torch.float32)[kind]
    expected = call()
    with ours.enable([kind], shadow=True):
        call()
        kernels.called.clear()
        check(call(), expected)
    assert kernels.called == [kind]
    assert outcomes()["shadow: the same"] == 1


def test_a_shadow_tells_differences(caplog: pytest.LogCaptureFixture) -> None:
    """Twice what a kernel may be off by is allowed, of float32 2e-5 of the largest magnitude."""
    x, weight = torch.ones(2, 32), torch.ones(32)
    off = {"none": 0.0, "little": 1e-5, "much": 4e-5, "all": math.nan}
    found = {}
    for name, by in off.items():
        solution = lambda hidden_states, weight, by=by: flashinfer.rmsnorm(hidden_states, weight) + by  # noqa: E731
        ours.clear()
        with ours.enable([], solutions={"rmsnorm_h32": solution}, shadow=True):
            assert flashinfer.rmsnorm(x, weight).isfinite().all()
        found[name] = next(iter(outcomes()))
    assert found == {
        "none": "shadow: the same",
        "little": "shadow: the same",
        "much": "shadow: differs",
        "all": "shadow: differs",
    }
    assert "ours differs from that of flashinfer: by 4" in caplog.text


def test_a_share_of_calls_is_ours() -> None:
    """Evenly spread, so that both see the same load."""
    x, weight = random(3, 32), random(32)
    with ours.enable([], definitions=["rmsnorm_h32"], share=0.25):
        for _ in range(20):
            flashinfer.rmsnorm(x, weight)
    assert outcomes() == {"served": 5, "left to flashinfer: share": 15}


def test_our_own_kernel_may_be_flashinfers() -> None:
    """A backend in this process calls flashinfer's functions for us: that call is not ours once more."""

    def solution(hidden_states: Tensor, weight: Tensor) -> Tensor:
        return flashinfer.rmsnorm(hidden_states, weight)

    kernels.called.clear()
    with ours.enable([], solutions={"rmsnorm_h32": solution}):
        flashinfer.rmsnorm(random(3, 32), random(32))
    assert kernels.called == ["rmsnorm"]
    assert outcomes() == {"served": 1}


def test_a_function_that_calls_another_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is served within a call is not taken for the call."""
    inner = flashinfer.activation.silu_and_mul

    @functools.wraps(inner)
    def outer(input: Tensor) -> Tensor:
        flashinfer.norm.rmsnorm(input, input[0])
        return inner(input)

    monkeypatch.setattr(flashinfer.activation, "silu_and_mul", outer)
    with ours.enable(["silu_and_mul"], definitions=["rmsnorm_h32"]) as switch:
        flashinfer.activation.silu_and_mul(random(3, 32))
        assert switch.definitions() == ("rmsnorm_h32", "silu_and_mul_h32")


def test_an_engine_that_has_imported_the_function_before() -> None:
    """`from flashinfer.norm import rmsnorm` in a module that is loaded: trace_apply alone does not reach it."""
    engine = types.ModuleType("an_engine")
    engine.rmsnorm = original = flashinfer.norm.rmsnorm  # type: ignore[attr-defined]
    sys.modules["an_engine"] = engine
    try:
        with ours.enable([], definitions=["rmsnorm_h32"]):
            engine.rmsnorm(random(3, 32), random(32))
        assert engine.rmsnorm is original
    finally:
        del sys.modules["an_engine"]
    assert outcomes() == {"served": 1}


def test_all_is_put_back() -> None:
    """Functions are the very ones that were there."""
    before = (flashinfer.rmsnorm, flashinfer.norm.rmsnorm, Decode.run, Paged.run)
    with ours.enable():
        flashinfer.rmsnorm(random(3, 32), random(32))
        assert flashinfer.rmsnorm is not before[0]
        assert flashinfer.rmsnorm is flashinfer.norm.rmsnorm
    assert (flashinfer.rmsnorm, flashinfer.norm.rmsnorm, Decode.run, Paged.run) == before


def test_threads() -> None:
    """Each has its own call under way, also while another learns."""
    x, weight = random(3, 32), random(32)
    expected = {h: flashinfer.rmsnorm(x[:, :h], weight[:h]) for h in range(8, 33, 8)}
    failures: list[BaseException] = []

    def run(h: int) -> None:
        try:
            while len(switch.definitions()) < len(expected) and not failures:
                check(flashinfer.rmsnorm(x[:, :h], weight[:h]), expected[h])
        except BaseException as error:
            failures.append(error)

    with ours.enable(["rmsnorm"]) as switch:
        threads = [threading.Thread(target=run, args=(h,)) for h in expected]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert switch.definitions() == tuple(sorted(f"rmsnorm_h{h}" for h in expected))
        check(flashinfer.rmsnorm(x, weight), expected[32])
    assert ours.report().served > 0


def test_anothers_solutions_are_not_replaced() -> None:
    """trace_apply has one table."""
    trace_apply.enable_apply({"rmsnorm_h32": lambda hidden_states, weight: hidden_states})
    try:
        with pytest.raises(lz.InvalidArgument, match="disable_apply"):
            ours.enable()
    finally:
        trace_apply.disable_apply()
    with ours.enable(), pytest.raises(lz.InvalidArgument, match=r"flashinfer\.disable\(\)"):
        ours.enable()


def test_another_trace_apply_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: a solution that cannot read a call's arguments would have to raise into the engine."""
    monkeypatch.setattr(trace_apply.apply, "_make_wrapper", lambda **options: None)
    with pytest.raises(lz.InvalidArgument, match=r"install flashinfer-python 0\.7"):
        ours.enable()
    assert not ours.is_enabled()


def test_what_fails_while_a_definition_is_learned_does_not_reach_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """flashinfer's functions are all back, and it is said."""
    before, broken = flashinfer.rmsnorm, RuntimeError("a bug")

    def fail(solutions: dict[str, Any]) -> int:
        raise broken

    x, weight = random(3, 32), random(32)
    expected = before(x, weight)
    ours.enable()
    monkeypatch.setattr(trace_apply, "enable_apply", fail)
    check(flashinfer.rmsnorm(x, weight), expected)
    assert flashinfer.rmsnorm is before
    assert not ours.is_enabled()
    assert "all calls are left to flashinfer" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"kinds": ["gelu"]}, "'gelu'"),
        ({"definitions": ["conv_h4"]}, "'conv_h4'"),
        ({"solutions": {"conv_h4": abs}}, "'conv_h4'"),
        ({"share": 2}, "share"),
        ({"share": "half"}, "share"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], words: str) -> None:
    """Nothing is put in."""
    with pytest.raises(lz.InvalidArgument, match=words):
        ours.enable(**arguments)
    assert not trace_apply.is_enabled()


def test_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    """LAYERZERO_DISABLE=1."""
    monkeypatch.setattr(running, "IS_DISABLED", True)
    before = flashinfer.rmsnorm
    with ours.enable():
        assert flashinfer.rmsnorm is before


def test_programs_that_torch_traces_keep_flashinfers_functions() -> None:
    """flashinfer's are ops of torch there."""
    x, weight = random(3, 32), random(32)
    compiled = torch.compile(lambda x: flashinfer.norm.rmsnorm(x, weight) + 1, backend="eager")
    with ours.enable([], definitions=["rmsnorm_h32"]):
        check(compiled(x), flashinfer.norm.rmsnorm.__wrapped__(x, weight) + 1)


def test_attributes_are_those_that_flashinfer_plans() -> None:
    """They are private, so a release may rename them: then calls would be handed over, each of them."""
    source = Path(definitions.__file__).read_text()
    required = set(re.findall(r'_planned\(wrapper, "(\w+)"\)', source)) | set(definitions._NOTHING)
    required |= {"_paged_kv_indices_buf", "_paged_kv_last_page_len_buf"}
    text = {cls: inspect.getsource(cls) for cls in (Decode, Paged, Ragged)}
    for name in (required | set(definitions._NOTHING_OPTIONAL)) - {"_planned"}:
        assert any(f"self.{name} = " in one for one in text.values()), name
    for name in definitions._NOTHING:
        assert all(f"self.{name} = " in one for one in text.values()), name


def test_arguments_are_those_of_flashinfer() -> None:
    """A new one that we do not know is handed over; the ones we do know must exist."""
    known = definitions._SCALES | definitions._INERT | definitions._MOOT
    have: set[str] = set()
    for kind in ours.KINDS.values():
        owner, name = applying._resolved(kind.api)
        have |= set(inspect.signature(getattr(owner, name)).parameters)
    assert known <= have
