"""Shadow checks: clients run a sampled call again on a reference kernel and tell how far the two results were apart.
This decides when a kernel that starts to differ is quarantined. Pure."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Collection
from dataclasses import dataclass

from layerzero.broker.selection.certification import Subject
from layerzero.ipc.vocabulary.numerics import tolerance

WINDOW = 20  # comparisons that count, per subject
LIMIT = 3  # so many of them beyond the tolerance end the trust
GROSS = 100.0  # times the tolerance; one such result, or a NaN, is enough
MAX_SUBJECTS = 4096
ENOUGH_CLIENTS = 2
BOTH = 2.0  # either kernel may be off by the tolerance, in opposite directions


@dataclass(frozen=True, slots=True)
class Comparison:
    """One shadow check. `error` as in ipc/vocabulary/numerics.py, of the kernel's result against the reference
    kernel's."""

    subject: Subject
    reference: str  # kernel id
    error: float

    @property
    def allowed(self) -> float:
        return BOTH * tolerance(self.subject.dtype)

    @property
    def is_beyond(self) -> bool:
        return not self.error <= self.allowed  # also for NaN

    @property
    def is_gross(self) -> bool:
        return self.is_beyond and not self.error <= GROSS * self.allowed


class ShadowLedger:
    """The last comparisons of each client and subject, and who has found what to be wrong. The oldest of too many is
    forgotten.

    A kernel that differs is quarantined for all, so one client's word is not enough where others are: two must say so,
    or each that is connected."""

    def __init__(self) -> None:
        self._recent: OrderedDict[tuple[Subject, int], deque[Comparison]] = OrderedDict()
        self._wrong: OrderedDict[Subject, dict[int, str]] = OrderedDict()  # evidence by client's number

    def __bool__(self) -> bool:
        """Somebody has found something wrong."""
        return bool(self._wrong)

    def note(self, comparison: Comparison, client: int = 0) -> str | None:
        """Take a comparison; returns the evidence when this client has now found the kernel to be wrong for the
        subject."""
        key = comparison.subject, client
        recent = self._recent.setdefault(key, deque(maxlen=WINDOW))
        self._recent.move_to_end(key)
        recent.append(comparison)
        beyond = [one for one in recent if one.is_beyond]
        if comparison.is_gross or len(beyond) >= LIMIT:
            del self._recent[key]
            worst = max(beyond, key=lambda one: math.inf if math.isnan(one.error) else one.error)
            evidence = (
                f"{len(beyond)} of the last {len(recent)} shadow checks differ from {worst.reference}: "
                f"error up to {worst.error:.3g}, allowed {worst.allowed:g}"
            )
            found = self._wrong.setdefault(comparison.subject, {})
            if len(found) < ENOUGH_CLIENTS:
                found[client] = evidence
            if len(self._wrong) > MAX_SUBJECTS:
                self._wrong.popitem(last=False)
            return evidence
        if len(self._recent) > MAX_SUBJECTS:
            self._recent.popitem(last=False)
        return None

    def quarantined(self, connected: Collection[int]) -> dict[Subject, str]:
        """The subjects that nobody is to be served with, and the evidence; `connected` are the clients' numbers."""
        return {
            subject: next(iter(found.values()))
            for subject, found in self._wrong.items()
            if len(found) >= ENOUGH_CLIENTS or all(number in found for number in connected)
        }

    def forget(self, kernel_ids: Collection[str]) -> None:
        """After a repair of these kernels' backend."""
        for key in [key for key in self._recent if key[0].kernel_id in kernel_ids]:
            del self._recent[key]
        for subject in [subject for subject in self._wrong if subject.kernel_id in kernel_ids]:
            del self._wrong[subject]
