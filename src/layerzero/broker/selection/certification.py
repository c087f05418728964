"""Which kernels may serve which calls: what the probes of their environments have shown, and what shadow checks have
taken back. A value: what is learned makes a new one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from layerzero.capabilities.certificate import ProbeRecord
from layerzero.capabilities.match import Rejection
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.vocabulary.shape_class import class_dtype, shape_class
from layerzero.ipc.vocabulary.tensors import TensorSpec


class Call(Protocol):
    """A call signature, as CallSpec and SelectionContext have it."""

    @property
    def op(self) -> str: ...
    @property
    def inputs(self) -> Sequence[TensorSpec | None]: ...
    @property
    def outputs(self) -> Sequence[TensorSpec]: ...
    @property
    def attrs(self) -> Mapping[str, Any]: ...


class Subject(NamedTuple):
    """What a certificate is about."""

    kernel_id: str
    dtype: str
    shape_class: str

    @classmethod
    def of(cls, kernel_id: str, call: Call) -> Subject:
        return cls(
            kernel_id, class_dtype(call.op, call.inputs), shape_class(call.op, call.inputs, call.attrs, call.outputs)
        )

    def __str__(self) -> str:
        return f"{self.dtype} of class {self.shape_class}"


class Certification:
    """`records`: the probes so far, by backend. A kernel that no probe has seen yet is not refused: its worker is
    probed before it serves. `owners`: the backend of each kernel; what a probe says of another's kernels is not
    heard, since its process is a foreign library's."""

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
        """The same records, heard on the kernels of their own backends alone."""
        return Certification(self._records, self._quarantined, owners)

    @property
    def quarantined(self) -> Mapping[Subject, str]:
        """What shadow checks have taken back, with the evidence."""
        return self._quarantined

    def is_known(self, kernel_id: str) -> bool:
        """A probe has seen this kernel."""
        return kernel_id in self._certified

    def with_record(self, record: ProbeRecord) -> Certification:
        """After a probe: it replaces what was known of that backend."""
        return Certification({**self._records, record.env: record}, self._quarantined, self._owners)

    def with_quarantine(self, subject: Subject, evidence: str) -> Certification:
        """After a shadow check: the certificate is void."""
        return Certification(self._records, {**self._quarantined, subject: evidence}, self._owners)

    def without_quarantine(self, kernel_ids: Collection[str]) -> Certification:
        """After a repair of these kernels' backend."""
        kept = {s: evidence for s, evidence in self._quarantined.items() if s.kernel_id not in kernel_ids}
        return Certification(self._records, kept, self._owners)

    def rejection(self, kernel_id: str, call: Call) -> Rejection | None:
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
