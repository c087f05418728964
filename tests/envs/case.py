"""One call that test_conformance.py makes, and how its tensors may lie in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tests import reference


@dataclass(frozen=True)
class Case:
    """Values of each tensor argument (None: left out; floating-point ones take the dtype under test, or of `kinds`),
    how each lies in memory, and how the output does. See `lay_out`. `told`: the reference, beside the attributes."""

    name: str
    tensors: tuple[reference.Array | None, ...]
    attrs: dict[str, Any] = field(default_factory=dict)
    layouts: tuple[str, ...] = ()  # per tensor; contiguous where there are fewer
    out_layout: str = "contiguous"
    kinds: dict[str, str] = field(default_factory=dict)
    told: dict[str, Any] = field(default_factory=dict)


SWAPS = {"transposed": (-1, -2), "heads": (1, 2), "first last": (0, -1)}
LAYOUTS = ("contiguous", "transposed", "gaps", "rows", "broadcast")


def normal(rng: np.random.Generator, *shape: int) -> reference.F64:
    return rng.standard_normal(shape)
