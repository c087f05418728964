"""Backends that this machine serves by imported lifted calls alone: their environment is not here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from layerzero.broker.processes.cuda_driver import Gpus
from layerzero.broker.selection.timings import PerfRow, Stat
from layerzero.capabilities.descriptor import Capability
from layerzero.capabilities.device import DeviceSpec
from layerzero.capabilities.match import Rejection
from layerzero.capabilities.reasons import Reason
from layerzero.envs.lifted.contents import ExportedBackend, Wrong
from layerzero.envs.lifted.imports import Import, ImportedCall
from layerzero.ipc.version import __version__
from layerzero.ipc.wording import counted

_WORDS = {
    "gpu": "GPU",
    "driver_version": "driver",
    "cuda_version": "CUDA",
    "layerzero_version": "LayerZero",
    "capabilities_hash": "descriptor",
}


@dataclass(frozen=True)
class ImportedBackend:
    """A backend of an import, as `exported` describes it. `elsewhere`: why none of its calls is for this machine."""

    source: Import
    exported: ExportedBackend
    calls: tuple[ImportedCall, ...]
    elsewhere: str = ""

    @property
    def facts(self) -> dict[str, object]:
        """For `lz status`."""
        return {
            "import": self.source.name,
            "signer": self.source.signer or None,
            "calls": len(self.calls),
        }

    @property
    def text(self) -> str:
        """What it is, for people."""
        by = f"signed by {self.source.signer}" if self.source.signer else "unsigned"
        return f"imported, {counted(len(self.calls), 'lifted call')} ({self.source.name}, {by})"

    def rejection(self, repair: str = "") -> Rejection:
        """Of all calls that no lifted call of it serves. `repair`: what builds its environment, if that is known."""
        if self.elsewhere:
            return Rejection(Reason.LIFTED_ELSEWHERE, self.elsewhere, repair)
        text = f"{self.text}, and no worker; lz explain says whether this call is one of them"
        return Rejection(Reason.LIFTED_ONLY, text, repair)


def choose(imports: Iterable[Import], gpus: Gpus | None) -> tuple[dict[str, ImportedBackend], list[str]]:
    """Of each backend the newest import that has calls for this machine, or else the newest; and what is wrong with
    imports. `imports`: the newest first."""
    found: dict[str, ImportedBackend] = {}
    problems = []
    for one in imports:
        for name in one.backends:
            try:
                exported = one.backend(name)
            except Wrong as exc:
                problems.append(f"import {one.name} does not hold: {exc}; repair: import it again")
                continue
            calls = tuple(one.calls_of(name))
            backend = ImportedBackend(one, exported, calls, _elsewhere(calls, exported.capability, gpus))
            if name not in found or (found[name].elsewhere and not backend.elsewhere):
                found[name] = backend
    return found, problems


def for_descriptor(backend: ImportedBackend, capability: Capability, gpus: Gpus | None) -> ImportedBackend:
    """The same, of a backend whose descriptor is here."""
    return replace(backend, elsewhere=_elsewhere(backend.calls, capability, gpus))


def _elsewhere(calls: Sequence[ImportedCall], capability: Capability, gpus: Gpus | None) -> str:
    """Why none of the calls is for this machine; empty when one is, and where nobody knows of GPUs."""
    here = [_facts_of(device, capability.hash) for device in (() if gpus is None else gpus.devices)]
    if not here or any(own.items() <= call.what.items() for call in calls for own in here):
        return ""
    what = calls[0].what
    own = min(here, key=lambda facts: sum(facts[name] != what[name] for name in facts))
    wrong = [name for name in own if own[name] != what[name]]
    theirs = ", ".join(f"{_WORDS[name]} {what[name]:.40}" for name in wrong)
    ours = ", ".join(f"{_WORDS[name]} {own[name]:.40}" for name in wrong)
    return f"its imported lifted calls are of another machine: of {theirs}; this one has {ours}"


def times(backends: Mapping[str, ImportedBackend], gpus: Gpus, now_s: float) -> list[PerfRow]:
    """What was measured where they were exported, for the GPUs of this machine that are of that kind."""
    rows = []
    for backend in backends.values():
        kinds = {call.what["gpu"] for call in backend.calls}
        uuids = [gpu.device_uuid for gpu in gpus.devices if gpu.device_name in kinds and not backend.elsewhere]
        for one in backend.exported.times:
            stat = Stat(one.count, one.median_us, one.p95_us, one.variance_us, one.warmup_ms, now_s)
            rows += [PerfRow(one.kernel_id, f"{one.key} on {uuid}", stat) for uuid in uuids]
    return rows


def _facts_of(device: DeviceSpec, capabilities_hash: str) -> dict[str, str]:
    return {
        "gpu": device.device_name,
        "driver_version": device.driver_version,
        "cuda_version": device.cuda_version,
        "layerzero_version": __version__,
        "capabilities_hash": capabilities_hash,
    }
