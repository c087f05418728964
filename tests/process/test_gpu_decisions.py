"""What decides about kernels, for arrays on a GPU: it asks for that GPU's kernels, measures there, and says so where it
cannot. On the GPU of threads (tests/soft_gpu); tests/gpu/test_decisions.py is the same on a real one."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.process.gpu_site import SOFT, broker, close, connected, finish, held, new_site, randn, silu, slow, soft
from tests.process.harness import BACKENDS, PATIENCE_S, ROOT, Site
from tests.process.test_cli import USAGE, Finished, data
from tests.process.test_cli import lz as lz_command
from tests.soft_gpu import soft_cupy, soft_gpu, soft_numpy

import layerzero as lz
from layerzero.broker.selection import dispatch_table
from layerzero.client.arrays.recognition import describe
from layerzero.client.gpu.own_arrays import GpuArray
from layerzero.client.tools.calls import calls_of
from layerzero.client.tools.dry_run import find_attention
from layerzero.client.tools.inputs import random_inputs
from layerzero.client.tools.trace import imagine
from layerzero.client.tools.tune import MIN_ROUNDS
from layerzero.ipc.transport import messages
from layerzero.ipc.vocabulary.tensors import TensorSpec

__all__ = ["broker", "connected", "new_site", "soft"]

SPEC = TensorSpec.contiguous("float32", (8, 16))


def block(x: Any) -> Any:
    return lz.silu(lz.matmul(lz.silu(x), x))


# --- which device is meant


def test_a_call_has_the_device_of_its_arrays(connected: Site) -> None:
    """Its explanation is that of lz.explain; it was that of the CPU's kernels, without a word."""
    x, _ = randn(8, 16)
    call = lz.Call.of("silu", x)
    assert (call.device, call.label) == ("cuda:0", "silu(8x16:float32) on cuda:0")
    assert call.explain().kernel_id == lz.explain("silu", x).kernel_id == "one.silu"
    assert lz.Call.of("silu", np.ones(4, np.float32)).device == "cpu"


@pytest.mark.parametrize("device", ["cuda", "cuda:0", soft_gpu.UUID])
def test_a_device_can_be_named_where_specs_stand_for_arrays(connected: Site, device: str) -> None:
    """As torch names them, or by UUID as everything else does here."""
    assert lz.Call.of("silu", SPEC, device=device).device == "cuda:0"
    assert lz.explain("silu", SPEC, device=device).kernel_id == "one.silu"
    assert lz.explain("silu", SPEC).kernel_id is None
    assert lz.explain("silu", SPEC, device="cpu").kernel_id is None


@pytest.mark.parametrize(
    ("device", "text"),
    [
        ("cuda:1", "cuda:1 is not there; pass cpu or one of cuda:0"),
        ("GPU-none", "GPU-none is not there; pass cpu or one of cuda:0"),
        ("gpu", "device 'gpu' is none; pass cpu, cuda, cuda:1 or the UUID of a GPU"),
        ("cuda:x", "device 'cuda:x' is none"),
    ],
)
def test_a_device_that_is_not_there_is_an_error_with_those_that_are(connected: Site, device: str, text: str) -> None:
    """Never the CPU in its place."""
    for name in (lz.explain, lz.tune, lz.warmup, lz.solve, lz.Call.of):
        with pytest.raises(lz.InvalidArgument) as caught:
            name("silu", SPEC, device=device)  # type: ignore[operator]
        assert str(caught.value).startswith(text)


def test_arrays_on_two_devices_and_another_than_the_named_one_are_refused(connected: Site) -> None:
    """One of them would be left out in silence."""
    x, _ = randn(8, 8)
    y = np.ones((8, 8), np.float32)
    for name in (lz.tune, lz.warmup, lz.solve, lz.Call.of, lz.explain):
        with pytest.raises(lz.InvalidArgument, match="a is on cuda:0, b on cpu; move all arrays to one device"):
            name("matmul", x, y)  # type: ignore[operator]
        with pytest.raises(lz.InvalidArgument, match="its arrays are on cpu; leave device='cuda' out"):
            name("silu", y, device="cuda")  # type: ignore[operator]
    with pytest.raises(lz.InvalidArgument, match="a is on cuda:0, b on cpu"):
        lz.dry_run(lambda: lz.matmul(x, y))


