"""LayerZero in flashinfer, and so in vLLM and SGLang where they call it: definitions of ours for its trace_apply.

import layerzero.engines.flashinfer
layerzero.engines.flashinfer.enable()             # all kinds; or enable(["rmsnorm"], shadow=True), enable(share=0.1)
print(layerzero.engines.flashinfer.report())
"""

from __future__ import annotations

from layerzero.engines.flashinfer.applying import Switch, disable, enable, is_enabled
from layerzero.engines.flashinfer.definitions import KINDS
from layerzero.engines.flashinfer.running import runner
from layerzero.torch.tally import Report


def report() -> Report:
    """What became of this process's calls so far."""
    return runner.tally.report()


def clear() -> None:
    """Forget all calls."""
    runner.tally.clear()


__all__ = ["KINDS", "Report", "Switch", "clear", "disable", "enable", "is_enabled", "report"]
