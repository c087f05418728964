"""Backends that imported lifted calls stand in for: which of several imports, where, and what is taken of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerzero.broker.configuration.settings import Settings
from layerzero.broker.processes import imported
from layerzero.broker.processes.cuda_driver import Gpus
from layerzero.broker.processes.launcher import Launcher
from layerzero.capabilities.certificate import ProbeRecord
from layerzero.capabilities.descriptor import Capability, load
from layerzero.capabilities.device import DeviceSpec
from layerzero.capabilities.reasons import Reason
from layerzero.envs.lifted import folder as folders
from layerzero.envs.lifted.contents import ExportedBackend, ExportedCall, MeasuredTime
from layerzero.envs.lifted.imports import Imports
from layerzero.ipc.lifting.form import Address, Fill, Lifted
from layerzero.ipc.lifting.specimen import SEEDS
from layerzero.ipc.version import __version__
from layerzero.ipc.vocabulary.tensors import TensorSpec

HERE = DeviceSpec("cuda", "this kind", device_uuid="GPU-1", driver_version="580", cuda_version="13.0", sm_version=90)
GPUS = Gpus((HERE,))
DESCRIPTORS = Path(imported.__file__).parents[2] / "capabilities" / "descriptors"
CUPY = load(DESCRIPTORS / "cupy.json")


def add(settings: Settings, name: str, capability: Capability = CUPY, **other: str) -> None:
    """Import a call of the backend's first silu, or first kernel, which was lifted on this machine but for `other`."""
    op = "silu"
    kernel_id = capability.ops[op][0].kernel_id
    spec = TensorSpec.contiguous("float32", (4,))
    fill = Fill(Address("output", 0, 0), 0, 4, 4)
    lifted = Lifted(op, kernel_id, (spec,), (spec,), {}, (16, 16), (), (fill,))
    what = {
        "kernel": kernel_id,
        "backend": capability.backend,
        "gpu": "this kind",
        "driver_version": "580",
        "cuda_version": "13.0",
        "backend_version": capability.backend_version,
        "torch_version": "",
        "layerzero_version": __version__,
        "capabilities_hash": capability.hash,
        "env_hash": "locked there",
        **other,
    }
    call = ExportedCall(lifted, what, dict.fromkeys(SEEDS, ("aa",)))
    time = MeasuredTime(
        kernel_id=kernel_id, key="silu", count=3, median_us=2.0, p95_us=2.0, variance_us=0.0, warmup_ms=0.0
    )
    record = ProbeRecord(capability.backend, "k", True, 0.1, {}, {kernel_id: {}}, {kernel_id: {}})
    backend = ExportedBackend(capability, what["env_hash"], record, (time,))
    parts = {f"backends/{backend.name}.json": backend.pack(), f"calls/{call.key}": call.pack()}
    target = settings.store / name
    folders.write(target, iter(parts.items()), None)
    Imports(settings.store).install(folders.open_folder(target, settings.store, allows_unsigned=True), name)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    store = tmp_path / "store"
    store.mkdir()
    return Settings(runtime_dir=tmp_path / "run", store=store, manifest_dirs=())


def test_what_is_not_built_is_stood_in_for(settings: Settings) -> None:
    assert Launcher(settings, GPUS).unusable["cupy"].code is Reason.NOT_INSTALLED
    add(settings, "a")
    one = Launcher(settings, GPUS)
    reason = one.unusable["cupy"]
    assert reason == one.missing("cupy")
    assert reason.code is Reason.LIFTED_ONLY
    assert reason.detail.startswith("imported, 1 lifted call (a, unsigned)")
    assert "lz env build" in reason.repair
    assert one.records()["cupy"].env == "cupy"
    assert one.env_ids()["cupy"] == "locked there"
    assert one.facts("cupy")["imported"] == {"import": "a", "signer": None, "calls": 1}
    assert one.problems == []
    (row,) = imported.times(one.imported, GPUS, 7.0)
    assert (row.key, row.stat.median_us, row.stat.measured_at_s) == ("silu on GPU-1", 2.0, 7.0)


@pytest.mark.parametrize(
    "other",
    [{"gpu": "another kind"}, {"driver_version": "570"}, {"cuda_version": "12.9"}, {"layerzero_version": "0.0.1"}],
)
def test_what_is_of_another_machine_is_elsewhere(settings: Settings, other: dict[str, str]) -> None:
    add(settings, "a", **other)
    one = Launcher(settings, GPUS)
    assert one.unusable["cupy"].code is Reason.LIFTED_ELSEWHERE
    assert next(iter(other.values())) in one.unusable["cupy"].detail
    assert imported.times(one.imported, GPUS, 7.0) == []
    add(settings, "b")
    add(settings, "c", **other)  # the newest is not for this machine
    assert Launcher(settings, GPUS).imported["cupy"].source.name == "b"


def test_another_descriptor_is_elsewhere(settings: Settings) -> None:
    add(settings, "a", CUPY.model_copy(update={"backend_version": "0"}))
    reason = Launcher(settings, GPUS).unusable["cupy"]
    assert (reason.code, "descriptor" in reason.detail) == (Reason.LIFTED_ELSEWHERE, True)


def test_a_machine_without_a_gpu_has_no_use_for_it(settings: Settings) -> None:
    add(settings, "a")
    assert Launcher(settings, Gpus((), "no driver")).unusable["cupy"].code is Reason.NOT_FOR_MACHINE


def renamed(name: str) -> Capability:
    """cupy's silu as that of a backend which nobody has here."""
    kernel = CUPY.ops["silu"][0].model_copy(update={"kernel_id": f"{name}.silu"})
    return CUPY.model_copy(update={"backend": name, "ops": {"silu": (kernel,)}})


def test_a_backend_that_nobody_knows_comes_with_its_descriptor(settings: Settings) -> None:
    add(settings, "a", renamed("elsewhere"))
    one = Launcher(settings, GPUS)
    assert one.capabilities["elsewhere"] == renamed("elsewhere")
    assert one.unusable["elsewhere"].code is Reason.LIFTED_ONLY
    assert one.unusable["elsewhere"].repair == ""
    assert one.missing("elsewhere", files=True) == one.unusable["elsewhere"]
    assert one.stand_in("elsewhere") is one.imported["elsewhere"]


def test_a_damaged_import_is_a_problem_and_nothing_else(settings: Settings) -> None:
    add(settings, "a", renamed("elsewhere"))
    (path,) = (settings.store / "lifted" / "imported" / "data").glob("*/backends/*")
    path.write_bytes(b"{}")
    one = Launcher(settings, GPUS)
    assert "elsewhere" not in one.capabilities
    (problem,) = one.problems
    assert problem.startswith("import a does not hold: backends/elsewhere.json: its bytes")
