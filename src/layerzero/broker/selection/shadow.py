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
    """The last comparisons of each subject. One that is quarantined is forgotten, and the oldest of too many."""

    def __init__(self) -> None:
        self._recent: OrderedDict[Subject, deque[Comparison]] = OrderedDict()

    def note(self, comparison: Comparison) -> str | None:
        """Take a comparison; returns the evidence when the kernel is to be quarantined for this subject."""
        recent = self._recent.setdefault(comparison.subject, deque(maxlen=WINDOW))
        self._recent.move_to_end(comparison.subject)
        recent.append(comparison)
        beyond = [one for one in recent if one.is_beyond]
        if comparison.is_gross or len(beyond) >= LIMIT:
            del self._recent[comparison.subject]
            worst = max(beyond, key=lambda one: math.inf if math.isnan(one.error) else one.error)
            return (
                f"{len(beyond)} of the last {len(recent)} shadow checks differ from {worst.reference}: "
                f"error up to {worst.error:.3g}, allowed {worst.allowed:g}"
            )
        if len(self._recent) > MAX_SUBJECTS:
            self._recent.popitem(last=False)
        return None

    def forget(self, kernel_ids: Collection[str]) -> None:
        """After a repair of these kernels' backend."""
        for subject in [s for s in self._recent if s.kernel_id in kernel_ids]:
            del self._recent[subject]
