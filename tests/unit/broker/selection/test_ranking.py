"""Who may serve a call, in which order, and why not the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulation import CAPABILITIES, DEVICES, GPU, GPU_CAPABILITIES, route_body

from layerzero.broker.selection.explain import explain
from layerzero.broker.selection.policy import Layer, Policy
from layerzero.broker.selection.prices import GPU_TIE_US, TIE_US
from layerzero.broker.selection.ranking import Engine
from layerzero.broker.selection.signature import CallSpec, Verdict, no_backend
from layerzero.capabilities import descriptor
from layerzero.capabilities.context import SelectionContext
from layerzero.capabilities.descriptor import Capability
from layerzero.capabilities.device import DeviceSpec
from layerzero.capabilities.match import Rejection
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.errors import BackendError
from layerzero.ipc.transport.messages import Route, encode
from layerzero.ipc.vocabulary.tensors import TensorSpec

DESCRIPTORS = sorted((Path(descriptor.__file__).parent / "descriptors").glob("*.json"))
OURS = {path.stem: descriptor.load(path) for path in DESCRIPTORS}
CPU = DeviceSpec(device_uuid="cpu-1")


def engine(capabilities: dict[str, Capability] = CAPABILITIES, **more: Any) -> Engine:
    return Engine(capabilities, CPU, **more)


def ranked(one: Engine, body: bytes = route_body(), now_s: float = 0.0, **down: Rejection) -> list[Verdict]:
    spec = CallSpec.parse(body)
    return list(one.rank(spec, one.context(spec), down, now_s))


def order(one: Engine, body: bytes = route_body(), now_s: float = 0.0, **down: Rejection) -> list[str]:
    return [v.backend for v in ranked(one, body, now_s, **down) if v.is_accepted]


def measured(one: Engine, body: bytes = route_body(), **times_us: float) -> None:
    """Two runs each: the first one warms up."""
    cell = one.cell(one.context(CallSpec.parse(body)))
    for backend, us in times_us.items():
        for _ in range(3):
            one.note_time(f"{backend}.silu", cell, round(us * 1e3), 0.0, is_clean=True)


def softmax(*shape: int, strides: tuple[int, ...] | None = None, dtype: str = "float32") -> bytes:
    dense = TensorSpec.contiguous(dtype, shape)
    x = dense if strides is None else TensorSpec(dtype, shape, strides)
    attrs = {"dim": len(shape) - 1, "dtype": ""}
    return encode(Route(op="softmax", inputs=[x.to_wire()], outputs=[dense.to_wire()], attrs=attrs))


def test_without_times_priority_decides() -> None:
    """The descriptor's author knows the library."""
    assert order(engine()) == ["alpha", "beta", "gamma", "delta"]


def test_a_kernel_that_takes_half_the_time_wins_over_priority() -> None:
    """A measurement on this machine knows more than a descriptor."""
    one = engine()
    measured(one, alpha=900.0, beta=400.0)
    assert order(one)[0] == "beta"
    assert ranked(one)[0].measured_us == 400.0


def test_times_that_differ_by_noise_are_a_tie() -> None:
    """Else calls would wander between backends from one start to the next."""
    one = engine()
    measured(one, alpha=20.0 + TIE_US, beta=20.0)
    assert order(one)[0] == "alpha"


@pytest.mark.parametrize(("slower", "first"), [(1.015, "alpha"), (1.05, "beta")])
def test_noise_of_long_kernels_is_a_share_of_their_time(slower: float, first: str) -> None:
    """A twentieth of a call's time is worth another backend; less than a fiftieth is not to be told from noise."""
    one = engine()
    measured(one, alpha=1000.0 * slower, beta=1000.0)
    assert order(one)[0] == first


def test_noise_is_less_on_a_gpu() -> None:
    """Its kernels take some us, and its clock tells them apart."""
    body = route_body(device=GPU)
    one = engine(GPU_CAPABILITIES, gpus=[DEVICES[GPU]])
    measured(one, body, alpha=6.0 + GPU_TIE_US, beta=6.0)
    assert order(one, body)[0] == "alpha"
    measured(one, body, alpha=8.5, beta=6.0)
    assert order(one, body)[0] == "beta"
    measured(one, body, alpha=36.5, beta=36.0)
    assert order(one, body)[0] == "beta"


