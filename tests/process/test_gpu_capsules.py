"""Capsules of calls on a GPU: what is kept of one whose worker lost its GPU, and the same call again, on the GPU of
threads (tests/soft_gpu)."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.process.gpu_site import close, finish, held, new_site, randn, report, silu, slow, soft
from tests.process.harness import PATIENCE_S, Site, wait_until
from tests.soft_gpu import soft_cupy
from tests.soft_gpu.soft_numpy import ILLEGAL, SLOW, WORN

import layerzero as lz
from layerzero.client.capsules import form, store
from layerzero.client.tools import shrink, under
from layerzero.client.tools.replay import Outcome, is_far, lay_out, own_broker, replay
from layerzero.ipc.errors import EnvError, InvalidArgument

__all__ = ["new_site", "soft"]
Sites = Callable[..., Site]


@pytest.fixture
def capsules(tmp_path: Path) -> Path:
    return tmp_path / "capsules"


@pytest.fixture
def new(new_site: Sites, capsules: Path) -> Sites:
    def make(mode: str, **settings: Any) -> Site:
        site = new_site(standby=0, **settings)
        site.environ["LAYERZERO_CAPSULES"] = mode
        site.environ["LAYERZERO_CAPSULE_DIR"] = str(capsules)
        return site

    return make


def lose_gpu(x: Any, values: np.ndarray) -> None:
    """A layer_norm by which "one" loses its GPU; "two" has the result."""
    wide = values.astype(np.float64)
    result = lz.layer_norm(x, (values.shape[-1],), eps=ILLEGAL)
    close(result, (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + ILLEGAL))


def only(folder: Path) -> form.Capsule:
    """Once what the broker says of the calls so far was heard of."""
    (name,) = wait_until(lambda: lz.synchronize(PATIENCE_S) or store.names(folder))  # type: ignore[func-returns-value]
    return form.read(folder / name)


def replayed(site: Site, monkeypatch: pytest.MonkeyPatch, capsule: form.Capsule, data: Any, **more: Any) -> Any:
    """By a broker with the site's backends."""
    lz.disconnect()
    for name, value in site.environ.items():
        monkeypatch.setenv(name, value)
    found: list[Outcome] = replay(capsule, data, **more)
    return {one.backend: one for one in found}


def test_a_lost_gpu_leaves_the_shapes_of_the_call_and_its_report_names_them(new: Sites, capsules: Path) -> None:
    site = new("shapes")
    site.connect()
    x, values = randn(8, 16)
    lose_gpu(x, values)
    note = wait_until(lambda: next((one for one in report().notes if "capsule" in one), ""))
    capsule = only(capsules)
    assert note == f"capsule of the failure: lz replay {capsule.name}"
    assert (capsule.op, capsule.device, capsule.failed.what) == ("layer_norm", "cuda", "gpu-lost")
    assert capsule.served_by == "two.layer_norm"
    assert capsule.arguments[0].spec.shape == (8, 16)
    assert capsule.params["eps"] == ILLEGAL
    assert not capsule.has_data
    assert "LAYERZERO_CAPSULES=shapes" in capsule.left_out
    assert "CUDA 13.0" in capsule.facts["gpu"]
    assert capsule.label.endswith("on cuda")


