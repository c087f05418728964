"""Kernels written here in Triton. They write the caller's memory in place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from layerzero.workers.provider import Call, Loaded
from layerzero.workers.providers._torch_cuda import TorchCuda
from layerzero.workers.providers._torch_ops import Run

MAX_BLOCK = 8192  # elements of a row that one program holds at a time; longer rows are read twice


def load() -> Loaded:
    import torch
    import triton
    import triton.language as tl

    gpu = TorchCuda(torch)

    @triton.jit  # type: ignore[untyped-decorator]
    def rms_norm_row(  # type: ignore[no-untyped-def]
        x, weight, out, row_stride, columns, eps, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64)
        x += row * row_stride
        out += row * columns
        squares = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, columns, BLOCK):
            lanes = start + tl.arange(0, BLOCK)
            values = tl.load(x + lanes, mask=lanes < columns, other=0.0).to(tl.float32)
            squares += values * values
        factor = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / columns + eps)
        for start in range(0, columns, BLOCK):
            lanes = start + tl.arange(0, BLOCK)
            values = tl.load(x + lanes, mask=lanes < columns, other=0.0).to(tl.float32) * factor
            if HAS_WEIGHT:
                values *= tl.load(weight + lanes, mask=lanes < columns, other=0.0).to(tl.float32)
            tl.store(out + lanes, values.to(out.dtype.element_ty), mask=lanes < columns)

    def rms_norm(views: Sequence[Any], call: Call) -> Run:
        x, weight = views
        columns = math.prod(x.shape[x.ndim - call.attrs["ndim"] :])
        block = min(triton.next_power_of_2(columns), MAX_BLOCK)
        warps = min(max(block // 256, 1), 16)
        eps, has_weight = call.attrs["eps"], weight is not None

        def run(out: Any) -> None:
            rows = x.reshape(-1, columns)  # a copy where the rows' starts are not evenly spaced
            flat_weight = weight.reshape(-1) if has_weight else rows
            rms_norm_row[(rows.shape[0],)](
                rows, flat_weight, out, rows.stride(0), columns, eps, has_weight, block, num_warps=warps
            )

        return run

    return Loaded(
        versions={"triton": triton.__version__, "torch": torch.__version__},
        kernels=gpu.binds({"triton.rms_norm": rms_norm}),
        on_stream=gpu.on_stream,
    )
