"""What decides about kernels, for arrays on a GPU: it asks for that GPU's kernels, measures there, and says so where it
cannot. On the GPU of threads (tests/soft_gpu); tests/gpu/test_decisions.py is the same on a real one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.process.gpu_site import broker, close, connected, new_site, randn, silu, soft
from tests.process.harness import Site
from tests.soft_gpu import soft_cupy, soft_gpu

import layerzero as lz
from layerzero.client.arrays.recognition import describe
from layerzero.client.tools.calls import calls_of
from layerzero.client.tools.dry_run import find_attention
from layerzero.client.tools.inputs import random_inputs
from layerzero.client.tools.trace import imagine
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
        random_inputs("silu", {"input": TensorSpec.contiguous("float32", (1 << 26,))}, seed=0, device=0)


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
    site.add_backend("alpha")
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
    site.add_backend("alpha")
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