def test_a_kernel_that_was_never_measured_gets_its_chance() -> None:
    """Else the kernel that ran first would win for ever, however slow."""
    one = engine()
    measured(one, beta=900.0)
    assert order(one)[:2] == ["alpha", "beta"]


def test_a_ranking_is_due_again_when_a_kernels_samples_double() -> None:
    """Decisions follow what is learned, and steady calls are not ranked each time."""
    one = engine()
    cell = one.cell(one.context(CallSpec.parse(route_body())))
    seen = []
    for _ in range(8):
        one.note_time("alpha.silu", cell, 1000, 0.0, is_clean=True)
        seen.append(cell.generation)
    assert seen == [1, 2, 2, 3, 3, 3, 3, 4]


def test_rejected_ones_come_last_with_all_their_reasons() -> None:
    """A report that stops at the first reason sends its reader round in circles."""
    down = Rejection(Reason.BACKEND_DISABLED, "died; repair: lz env probe alpha")
    verdicts = ranked(engine(), route_body(dtype="float16", backend="beta"), alpha=down)
    assert not any(v.is_accepted for v in verdicts)
    codes = {v.backend: [r.code for r in v.reasons] for v in verdicts}
    assert codes["alpha"] == [Reason.DTYPE_UNSUPPORTED, Reason.NOT_PINNED, Reason.BACKEND_DISABLED]
    assert codes["beta"] == [Reason.DTYPE_UNSUPPORTED]


def test_details_are_those_of_the_call_also_from_the_cache() -> None:
    """Calls of many sizes share an entry of the validity cache; none may be told another's shape."""
    one = engine(OURS)
    for shape in ((4, 0), (5, 0)):
        (verdict,) = (v for v in ranked(one, softmax(*shape)) if v.backend == "onnxruntime")
        assert any(str(list(shape)) in r.detail for r in verdict.reasons)
    assert (one.hits, one.misses) == (1, 1)


def test_backend_without_the_op_is_named_when_it_is_pinned() -> None:
    """An empty list of candidates would explain nothing."""
    (verdict,) = (v for v in ranked(engine(), route_body("gelu", backend="gamma")) if v.backend == "gamma")
    assert verdict.reasons == (Rejection(Reason.OP_UNSUPPORTED, "gamma serves silu"),)


def test_score_is_the_sum_of_its_terms() -> None:
    """Each term is in the report: nobody has to guess where a score comes from."""
    one = engine()
    measured(one, alpha=200.0, beta=100.0)
    one.note_failure("alpha", "silu", BackendError("boom"), 0.0)
    (alpha,) = (v for v in ranked(one) if v.backend == "alpha")
    assert set(alpha.terms) == {"priority", "perfdb", "reliability"}
    assert alpha.terms["perfdb"] == pytest.approx(500.0)
    assert alpha.score == pytest.approx(sum(alpha.terms.values()))


def test_a_kernel_that_keeps_failing_is_the_last_resort_until_one_call_may_try_it() -> None:
    """Nobody waits for the same failure again and again, and it comes back by itself."""
    one = engine()
    for now_s in (0.0, 0.1, 0.2):
        one.note_failure("alpha", "silu", BackendError("boom 0x7f"), now_s)
    assert order(one, now_s=0.3) == ["beta", "gamma", "delta", "alpha"]
    alpha = ranked(one, now_s=0.3)[-1]
    assert alpha.is_last_resort
    assert any("boom" in note for note in alpha.notes)
    retry_s = one.health.next_change_s(0.3)
    assert order(one, now_s=retry_s)[0] == "alpha"
    assert one.reserve_trial("alpha", "silu", retry_s)
    assert order(one, now_s=retry_s)[-1] == "alpha"
    one.note_success("alpha", "silu", retry_s + 0.1)
    assert order(one, now_s=retry_s + 0.2)[0] == "alpha"


def test_inputs_that_a_copy_mends_are_adapted_and_the_copy_is_counted() -> None:
    """A strided input must not rule out the only backend, nor cost anything in silence."""
    one = engine({"onnxruntime": OURS["onnxruntime"]})
    (verdict,) = ranked(one, softmax(512, 1024, strides=(2048, 2)))
    assert verdict.is_accepted
    assert verdict.transforms == ("contiguous x",)
    assert verdict.terms["transform"] == -2.0  # 2 MiB


