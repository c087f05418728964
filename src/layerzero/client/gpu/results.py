"""New arrays for the results of a call on a GPU. Those of a call that has several lie in one piece of memory, so that a
call has one address for all it makes, however many that are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from layerzero.client.arrays.recognition import Array
from layerzero.client.connection.call import Request
from layerzero.client.gpu.arrays import new_like, refuse_mixture
from layerzero.client.gpu.own_arrays import GpuArray
from layerzero.client.planning.plans import plan_out
from layerzero.ipc.vocabulary.tensors import TensorSpec

STEP = 256  # bytes; each result begins at a multiple, as an allocator's memory does


class Layout(NamedTuple):
    """Where in their memory the results of a call begin, and how many bytes there are."""

    offsets: tuple[int, ...]
    nbytes: int


@lru_cache(1024)
def layout_of(specs: tuple[TensorSpec, ...]) -> Layout:
    offsets, nbytes = [], 0
    for spec in specs:
        at = -(-nbytes // STEP) * STEP
        offsets.append(at)
        nbytes = at + spec.span_bytes
    return Layout(tuple(offsets), nbytes)


def result_like(array: Array, out: Array | None, specs: Sequence[TensorSpec]) -> tuple[Any, int]:
    """What a call returns and its address: `out`, a new array of the spec, a tuple of those, or (None, 0) where there
    is no spec."""
    if out is not None:
        return out.obj, out.address
    if len(specs) > 1:
        return _together(array, tuple(specs))
    return new_like(array, specs[0]) if specs else (None, 0)


def copied_to(
    request: Request,
    arrays: Sequence[Array | None],
    outs: tuple[Array, ...],
    run: Callable[[Request], tuple[Any, ...]],
) -> tuple[Any, ...]:
    """Several results in the caller's own arrays: new ones, which lie in one piece of memory, are copied there by its
    library, in the stream's order. Raises InvalidArgument before anything runs."""
    like = next(array for array in arrays if array is not None)
    refuse_mixture(request.op, like, arrays, outs)
    specs = tuple(None if array is None else array.spec for array in arrays)
    plan_out(request.planner(*specs, **request.params), *(out.spec for out in outs))
    for out, result in zip(outs, run(replace(request, out=None)), strict=True):
        out.obj[...] = result
    return tuple(out.obj for out in outs)


def torch_results(device: int, specs: Sequence[TensorSpec]) -> Callable[[Any], tuple[Any, int]]:
    """Makes several tensors, on a GPU by ordinal. None of them is a view, which autograd would not let be written."""
    torch = sys.modules["torch"]
    layout, place = layout_of(tuple(specs)), torch.device("cuda", device)
    forms = [
        (getattr(torch, spec.dtype), at // spec.itemsize, spec.shape, spec.strides)
        for spec, at in zip(specs, layout.offsets, strict=True)
    ]

    def make(_: Any) -> tuple[Any, int]:
        whole = torch.empty(layout.nbytes, dtype=torch.uint8, device=place)
        memory = whole.untyped_storage()
        made = tuple(
            torch.empty(0, dtype=dtype, device=place).set_(memory, at, shape, strides)
            for dtype, at, shape, strides in forms
        )
        return made, whole.data_ptr()

    return make


def _together(array: Array, specs: tuple[TensorSpec, ...]) -> tuple[Any, int]:
    if array.kind == "torch":
        return torch_results(array.device, specs)(None)
    layout = layout_of(specs)
    if array.kind in ("dlpack", "own"):
        whole = GpuArray(array.device, TensorSpec.contiguous("uint8", (layout.nbytes,)))
        parts = tuple(whole.part(spec, at) for spec, at in zip(specs, layout.offsets, strict=True))
        return parts, whole.address
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(array.device):
        flat = cupy.empty(max(layout.nbytes, 1), "uint8")
    made = []
    for spec, at in zip(specs, layout.offsets, strict=True):
        strides = tuple(step * spec.itemsize for step in spec.strides)
        dtype = array.owner.dtype if spec.dtype == array.spec.dtype else cupy.dtype(spec.dtype)
        made.append(cupy.ndarray(spec.shape, dtype, memptr=flat.data + at, strides=strides))
    return tuple(made), int(flat.data.ptr)
