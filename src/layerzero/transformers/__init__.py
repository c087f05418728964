"""LayerZero in Transformers. Importing this makes attn_implementation="layerzero" known.

import layerzero.transformers
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="layerzero")
tokenizer = layerzero.transformers.Tokenizer.from_pretrained(name)
"""

from __future__ import annotations

from dataclasses import replace

from layerzero.torch.tally import Report
from layerzero.transformers.kernelizing import Repository, kernel_mapping, kernelize, unkernelize
from layerzero.transformers.registration import instead_of_sdpa, register
from layerzero.transformers.running import evidence, runner
from layerzero.transformers.tokenizer import Tokenizer

register()


def report() -> Report:
    """What became of this process's calls so far, and the times of those that are ours only where that is faster."""
    return replace(runner.tally.report(), comparisons=evidence.comparisons())


def clear() -> None:
    """Forget all calls, and their times."""
    runner.tally.clear()
    evidence.clear()


__all__ = [
    "Report",
    "Repository",
    "Tokenizer",
    "clear",
    "instead_of_sdpa",
    "kernel_mapping",
    "kernelize",
    "report",
    "unkernelize",
]
