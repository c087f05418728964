"""Certification: which kernels may serve which calls, by what the probes of their environments have shown and what
shadow checks have taken back. It never changes; what is learned later makes a new one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from layerzero.capabilities.certificate import ProbeRecord
from layerzero.capabilities.match import Rejection
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.vocabulary.shape_class import class_dtype, shape_class
from layerzero.ipc.vocabulary.signature import CallSignature


class Subject(NamedTuple):
    """The subject of a certificate: a kernel and the class of calls that it was checked on."""

    kernel_id: str
    dtype: str
    shape_class: str

    @classmethod
    def of(cls, kernel_id: str, call: CallSignature) -> Subject:
        return cls(
            kernel_id, class_dtype(call.op, call.inputs), shape_class(call.op, call.inputs, call.attrs, call.outputs)
        )

    def __str__(self) -> str:
        return f"{self.dtype} of class {self.shape_class}"


class Certification:
    """What is certified. `records`: the last probe of each backend. A kernel that no probe has seen yet is not refused:
    its worker is probed before it serves. `owners`: the backend of each kernel; what a backend's probe says of another
    backend's kernels is not believed, since a probe runs foreign libraries."""

    def __init__(
        self,
        records: Mapping[str, ProbeRecord],
        quarantined: Mapping[Subject, str] | None = None,
        owners: Mapping[str, str] | None = None,
    ) -> None:
        self._records = dict(records)
        self._quarantined = dict(quarantined or {})
        self._owners = owners
        self._certified: dict[str, Mapping[str, Mapping[str, float]]] = {}
        self._failures: dict[Subject, str] = {}
        for backend, record in self._records.items():
            for kernel_id in record.kernels:
                if self._owns(backend, kernel_id):
                    self._certified[kernel_id] = record.certified.get(kernel_id, {})
            for failure in record.failures:
                subject = Subject(failure["kernel_id"], failure["dtype"], failure["shape_class"])
                if self._owns(backend, subject.kernel_id):
                    self._failures[subject] = f"{failure['detail']} (case {failure['case']!r})"

    def _owns(self, backend: str, kernel_id: str) -> bool:
        return self._owners is None or self._owners.get(kernel_id) == backend

    def owned_by(self, owners: Mapping[str, str]) -> Certification:
        """The same certification, in which a record counts for the kernels of its own backend alone."""
        return Certification(self._records, self._quarantined, owners)

    @property
    def quarantined(self) -> Mapping[Subject, str]:
        """The subjects whose certificates shadow checks have taken back, with the evidence."""
        return self._quarantined

    def is_known(self, kernel_id: str) -> bool:
        """Whether a probe has seen this kernel."""
        return kernel_id in self._certified

    def with_record(self, record: ProbeRecord) -> Certification:
        """The certification after a probe, whose record takes the place of the backend's earlier one."""
        return Certification({**self._records, record.env: record}, self._quarantined, self._owners)

    def with_quarantine(self, subject: Subject, evidence: str) -> Certification:
        """The certification after a shadow check has found the subject's results wrong: its certificate is void."""
        return Certification(self._records, {**self._quarantined, subject: evidence}, self._owners)

    def with_quarantines(self, quarantined: Mapping[Subject, str]) -> Certification:
        """The certification with these subjects in quarantine, and no others."""
        return Certification(self._records, quarantined, self._owners)

    def without_quarantine(self, kernel_ids: Collection[str]) -> Certification:
        """The certification after a repair of these kernels' backend: nothing of them is in quarantine."""
        kept = {s: evidence for s, evidence in self._quarantined.items() if s.kernel_id not in kernel_ids}
        return Certification(self._records, kept, self._owners)

    def rejection(self, kernel_id: str, call: CallSignature) -> Rejection | None:
        """Why a kernel may not serve this call, or None."""
        return self.judge(Subject.of(kernel_id, call))

    def judge(self, subject: Subject) -> Rejection | None:
        """As `rejection`, for a dtype and shape class."""
        if subject in self._quarantined:
            return Rejection(Reason.NOT_CERTIFIED, f"{subject}: quarantined, {self._quarantined[subject]}")
        certified = self._certified.get(subject.kernel_id)
        if certified is None or subject.shape_class in certified.get(subject.dtype, ()):
            return None
        why = self._failures.get(subject, "no case of the probe covers it")
        return Rejection(Reason.NOT_CERTIFIED, f"{subject}: {why}")
