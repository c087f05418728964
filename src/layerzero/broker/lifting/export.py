"""What of the store can serve another machine, as the contents of a folder (envs/lifted/folder.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from layerzero.broker.configuration.settings import Settings
from layerzero.broker.lifting.store import Entry, LiftStore
from layerzero.broker.processes.cuda_driver import Gpus
from layerzero.broker.processes.launcher import Launcher
from layerzero.broker.storage.perf_rows import Identity
from layerzero.broker.storage.perf_store import Damaged, Store, Unavailable
from layerzero.envs.lifted.contents import MAX_TIMES, ExportedBackend, ExportedCall, MeasuredTime
from layerzero.envs.lifted.imports import neighbour
from layerzero.ipc.errors import ConfigError, ProtocolError
from layerzero.ipc.lifting.form import Lifted
from layerzero.ipc.version import __version__


@dataclass
class Export:
    """Calls to be written, by their backends. `left_out`: how many others there are, by why."""

    backends: dict[str, ExportedBackend] = field(default_factory=dict)
    calls: dict[str, ExportedCall] = field(default_factory=dict)
    codes: dict[str, bytes] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)

    def contents(self) -> Iterator[tuple[str, bytes]]:
        """Paths in the folder, and bytes."""
        for name, backend in sorted(self.backends.items()):
            yield f"backends/{name}.json", backend.pack()
        for key, call in sorted(self.calls.items()):
            yield f"calls/{key}", call.pack()
        for name, code in sorted(self.codes.items()):
            yield f"code/{name}", code


def collect(settings: Settings, gpus: Gpus, backends: Collection[str], kernels: Collection[str]) -> Export:
    """All lifted calls of the store that were proved here and never at fault; with names, those alone. Raises
    ConfigError where there are none."""
    launcher = Launcher(settings)
    unknown = sorted({*backends} - launcher.capabilities.keys())
    if unknown:
        known = ", ".join(sorted(launcher.capabilities))
        raise ConfigError(f"name backends that there are: {unknown[0]!r:.80} is none; known: {known}")
    store, export = LiftStore(settings.store / "lifted"), Export()
    current = _current(launcher)
    found: dict[str, ExportedCall] = {}
    for key, entry in store.entries():
        if (backends and entry.backend not in backends) or (kernels and entry.kernel_id not in kernels):
            continue
        why = _why_not(entry, store, current)
        if why:
            export.left_out[why] += 1
            continue
        with suppress(ProtocolError):
            call = ExportedCall(Lifted.unpack(entry.form), entry.what, entry.trials)
            if call.key == key:
                found[key] = call
    for key, call in found.items():
        if not call.trials and not neighbour(call, iter(found.values())):
            export.left_out["nothing shows that they work: neither trials, nor a call that they are like"] += 1
            continue
        codes = {name: store.code(name) for name in call.lifted.codes}
        if None in codes.values():
            export.left_out["their machine code is gone"] += 1
            continue
        export.codes |= {name: code for name, code in codes.items() if code is not None}
        export.calls[key] = call
    if not export.calls:
        why = "; ".join(f"{count} {text}" for text, count in export.left_out.items())
        raise ConfigError(f"call the kernels until they are lifted, then export: there is nothing to export; {why}")
    for name in {call.what["backend"] for call in export.calls.values()}:
        export.backends[name] = current[name]
    _add_times(export, settings, gpus)
    return export


def _current(launcher: Launcher) -> dict[str, ExportedBackend]:
    """Backends as they are now, whose environments are here and whose probe has passed."""
    records, env_ids = launcher.records(), launcher.env_ids()
    return {
        name: ExportedBackend(capability, env_ids.get(name, ""), records[name])
        for name, capability in launcher.capabilities.items()
        if name in records and records[name].ok and launcher.stand_in(name) is None
    }


def _why_not(entry: Entry, store: LiftStore, current: Mapping[str, ExportedBackend]) -> str:
    """Why an entry is not for others; empty when it is."""
    backend, what = current.get(entry.backend), entry.what
    if not entry.form:
        return "cannot be lifted"
    if entry.imported:
        return "were imported; export them where they were lifted"
    if store.fault_of(what):
        return "are of kernels that a process lost its GPU with"
    if backend is None:
        return "are of backends that are not built here, or whose probe has not passed"
    now = {
        "backend_version": backend.capability.backend_version,
        "torch_version": backend.record.versions.get("torch", ""),
        "capabilities_hash": backend.capability.hash,
        "env_hash": backend.env,
        "layerzero_version": __version__,
    }
    return "" if now.items() <= what.items() else "are of earlier versions"


def _add_times(export: Export, settings: Settings, gpus: Gpus) -> None:
    """What was measured of these kernels on a GPU of the kind that they were lifted on: without it, nobody who imports
    them knows how fast they are. None where there is nothing to read."""
    path = settings.times
    if not path.is_file():
        return
    try:
        db, _ = Store.open(path)
    except Unavailable:
        return
    try:
        for name, backend in export.backends.items():
            calls = [call for call in export.calls.values() if call.what["backend"] == name]
            times = list(_times(db, name, calls, gpus))[:MAX_TIMES]
            export.backends[name] = ExportedBackend(backend.capability, backend.env, backend.record, tuple(times))
    except (Damaged, Unavailable):
        return
    finally:
        db.close()


def _times(db: Store, name: str, calls: Collection[ExportedCall], gpus: Gpus) -> Iterator[MeasuredTime]:
    kernels = {call.lifted.kernel_id for call in calls}
    whats = {tuple(sorted((k, v) for k, v in call.what.items() if k not in ("kernel", "backend"))) for call in calls}
    for what in map(dict, sorted(whats)):
        kind = what.pop("gpu")
        uuid = next((gpu.device_uuid for gpu in gpus.devices if gpu.device_name == kind), None)
        if uuid is None:
            continue
        for row in db.load(name, Identity(device_uuid=uuid, **what)):
            key, _, place = row.key.rpartition(" on ")
            if row.kernel_id in kernels and place == uuid:
                yield MeasuredTime(
                    kernel_id=row.kernel_id,
                    key=key,
                    count=row.count,
                    median_us=row.median_us,
                    p95_us=row.p95_us,
                    variance_us=row.variance_us,
                    warmup_ms=row.warmup_ms,
                )
