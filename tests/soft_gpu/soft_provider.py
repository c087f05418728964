"""The provider of backends on the GPU of threads, in their workers or in the caller's process: soft_numpy.py's kernels.
LZ_SOFT_ROOT: the repository. LZ_SOFT_VERSION: of the library. LZ_SOFT_WRONG: "crash", or "silu" of many elements."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from layerzero.workers.provider import Block, Bound, Call, Loaded


def load() -> Loaded:
    sys.path.append(os.environ["LZ_SOFT_ROOT"])
    from tests.soft_gpu import soft_numpy

    wrong, name = os.environ.get("LZ_SOFT_WRONG"), os.environ["LZ_TOY_NAME"]
    if wrong == "crash":
        ctypes.string_at(0)
    loaded = soft_numpy.load(Path(__file__).with_name(soft_numpy.GATE))
    kernels, right = dict(loaded.kernels), loaded.kernels[f"{name}.silu"]

    def silu(call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        return right(call, inputs, outputs) if call.inputs[0].numel <= 256 else lambda: None  # type: ignore[union-attr]

    if wrong == "silu":
        kernels[f"{name}.silu"] = silu
    return replace(loaded, kernels=kernels, versions={"soft": os.environ.get("LZ_SOFT_VERSION", "1")})
