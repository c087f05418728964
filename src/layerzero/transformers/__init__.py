"""LayerZero in Transformers. Importing this makes attn_implementation="layerzero" known.

import layerzero.transformers
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="layerzero")
tokenizer = layerzero.transformers.Tokenizer.from_pretrained(name)
"""

from __future__ import annotations

from layerzero.transformers.kernelizing import Repository, kernel_mapping, kernelize, unkernelize
from layerzero.transformers.registration import instead_of_sdpa, register
from layerzero.transformers.tally import Report, clear, report
from layerzero.transformers.tokenizer import Tokenizer

register()

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