def test_other_library_versions_void_what_was_decided_and_measured() -> None:
    """A library that was upgraded under a running broker is another library."""
    one = engine()
    one.note_versions("alpha", {"lib": "1"})
    measured(one, alpha=10.0)
    ranked(one)
    epoch, misses = one.epoch, one.misses
    one.note_versions("alpha", {"lib": "2"})
    ranked(one)
    assert one.epoch > epoch
    assert one.misses == misses + 1
    assert next(v for v in ranked(one) if v.backend == "alpha").measured_us is None


def test_a_kernel_that_does_the_next_op_as_well_is_worth_more() -> None:
    """Only where that op really follows; which ones, the report says."""
    described = CAPABILITIES["beta"].model_dump()
    described["ops"]["silu"][0]["fuses_ops"] = ["matmul", "gelu"]
    weights = {"weights": {"fusion": 25}}
    one = engine({**CAPABILITIES, "beta": Capability.model_validate(described)}, policy=Policy.of(Layer("t", weights)))
    assert order(one)[0] == "alpha"
    x = TensorSpec.contiguous("float32", (4,)).to_wire()
    body = encode(Route(op="silu", inputs=[x], outputs=[x], attrs={}, next_ops=["matmul", "softmax"]))
    best = ranked(one, body)[0]
    assert (best.backend, best.terms["fusion"], best.fused_ops) == ("beta", 25.0, ("matmul",))


def test_explain_says_what_would_make_a_rejected_kernel_eligible_and_what_it_saves() -> None:
    """Why not is half an answer."""
    one = engine()
    measured(one, body=route_body(dtype="float32"), alpha=30.0)
    spec = CallSpec.parse(route_body(dtype="float16"))
    _, candidates = explain(one, spec, {}, 0.0)
    alpha = next(c for c in candidates if c["backend"] == "alpha")
    assert alpha["accepted"] is False
    assert "float32" in alpha["fix"]
    assert alpha["fix_saves_us"] is None  # nobody serves the call as it is: nothing to compare with


def test_kernels_that_refuse_for_no_reason_of_the_call_are_of_a_group() -> None:
    """Fifteen of them are one line for whoever reads the report; those with reasons of the call stay alone."""
    one = engine({name: OURS[name] for name in ("torch", "onnxruntime", "torch-cuda")})
    here = {"torch-cuda": Rejection(Reason.NOT_FOR_MACHINE, "needs an NVIDIA GPU, and this machine has none")}
    body = softmax(64, 64, dtype="bfloat16")
    groups = {v.backend: v.group for v in ranked(one, body, **here)}
    assert groups == {"torch": "", "onnxruntime": "", "torch-cuda": "need an NVIDIA GPU"}
    on_gpu_machine = {v.backend: v.group for v in ranked(one, body)}
    assert on_gpu_machine["torch-cuda"] == "need tensors on an NVIDIA GPU"


@pytest.mark.parametrize(
    ("code", "group"), [(Reason.NOT_FOR_MACHINE, "need other hardware"), (Reason.NOT_RUN, "need a first run")]
)
def test_kernels_that_nobody_has_run_are_of_a_group_and_of_no_advice(code: Reason, group: str) -> None:
    """They take the CPU's tensors: without a certificate of this machine nothing else keeps them from a call."""
    one = engine({name: OURS[name] for name in ("torch", "torch-xpu")})
    body = softmax(64, 64)
    left_alone = {v.backend: v for v in ranked(one, body, **{"torch-xpu": Rejection(code, "left alone")})}
    assert (left_alone["torch-xpu"].group, left_alone["torch-xpu"].repair) == (group, "")
    tried = ranked(one, body)
    assert [(v.backend, v.is_accepted) for v in tried] == [("torch", True), ("torch-xpu", True)]


