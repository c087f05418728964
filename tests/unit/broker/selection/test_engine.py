"""What the engine is told, and what follows for rankings, errors and `lz status`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.simulation import CAPABILITIES, DEVICES, GPU, GPU_CAPABILITIES, route_body
from tests.simulation.backends import passed_probe

from layerzero.broker.selection import ranking
from layerzero.broker.selection.breaker import failure_signature
from layerzero.broker.selection.certification import Certification, Subject
from layerzero.broker.selection.compile_queue import Compilation, Job
from layerzero.broker.selection.policy import Layer, Policy
from layerzero.broker.selection.ranking import Engine
from layerzero.broker.selection.signature import CallSpec, Verdict
from layerzero.broker.selection.timings import PerfRow, Stat
from layerzero.capabilities.compile_unit import Unit
from layerzero.capabilities.context import SelectionContext
from layerzero.capabilities.descriptor import Capability
from layerzero.capabilities.device import DeviceSpec
from layerzero.capabilities.match import Rejection
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.errors import BackendError, InvalidArgument
from layerzero.ipc.transport.messages import Route, encode
from layerzero.ipc.vocabulary.tensors import TensorSpec

CPU = DeviceSpec(device_uuid="cpu-1")
BODY = route_body()
SUBJECT = Subject("alpha.silu", "float32", "plain/small/dense")
BOOM = BackendError("boom")


def engine(capabilities: dict[str, Capability] = CAPABILITIES, **more: Any) -> Engine:
    return Engine(capabilities, CPU, **more)


def policy(**values: Any) -> Policy:
    return Policy.of(Layer("test", values))


def changed(backend: str, op: str = "silu", **claims: Any) -> dict[str, Capability]:
    """The toy backends, one of whose kernels claims something else."""
    described = CAPABILITIES[backend].model_dump()
    described["ops"][op][0].update(claims)
    return {**CAPABILITIES, backend: Capability.model_validate(described)}


def ranked(one: Engine, body: bytes = BODY, now_s: float = 0.0, **down: Rejection) -> dict[str, Verdict]:
    spec = CallSpec.parse(body)
    return {verdict.backend: verdict for verdict in one.rank(spec, one.context(spec), down, now_s)}


def with_policy(values: dict[str, Any], **signature: str) -> bytes:
    """A route of a caller who asks for this."""
    spec = TensorSpec.contiguous("float32", (4,)).to_wire()
    overlay = {"layers": [{"origin": "a call", "values": values}]}
    return encode(Route(op="silu", inputs=[spec], outputs=[spec], attrs={}, policy=overlay, **signature))


def note(one: Engine, backend: str, us: float, *, now_s: float = 0.0, runs: int = 3) -> None:
    cell = one.cell(one.context(CallSpec.parse(BODY)))
    for _ in range(runs):
        one.note_time(f"{backend}.silu", cell, round(us * 1e3), now_s, is_clean=True)


# --- what makes rankings due again -----------------------------------------------------------------------------


def fail(one: Engine, now_s: float = 0.0) -> None:
    one.note_failure("alpha", "silu", BOOM, now_s)


CHANGES: dict[str, Callable[[Engine, str], object]] = {
    "policy": lambda one, _: one.set_policy(policy(strict_mode=True)),
    "table": lambda one, _: one.set_table(None),
    "certification": lambda one, _: one.set_certification(Certification({})),
    "compilation": lambda one, _: one.set_compilation(Compilation()),
    "environment": lambda one, text: one.note_env("alpha", text),
    "versions": lambda one, text: one.note_versions("alpha", {"lib": text}),
    "memory": lambda one, _: one.note_free_memory(7),
    "times": lambda one, _: one.load_times([PerfRow("alpha.silu", "key", Stat(5, 1.0, 1.0, 0.0, 0.0, 0.0))]),
    "failure": lambda one, _: fail(one),
    "repair": lambda one, _: one.forgive("alpha"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_can_change_a_ranking_makes_the_epoch_grow_each_time(name: str) -> None:
    """Signatures keep their ranking until then."""
    one = engine()
    one.note_versions("alpha", {"lib": "0"})
    for text in ("1", "2", "3"):
        before = one.epoch
        CHANGES[name](one, text)
        assert one.epoch > before


def test_what_changes_nothing_leaves_rankings_alone() -> None:
    """Each of them costs a ranking of every signature."""
    one = engine(envs={"alpha": "lock"})
    one.note_versions("beta", {"lib": "1"})
    before = one.epoch
    one.note_env("alpha", "lock")
    one.note_env("beta", "")
    one.note_versions("beta", {"lib": "1"})
    one.load_times([])
    one.note_success("alpha", "silu", 0.0)
    assert not one.reserve_trial("alpha", "silu", 0.0)
    assert one.epoch == before


def test_epochs_follow_a_breaker_through_its_trial() -> None:
    one = engine()
    for now_s in (0.0, 0.1, 0.2):
        fail(one, now_s)
    retry_s = one.health.next_change_s(0.3)
    before = one.epoch
    assert one.reserve_trial("alpha", "silu", retry_s)
    reserved = one.epoch
    assert not one.reserve_trial("alpha", "silu", retry_s)
    assert (reserved, one.epoch) == (before + 1, before + 1)
    one.note_success("alpha", "silu", retry_s)
    assert one.epoch > reserved


# --- the cache of verdicts ---------------------------------------------------------------------------------------


def test_verdicts_are_cached_by_the_call_and_by_what_serves_it() -> None:
    """Another environment, or other versions in it, are another library."""
    one = engine()
    for _ in range(3):
        ranked(one)
    assert (one.hits, one.misses) == (2, 1)
    one.note_env("alpha", "lock")
    ranked(one)
    one.note_versions("alpha", {"lib": "1"})
    ranked(one)
    assert (one.hits, one.misses) == (2, 3)
    one.note_env("alpha", "other")
    ranked(one)
    assert (one.hits, one.misses) == (2, 4)
    one.note_env("alpha", "lock")
    ranked(one)
    assert (one.hits, one.misses) == (3, 4)


def test_the_oldest_verdict_goes_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking, "MAX_VALIDITY", 2)
    one = engine()
    for dtype in ("float16", "float32", "float64"):
        ranked(one, route_body(dtype=dtype))
    ranked(one, route_body(dtype="float32"))
    ranked(one, route_body(dtype="float64"))
    assert (one.hits, one.misses) == (2, 3)
    ranked(one, route_body(dtype="float16"))
    assert one.misses == 4


def test_calls_of_one_size_share_a_bucket_of_times_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking, "MAX_CELLS", 2)
    one = engine()
    first, second, third = (
        one.cell(one.context(CallSpec.parse(route_body(dtype=dtype)))) for dtype in ("float16", "float32", "float64")
    )
    assert one.cell(one.context(CallSpec.parse(route_body(dtype="float32")))) is second
    assert one.cell(one.context(CallSpec.parse(route_body(dtype="float64")))) is third
    assert one.cell(one.context(CallSpec.parse(route_body(dtype="float16")))) is not first


# --- policy ------------------------------------------------------------------------------------------------------


def test_what_a_caller_asks_for_is_on_top_of_the_brokers_policy() -> None:
    """And holds for its calls alone."""
    one = engine(policy=policy(requires_deterministic=True))
    spec = CallSpec.parse(with_policy({"avoid_sources": ["alpha"]}))
    asked = one.policy_for(spec)
    assert asked.requires_deterministic
    assert one.policy_for(spec) is asked
    assert one.policy_for(CallSpec.parse(BODY)) is one.policy
    assert not ranked(one, with_policy({"avoid_sources": ["alpha"]}))["alpha"].is_accepted
    assert ranked(one)["alpha"].is_accepted
    one.set_policy(policy(strict_mode=True))
    again = one.policy_for(spec)
    assert (again.strict_mode, again.requires_deterministic) == (True, False)


def test_the_oldest_of_what_callers_ask_for_is_merged_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking, "MAX_POLICIES", 2)
    one = engine()
    specs = [CallSpec.parse(with_policy({"avoid_sources": [name]})) for name in ("alpha", "beta", "gamma")]
    first, second, third = map(one.policy_for, specs)
    assert one.policy_for(specs[2]) is third
    assert one.policy_for(specs[1]) is second
    assert one.policy_for(specs[0]) is not first


def test_a_bad_wish_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="a call: "):
        engine().policy_for(CallSpec.parse(with_policy({"no_such_key": 1})))


def test_a_context_has_what_policy_says() -> None:
    """Rules of descriptors look at it."""
    values = {"allow_jit_compile": False, "requires_deterministic": True, "memory_headroom_bytes": 1024}
    one = engine(policy=policy(**values))
    one.note_free_memory(4096)
    one.note_free_memory(5, GPU)
    context = one.context(CallSpec.parse(BODY))
    assert {name: getattr(context, name) for name in values} == values
    assert (context.policy_hash, context.free_memory_bytes) == (one.policy.hash, 4096)
    plain = engine()
    plain.note_free_memory(4096)
    context = plain.context(CallSpec.parse(BODY))
    assert (context.allow_jit_compile, context.requires_deterministic) == (True, False)
    assert (context.memory_headroom_bytes, context.free_memory_bytes) == (None, None), "it changes with each call"


def test_policy_judges_each_kernel_by_its_name_and_backend() -> None:
    rules = [{"prefer": ["gamma"], "bonus": 25}, {"avoid": ["beta.silu"]}]
    found = ranked(engine(policy=policy(rules=rules, weights={"policy": 2.0}, avoid_sources=["delta"])))
    assert {name: verdict.is_accepted for name, verdict in found.items()} == {
        "alpha": True,
        "beta": False,
        "gamma": True,
        "delta": False,
    }
    assert found["gamma"].terms["policy"] == 50.0
    assert "policy" not in found["alpha"].terms


@pytest.mark.parametrize(("mode", "may"), [("in_process", True), ("auto", True), ("subprocess", False)])
def test_isolation_says_whose_kernels_a_client_may_run_itself(mode: str, may: bool) -> None:
    """Those of one backend do not speak for another."""
    found = ranked(engine(policy=policy(backend_isolation={"beta": mode})))
    assert (found["alpha"].may_run_here, found["beta"].may_run_here) == (False, may)


# --- memory, devices -----------------------------------------------------------------------------------------------


def test_a_kernel_that_takes_too_much_memory_is_refused_with_the_numbers() -> None:
    one = engine(changed("alpha", workspace_bytes=3000), policy=policy(memory_headroom_bytes=1024))
    one.note_free_memory(4000)
    verdict = ranked(one)["alpha"]
    assert [reason.code for reason in verdict.reasons] == [Reason.MEMORY_HEADROOM_EXCEEDED]
    assert "needs 3000 bytes of 4000 free ones" in verdict.reasons[0].detail
    one.note_free_memory(4024)
    assert ranked(one)["alpha"].is_accepted
    one.note_free_memory(None)
    assert ranked(one)["alpha"].is_accepted


@pytest.mark.parametrize(
    ("more", "there_is"),
    [
        ({"gpus": [DEVICES[GPU], DeviceSpec("cuda", "two", device_uuid="GPU-2")]}, "it has GPU-1 (a GPU), GPU-2 (two)"),
        ({"no_gpus": "the driver is too old"}, "it has none: the driver is too old"),
        ({}, "it has none: none was looked for"),
    ],
)
def test_a_call_on_a_device_that_is_not_here_is_told_which_are(more: dict[str, Any], there_is: str) -> None:
    one = engine(**more)
    error = one.missing("GPU-9")
    assert error is not None
    assert error.message == f"this broker has no GPU 'GPU-9'; {there_is}"
    assert error.facts["device"] == "GPU-9"
    assert one.missing("") is None
    with pytest.raises(InvalidArgument, match="this broker has no GPU 'GPU-9'"):
        one.context(CallSpec.parse(route_body(device="GPU-9")))


def test_times_of_a_backend_are_valid_for_its_device() -> None:
    one = engine({**CAPABILITIES, "beta": GPU_CAPABILITIES["beta"]}, gpus=[DEVICES[GPU]])
    assert (one.device_for("alpha"), one.device_for("beta")) == (CPU, DEVICES[GPU])
    assert engine({"beta": GPU_CAPABILITIES["beta"]}).device_for("beta") == CPU


def test_kernels_of_an_op_are_listed_with_their_backends() -> None:
    one = engine()
    assert one.kernels("gelu") == (("alpha.gelu", "alpha"), ("beta.gelu", "beta"))
    assert one.kernels("softmax") == ()
    assert one.kernel("gamma.silu").kernel_id == "gamma.silu"


# --- certificates, compilation, health ---------------------------------------------------------------------------


def test_a_kernel_is_refused_for_the_class_of_calls_that_it_is_not_certified_for() -> None:
    """The class follows from outputs, attributes and dtypes as well."""
    one = engine()
    one.set_certification(Certification({"alpha": passed_probe("alpha")}))
    assert ranked(one)["alpha"].is_accepted
    one.set_certification(one.certification.with_quarantine(SUBJECT, "evidence"))
    assert [r.code for r in ranked(one)["alpha"].reasons] == [Reason.NOT_CERTIFIED]
    assert ranked(one, route_body(dtype="float64"))["alpha"].is_accepted
    assert ranked(one, route_body("gelu"))["alpha"].is_accepted
    dense, strided = TensorSpec.contiguous("float32", (2, 3)), TensorSpec("float32", (2, 3), (1, 2))
    body = encode(Route(op="silu", inputs=[dense.to_wire()], outputs=[strided.to_wire()], attrs={}))
    detail = ranked(one, body)["alpha"].reasons[-1].detail
    assert detail == "float32 of class plain/small/strided: no case of the probe covers it"


def test_a_probe_is_not_believed_about_kernels_of_other_backends() -> None:
    one = engine()
    one.set_certification(Certification({"beta": passed_probe("alpha")}))
    assert not one.certification.is_known("alpha.silu")
    fresh = engine()
    record = passed_probe("alpha")
    assert not fresh.certification.with_record(replace(record, env="beta")).is_known("alpha.silu")
    fresh.set_certification(fresh.certification.with_record(record))
    assert fresh.certification.is_known("alpha.silu")


JIT = changed("alpha", needs_jit=True, compiled_for=["dtypes"])
UNIT = Unit("alpha.silu", "dtypes=float32,float32")


def jit() -> Engine:
    one = engine(JIT)
    one.set_certification(Certification({"alpha": passed_probe("alpha")}))
    return one


def test_a_kernel_that_is_not_compiled_is_refused_for_that_with_its_unit() -> None:
    """It is what can be done about it; with other reasons against it, nothing is compiled."""
    one = jit()
    verdict = ranked(one)["alpha"]
    assert ([r.code for r in verdict.reasons], verdict.uncompiled) == ([Reason.NOT_COMPILED], UNIT)
    assert verdict.terms["priority"] == 60.0
    starting = Rejection(Reason.BACKEND_RESTARTING, "it restarts")
    assert ranked(one, alpha=starting)["alpha"].uncompiled == UNIT
    disabled = Rejection(Reason.BACKEND_DISABLED, "it died")
    assert ranked(one, alpha=disabled)["alpha"].uncompiled is None
    assert ranked(one, route_body(dtype="float16"))["alpha"].uncompiled is None
    one.set_compilation(Compilation({"alpha": [UNIT]}))
    assert (ranked(one)["alpha"].is_accepted, ranked(one)["alpha"].uncompiled) == (True, None)
    assert ranked(one, alpha=disabled)["alpha"].reasons == (disabled,)


def test_a_gpus_kernel_is_compiled_for_its_compute_capability() -> None:
    gpu = DeviceSpec("cuda", "a GPU", device_uuid=GPU, sm_version=90)
    described = GPU_CAPABILITIES["alpha"].model_dump()
    described["ops"]["silu"][0].update(needs_jit=True, compiled_for=["dtypes"])
    one = Engine({"alpha": Capability.model_validate(described)}, CPU, gpus=[gpu])
    one.set_certification(Certification({"alpha": passed_probe("alpha")}))
    uncompiled = ranked(one, route_body(device=GPU))["alpha"].uncompiled
    assert uncompiled == Unit("alpha.silu", "sm_90 dtypes=float32,float32")


def test_a_kernel_that_would_compile_at_its_first_call_costs_until_it_is_known_or_measured() -> None:
    """Before its probe nobody compiles for it."""
    one = engine(JIT)
    assert ranked(one)["alpha"].terms["jit"] == -50.0
    assert ranked(one)["alpha"].uncompiled is None
    assert "jit" not in ranked(one)["beta"].terms
    note(one, "alpha", 9.0)
    assert "jit" not in ranked(one)["alpha"].terms
    known = jit()
    known.set_compilation(Compilation({"alpha": [UNIT]}))
    assert "jit" not in ranked(known)["alpha"].terms


def test_a_repair_forgives_failures_compilations_and_quarantines_of_its_backend() -> None:
    one = jit()
    one.compilation.ask(Job("alpha", UNIT, b""))
    one.compilation.end("alpha", UNIT, "no compiler")
    other = Unit("beta.silu", "any call")
    one.compilation.ask(Job("beta", other, b""))
    one.compilation.end("beta", other, "no compiler")
    kept = SUBJECT._replace(kernel_id="beta.silu")
    one.set_certification(one.certification.with_quarantines({SUBJECT: "evidence", kept: "evidence"}))
    fail(one)
    one.note_failure("beta", "silu", BOOM, 0.0)
    one.forgive("alpha")
    assert one.health.places() == (("beta", "silu", "cpu-1"),)
    assert dict(one.compilation.failures) == {other: "no compiler"}
    assert dict(one.certification.quarantined) == {kept: "evidence"}


def test_a_last_resort_says_when_it_is_tried_again_and_what_failed() -> None:
    one = engine()
    for now_s in (100.0, 100.1, 100.2):
        fail(one, now_s)
    retry_s = one.health.next_change_s(100.2)
    signature = failure_signature("BACKEND_ERROR", "boom")
    verdict = ranked(one, now_s=101.0)["alpha"]
    assert verdict.notes == (f"last resort, until {retry_s - 101.0:.1f} s from now: failed 3 times, last: {signature}",)
    assert (verdict.is_last_resort, verdict.is_on_trial) == (True, False)
    assert verdict.terms["reliability"] < 0.0
    verdict = ranked(one, now_s=retry_s)["alpha"]
    assert verdict.notes == (f"last resort, one call may try it now: failed 3 times, last: {signature}",)
    assert (verdict.is_last_resort, verdict.is_on_trial) == (False, True)


# --- times ---------------------------------------------------------------------------------------------------------


def test_the_first_run_of_a_kernel_on_a_size_is_kept_apart() -> None:
    """It may load, compile and fill caches."""
    one = engine()
    note(one, "alpha", 900.0, runs=1)
    assert ranked(one)["alpha"].measured_us is None
    note(one, "alpha", 10.0, now_s=5.0, runs=1)
    assert ranked(one)["alpha"].measured_us == 10.0
    one.note_time("alpha.silu", one.cell(one.context(CallSpec.parse(BODY))), 1, 6.0, is_clean=False)
    stat = one.perf.stat("alpha.silu", one.context(CallSpec.parse(BODY)).perf_key())
    assert stat is not None
    assert (stat.count, stat.warmup_ms, stat.measured_at_s) == (1, 0.9, 5.0)


def test_times_that_were_stored_are_ranked_by() -> None:
    one = engine()
    key = one.context(CallSpec.parse(BODY)).perf_key()
    rows = [PerfRow(f"{name}.silu", key, Stat(9, us, us, 0.0, 0.0, 0.0)) for name, us in (("alpha", 900), ("beta", 9))]
    one.load_times(iter(rows))
    assert next(iter(ranked(one))) == "beta"
    assert one.epoch == 1


# --- the order, and what is told -------------------------------------------------------------------------------------


def test_accepted_ones_come_first_and_equals_by_name() -> None:
    down = Rejection(Reason.BACKEND_DISABLED, "it died")
    assert list(ranked(engine(), alpha=down)) == ["beta", "gamma", "delta", "alpha"]
    same = {name: changed(name, priority=50)[name] for name in reversed(CAPABILITIES)}
    assert list(ranked(engine(same))) == ["alpha", "beta", "delta", "gamma"]


def test_reasons_of_a_pinned_call_name_the_backend_and_what_it_serves() -> None:
    verdicts = ranked(engine(), route_body(backend="beta"))
    assert verdicts["alpha"].reasons == (Rejection(Reason.NOT_PINNED, "the call is pinned to 'beta'"),)
    described = CAPABILITIES["beta"].model_dump()
    del described["ops"]["silu"]
    described["ops"]["softmax"] = [{**described["ops"]["gelu"][0], "kernel_id": "beta.softmax"}]
    one = engine({**CAPABILITIES, "beta": Capability.model_validate(described)})
    assert ranked(one, route_body(backend="beta"))["beta"].reasons == (
        Rejection(Reason.OP_UNSUPPORTED, "beta serves gelu, softmax"),
    )


def test_a_plan_that_has_no_bucket_for_a_call_is_named_with_it() -> None:
    class Table:
        def lookup(self, context: SelectionContext) -> str | None:
            return "gamma.silu" if context.dtype == "float32" else None

        def covers(self, device: DeviceSpec) -> bool:
            return True

    one = engine(JIT, policy=policy(plan_mode=True), gpus=[DEVICES[GPU]])
    one.set_certification(Certification({"alpha": passed_probe("alpha")}))
    one.set_table(Table())
    assert ranked(one)["gamma"].terms["table"] == 2000.0
    body = route_body(dtype="float64")
    missed = ranked(one, body)
    text = f"plan_mode is on and the dispatch table has no bucket for {one.context(CallSpec.parse(body)).perf_key()}"
    assert missed["beta"].others == (Rejection(Reason.PLAN_BUCKET_MISS, text),)
    assert missed["alpha"].uncompiled is None, "nothing is compiled for a call that the plan refuses"
    one.set_table(None)
    assert ranked(one, body)["beta"].is_accepted


def test_status_tells_what_is_known_and_what_fails() -> None:
    one = jit()
    note(one, "beta", 5.0)
    ranked(one)
    ranked(one)
    other = Unit("beta.silu", "any call")
    one.compilation.ask(Job("alpha", UNIT, b""))
    one.compilation.ask(Job("beta", other, b""))
    one.compilation.end("beta", other, "no compiler")
    one.set_certification(one.certification.with_quarantine(SUBJECT, "evidence"))
    fail(one)
    assert one.facts() == {
        "policy": one.policy.hash,
        "times": 1,
        "verdicts": {"entries": 1, "hits": 1, "misses": 1},
        "compiled": {
            "units": 0,
            "running": [{"kernel_id": "alpha.silu", "calls": "dtypes=float32,float32"}],
            "failed": [{"kernel_id": "beta.silu", "calls": "any call", "why": "no compiler"}],
        },
        "quarantined": {str(SUBJECT): "evidence"},
        "failing": [{"backend": "alpha", "op": "silu", "kinds": {failure_signature("BACKEND_ERROR", "boom"): 1}}],
    }
    assert engine(refused={"theirs": "no such op"}).refused == {"theirs": "no such op"}
