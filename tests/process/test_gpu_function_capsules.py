"""Capsules of calls of functions with arrays on a GPU, over that of threads (tests/soft_gpu): what is kept, and the
same call again, there and on the CPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.process import forks
from tests.process import gpu_capsule_functions as fn
from tests.process.capsule_site import hashed
from tests.process.gpu_express_site import settled
from tests.process.gpu_site import SOFT, randn, soft
from tests.process.harness import Site
from tests.soft_gpu import soft_cupy, soft_torch
from tests.soft_gpu.soft_gpu import driver

import layerzero as lz
from layerzero.client.arrays.recognition import CPU
from layerzero.client.capsules import form, store
from layerzero.client.tools.replay import own_broker
from layerzero.functions import replaying, shrinking
from layerzero.functions.gpu_express import GpuExpressCall
from layerzero.ipc.errors import InvalidArgument

__all__ = ["soft"]


@pytest.fixture
def capsules(tmp_path: Path) -> Path:
    return tmp_path / "capsules"


@pytest.fixture
def site(soft: None, tmp_path: Path, capsules: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A broker with the GPU, whose workers may open others' memory as a driver does; capsules keep all."""
    forks.start_server()
    one = Site(tmp_path / "store", restart_budget=100, backoff_s=0.01, backoff_max_s=0.01)
    one.environ |= {"LAYERZERO_WORKER_CONFINED": "0", "PYTHONPATH": str(SOFT / "broker")}
    one.environ |= {"LAYERZERO_CAPSULES": "full", "LAYERZERO_CAPSULE_DIR": str(capsules)}
    for name, value in one.environ.items():
        monkeypatch.setenv(name, value)
    with one.environment():
        fn.THERE.build(quiet=True)
        one.start().connect()
        fn.prepare()
        learn = replaying.learn

        def prepared(session: Any, env: str) -> None:
            learn(session, env)
            fn.prepare()

        monkeypatch.setattr(replaying, "learn", prepared)  # a real GPU's worker needs nothing for it
        yield one
        lz.disconnect()
    one.stop()


def only(folder: Path) -> form.Capsule:
    (name,) = store.names(folder)
    return hashed(folder / name)


def deadly(rows: int, columns: int) -> tuple[Any, np.ndarray]:
    _, values = randn(rows, columns)
    values[0, 0] = 13
    return soft_cupy.asarray(values), values


def replayed(capsule: form.Capsule, folder: Path, **more: Any) -> dict[str, int]:
    lz.disconnect()
    data = form.memory(folder / capsule.name, capsule) if capsule.has_data else []
    (found,) = replaying.replay(capsule, data, is_trusted=True, **more)
    assert found.runs.keys() <= {"ok", "exit 3"}, found.details
    return found.runs


def test_arrays_on_a_gpu_are_kept_as_they_lie_and_the_call_ends_there_again(site: Site, capsules: Path) -> None:
    """A view with a step, memory that two arguments share, and an array of the CPU beside them."""
    x, values = deadly(8, 6)
    beside = lz.share(np.arange(4.0))
    with pytest.raises(lz.BackendError):
        fn.struck(x[::2], beside, by=3.0)
    capsule = only(capsules)
    assert (capsule.op, capsule.device, capsule.failed.what) == ("function", "cuda", "exit3")
    assert capsule.function is not None
    assert not capsule.function.problem
    assert "struck(gpu:cupy 4x6:float32, numpy 4:float64, by=3.0)" in capsule.label
    assert "as the failed attempts" in capsule.facts["arrays on the GPU"]
    memory = form.memory(capsules / capsule.name, capsule)
    assert beside.tobytes() in memory
    assert values[:7].tobytes() in memory, "as far as the view spans"
    assert replayed(capsule, capsules) == {"exit 3": 1}