def test_error_of_an_unserved_call_begins_with_what_helps() -> None:
    """First the repair or the change of the call, last those that nobody can help."""
    one = engine({name: OURS[name] for name in ("onnxruntime", "torch-cuda", "torch")})
    spec = CallSpec.parse(softmax(64, 64, dtype="bfloat16"))
    here = {"torch-cuda": Rejection(Reason.NOT_FOR_MACHINE, "needs an NVIDIA GPU, and this machine has none")}
    down = {"torch": Rejection(Reason.NOT_INSTALLED, "its environment is not built", "lz env build torch"), **here}
    error = no_backend(spec, one.rank(spec, one.context(spec), down, 0.0), one.capabilities, {})
    assert error.message.splitlines() == [
        "softmax: no kernel accepts this call; repair: lz env build torch",
        "  torch.softmax: NOT_INSTALLED: its environment is not built; repair: lz env build torch",
        "  onnxruntime.softmax: DTYPE_UNSUPPORTED: x is bfloat16; allowed: float32, float64, float16",
        "  1 kernel needs an NVIDIA GPU",
    ]
    assert error.facts == {"repair": "lz env build torch"}
    one = engine({name: OURS[name] for name in ("onnxruntime", "torch-cuda")})
    error = no_backend(spec, one.rank(spec, one.context(spec), here, 0.0), one.capabilities, {})
    assert error.message.splitlines()[0].startswith(
        "softmax: no kernel accepts this call; for onnxruntime.softmax: cast x bfloat16->"
    )


def test_a_fix_is_worth_what_was_measured_of_the_changed_call() -> None:
    """A cast that makes a call slower is no advice; one that halves it is."""
    one = engine({"torch": OURS["torch"], "onnxruntime": OURS["onnxruntime"]})
    for dtype, kernel_id, us in (("bfloat16", "torch.softmax", 90.0), ("float32", "onnxruntime.softmax", 30.0)):
        cell = one.cell(one.context(CallSpec.parse(softmax(64, 64, dtype=dtype))))
        for _ in range(3):
            one.note_time(kernel_id, cell, round(us * 1e3), 0.0, is_clean=True)
    _, candidates = explain(one, CallSpec.parse(softmax(64, 64, dtype="bfloat16")), {}, 0.0)
    other = next(c for c in candidates if c["backend"] == "onnxruntime")
    assert "cast" in other["fix"]
    assert other["fix_saves_us"] == 60.0


def test_a_table_beats_measured_times_and_plan_mode_refuses_what_it_does_not_cover() -> None:
    """A plan that was baked for deployment is followed to the letter, or not at all."""

    class Table:
        def lookup(self, context: SelectionContext) -> str | None:
            return "gamma.silu" if context.dtype == "float32" else None

        def covers(self, device: DeviceSpec) -> bool:
            return is_covered

    is_covered = True
    one = engine(policy=Policy.of(Layer("test", {"plan_mode": True})))
    one.set_table(Table())
    measured(one, alpha=1.0, gamma=900.0)
    assert order(one)[0] == "gamma"
    verdicts = ranked(one, route_body(dtype="float64"))
    assert {r.code for v in verdicts for r in v.reasons} == {Reason.PLAN_BUCKET_MISS}
    is_covered = False  # a device that was not measured is left to the ranking
    one.set_table(Table())
    assert all(v.is_accepted for v in ranked(one, route_body(dtype="float64")))
    assert order(one)[0] == "alpha"


extents = st.integers(0, 40)
dtypes = st.sampled_from(["float64", "float32", "float16", "bfloat16"])


@st.composite
def calls(draw: st.DrawFn) -> bytes:
    rows, columns = draw(extents), draw(extents)
    step = draw(st.integers(1, 2))
    return softmax(rows, columns, strides=(columns * step + draw(st.integers(0, 1)), step), dtype=draw(dtypes))


@settings(deadline=None)  # a busy machine is no defect
@given(st.lists(calls(), min_size=1, max_size=12))
def test_a_cached_verdict_is_the_one_that_a_fresh_engine_gives(bodies: list[bytes]) -> None:
    """Calls share an entry of the validity cache only when no kernel tells them apart."""
    shared = engine(OURS)
    for body in bodies:
        fresh = engine(OURS)
        assert [v.to_wire() for v in ranked(shared, body)] == [v.to_wire() for v in ranked(fresh, body)]


