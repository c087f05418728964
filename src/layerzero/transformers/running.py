"""Calls of ours from a layer of a model of Transformers: layerzero.torch.running with a report of their own."""

from __future__ import annotations

from layerzero.torch.evidence import Evidence
from layerzero.torch.running import IS_DISABLED, HandedOver, Runner, check_attention

runner = Runner("Transformers")
call = runner.call
try_call = runner.try_call
connected = runner.connected
count = runner.count
evidence = Evidence()

__all__ = [
    "IS_DISABLED",
    "HandedOver",
    "call",
    "check_attention",
    "connected",
    "count",
    "evidence",
    "runner",
    "try_call",
]
