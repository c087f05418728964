"""Imported lifted calls in the broker: of which calls they are, and why they are of no other. Their backends have no
worker here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from layerzero.broker.core.state import BrokerState
from layerzero.broker.lifting.store import Entry, LiftStore
from layerzero.broker.processes.imported import ImportedBackend
from layerzero.broker.selection.signature import CallSpec
from layerzero.capabilities.match import Rejection
from layerzero.capabilities.reasons import Reason
from layerzero.envs.lifted.contents import Wrong
from layerzero.envs.lifted.imports import ImportedCall
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.lifting.keys import call_digest
from layerzero.ipc.lifting.specimen import Specimen

# All that machine code of a kernel depends on besides the call: of a call, a kernel's id and its backend.
WhatOf = Callable[[CallSpec, str, str], Mapping[str, str]]


class _Place(NamedTuple):
    backend: str
    kernel_id: str
    call: str  # its digest


class ImportedCalls:
    """Those of backends whose environments are not here. Decides what the engine asks of it (`LiftedKernels`)."""

    def __init__(
        self, state: BrokerState, backends: Mapping[str, ImportedBackend], store: LiftStore, what_of: WhatOf
    ) -> None:
        self._state, self._backends, self._store, self._what_of = state, backends, store, what_of
        self._calls: defaultdict[_Place, list[ImportedCall]] = defaultdict(list)
        self._refused: dict[str, str] = {}  # why a call was refused here, by the digest of its file
        for name, backend in backends.items():
            for call in backend.calls:
                self._calls[_Place(name, call.what["kernel"], call.call)].append(call)

    def stands_in(self, backend: str) -> bool:
        """Whether the backend has no worker, and is served by imported calls."""
        unavailable = self._state.unavailable.get(backend)
        return unavailable is not None and unavailable.code is Reason.LIFTED_ONLY and backend in self._backends

    def rejection(self, kernel_id: str, backend: str, spec: CallSpec) -> Rejection | None:
        """Why no imported call of the kernel serves this call, wherever its tensors lie. None where one does, and for
        backends with a worker."""
        if not self.stands_in(backend):
            return None
        text = self._backends[backend].text
        calls = self._calls.get(_Place(backend, kernel_id, call_digest(spec)), ())
        here = self._here(calls, kernel_id, backend, spec)
        if not here:
            if calls and spec.device:
                return Rejection(Reason.LIFTED_ELSEWHERE, f"{text}; this call is, but of another kind of GPU or driver")
            return Rejection(Reason.LIFTED_ONLY, f"{text}; this call is none of them")
        policy = self._state.engine.policy_for(spec)
        isolation, named = policy.isolation(backend, kernel_id), policy.isolation_key(backend, kernel_id)
        if isolation not in ("lifted", "auto"):
            whose = backend if named == "*" else named
            return Rejection(Reason.LIFTED_ONLY, f"{text}; policy: backend_isolation is {isolation} for {whose}")
        if fault := self._store.fault_of(here[0].what):
            return Rejection(Reason.LIFTED_ONLY, f"{text}; {fault}")
        refused = [self._refused[call.file] for call in here if call.file in self._refused]
        if len(refused) == len(here):
            return Rejection(Reason.LIFTED_ONLY, f"{text}; this call is, and was refused here: {refused[0]}")
        return None

    def find(self, kernel_id: str, backend: str, spec: CallSpec, alignments: Sequence[int]) -> ImportedCall | None:
        """The imported call for tensors of these alignments, if there is one that was not refused: what needs less is
        served, too."""
        if not self.stands_in(backend):
            return None
        calls = self._calls.get(_Place(backend, kernel_id, call_digest(spec)), ())
        fitting = [
            call
            for call in self._here(calls, kernel_id, backend, spec)
            if call.file not in self._refused and _fits(call.alignments, alignments)
        ]
        return max(fitting, key=lambda call: sum(call.alignments), default=None)

    def _here(
        self, calls: Sequence[ImportedCall], kernel_id: str, backend: str, spec: CallSpec
    ) -> Sequence[ImportedCall]:
        """Those that are of this machine, too."""
        if not calls or not spec.device:
            return ()
        what = self._what_of(spec, kernel_id, backend)
        return [call for call in calls if call.what == what]

    def specimen(self, backend: str, call: ImportedCall) -> tuple[Specimen, Specimen]:
        """The call, and what is to be tried to show that it works. Raises InvalidArgument when files do not hold."""
        source = self._backends[backend].source
        try:
            return source.specimen(call)
        except Wrong as exc:
            raise InvalidArgument(f"import {source.name} does not hold: {exc}; import it again, then lz down") from exc

    def note_refused(self, call: ImportedCall, entry: Entry) -> None:
        """The next kernel serves it."""
        self._refused[call.file] = f"{entry.reason}: {entry.detail}"
        self._state.engine.epoch += 1


def _fits(needed: Sequence[int], given: Sequence[int]) -> bool:
    return len(needed) == len(given) and all(
        not has if not need else has and has % need == 0 for need, has in zip(needed, given, strict=True)
    )
