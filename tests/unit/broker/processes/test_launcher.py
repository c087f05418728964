"""A backend that cannot be used is disabled with its reason, and takes no other with it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.capabilities.test_descriptor import GOOD

from layerzero.broker.configuration.settings import Settings
from layerzero.broker.processes.cuda_driver import Gpus
from layerzero.broker.processes.launcher import FACTS_S, Launcher
from layerzero.capabilities.certificate import ProbeRecord
from layerzero.capabilities.device import DeviceSpec
from layerzero.capabilities.match import Rejection
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.errors import EnvError

BACKENDS = ("first", "second", "third")
MANIFEST = 'summary = "test"\nprovider = "provider.py"\ndescriptor = "{name}.json"\ninterpreter = "host"\n'


def launcher(tmp_path: Path, change: Callable[[dict[str, Any]], object] = lambda data: None) -> Launcher:
    """Three backends in a folder of their own; `change` edits the descriptor of the second."""
    folder = tmp_path / "manifests"
    folder.mkdir()
    (folder / "provider.py").write_text("")
    for name in BACKENDS:
        data = copy.deepcopy(GOOD)
        data["backend"] = name
        for kernels in data["ops"].values():
            kernels[0]["kernel_id"] = kernels[0]["kernel_id"].replace("lib.", f"{name}.")
        if name == "second":
            change(data)
        (folder / f"{name}.json").write_text(json.dumps(data))
        (folder / f"{name}.toml").write_text(MANIFEST.format(name=name))
    settings = Settings(runtime_dir=tmp_path / "run", store=tmp_path / "store", manifest_dirs=(folder,))
    return Launcher(settings)


def usable(one: Launcher) -> list[str]:
    return [name for name in BACKENDS if name in one.capabilities]


def test_good_descriptors_are_all_used(tmp_path: Path) -> None:
    """The rest of this file would pass on a launcher that reads nothing."""
    one = launcher(tmp_path)
    assert usable(one) == list(BACKENDS)
    assert one.problems == []


def silu(data: dict[str, Any]) -> dict[str, Any]:
    kernel: dict[str, Any] = data["ops"]["silu"][0]
    return kernel


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "schema version": (
        lambda data: data.update(schema_version="2.0"),
        "CAPABILITIES_SCHEMA_MISMATCH: {path}: schema_version: Input should be '1.0' (got '2.0'",
    ),
    "missing constraint": (
        lambda data: silu(data).pop("dtypes"),
        "CAPABILITIES_INVALID: {path}: descriptor: Value error, second.silu: missing constraint dtypes",
    ),
    "kernel id twice": (
        lambda data: data["ops"].update(gelu=data["ops"]["silu"]),
        "CAPABILITIES_INVALID: {path}: descriptor: Value error, kernel ids must be unique in a backend; given twice: "
        "second.silu",
    ),
    "kernel id of another backend": (
        lambda data: silu(data).update(kernel_id="first.silu"),
        "CAPABILITIES_INVALID: {path}: kernel id 'first.silu' belongs to backend 'first'",
    ),
    "name of another backend": (
        lambda data: data.update(backend="first"),
        "CAPABILITIES_INVALID: {path}: backend is 'first', its manifest says 'second'",
    ),
    "unknown constraint": (
        lambda data: silu(data).update(require_contiguous=True),
        "CAPABILITIES_INVALID: {path}: ops.silu.0.require_contiguous: "
        "unknown field require_contiguous; did you mean requires_contiguous? (got True",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_descriptor_disables_its_backend_alone(tmp_path: Path, name: str) -> None:
    """One bad file must not take down the service, nor pass unnoticed."""
    change, text = BROKEN[name]
    one = launcher(tmp_path, change)
    assert usable(one) == ["first", "third"]
    (problem,) = one.problems
    assert problem.startswith(text.format(path=tmp_path / "manifests" / "second.json"))


def test_status_does_not_look_for_what_is_not_here_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To look for a Python takes as long as a hundred calls, which would wait for it. A reset looks again."""
    one = launcher(tmp_path)
    page_poller = []

    def find(*_: object, **__: object) -> None:
        page_poller.append(1)
        raise EnvError("no Python 3.11 here", env="first", repair="install it")

    monkeypatch.setattr("layerzero.envs.build.build.find", find)
    monkeypatch.setattr("layerzero.broker.processes.launcher.FACTS_S", 0.0)
    monkeypatch.setattr("layerzero.broker.processes.launcher.PROBLEM_S", 60.0)
    assert one.missing("first") is not None
    page_poller.clear()
    assert {str(one.facts("first")["error"]) for _ in range(3)} == {"no Python 3.11 here"}
    assert len(page_poller) == 1
    assert one.missing("first") is not None
    one.facts("first")
    assert len(page_poller) == 3


