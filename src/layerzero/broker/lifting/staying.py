"""Why policy keeps a kernel that would be lifted in its worker, for good or for now."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from layerzero.broker.lifting.answers import later, refused
from layerzero.broker.selection.policy import Policy
from layerzero.broker.selection.signature import Verdict
from layerzero.ipc.lifting.reasons import LiftReason


def refused_by_policy(
    policy: Policy, best: Verdict, allowed: Collection[str], *, is_outsider: bool
) -> dict[str, Any] | None:
    """`allowed`: values of backend_isolation. `is_outsider`: the backend did not come with LayerZero."""
    isolation = policy.isolation(best.backend, best.kernel_id)
    named = policy.isolation_key(best.backend, best.kernel_id)
    if isolation not in allowed:
        text = f"policy: backend_isolation is {isolation} for {best.backend if named == '*' else named}"
        return refused(LiftReason.NOT_ALLOWED, text)
    if is_outsider and named == "*" and not best.is_lifted_only:  # an import is its operator's leave
        text = f"{best.backend} comes from outside; its code runs here only if backend_isolation names it"
        return refused(LiftReason.NOT_ALLOWED, text)
    return None


def not_now(policy: Policy, best: Verdict, *, is_tuned: bool) -> dict[str, Any] | None:
    """What may change by itself. `is_tuned`: calls are taken for measurements."""
    if best.transforms or best.is_in_doubt:
        return later(f"{best.kernel_id} converts arrays, is on trial after failures, or is the last resort")
    return later("calls are sampled") if policy.shadow_rate or is_tuned else None
