"""Capsules of calls of functions with CUDA tensors, on a real GPU: bytes are copied from the caller's memory, and the
call is made again there. tests/process/test_gpu_function_capsules.py has what needs none."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import numpy as np
import pytest
from tests.gpu.function_sites import interpreter
from tests.gpu.test_functions import torch
from tests.process.harness import Site

import layerzero as lz
from layerzero.client.capsules import form, store
from layerzero.client.tools.replay import own_broker
from layerzero.functions import replaying, shrinking


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return interpreter(tmp_path_factory.mktemp("venv") / "v")


@pytest.fixture
def capsules(tmp_path: Path) -> Path:
    return tmp_path / "capsules"


@pytest.fixture
def fn(python: Path, tmp_path: Path, capsules: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    site = Site(tmp_path / "store", restart_budget=1000, backoff_s=0.01, backoff_max_s=0.01)
    site.environ |= {"LAYERZERO_CAPSULES": "full", "LAYERZERO_CAPSULE_DIR": str(capsules)}
    for name, value in site.environ.items():  # of the replay's broker, too
        monkeypatch.setenv(name, value)
    with mock.patch.dict(os.environ, {"LZ_TEST_INTERPRETER": str(python)}):
        sys.modules.pop("tests.gpu.function_calls", None)
        functions = importlib.import_module("tests.gpu.function_calls")
    try:
        with site.environment():
            functions.GPU.build(quiet=True)
            site.start().connect()
            functions.place()
            yield functions
            lz.disconnect()
    finally:
        site.stop()


def only(folder: Path) -> form.Capsule:
    (name,) = store.names(folder)
    return form.read(folder / name)


@pytest.mark.parametrize(("first", "what", "why"), [(13, "exit3", "exit 3"), (14, "gpu-lost", "GPU lost")])
def test_tensors_are_kept_as_they_lie_and_the_call_ends_there_again(
    fn: ModuleType, capsules: Path, first: int, what: str, why: str
) -> None:
    base = torch.randn(9, 64, device="cuda")
    x = base[1:, ::2]
    x[0, 0] = first
    beside = lz.share(np.arange(4.0))
    with pytest.raises(lz.BackendError):
        fn.struck(x, beside)
    assert float((x * 2).sum()) == pytest.approx(2 * float(x.sum()), rel=1e-3), "this process's context is whole"
    capsule = only(capsules)
    assert (capsule.device, capsule.failed.what) == ("cuda", what)
    memory = form.memory(capsules / capsule.name, capsule)
    spanned = base.flatten()[64 : 64 + 7 * 64 + 63].cpu().numpy().tobytes()
    assert spanned in memory
    assert beside.tobytes() in memory
    lz.disconnect()
    (found,) = replaying.replay(capsule, memory, is_trusted=True, times=2)
    assert found.runs == {why: 2}, found.details


def test_a_call_that_ends_well_gives_the_same_numbers_on_the_gpu_and_on_the_cpu(fn: ModuleType, capsules: Path) -> None:
    """Of a capsule without bytes: random numbers."""
    os.environ["LAYERZERO_CAPSULES"] = "shapes"
    lz.disconnect()
    lz.connect()
    x = torch.full((4, 8), 13.0, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(lz.BackendError):
        fn.struck(x)
    capsule = only(capsules)
    assert not capsule.has_data
    lz.disconnect()
    found = replaying.replay(capsule, [], is_trusted=True, times=2)
    assert [one.runs for one in found] == [{"ok": 2}], [one.details for one in found]
    assert found[0].is_same


def test_a_call_is_made_smaller_on_the_gpu(fn: ModuleType, capsules: Path) -> None:
    x = torch.randn(6, 8, device="cuda")[:, ::2]
    x[0, 0] = 13
    with pytest.raises(lz.BackendError):
        fn.struck(x)
    capsule = only(capsules)
    data = form.memory(capsules / capsule.name, capsule)
    lz.disconnect()
    env, code, told = replaying.to_call(capsule, data, capsule.failed.backend, 0, None, is_trusted=True)
    with own_broker() as session:
        replaying.learn(session, env)
        found = shrinking.shrink(session, capsule, code, env, told, ordinal=0)
    assert (found.what, found.shapes) == ("exit 3", [[1, 1]])
