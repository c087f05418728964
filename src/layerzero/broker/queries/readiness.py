"""Is this broker fit for production? One function per question; client/tools/ready.py adds what only a client can
try."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from layerzero.broker.processes.host import free_memory_bytes
from layerzero.broker.queries.broker_view import BrokerView
from layerzero.broker.selection.dispatch_table import DispatchTable
from layerzero.broker.selection.signature import unknown_backend
from layerzero.capabilities.certificate import ProbeRecord
from layerzero.capabilities.match import Rejection
from layerzero.capabilities.reasons import Reason
from layerzero.ipc import confinement
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.wording import counted


class Check(NamedTuple):
    """`detail`: what was found. `repair`: the command or change that helps; empty when `is_ok`."""

    name: str
    is_ok: bool
    detail: str
    repair: str = ""

    def to_wire(self) -> dict[str, Any]:
        return {"name": self.name, "ok": self.is_ok, "detail": self.detail, "repair": self.repair}


def wanted_backends(server: BrokerView, names: Sequence[str] | None) -> list[str]:
    """Those named, or all that the policy allows. Raises InvalidArgument for a name that does not exist."""
    known = sorted(server.state.capabilities)
    for name in names or ():
        if name not in known:
            raise InvalidArgument(unknown_backend(name, known, server.state.engine.refused.get(name, "")))
    if names is not None:
        return sorted(set(names))
    return [name for name in known if not _is_denied(server, name) and not _is_left_alone(server, name)]


def _is_left_alone(server: BrokerView, backend: str) -> bool:
    """A backend from outside that may not be used (`_sources` tells), one that is not for this machine, or one that
    nobody has run (`_platforms` tells)."""
    missing = server.launcher.missing(backend)
    return missing is not None and missing.code in (
        Reason.SOURCE_NOT_ALLOWED,
        Reason.SOURCE_CHANGED,
        Reason.NOT_FOR_MACHINE,
        Reason.NOT_RUN,
    )


def _is_denied(server: BrokerView, backend: str) -> bool:
    """The policy's lists forbid every kernel of it, whatever the call."""
    limits = server.policy.policy.limits
    kernels = server.state.capabilities[backend].kernel_ids
    return all(any(limit.objection(kernel, backend) for limit in limits) for kernel in kernels)


def examine(server: BrokerView, names: Sequence[str] | None) -> list[Check]:
    """All checks, environments first."""
    records, joined = server.launcher.records(), server.joined.names
    checks = [
        _joined(server, name) if name in joined else _environment(server, name, records.get(name))
        for name in wanted_backends(server, names)
    ]
    return [*checks, *(question(server) for question in QUESTIONS)]


def _environment(server: BrokerView, backend: str, record: ProbeRecord | None) -> Check:
    """Built, its probe passed, and nothing has disabled it since."""
    name = f"environment {backend}"
    missing = server.launcher.missing(backend, files=True)
    if missing is not None and missing.code is Reason.LIFTED_ONLY:
        return Check(name, True, server.launcher.imported[backend].text)
    if missing is not None:
        return _fault(name, missing, "a machine that has one")
    reason = server.state.unavailable_at(time.monotonic()).get(backend)
    if reason is not None:
        return _fault(name, reason, f"lz restart {backend}")
    if record is None:
        return Check(name, False, "built, and not probed yet", f"lz env probe {backend}")
    if not record.ok:
        return Check(name, False, record.cause, record.repair)
    where = server.launcher.facts(backend).get("interpreter")
    return Check(name, True, f"{f'{where}, as it is; ' if where else 'built and '}probed; {_certified(record)}")


def _joined(server: BrokerView, backend: str) -> Check:
    """A worker of it has joined, or stands by; what is installed where the broker is does not matter."""
    name = f"environment {backend}"
    reason = server.state.unavailable.get(backend)
    if reason is not None:
        return _fault(name, reason, f"lz restart {backend}")
    records = server.joined.records(backend)
    certified = _certified(records[0]) if records else "one that serves has no agent any more"
    return Check(name, True, f"{counted(len(records), 'worker')} joined; {certified}")


def _fault(name: str, reason: Rejection, otherwise: str) -> Check:
    """`otherwise`: the repair where the reason names none."""
    return Check(name, False, f"{reason.code.value}: {reason.detail}", reason.repair or otherwise)


def _certified(record: ProbeRecord) -> str:
    certified, refused = record.counts
    kinds = f"{certified:,} class{'' if certified == 1 else 'es'} of calls certified"
    return f"{kinds}, {refused:,} refused" if refused else kinds


def _platforms(server: BrokerView) -> Check:
    """Backends for devices that this machine has not are no fault of it, nor those that we have never run."""
    details: dict[str, list[str]] = {}
    lines = []
    for backend in sorted(server.launcher.manifests):
        missing = server.launcher.missing(backend)
        if missing is not None and missing.code is Reason.NOT_FOR_MACHINE:
            details.setdefault(missing.detail, []).append(backend)
        elif missing is not None and missing.code is Reason.NOT_RUN:
            lines.append(f"never run: {backend}: {missing.detail}")
    lines = [*(f"not for this machine: {', '.join(names)}: {why}" for why, names in details.items()), *lines]
    return Check("platforms", True, _lines(lines) if lines else "all backends are for this machine")


def _descriptors(server: BrokerView) -> Check:
    problems = server.launcher.problems
    if problems:
        return Check("descriptors", False, _lines(problems), "mend what the text names, then lz down and lz up")
    return Check("descriptors", True, f"{len(server.launcher.capabilities)} valid, schema 1.0")


