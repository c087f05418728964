"""Calls on a GPU that clients run by the backend's own provider: what of their leave is not as with lifted ones."""

from __future__ import annotations

import math
from typing import Any

from layerzero.broker.core.model import Route, RunGrant
from layerzero.broker.selection.policy import Policy
from layerzero.broker.selection.signature import Verdict
from layerzero.capabilities.descriptor import KernelCapability

VALUES = ("in_process", "auto")  # of backend_isolation


def is_wanted(policy: Policy, best: Verdict) -> bool:
    """Whether policy wants this kernel in the caller's process. What was imported has no provider there."""
    return policy.isolation(best.backend, best.kernel_id) in VALUES and not best.is_lifted_only


def note_grant(route: Route, kernel_id: str, now_s: float) -> None:
    """The client may tell times of it from now on (RAN_HERE)."""
    if route.grant is None or route.grant.kernel_id != kernel_id:
        route.grant = RunGrant(kernel_id, now_s, math.inf)


def leave(number: int, kernel: KernelCapability, backend: str, epoch: int) -> dict[str, Any]:
    """To run the kernel as long as the GPU's page has the epoch."""
    return {
        "state": "here",
        "number": number,
        "backend": backend,
        "kernel_id": kernel.kernel_id,
        "epoch": epoch,
        "is_graph_safe": kernel.is_cuda_graph_safe,
        "copies_inputs": kernel.copies_inputs,
        "copies_outputs": kernel.copies_outputs,
    }