def attention(tokens: int) -> bytes:
    x = TensorSpec.contiguous("float32", (1, 1, tokens, 8)).to_wire()
    attrs = {"is_causal": False, "scale": 1.0, "causal_alignment": "top_left", "layout": "BHSD"}
    return encode(Route(op="attention", inputs=[x, x, x, None, None, None], outputs=[x], attrs=attrs))


def test_calls_on_both_sides_of_a_limit_on_length_share_no_verdict() -> None:
    """The cache tells lengths apart by the kernels' limits alone."""
    described = CAPABILITIES["alpha"].model_dump()
    claims = {**described["ops"]["silu"][0], "kernel_id": "alpha.attention", "max_seq_len": 16}
    claims |= {"requires_layouts": ["BHSD"], "causal_alignments": ["top_left"], "masked_rows": "zero"}
    one = engine({"alpha": Capability.model_validate({**described, "ops": {"attention": [claims]}})})
    served = [bool(order(one, attention(tokens))) for tokens in (4, 16, 17, 900)]
    assert served == [True, True, False, False]
    assert (one.hits, one.misses) == (2, 2)


def test_an_op_that_nobody_serves_has_no_candidates() -> None:
    """And is no error here: the call's own tells it."""
    assert ranked(engine(), attention(4)) == []
    assert engine().kernels("attention") == ()


@pytest.mark.parametrize("values", [{"strict_mode": True}, {"allow_adaptation": False}])
def test_no_copy_is_made_where_policy_forbids_it(values: dict[str, bool]) -> None:
    """The kernel is refused for the strides, then."""
    one = engine({"onnxruntime": OURS["onnxruntime"]}, policy=Policy.of(Layer("test", values)))
    (verdict,) = ranked(one, softmax(512, 1024, strides=(2048, 2)))
    assert not verdict.is_accepted
    assert verdict.transforms == ()


def test_a_rejected_kernel_has_no_score_and_tells_its_copies() -> None:
    """What a report says of it is what it would need."""
    one = engine({"onnxruntime": OURS["onnxruntime"]})
    body = softmax(512, 1024, strides=(2048, 2))
    down = Rejection(Reason.BACKEND_DISABLED, "died")
    (verdict,) = ranked(one, body, onnxruntime=down)
    assert (verdict.reasons, verdict.transforms, verdict.terms) == ((down,), ("contiguous x",), {})
    two = engine()
    measured(two, alpha=5.0, beta=9.0)
    terms = {v.backend: set(v.terms) for v in ranked(two, alpha=down)}
    assert terms["alpha"] == set()
    assert terms["beta"] == {"priority", "perfdb"}


@pytest.mark.parametrize(("slower", "is_tie"), [(1.004, True), (1.006, False)])
def test_noise_of_long_kernels_on_a_gpu_is_a_share_of_their_time_too(slower: float, is_tie: bool) -> None:
    body = route_body(device=GPU)
    one = engine(GPU_CAPABILITIES, gpus=[DEVICES[GPU]])
    measured(one, body, alpha=1000.0 * slower, beta=1000.0)
    times = {v.backend: v.terms["perfdb"] for v in ranked(one, body)}
    assert (times["alpha"] == times["beta"]) == is_tie


def test_a_table_says_nothing_of_devices_that_it_was_not_solved_for() -> None:
    class Table:
        def lookup(self, context: SelectionContext) -> str | None:
            return "delta.silu"

        def covers(self, device: DeviceSpec) -> bool:
            return device.device_type == "cpu"

    one = engine(GPU_CAPABILITIES, gpus=[DEVICES[GPU]])
    one.set_table(Table())
    assert order(one, route_body(device=GPU))[0] == "alpha"


def test_each_op_that_a_kernel_does_as_well_counts() -> None:
    described = CAPABILITIES["beta"].model_dump()
    described["ops"]["silu"][0]["fuses_ops"] = ["matmul", "gelu"]
    one = engine({**CAPABILITIES, "beta": Capability.model_validate(described)})
    x = TensorSpec.contiguous("float32", (4,)).to_wire()
    body = encode(Route(op="silu", inputs=[x], outputs=[x], attrs={}, next_ops=["matmul", "gelu"]))
    beta = next(v for v in ranked(one, body) if v.backend == "beta")
    assert (beta.terms["fusion"], beta.fused_ops) == (2.0, ("matmul", "gelu"))
    assert beta.kernel is one.kernel("beta.silu")