def _sources(server: BrokerView) -> Check:
    """Backends from outside are what was allowed. One that nobody has allowed is left alone, and no fault."""
    name, told = "kernel sources", []
    for backend, manifest in sorted(server.launcher.manifests.items()):
        missing = server.launcher.missing(backend) if manifest.source is not None else None
        if missing is not None and missing.code is Reason.SOURCE_CHANGED:
            return Check(name, False, missing.detail, missing.repair)
        if missing is not None and missing.code is Reason.SOURCE_NOT_ALLOWED:
            told.append(f"{missing.detail}; repair: {missing.repair}")
        elif manifest.source is not None:
            told.append(f"{backend} of {manifest.source.origin}: allowed, {manifest.source.sha256}")
    return Check(name, True, _lines(told) if told else "no backend comes from outside")


def _policy(server: BrokerView) -> Check:
    source = server.policy
    if source.problem:
        return Check("policy", False, source.problem, f"lz policy check {source.file}")
    return Check("policy", True, f"valid, hash {source.policy.hash}")


def _table(server: BrokerView) -> Check:
    """Where the policy names one: readable, of this machine and these environments."""
    name, policy = "dispatch table", server.policy.policy
    path = policy.dispatch_table
    if path is None and policy.plan_mode:
        return Check(name, False, "plan_mode is on, and no dispatch_table is set", "lz solve, then set dispatch_table")
    if path is None:
        return Check(name, True, "none is set; calls are ranked as they come")
    table = server.state.engine.table
    if server.table_problem or not isinstance(table, DispatchTable):
        return Check(name, False, server.table_problem, "lz solve")
    return Check(
        name,
        True,
        f"{path}: {counted(len(table.trees), 'kind')} of calls, {counted(table.buckets, 'bucket')}; made for "
        f"this machine: {', '.join(sorted(table.groups))}",
    )


def _times(server: BrokerView) -> Check:
    problems = server.perfdb.problems
    if problems:
        return Check("measured times", False, _lines(problems), f"a writable {server.perfdb.path.parent}, then lz down")
    return Check("measured times", True, f"{server.perfdb.path}, {len(server.state.engine.perf)} known")


def _memory(server: BrokerView) -> Check:
    """Where the policy wants some to stay free: it is free now, on each device."""
    headroom = server.policy.policy.memory_headroom_bytes
    if headroom is None:
        return Check("memory", True, "memory_headroom_bytes is not set: memory is not looked at")
    free = {uuid: free_memory_bytes(device) for uuid, device in server.state.engine.devices.items()}
    unknown = [uuid or "the CPU" for uuid, nbytes in free.items() if nbytes is None]
    if unknown:
        text = f"how much is free on {', '.join(unknown)} cannot be told here"
        return Check("memory", False, text, "take memory_headroom_bytes out of the policy")
    told = [f"{nbytes:,} bytes free" + (f" on {uuid}" if uuid else "") for uuid, nbytes in free.items()]
    is_ok = all(nbytes is not None and nbytes > headroom for nbytes in free.values())
    text = f"{', '.join(told)}, memory_headroom_bytes is {headroom:,}"
    return Check("memory", is_ok, text, "" if is_ok else "free memory, or a lower headroom")


def _compiled(server: BrokerView) -> Check:
    """No kernel has failed to compile; those that are compiled now say so."""
    name, compilation = "compiled kernels", server.state.engine.compilation
    if compilation.failures:
        lines = [f"{unit.kernel_id} for {unit.calls}: {why}" for unit, why in compilation.failures.items()]
        return Check(name, False, _lines(lines), "mend what the compiler names, then lz restart BACKEND")
    going = [f"{unit.kernel_id} is being compiled for {unit.calls}" for unit in compilation.running()]
    return Check(name, True, _lines([f"{compilation.count()} are kept, for one kind of calls each", *going]))


def _sharing(server: BrokerView) -> Check:
    """Faults of one process on a GPU stay there."""
    name, allowed = "GPU sharing", server.settings.allow_mps
    if not server.launcher.has_mps:
        return Check(name, True, "MPS is off: a fault on a GPU ends the process that made it, and no other")
    text = (
        "MPS is on: a fault on a GPU, such as an illegal address, ends all processes that use it, applications included"
    )
    if allowed:
        return Check(name, True, f"{text}; allow_mps is set")
    return Check(name, False, text, "echo quit | nvidia-cuda-mps-control, then lz down; or allow_mps = true")


def _confinement(server: BrokerView) -> Check:
    """Where the kernel cannot, that is no fault of the installation."""
    name, version = "confinement", confinement.version()
    why = "" if version else "this kernel has no Landlock"
    with suppress(ValueError):  # workers say so, and do not start
        why = why or ("" if confinement.is_wanted(os.environ) else f"{confinement.VARIABLE} is 0")
    if why:
        return Check(name, True, f"{why}: a library in a worker can read the memory of your processes")
    signals = ", and from signalling them" if version >= confinement.WITH_SCOPES else ""
    return Check(name, True, f"workers are kept from the memory of other processes{signals} (Landlock {version})")


def _lines(texts: Iterable[str]) -> str:
    return "\n".join(texts)


QUESTIONS: tuple[Callable[[BrokerView], Check], ...] = (
    _descriptors,
    _platforms,
    _sources,
    _policy,
    _table,
    _times,
    _compiled,
    _memory,
    _sharing,
    _confinement,
)
