"""LayerZero in Transformers. Importing this makes attn_implementation="layerzero" known.

import layerzero.transformers
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="layerzero")
"""

from __future__ import annotations

from layerzero.transformers.kernelizing import Repository, kernel_mapping, kernelize, unkernelize
from layerzero.transformers.registration import instead_of_sdpa, register
from layerzero.transformers.tally import Report, clear, report

register()

__all__ = ["Report", "Repository", "clear", "instead_of_sdpa", "kernel_mapping", "kernelize", "report", "unkernelize"]
