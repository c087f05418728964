"""The knobs of the core; settings.py declares their defaults, units and variables."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    timeout_s: float
    start_timeout_s: float
    max_in_flight: int
    depth: int
    share: int
    standby: int
    restart_budget: int
    restart_window_s: float
    backoff_s: float
    backoff_max_s: float
    retry_disabled_s: float
    retry_disabled_max_s: float
    poison_quarantine_s: float
    express: bool
