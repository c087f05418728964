"""Gradients of norms in Triton. Used by triton.py.

One kernel reads rows of x and of the gradient once, writes the gradient by x, and has each program add up its rows'
part of the gradients by weight and bias; a second one adds up the parts, always in the same order, so a call gives the
same bits again. Parts lie in scratch of at most PER_SM programs for each SM, in float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from layerzero.ipc.errors import BackendError
from layerzero.workers.provider import Call
from layerzero.workers.providers._torch_ops import Builder, Run

MAX_COLUMNS = 16384  # elements of a row, which a program holds as a whole
LEAST_BLOCK = 16
TILE = 2048  # elements that a program works on at once, of several rows where these are short
MAX_ROWS = 32
LEAST_TILES = 2  # of a program, so that there are fewer parts to add up than rows
PER_SM = 2
ELEMENTS_PER_WARP = 512
SUMMED_ROWS, SUMMED_COLUMNS = 128, 32  # of parts, that a program of the second kernel holds at once


class Tile(NamedTuple):
    """How a call is cut up: `rows` of `block` elements at once, in so many programs of so many `warps`."""

    rows: int
    block: int
    programs: int
    warps: int


def tile_for(rows: int, columns: int, sms: int) -> Tile:
    """But for `programs` a matter of the columns alone, which calls that share a compilation agree in."""
    block = max(1 << (columns - 1).bit_length(), LEAST_BLOCK)
    at_once = min(max(TILE // block, 1), MAX_ROWS)
    programs = min(-(-rows // (at_once * LEAST_TILES)), PER_SM * sms)
    warps = min(max(at_once * block // ELEMENTS_PER_WARP, 1), 32)
    return Tile(at_once, block, programs, warps)


class Kernels(NamedTuple):
    rows: Any
    sums: Any


def kernels(triton: Any, tl: Any) -> Kernels:
    @triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
    def gradient_rows(  # type: ignore[no-untyped-def]
        grad, x, weight, grad_x, parts, rows, columns, grad_stride, x_stride, eps,
        HAS_WEIGHT: tl.constexpr, CENTRED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Beyond rows and columns everything is 0, and stays so."""
        program, programs = tl.program_id(0), tl.num_programs(0)
        lanes = tl.arange(0, BLOCK)[None, :]
        by_weight = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
        by_bias = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
        for first in range(program * ROWS, rows, programs * ROWS):
            row = first + tl.arange(0, ROWS)
            mask = (row < rows)[:, None] & (lanes < columns)
            at = row.to(tl.int64)[:, None]
            n = tl.load(x + at * x_stride + lanes, mask=mask, other=0.0).to(tl.float32)
            g = tl.load(grad + at * grad_stride + lanes, mask=mask, other=0.0).to(tl.float32)
            if CENTRED:
                mean = tl.sum(n, axis=1) / columns
                n = tl.where(mask, n - mean[:, None], 0.0)
                by_bias += g
            factor = 1.0 / tl.sqrt(tl.sum(n * n, axis=1) / columns + eps)
            n = tl.where(mask, n * factor[:, None], 0.0)  # 0 times infinity, where there is no row and no eps
            by_weight += g * n
            if HAS_WEIGHT:
                g *= tl.load(weight + at * 0 + lanes, mask=mask, other=0.0).to(tl.float32)  # lies in threads as g does
            change = g - n * (tl.sum(g * n, axis=1) / columns)[:, None]
            if CENTRED:
                change -= (tl.sum(g, axis=1) / columns)[:, None]
            change *= factor[:, None]
            tl.store(grad_x + at * columns + lanes, change.to(grad_x.dtype.element_ty), mask=mask)
        place = parts + program * columns + lanes
        tl.store(place, tl.sum(by_weight, axis=0, keep_dims=True), mask=lanes < columns)
        if CENTRED:
            tl.store(place + programs * columns, tl.sum(by_bias, axis=0, keep_dims=True), mask=lanes < columns)

    @triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
    def summed_parts(  # type: ignore[no-untyped-def]
        parts, grad_weight, grad_bias, count, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
    ):
        lanes = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        of_bias = tl.program_id(1)
        parts += of_bias * count * columns
        total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for first in range(0, count, ROWS):
            part = first + tl.arange(0, ROWS)
            mask = (part < count)[:, None] & (lanes < columns)[None, :]
            total += tl.load(parts + part[:, None] * columns + lanes[None, :], mask=mask, other=0.0)
        found = tl.sum(total, axis=0).to(grad_weight.dtype.element_ty)
        if of_bias == 0:
            tl.store(grad_weight + lanes, found, mask=lanes < columns)
        else:
            tl.store(grad_bias + lanes, found, mask=lanes < columns)

    return Kernels(gradient_rows, summed_parts)


class NormGradients:
    """Two Builders, of layer_norm_backward and rms_norm_backward."""

    def __init__(self, torch: Any, triton: Any, tl: Any) -> None:
        self.torch, self.kernels = torch, kernels(triton, tl)

    def builders(self) -> Mapping[str, Builder]:
        return dict.fromkeys(("layer_norm_backward", "rms_norm_backward"), self.build)

    def build(self, views: Sequence[Any], call: Call) -> Run:
        """Targets: the gradients by x, weight and, of layer_norm, bias. Raises BackendError for rows that are longer
        than MAX_COLUMNS."""
        grad, x, weight = views
        is_centred = call.op == "layer_norm_backward"
        columns, eps = math.prod(x.shape[x.ndim - call.attrs["ndim"] :]), call.attrs["eps"]
        if columns > MAX_COLUMNS:
            raise BackendError(
                f"triton: {call.op} of rows of {columns} elements; allowed: {MAX_COLUMNS}, which one program holds; "
                "another backend serves longer ones",
                exception="refused",
            )
        if not x.numel():
            return _zeros
        count = x.numel() // columns
        tile = tile_for(count, columns, self._sms(x))
        sums = 2 if is_centred else 1

        def run(targets: Any) -> None:
            torch = self.torch
            results = [
                t if t.is_contiguous() else torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in targets
            ]
            parts = torch.empty(sums * tile.programs * columns, dtype=torch.float32, device=x.device)
            of_grad, of_x = in_rows(grad, columns), in_rows(x, columns)
            self.kernels.rows[(tile.programs,)](
                *(of_grad, of_x, of_x if weight is None else weight.reshape(-1), results[0], parts),
                *(count, columns, of_grad.stride(0), of_x.stride(0), eps),
                *(weight is not None, is_centred, tile.rows, tile.block),
                num_warps=tile.warps,
            )
            self.kernels.sums[(-(-columns // SUMMED_COLUMNS), sums)](
                *(parts, results[1], results[-1], tile.programs, columns, SUMMED_ROWS, SUMMED_COLUMNS), num_warps=8
            )
            for target, result in zip(targets, results, strict=True):
                if target is not result:
                    target.copy_(result)

        return run

    def _sms(self, x: Any) -> int:
        return int(self.torch.cuda.get_device_properties(x.device).multi_processor_count)


def in_rows(tensor: Any, columns: int) -> Any:
    """(rows, columns), each row without gaps; a copy where the tensor does not lie so."""
    rows = tensor.reshape(-1, columns)
    return rows if columns == 1 or rows.stride(1) == 1 else rows.contiguous()


def _zeros(targets: Any) -> None:
    """Sums over no rows."""
    for target in targets:
        target.zero_()
