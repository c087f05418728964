"""The kernels of all backends for NVIDIA GPUs, as their descriptors have them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import layerzero

DESCRIPTORS = Path(layerzero.__file__).parent / "capabilities" / "descriptors"
KERNELS = [
    pytest.param(op, kernel, id=kernel["kernel_id"])
    for descriptor in (json.loads(path.read_text(encoding="utf-8")) for path in sorted(DESCRIPTORS.glob("*.json")))
    if descriptor["platform"] == "cuda"
    for op, kernels in descriptor["ops"].items()
    for kernel in kernels
]