def test_status_tells_of_an_environment_that_is_built_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has seen is kept for as long as it says, and no longer."""
    one = launcher(tmp_path)
    clock = SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr("layerzero.broker.processes.launcher.time", clock)
    now_s = 100.0
    assert one.facts("first")["built"] is True
    monkeypatch.setattr("layerzero.envs.build.env.Env.is_built", False)
    now_s += 0.9 * FACTS_S
    assert one.facts("first")["built"] is True
    now_s += 0.2 * FACTS_S
    assert one.facts("first")["built"] is False


# --- devices

GPU = DeviceSpec("cuda", device_name="NVIDIA H200", device_uuid="GPU-1")
NO_GPU = Gpus((), "no NVIDIA driver: libcuda.so.1: cannot open shared object file")


def on(tmp_path: Path, gpus: Gpus | None, **settings: Any) -> Launcher:
    """Of the built-in backends, on a machine with these GPUs."""
    return Launcher(Settings(runtime_dir=tmp_path / "run", store=tmp_path / "store", **settings), gpus)


def test_backend_for_a_device_that_is_not_here_is_not_for_this_machine(tmp_path: Path) -> None:
    """No fault of the machine, so nobody's to repair; whoever looks can tell it from one that is not built."""
    one = on(tmp_path, NO_GPU)
    for name in ("torch-cuda", "cupy"):
        rejection = one.missing(name)
        assert rejection == one.unusable[name]
        assert rejection == Rejection(
            Reason.NOT_FOR_MACHINE, "needs an NVIDIA GPU, and this machine has none (no NVIDIA driver)"
        )
    assert one.missing("torch") == Rejection(Reason.NOT_INSTALLED, "its environment is not built", "lz env build torch")


def test_gpu_backend_on_a_machine_with_a_gpu_has_a_repair(tmp_path: Path) -> None:
    """There it is a fault that it does not serve: the broker is set to environments for the CPU, or it is not built."""
    rejection = on(tmp_path, Gpus((GPU,))).missing("torch-cuda")
    assert rejection is not None
    assert (rejection.code, str(tmp_path) in rejection.detail) == (Reason.NOT_INSTALLED, False)
    assert rejection.repair == "export LAYERZERO_VARIANT=cu13, then lz env build torch-cuda, lz down and lz up"
    rejection = on(tmp_path, Gpus((GPU,)), variant="cu13").missing("torch-cuda")
    assert rejection is not None
    assert (rejection.code, rejection.repair) == (Reason.NOT_INSTALLED, "lz env build torch-cuda --variant cu13")


def test_driver_that_fails_hides_its_gpus_which_is_a_fault(tmp_path: Path) -> None:
    """A GPU that has fallen off the bus must not look like a machine without one."""
    failed = Gpus((), "the NVIDIA driver failed: cuInit returned 999", has_failed=True)
    rejection = on(tmp_path, failed).missing("torch-cuda")
    assert rejection is not None
    assert (rejection.code, rejection.detail) == (Reason.BACKEND_DISABLED, failed.reason)
    assert "nvidia-smi" in rejection.repair


def test_joined_backend_for_a_device_that_is_not_here_is_not_awaited(tmp_path: Path) -> None:
    """`joined: all` names every backend; nobody starts a GPU's container where there is none."""
    one = on(tmp_path, NO_GPU, joined="all")
    assert one.unusable["torch-cuda"].code is Reason.NOT_FOR_MACHINE
    assert one.unusable["torch"].code is Reason.NOT_JOINED
    assert "python -m layerzero.workers.join --backend torch" in one.unusable["torch"].repair


ARC = DeviceSpec("xpu", device_name="Intel GPU 0xe20b", device_vendor="intel", device_uuid="pci-0000:03:00.0")


def with_arc(tmp_path: Path) -> Launcher:
    return Launcher(Settings(runtime_dir=tmp_path / "run", store=tmp_path / "store"), NO_GPU, (ARC,))


def test_backends_of_devices_that_are_not_here_name_them(tmp_path: Path) -> None:
    """They were run on no machine of ours, and here there is nothing to run them on: no fault, nothing to repair."""
    one = on(tmp_path, NO_GPU)
    told = {name: one.missing(name) for name in ("torch-rocm", "torch-xpu", "torch-hpu")}
    assert [(rejection.code, rejection.repair) for rejection in told.values() if rejection] == [
        (Reason.NOT_FOR_MACHINE, "")
    ] * 3
    assert "needs an AMD GPU" in told["torch-rocm"].detail  # type: ignore[union-attr]
    assert with_arc(tmp_path).missing("torch-hpu") == told["torch-hpu"]


def test_a_backend_that_was_never_run_is_left_alone_where_its_device_is(tmp_path: Path) -> None:
    """An integrated GPU makes no machine ill, and no repair of another call suggests to build for it."""
    rejection = with_arc(tmp_path).missing("torch-xpu")
    assert rejection is not None
    assert (rejection.code, rejection.repair) == (Reason.NOT_RUN, "")
    assert rejection.detail.startswith("no machine of this project has run it, and ")
    assert rejection.detail.endswith("; to try it: lz env build torch-xpu, then lz restart torch-xpu")


@pytest.mark.parametrize("said", [None, False, True], ids=["not probed", "failed", "passed"])
def test_a_backend_that_was_never_run_serves_by_a_certificate_of_this_machine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bool | None
) -> None:
    """Others are probed when they are first wanted; that must not happen unasked to one that may hang the machine."""
    one = with_arc(tmp_path)
    record = None if said is None else ProbeRecord("torch-xpu", "key", said, 1.0, kind="" if said else "kernel")
    monkeypatch.setattr(Launcher, "_unbuilt", lambda *_: None)
    monkeypatch.setattr(Launcher, "record", lambda *_: record)
    rejection = one.missing("torch-xpu")
    assert (rejection is None) is (said is True)
    assert rejection is None or (rejection.code, "lz env probe torch-xpu" in rejection.detail) == (Reason.NOT_RUN, True)
