"""LayerZero in Diffusers. Importing this makes model.set_attention_backend("layerzero") known.

import layerzero.diffusers
model.set_attention_backend("layerzero")  # models whose processors ask Diffusers' dispatcher: Flux, Wan, ...
layerzero.diffusers.set_processors(model)  # those whose processors call SDPA themselves: UNets, VAEs, SD3, ...
"""

from __future__ import annotations

from layerzero.diffusers.processors import processor, set_processors, unset_processors
from layerzero.diffusers.registration import register, unregister
from layerzero.diffusers.running import runner
from layerzero.torch.tally import Report

register()


def report() -> Report:
    """What became of this process's calls so far."""
    return runner.tally.report()


def clear() -> None:
    """Forget all calls."""
    runner.tally.clear()


__all__ = [
    "Report",
    "clear",
    "processor",
    "register",
    "report",
    "set_processors",
    "unregister",
    "unset_processors",
]