def test_memory_is_copied_from_the_gpu_as_the_kernel_met_it_and_the_call_fails_again(
    new: Sites, capsules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strides, a start within an allocation, and numbers; in one backend it dies again, in the other it does not."""
    site = new("full")
    site.connect()
    x, values = randn(9, 16)
    lose_gpu(x[1:], values[1:])
    capsule = only(capsules)
    (memory,) = form.memory(capsules / capsule.name, capsule)
    assert memory == values[1:].tobytes()
    assert capsule.segments[0].offset == 64
    found = replayed(site, monkeypatch, capsule, [memory], times=2)
    assert found["one"].runs == {"GPU lost": 2}
    assert found["two"].runs == {"ok": 2}
    assert found["two"].is_same


def test_a_wrong_result_on_the_gpu_is_kept_with_its_arguments_and_wrong_again(
    new: Sites, capsules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the check had them: the caller may have written there since."""
    site = new("full")
    session = site.connect()
    session.shadow.references, session.shadow.rate = ("two",), 1.0
    worn = np.full((8, 16), WORN, np.float32)
    x = soft_cupy.asarray(worn)
    lz.silu(x)  # the first call after the rate was set is not sampled
    lz.silu(x)
    x.fill(1.0)
    capsule = only(capsules)
    assert (capsule.op, capsule.device, capsule.failed.outcome) == ("silu", "cuda", form.WRONG)
    assert (capsule.failed.kernel_id, capsule.served_by) == ("one.silu", "two.silu")
    data = form.memory(capsules / capsule.name, capsule)
    assert data == [worn.tobytes()]
    found = replayed(site, monkeypatch, capsule, data, backends=["one", "two"])
    assert found["one"].runs == found["two"].runs == {"ok": 1}
    assert is_far(found["one"], capsule)
    assert not is_far(found["two"], capsule)


def test_a_smaller_call_is_found_on_the_gpu(new: Sites, capsules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = new("full")
    site.connect()
    x, values = randn(4, 8)
    lose_gpu(x, values)
    capsule = only(capsules)
    data = form.memory(capsules / capsule.name, capsule)
    lz.disconnect()
    for name, value in site.environ.items():
        monkeypatch.setenv(name, value)
    with own_broker() as session:
        arguments = lay_out(capsule.op, capsule.arguments, capsule.segments, data, 0)
        found = shrink.shrink(session, capsule, arguments, "one", device=0)
    assert found.what == "GPU lost"
    assert found.arguments["x"].shape == (1, 8), "the last extent is a parameter, too"


def test_a_call_that_nobody_finished_is_kept_and_the_error_of_the_next_call_names_it(
    new: Sites, capsules: Path
) -> None:
    site = new("full", backoff_s=600, backoff_max_s=600)
    site.connect()
    x, values = randn(SLOW)
    slow(x, backend="one")
    finish()
    with held(site):
        slow(x, backend="one")
        os.kill(site.backend("one")["pid"], signal.SIGKILL)
    with pytest.raises(lz.BackendError, match="an earlier call on the GPU, gelu, failed") as error:
        lz.synchronize(PATIENCE_S)
    finish()
    capsule = only(capsules)
    assert capsule.name in str(error.value.report)  # type: ignore[attr-defined]
    assert (capsule.failed.what, capsule.served_by) == ("signal9", "")
    assert form.memory(capsules / capsule.name, capsule) == [values.tobytes()]
    close(lz.silu(x), silu(values))


def test_arguments_are_held_until_their_call_is_done_and_only_where_their_bytes_are_wanted(new: Sites) -> None:
    for mode, is_held in (("shapes", False), ("full", True)):
        site = new(mode)
        site.connect()
        lz.silu(randn(4)[0])
        x, values = randn(SLOW)
        with held(site):
            result = slow(x, backend="one")
            block = weakref.ref(x)
            del x
            gc.collect()
            assert (block() is not None) == is_held, mode
        finish()
        lz.synchronize(PATIENCE_S)
        wait_until(lambda: gc.collect() >= 0 and block() is None)  # noqa: B023
        assert result.size == values.size
        lz.disconnect()


def test_a_replay_needs_the_gpu_or_is_told_to_go_without(new: Sites, capsules: Path) -> None:
    """What to do says the error of a machine without one."""
    site = new("shapes")
    site.connect()
    x, values = randn(8, 16)
    lose_gpu(x, values)
    capsule = only(capsules)
    with pytest.raises(InvalidArgument, match="cuda:7 is not there; pass cpu or one of cuda:0"):
        replay(capsule, [], device="cuda:7")
    host = form.Capsule(**{**vars(capsule), "device": "cpu"})
    for tool in (under.BLOCKING, under.SANITIZER):
        with pytest.raises(InvalidArgument, match="replay it under gdb or coredump: --under"):
            under.variables(tool, host)
    assert under.variables(under.BLOCKING, capsule) == {"CUDA_LAUNCH_BLOCKING": "1"}


def test_workers_run_under_a_sanitizer_where_there_is_one(
    new: Sites, capsules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that starts them as its own child, as NVIDIA's does, and writes to their log."""
    site = new("full")
    site.connect()
    x, values = randn(8, 16)
    lose_gpu(x, values)
    capsule = only(capsules)
    data = form.memory(capsules / capsule.name, capsule)
    monkeypatch.setattr(under, "_BESIDE", (str(tmp_path / "nowhere"),))
    with pytest.raises(EnvError, match="compute-sanitizer is not installed here") as error:
        under.variables(under.SANITIZER, capsule)
    assert "cuda-sanitizer" in error.value.facts["repair"]
    program = tmp_path / "bin" / under.PROGRAM
    program.parent.mkdir()
    program.write_text(
        '#!/bin/sh\nwhile [ "$1" != "${1#-}" ]; do shift 2; done\n'
        'echo "========= COMPUTE-SANITIZER"\necho "========="\n"$@"\necho "========= ERROR SUMMARY: $? as exit code"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    wanted, written = under.variables(under.SANITIZER, capsule), dict[str, str]()
    site.environ.pop("PATH", None)
    found = replayed(
        site, monkeypatch, capsule, data, backends=["one", "two"], variables=wanted, log=written.__setitem__
    )
    assert found["two"].runs == {"ok": 1}
    assert not found["one"].is_right
    assert under.findings(written["one"])[:2] == ["COMPUTE-SANITIZER", "ERROR SUMMARY: 70 as exit code"]


def test_a_call_on_the_cpu_in_place_of_the_gpu(new: Sites, capsules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No backend of this site serves there: each says so, and nothing waits for a GPU."""
    site = new("shapes")
    site.connect()
    x, values = randn(8, 16)
    lose_gpu(x, values)
    capsule = only(capsules)
    found = replayed(site, monkeypatch, capsule, [], backends=["one"], device="cpu")
    assert found["one"].runs == {"NO_BACKEND": 1}
    assert soft_cupy.empty(1).size == 1