def on_gpu() -> bytes:
    x = TensorSpec.contiguous("float32", (64, 64)).to_wire()
    return encode(Route(op="silu", inputs=[x], outputs=[x], attrs={}, device=GPU))


def test_a_kernel_that_stays_in_its_worker_pays_for_the_way() -> None:
    """5 us faster is not worth two changes between processes. One that only was not lifted yet pays nothing: else the
    first that was lifted would win for ever."""
    one = engine(GPU_CAPABILITIES, gpus=[DEVICES[GPU]])
    cell = one.cell(one.context(CallSpec.parse(on_gpu())))
    first, *others = kernels = [v.kernel_id for v in ranked(one, on_gpu()) if v.is_accepted]
    for rank, kernel_id in enumerate(kernels):
        for _ in range(3):
            one.note_time(kernel_id, cell, 15_000 + 5_000 * rank, 0.0, is_clean=True)
    assert [v.kernel_id for v in ranked(one, on_gpu()) if v.is_accepted] == kernels
    before = one.epoch
    one.note_staying(first, cell, "NOT_CAPTURABLE")
    assert one.epoch > before
    found = [v for v in ranked(one, on_gpu()) if v.is_accepted]
    assert [v.kernel_id for v in found] == [*others, first]
    assert "is not lifted (NOT_CAPTURABLE): 300 us more" in "; ".join(found[-1].notes)
    for kernel_id in others:
        one.note_staying(kernel_id, cell, "NOT_CAPTURABLE")
    assert [v.kernel_id for v in ranked(one, on_gpu()) if v.is_accepted] == kernels, "nobody is lifted: all pay"


# --- versions beside a backend


def with_version() -> Engine:
    """alpha, and a version of it that is preferred by its priority."""
    base = CAPABILITIES["alpha"]
    renamed = {
        op: [{**k.model_dump(), "kernel_id": f"alpha@2{k.kernel_id.removeprefix('alpha')}", "priority": 99} for k in ks]
        for op, ks in base.ops.items()
    }
    version = Capability.model_validate({**base.model_dump(), "backend": "alpha@2", "ops": renamed})
    return engine({**CAPABILITIES, "alpha@2": version})


@pytest.mark.parametrize(
    ("values", "first"),
    [
        ({}, "alpha"),
        ({"allow_sources": ["*"]}, "alpha"),
        ({"allow_sources": ["alpha"]}, "alpha"),
        ({"allow_sources": ["alpha*"]}, "alpha"),
        ({"avoid_sources": ["alpha", "alpha@3"]}, "beta"),
        ({"avoid_sources": ["beta@2"]}, "alpha"),
        ({"allow_sources": ["alpha@2"]}, "alpha@2"),
        ({"allow_sources": ["alpha@*", "alpha"]}, "alpha@2"),
        ({"allow_kernels": ["alpha@2.silu"]}, "alpha@2"),
        ({"rules": [{"prefer": ["alpha@2"]}]}, "alpha@2"),
        ({"rules": [{"match": {"op": "matmul"}, "prefer": ["alpha@2"]}]}, "alpha"),
        ({"locks": {"silu": "alpha@2.silu"}}, "alpha@2"),
    ],
)
def test_a_version_serves_calls_whose_policy_names_it(values: dict[str, Any], first: str) -> None:
    """Whoever builds an old one to compare with does not want to be served by it."""
    one = with_version()
    one.set_policy(Policy.of(Layer("test", values)))
    assert order(one)[0] == first


def test_a_version_serves_a_call_that_is_pinned_to_it() -> None:
    one = with_version()
    assert order(one, route_body(backend="alpha@2")) == ["alpha@2"]
    assert order(one, route_body(backend="alpha")) == ["alpha"]


def test_a_version_that_nobody_names_says_how_to() -> None:
    reasons = next(v for v in ranked(with_version()) if v.backend == "alpha@2").reasons
    assert [(r.code, r.repair) for r in reasons] == [(Reason.VERSION_NOT_NAMED, "backend='alpha@2'")]