def test_typical_calls_of_a_gpu_are_those_that_it_can_serve(connected: Site) -> None:
    """In half precision, which its kernels are for; an op that runs on the CPU only is an error when it is named."""
    calls = calls_of(None, (), {}, "cuda")
    assert {call.device for call in calls} == {"cuda:0"}
    assert {"attention", "silu"} < {call.op for call in calls}
    assert "null" not in {call.op for call in calls}
    assert {spec.dtype for call in calls if call.op == "rope" for spec in call.arrays.values() if spec} == {"float16"}
    for call in calls:
        assert lz.explain(call.op, **call.arrays, **call.params, device=call.device).op == call.op
    with pytest.raises(lz.InvalidArgument, match="null runs on the CPU only; leave device= out"):
        calls_of("null", (), {}, "cuda")


# --- inputs


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "bool"])
def test_inputs_are_made_on_the_gpu_with_the_strides_that_were_asked_for(soft: None, dtype: str) -> None:
    """In memory of ours: no library has to be imported for it."""
    specs = {"a": TensorSpec(dtype, (3, 4), (8, 2)), "b": None, "c": TensorSpec.contiguous(dtype, (0, 4))}
    arrays = random_inputs("matmul", specs, seed=0, device=0)
    assert arrays["b"] is None
    for name in "ac":
        array = describe(arrays[name])
        assert (array.spec, array.device) == (specs[name], 0)
    if dtype == "float32":
        same = random_inputs("matmul", specs, seed=0)["a"]
        np.testing.assert_array_equal(soft_gpu.array_at(describe(arrays["a"]).address, specs["a"]), same)
    if dtype == "bfloat16":
        wide = np.frombuffer(arrays["a"].load(), np.uint16).astype(np.uint32) << 16
        assert 0.1 < np.abs(wide.view(np.float32)).mean() < 3