def test_a_call_whose_results_were_to_be_on_the_gpu_is_made_there_again(site: Site, capsules: Path) -> None:
    """It has no array there; what comes of others like it is read here."""
    with soft_torch.installed():
        made = fn.made.options(device="cuda")
        np.testing.assert_array_equal(made(2.0).numpy(), np.full((4, 2), 2.0))
        with pytest.raises(lz.BackendError):
            made(13.0)
    capsule = only(capsules)
    assert (capsule.device, capsule.facts.get("arrays on the GPU")) == ("cuda", None)
    assert replayed(capsule, capsules) == {"exit 3": 1}
    function = replaying._again(capsule)
    told = replaying.function_memory(capsule, form.memory(capsules / capsule.name, capsule), 0)
    told[0][0][0][1] = 3.0
    with own_broker() as session:
        replaying.learn(session, fn.THERE.backend)
        code = replaying.code_to_call(function, fn.THERE.backend, None, told, is_trusted=True)
        found = replaying.run(session, function, code, fn.THERE.backend, told, 30.0, 0)
    np.testing.assert_array_equal(found, np.full((4, 2), 3.0))


def test_the_call_is_made_on_the_cpu_where_there_is_no_gpu(site: Site, capsules: Path) -> None:
    x, _ = deadly(4, 6)
    with pytest.raises(lz.BackendError):
        fn.struck(x)
    capsule = only(capsules)
    assert replayed(capsule, capsules, device="cpu") == {"exit 3": 1}
    with pytest.raises(InvalidArgument, match=r"cuda:7"):
        replaying.place_of(capsule, "cuda:7")


def test_without_bytes_random_numbers_stand_for_them(site: Site, capsules: Path) -> None:
    site.environ["LAYERZERO_CAPSULES"] = "shapes"
    lz.disconnect()
    site.connect()
    fn.prepare()
    x, _ = deadly(4, 6)
    with pytest.raises(lz.BackendError):
        fn.struck(x)
    capsule = only(capsules)
    assert not capsule.has_data
    assert replayed(capsule, capsules) == {"ok": 1}


def test_an_object_that_was_made_of_an_array_is_made_again_of_it(site: Site, capsules: Path) -> None:
    """Then the method is called on that."""
    first, values = randn(2, 3)
    total = fn.Total(first)
    x, _ = deadly(2, 3)
    with pytest.raises(lz.BackendError):
        total.add(x)
    capsule = only(capsules)
    assert capsule.function is not None
    assert [part.kind for part in capsule.function.parts] == ["call", "method"]
    assert values.tobytes() in form.memory(capsules / capsule.name, capsule)
    assert replayed(capsule, capsules) == {"exit 3": 1}


def test_a_call_that_was_on_the_gpu_is_made_smaller_on_the_cpu(site: Site, capsules: Path) -> None:
    """On a real GPU it is there: tests/gpu/test_function_capsules.py."""
    x, _ = deadly(4, 6)
    with pytest.raises(lz.BackendError):
        fn.struck(x)
    capsule = only(capsules)
    data = form.memory(capsules / capsule.name, capsule)
    lz.disconnect()
    env, code, told = replaying.to_call(capsule, data, capsule.failed.backend, 0, None, is_trusted=True)
    with own_broker() as session:
        replaying.learn(session, env)
        found = shrinking.shrink(session, capsule, code, env, told, ordinal=CPU)
    assert (found.what, found.shapes) == ("exit 3", [[1, 1]])


def test_arguments_of_a_call_on_a_ring_are_kept_as_their_stream_made_them(site: Site, capsules: Path) -> None:
    """The worker died before that."""
    x, _ = randn(4, 3)
    settled(x, function=fn.left)
    driver.put(soft_cupy.current().ptr, lambda: time.sleep(0.5))
    x.fill(5.0)
    sent = fn.left.submit(x, 3)
    assert isinstance(sent._call, GpuExpressCall)
    with pytest.raises(lz.BackendError, match="died"):
        sent.result()
    capsule = only(capsules)
    kept = [bytes(one) for one in form.memory(capsules / capsule.name, capsule)]
    assert np.full((4, 3), 5.0, np.float32).tobytes() in kept
