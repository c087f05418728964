"""The policy's keys, which a file, variables and calls share: docs/policy.md says what they mean.

Broker and client both read variables; the broker alone checks values (broker/selection/policy_values.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PER_CALL = (
    "locks",
    "allow_sources",
    "avoid_sources",
    "allow_kernels",
    "avoid_kernels",
    "rules",
    "strict_mode",
    "plan_mode",
    "allow_adaptation",
    "backend_isolation",
    "allow_jit_compile",
    "requires_deterministic",
    "memory_headroom_bytes",
    "weights",
    "shadow_rate",
    "traces",
)
"""Keys that may travel with a call."""

BROKER_WIDE = ("tune_budget", "dispatch_table", "kernel_sources")
"""Keys of the broker as a whole: its policy file and its environment only."""

KERNEL_SOURCES = "kernel_sources"
REFUSE = "refuse"
KERNEL_SOURCE = r"^(sha256:[0-9a-f]{64}|refuse)$"
"""A value of kernel_sources: the hash of a backend's sources (envs/trust/bundle.py), or that they are refused in any
case."""

KEYS = (*PER_CALL, *BROKER_WIDE)
GONE = {
    "graph_strict_mode": "take graph_strict_mode out: it had no effect and is no key any more. While a stream is being "
    "captured, a call whose kernel no CUDA graph can hold is refused with CUDA_GRAPH_UNSAFE"
}
"""Keys of earlier versions, and what to do about each: whoever sets one is told."""

VARIABLE_PREFIX = "LAYERZERO_"
WITHOUT_VARIABLE = {"rules"}  # too much structure for one line of text


def variables(environ: Mapping[str, str], keys: tuple[str, ...] = KEYS) -> list[dict[str, Any]]:
    """One layer of policy for each variable that is set, of these keys and those that are gone: `origin` is its name,
    `values` has the text under its key."""
    names = {key: VARIABLE_PREFIX + key.upper() for key in (*keys, *GONE) if key not in WITHOUT_VARIABLE}
    return [{"origin": name, "values": {key: environ[name]}} for key, name in names.items() if environ.get(name)]