def test_inputs_do_not_fall_back_to_the_cpu_where_the_gpu_has_no_room(
    soft: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time of the CPU would be taken for one of the GPU."""

    def full(nbytes: int) -> int:
        raise soft_gpu.error("cuMemAlloc_v2", 2)

    monkeypatch.setattr(soft_gpu.driver, "allocate", full)
    with pytest.raises(lz.OutOfMemory, match="free memory on cuda:0, for instance by torch"):
        random_inputs("silu", {"input": TensorSpec.contiguous("float32", (1 << 23,))}, seed=0, device=0)


def test_a_process_without_a_library_calls_on_the_gpu_all_the_same(
    connected: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays of our own, also with strides."""
    monkeypatch.delitem(sys.modules, "cupy")
    arrays = random_inputs("silu", {"input": SPEC.permute(1, 0)}, seed=0, device=0)
    result = lz.silu(**arrays)
    assert describe(result).device == 0
    values = random_inputs("silu", {"input": SPEC.permute(1, 0)}, seed=0)["input"]
    found = np.frombuffer(result.load(), np.float32).reshape(values.shape)
    np.testing.assert_allclose(found, silu(values), rtol=1e-4, atol=1e-5)


# --- plans of functions


def test_a_dry_run_plans_for_the_gpu(connected: Site) -> None:
    """Results are zeros of the caller's library there; links are found as on the CPU."""
    x, _ = randn(8, 8)
    seen = []

    def function() -> None:
        seen.append(block(x))

    plan = lz.dry_run(function)
    assert [call.kernel_id for call in plan.calls] == ["one.silu", "one.matmul", "one.silu"]
    assert [call.sources for call in plan.calls] == [(), (0,), (1,)]
    assert (type(seen[0]), plan.problem) == (soft_cupy.ndarray, "")
    assert not seen[0].get().any()


def test_compiled_functions_have_plans_of_their_own_for_each_device(new_site: Callable[..., Site]) -> None:
    """The same shapes on the CPU and on a GPU are two kinds of calls; one plan served both."""
    site = new_site("one")
    site.environ["LAYERZERO_MANIFEST_DIRS"] += f":{BACKENDS}"
    site.start().connect()
    fast = lz.compile(lz.silu)
    x, values = randn(4, 8)
    on_gpu = fast.bake(x)
    on_cpu = fast.bake(values)
    assert [call.kernel_id for plan in (on_gpu, on_cpu) for call in plan.calls] == ["one.silu", "alpha.silu"]
    close(fast(x), silu(values))
    assert lz.last_report().kernel_id == "one.silu"
    np.testing.assert_allclose(fast(values), silu(values), rtol=1e-5)
    assert lz.last_report().kernel_id == "alpha.silu"
    report = fast.report()
    assert (len(report.plans), report.planned_calls, report.unplanned) == (2, 2, {})


def test_one_function_may_call_on_both(new_site: Callable[..., Site]) -> None:
    """Each call is planned for where its arrays are."""
    site = new_site("one")
    site.environ["LAYERZERO_MANIFEST_DIRS"] += f":{BACKENDS}"
    site.start().connect()
    x, values = randn(4, 8)
    plan = lz.dry_run(lambda: (lz.silu(x), lz.silu(values)))
    assert [call.kernel_id for call in plan.calls] == ["one.silu", "alpha.silu"]
    assert [call.label for call in plan.calls] == ["silu(float32[4, 8]) on cuda:0", "silu(float32[4, 8])"]


def test_attention_written_out_is_found_on_a_gpu(connected: Site) -> None:
    """The one call that would do the same is one on that GPU."""
    q, k, v = (randn(1, 2, 4, 8)[0] for _ in range(3))
    k_t = soft_cupy.ndarray((1, 2, 8, 4), k.dtype, k.data, (k.strides[0], k.strides[1], k.strides[3], k.strides[2]))
    session = lz.session()
    calls = imagine(session, lambda: lz.matmul(lz.softmax(lz.matmul(q, k_t), dim=-1), v), (), {})
    [found] = find_attention(session, calls)
    assert messages.decode(found.body, messages.Route).device == soft_gpu.UUID


# --- measuring


def test_every_kernel_is_measured_with_the_gpus_own_times(new_site: Callable[..., Site]) -> None:
    """Also those that their backend does not choose; until now the best by priority was the only one."""
    site = new_site("one", "two", slow_silu=True)
    (site.folder / "layerzero" / "policy.yaml").write_text("")  # times decide
    site.connect()
    x, _ = randn(8, 16)
    [call] = lz.tune("silu", x, budget_s=6.0).calls
    slow_us = 1e6 * soft_numpy.SLOW_SILU_S
    assert (call.label, call.previous) == ("silu(8x16:float32) on cuda:0", "one.silu.slow")
    assert sorted(k.kernel_id for k in call.kernels) == ["one.silu", "one.silu.slow", "two.silu", "two.silu.slow"]
    for kernel in call.kernels:
        assert kernel.kernel is not None
        assert kernel.call is not None
        assert kernel.kernel.count >= 3  # as many as a busy machine gets to within the budget
        assert (kernel.kernel.median_us >= slow_us) == kernel.kernel_id.endswith("slow")
        assert kernel.call.median_us >= kernel.kernel.median_us  # the call was waited for
    assert call.fastest is not None
    assert call.fastest.kernel_id in ("one.silu", "two.silu")
    assert not str(call.now).endswith("slow")
    assert not lz.explain("silu", x).candidates[0].kernel_id.endswith("slow")


def test_every_kernel_of_a_backend_on_the_cpu_is_measured_too(new_site: Callable[..., Site]) -> None:
    """The call is pinned to the kernel, and not to the backend alone."""
    site = new_site("one")
    site.add_backend("delta", twice="silu")
    site.connect()
    [call] = lz.tune("silu", SPEC, budget_s=6.0).calls
    kernels = ["alpha.silu", "beta.silu", "delta.silu", "delta.silu.again", "gamma.silu"]
    assert sorted(k.kernel_id for k in call.kernels) == kernels
    assert all(k.kernel is not None and k.kernel.count >= MIN_ROUNDS for k in call.kernels)


def test_a_spent_budget_leaves_a_time_of_each_kernel(connected: Site) -> None:
    """A worker tells the time of a run with a later one's answer: one run of each says nothing on a GPU."""
    x, _ = randn(8, 24)
    for _ in range(2):  # a second time, when the worker measures each 32nd run only
        [call] = lz.tune("silu", x, budget_s=1e-6).calls
        assert [k.kernel is not None and k.kernel.count >= 1 for k in call.kernels] == [True, True]


def test_a_kernel_that_fails_on_the_gpu_is_a_line_of_the_report(new_site: Callable[..., Site]) -> None:
    """Raised at once, or noticed when its caller has gone on: either way it is not the next kernel's fault, nor is it
    raised by a later call."""
    site = new_site("one", "two")
    site.connect()
    x, values = randn(8, 16)
    for eps, code in ((soft_numpy.RAISE, "BACKEND_ERROR"), (soft_numpy.ILLEGAL, "BACKEND_ERROR")):
        [call] = lz.tune("layer_norm", x, (16,), eps=eps, budget_s=1.0).calls
        assert call.fastest is not None
        assert call.fastest.kernel_id == "two.layer_norm"
        [failed] = [k for k in call.kernels if k.kernel is None]
        assert (failed.kernel_id, failed.note.partition(":")[0]) == ("one.layer_norm", code)
        close(lz.silu(x), silu(values))
        lz.synchronize(PATIENCE_S)


def test_measuring_leaves_what_failed_before_it_to_the_callers_next_call(new_site: Callable[..., Site]) -> None:
    """An error belongs to whoever made the call."""
    site = new_site("one", backoff_s=600, backoff_max_s=600)
    site.connect()
    x, _ = randn(soft_numpy.SLOW)
    slow(x)  # the first call of a route is waited for
    finish()
    with held(site):
        slow(x)
        os.kill(site.backend("one")["pid"], signal.SIGKILL)
    finish()
    report = lz.warmup("silu", x)
    assert not report.ok
    with pytest.raises(lz.BackendError, match="an earlier call on the GPU, gelu, failed"):
        lz.synchronize(PATIENCE_S)


def test_a_warm_up_runs_on_the_gpu_until_its_times_are_known(new_site: Callable[..., Site]) -> None:
    """And says what it measured; `every` is every kernel."""
    site = new_site("one", "two", slow_silu=True)
    site.connect()
    x, _ = randn(8, 16)
    likely = lz.warmup("silu", x)
    assert likely.ok
    assert [run.kernel_id for run in likely.runs] == ["one.silu.slow", "two.silu.slow"]
    assert all(run.later_us is not None and run.later_us >= 1e6 * soft_numpy.SLOW_SILU_S for run in likely.runs)
    every = lz.warmup("silu", x, every=True)
    assert {run.kernel_id for run in every.runs} == {"one.silu", "one.silu.slow", "two.silu", "two.silu.slow"}
    assert all(c.measured_us is not None for c in lz.explain("silu", x).candidates if c.accepted)
    [check] = [
        c for c in lz.readiness_check(calls=[lz.Call.of("silu", x)], starts_workers=False).checks if "warm" in c.name
    ]
    assert check.ok


# --- dispatch tables


def test_a_table_is_solved_for_a_gpu_and_rules_there(new_site: Callable[..., Site], tmp_path: Path) -> None:
    """Its calls were refused by plan_mode as soon as any table was in force."""
    site = new_site("one", "two", slow_silu=True)
    path = tmp_path / "table.json"
    site.environ |= {"LAYERZERO_DISPATCH_TABLE": str(path), "LAYERZERO_PLAN_MODE": "true"}
    site.environ["LAYERZERO_MANIFEST_DIRS"] += f":{BACKENDS}"
    site.connect()
    x, values = randn(8, 16)
    report = lz.solve([lz.Call.of("silu", x), lz.Call.of("silu", values)], path=path, budget_s=4.0)
    assert (report.kinds, report.buckets, report.in_force) == (2, 2, True)
    table = dispatch_table.parse(path.read_text(), "t")
    assert set(table.groups) == {"cpu", "cuda GPU of threads sm_90"}
    assert table.header.hardware["cuda GPU of threads sm_90"].driver == "0"
    for array, kernels in ((x, {"one.silu", "two.silu"}), (values, {"alpha.silu", "beta.silu", "gamma.silu"})):
        found = lz.explain("silu", array)
        assert found.kernel_id in kernels
        assert "table" in found.candidates[0].terms
    close(lz.silu(x), silu(values))
    wide, _ = randn(8, 1000)
    with pytest.raises(lz.NoBackend, match="PLAN_BUCKET_MISS"):
        lz.silu(wide)


def test_a_table_of_the_cpu_leaves_a_gpu_to_the_ranking(new_site: Callable[..., Site], tmp_path: Path) -> None:
    """Also with plan_mode; and the other way round."""
    site = new_site("one")
    path = tmp_path / "table.json"
    site.environ |= {"LAYERZERO_DISPATCH_TABLE": str(path), "LAYERZERO_PLAN_MODE": "true"}
    site.environ["LAYERZERO_MANIFEST_DIRS"] += f":{BACKENDS}"
    site.connect()
    x, values = randn(8, 16)
    for own, other in ((values, x), (x, values)):
        assert lz.solve("silu", own, path=path, budget_s=1.0).in_force
        assert "table" in lz.explain("silu", own).candidates[0].terms
        assert lz.explain("silu", other).kernel_id is not None
        assert "table" not in lz.explain("silu", other).candidates[0].terms
    close(lz.silu(x), silu(values))


# --- readiness and compilations


def test_a_gpu_backend_is_ready_when_it_answers_on_its_gpu(new_site: Callable[..., Site]) -> None:
    """It was asked with memory of the CPU, which no such kernel takes: the gate could not be passed."""
    site = new_site("one", "two")
    site.set_policy("memory_headroom_bytes: 1 MiB\n")
    site.connect()
    report = lz.readiness_check(backends=["one", "two"])
    assert report.ok, str(report)
    checks = {check.name: check.detail for check in report.checks}
    for name in ("one", "two"):
        pid = site.backend(name)["pid"]
        assert f"answered in process {pid} on cuda:0 ({soft_gpu.UUID})" in checks[f"worker {name}"]
    assert f"1,073,741,824 bytes free on {soft_gpu.UUID}" in checks["memory"]


def test_a_gpu_backend_that_fails_or_that_this_process_cannot_reach_is_not_ready(
    new_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what this process would have to do about it."""
    site = new_site("one")
    site.connect()
    monkeypatch.setattr(soft_gpu.driver, "gpus", lambda: ())
    report = lz.readiness_check(backends=["one"])
    [check] = [check for check in report.checks if check.name == "worker one"]
    assert (report.exit_code, check.ok) == (1, False)
    assert f"this process cannot call it: {soft_gpu.UUID} is not there" in check.detail
    assert check.repair == "unset CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize("way", ["warmup", "tune", "ready", "bake"])
def test_kernels_that_compile_are_compiled_for_the_gpu_first(
    new_site: Callable[..., Site], tmp_path: Path, way: str
) -> None:
    """Those that come with LayerZero are all CUDA's: none was ever compiled ahead."""
    site = new_site("one", needs_jit=True)
    site.use_store(tmp_path / "store")  # where nothing is compiled yet
    site.connect()
    x, values = randn(8, 16)
    if way == "warmup":
        assert lz.warmup("silu", x).ok
    elif way == "tune":
        assert lz.tune("silu", x, budget_s=0.1).calls[0].fastest is not None
    elif way == "ready":
        assert lz.readiness_check(backends=["one"]).ok
    else:
        assert lz.compile(lz.silu).bake(x).calls[0].kernel_id == "one.silu"
    lines = site.events("kernel.compiled")
    assert lines
    assert all(line["calls"].startswith("sm_90") for line in lines)
    if way != "ready":
        assert {line["kernel_id"] for line in lines} == {"one.silu"}
        close(lz.silu(x), silu(values))
        assert lz.last_report().kernel_id == "one.silu"
        assert not [a for a in lz.last_report().attempts if a.outcome]


# --- the command line


def run_lz(site: Site, *words: str) -> Finished:
    """In a process that sees the GPU, and has no array library for it."""
    path = os.pathsep.join((str(SOFT / "broker"), str(ROOT / "src"), str(ROOT)))
    return lz_command(site, *words, PYTHONPATH=path, LZ_SOFT_CLIENT="1")


@pytest.mark.parametrize("device", ["cuda", "cuda:0", soft_gpu.UUID])
def test_commands_make_their_arrays_on_the_device_that_is_named(broker: Site, device: str) -> None:
    """An explanation, a call, and times: all of the GPU's kernels."""
    explained = data(run_lz(broker, "explain", "silu", "4x8:float32", "--device", device, "--json"))
    assert explained["kernel_id"] == "one.silu"
    ran = data(run_lz(broker, "run", "silu", "4x8:float32", "-d", device, "-r", "20", "--json"))
    assert (ran["report"]["kernel_id"], ran["result"]["shape"], ran["result"]["not_finite"]) == ("one.silu", [4, 8], 0)
    assert ran["result"]["min"] > -0.3
    assert ran["times"]["kernel_us"]
    tuned = data(run_lz(broker, "tune", "silu", "4x8:float32", "--device", device, "--budget", "1", "--json"))
    [call] = tuned["calls"]
    assert call["label"] == "silu(4x8:float32) on cuda:0"
    assert {kernel["kernel_id"] for kernel in call["kernels"]} == {"one.silu", "two.silu"}


def test_the_commands_default_is_the_cpu(broker: Site) -> None:
    """As it was; the site has no kernel for it."""
    explained = data(run_lz(broker, "explain", "silu", "4x8:float32", "--json"))
    assert explained["kernel_id"] is None
    assert data(run_lz(broker, "explain", "silu", "4x8:float32", "--device", "cpu", "--json")) == explained


@pytest.mark.parametrize("words", [("explain",), ("run",), ("tune",), ("solve",)])
def test_commands_refuse_a_device_that_is_not_there(broker: Site, words: tuple[str, ...]) -> None:
    """Wrong usage, with the devices that there are."""
    done = run_lz(broker, *words, "silu", "4x8:float32", "--device", "cuda:7")
    assert done.returncode == USAGE
    assert "cuda:7 is not there; pass cpu or one of cuda:0" in " ".join(done.stderr.split())
    bare = lz_command(broker, *words, "silu", "4x8:float32", "--device", "cuda")
    assert bare.returncode == USAGE
    assert "cuda is not there; pass cpu: this process sees no NVIDIA GPU" in " ".join(bare.stderr.split())


def test_a_table_for_several_devices_is_one_command(new_site: Callable[..., Site], tmp_path: Path) -> None:
    """A policy names one file."""
    site = new_site("one")
    site.environ["LAYERZERO_MANIFEST_DIRS"] += f":{BACKENDS}"
    site.start()
    path = tmp_path / "t.json"
    words = ("solve", "silu", "4xS:float32", "--extent", "S=8", "--device", "cpu", "--device", "cuda")
    value = data(run_lz(site, *words, "--out", str(path), "--budget", "2", "--json"))
    assert (value["path"], value["kinds"]) == (str(path), 2)
    table = dispatch_table.parse(path.read_text(), "t")
    assert set(table.groups) == {"cpu", "cuda GPU of threads sm_90"}
    assert "--device cpu --device cuda" in table.header.command


# --- arrays of our own


def test_memory_of_an_array_of_ours_is_taken_again_once_nobody_has_it(soft: None) -> None:
    """At once, not when Python looks for circles: the next call is at the same place, and repeats."""
    made = GpuArray(0, SPEC)
    address = made.address
    part = made.part(SPEC, 0)
    del made
    assert part.address == address
    others = [GpuArray(0, SPEC) for _ in range(2)]
    assert address not in [one.address for one in others]
    del part
    others = [GpuArray(0, SPEC) for _ in range(4)]
    assert address in [one.address for one in others]
