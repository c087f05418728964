"""Kernels written here in Triton. They write the caller's memory in place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from layerzero.workers.provider import Call, Loaded
from layerzero.workers.providers._torch_cuda import TorchCuda
from layerzero.workers.providers._torch_ops import Run
from layerzero.workers.providers._triton_attention import Attention
from layerzero.workers.providers._triton_norms import NormGradients, in_rows

ROPE_BLOCK = 2048  # pairs of elements that one program turns, of several heads
SWIGLU_BLOCK = 1024
MAX_BLOCK = 8192  # elements of a row that one program holds at a time; longer rows are read twice


def load() -> Loaded:
    import torch
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

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

    @triton.jit  # type: ignore[untyped-decorator]
    def add_rms_norm_row(  # type: ignore[no-untyped-def]
        x, residual, weight, out, summed, x_stride, residual_stride, columns, eps,
        HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Rows that one block does not hold are read and added twice."""
        row = tl.program_id(0).to(tl.int64)
        x, residual = x + row * x_stride, residual + row * residual_stride
        out, summed = out + row * columns, summed + row * columns
        squares = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, columns, BLOCK):
            lanes = start + tl.arange(0, BLOCK)
            values = tl.load(x + lanes, mask=lanes < columns, other=0.0).to(tl.float32)
            values += tl.load(residual + lanes, mask=lanes < columns, other=0.0).to(tl.float32)
            tl.store(summed + lanes, values.to(summed.dtype.element_ty), mask=lanes < columns)
            squares += values * values
        factor = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / columns + eps)
        for start in range(0, columns, BLOCK):
            lanes = start + tl.arange(0, BLOCK)
            values = tl.load(x + lanes, mask=lanes < columns, other=0.0).to(tl.float32)
            values += tl.load(residual + lanes, mask=lanes < columns, other=0.0).to(tl.float32)
            values *= factor
            if HAS_WEIGHT:
                values *= tl.load(weight + lanes, mask=lanes < columns, other=0.0).to(tl.float32)
            tl.store(out + lanes, values.to(out.dtype.element_ty), mask=lanes < columns)

    @triton.jit  # type: ignore[untyped-decorator]
    def rope_token(  # type: ignore[no-untyped-def]
        x, cos, sin, out, sequence, heads, pairs, dim,
        x_b, x_s, x_h, x_d, cos_b, cos_s, cos_d, sin_b, sin_s, sin_d, out_b, out_s, out_h, out_d,
        INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
    ):  # fmt: skip
        token = tl.program_id(0).to(tl.int64)
        b, s = token // sequence, token % sequence
        head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
        pair = tl.arange(0, PAIRS)[None, :]
        c = tl.load(cos + b * cos_b + s * cos_s + pair * cos_d, mask=pair < pairs, other=0.0).to(tl.float32)
        d = tl.load(sin + b * sin_b + s * sin_s + pair * sin_d, mask=pair < pairs, other=0.0).to(tl.float32)
        if INTERLEAVED:
            one, other = 2 * pair, 2 * pair + 1
        else:
            one, other = pair, pair + pairs
        rows, targets = x + b * x_b + s * x_s + head * x_h, out + b * out_b + s * out_s + head * out_h
        mask = (head < heads) & (pair < pairs)
        first = tl.load(rows + one * x_d, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(rows + other * x_d, mask=mask, other=0.0).to(tl.float32)
        tl.store(targets + one * out_d, (first * c - second * d).to(out.dtype.element_ty), mask=mask)
        tl.store(targets + other * out_d, (second * c + first * d).to(out.dtype.element_ty), mask=mask)
        if REST > 0:
            lanes = 2 * pairs + tl.arange(0, REST)[None, :]
            mask = (head < heads) & (lanes < dim)
            tl.store(targets + lanes * out_d, tl.load(rows + lanes * x_d, mask=mask), mask=mask)

    def rope(views: Sequence[Any], call: Call) -> Run:
        x, cos, sin = views
        batch, sequence, heads, dim = x.shape
        pairs = cos.shape[2]
        block = triton.next_power_of_2(pairs)
        rest = triton.next_power_of_2(dim - 2 * pairs) if dim > 2 * pairs else 0
        per_program = min(triton.next_power_of_2(heads), max(ROPE_BLOCK // max(block, rest), 1))
        shared = cos.shape[0] == 1
        strides = [(0 if shared else table.stride(0), *table.stride()[1:]) for table in (cos, sin)]
        grid, interleaved = (batch * sequence, triton.cdiv(heads, per_program)), call.attrs["interleaved"]

        def run(out: Any) -> None:
            rope_token[grid](
                *(x, cos, sin, out, sequence, heads, pairs, dim),
                *(*x.stride(), *strides[0], *strides[1], *out.stride()),
                *(interleaved, per_program, block, rest),
            )

        return run

    @triton.jit  # type: ignore[untyped-decorator]
    def swiglu_row(gate, up, out, gate_stride, up_stride, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64)
        lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(gate + row * gate_stride + lanes, mask=lanes < columns, other=0.0).to(tl.float32)
        factors = tl.load(up + row * up_stride + lanes, mask=lanes < columns, other=0.0).to(tl.float32)
        values = values / (1.0 + tl.exp(-values)) * factors
        tl.store(out + row * columns + lanes, values.to(out.dtype.element_ty), mask=lanes < columns)

    def swiglu(views: Sequence[Any], call: Call) -> Run:
        columns = views[0].shape[-1] if views[0].ndim else 1
        grid = (views[0].numel() // columns, triton.cdiv(columns, SWIGLU_BLOCK))

        def run(out: Any) -> None:
            gate, up = (view.reshape(-1, columns) for view in views)
            swiglu_row[grid](gate, up, out, gate.stride(0), up.stride(0), columns, SWIGLU_BLOCK)

        return run

    def rms_norm(views: Sequence[Any], call: Call) -> Run:
        x, weight = views
        columns = math.prod(x.shape[x.ndim - call.attrs["ndim"] :])
        block = min(triton.next_power_of_2(columns), MAX_BLOCK)
        warps = min(max(block // 256, 1), 16)
        eps, has_weight = call.attrs["eps"], weight is not None

        def run(out: Any) -> None:
            rows = in_rows(x, columns)
            flat_weight = weight.reshape(-1) if has_weight else rows
            rms_norm_row[(rows.shape[0],)](
                rows, flat_weight, out, rows.stride(0), columns, eps, has_weight, block, num_warps=warps
            )

        return run

    def add_rms_norm(views: Sequence[Any], call: Call) -> Run:
        x, residual, weight = views
        if not x.numel():
            return lambda targets: None
        columns = math.prod(x.shape[x.ndim - call.attrs["ndim"] :])
        block = min(triton.next_power_of_2(columns), MAX_BLOCK)
        warps = min(max(block // 256, 1), 16)
        eps, has_weight = call.attrs["eps"], weight is not None

        def run(targets: Any) -> None:
            rows, others = in_rows(x, columns), in_rows(residual, columns)
            flat_weight = weight.reshape(-1) if has_weight else rows
            made = [t if t.is_contiguous() else torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in targets]
            add_rms_norm_row[(rows.shape[0],)](
                *(rows, others, flat_weight, *made, rows.stride(0), others.stride(0), columns, eps),
                *(has_weight, block),
                num_warps=warps,
            )
            for target, result in zip(targets, made, strict=True):
                if target is not result:
                    target.copy_(result)

        return run

    attention = Attention(torch, triton, tl, TensorDescriptor, gpu)
    builders = {
        "triton.attention.decode": attention.decode,
        "triton.attention.prefill": attention.prefill,
        "triton.rms_norm": rms_norm,
        "triton.add_rms_norm": add_rms_norm,
        "triton.rope": rope,
        "triton.swiglu": swiglu,
        **{f"triton.{op}": build for op, build in NormGradients(torch, triton, tl).builders().items()},
    }
    return Loaded(
        versions={"triton": triton.__version__, "torch": torch.__version__},
        kernels=gpu.binds(builders),
        on_stream=gpu.on_stream,
    )
