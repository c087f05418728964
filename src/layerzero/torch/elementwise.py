"""Ops that work element by element, and cat: gradient formulas in plain torch, fake functions and batch rules, as
gradients.py, fakes.py and batching.py have them of others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import layerzero as lz
from layerzero.ipc.vocabulary.ops import CAST_DTYPES, CAT_INPUTS
from layerzero.torch.gradients import Call, Gradients

Dims = Sequence[int | None]
ops = torch.ops.layerzero
CAT_ARGUMENTS = ", ".join(["Tensor t0", *(f"Tensor? {name}=None" for name in CAT_INPUTS[1:]), "*, int dim=0"])


def cat(*tensors: Tensor | None, **options: Any) -> Tensor:
    """What reaches a kernel."""
    made: Tensor = lz.cat(*tensors, **options)
    return made


# --- gradients: of what was broadcast the sum


def _summed(grad: Tensor, shape: Sequence[int]) -> Tensor:
    wide = grad if grad.dtype == torch.float64 else grad.float()
    return wide.sum_to_size(shape).to(grad.dtype)


def add_gradients(grad: Tensor, call: Call) -> Gradients:
    """The gradient itself, by both."""
    return {name: _summed(grad, call.shape[name]) for name in ("input", "other") if name in call.needs}


def mul_gradients(grad: Tensor, call: Call) -> Gradients:
    """The gradient times the other one."""
    found: Gradients = {}
    for name, factor in (("input", "other"), ("other", "input")):
        if name in call.needs:
            found[name] = _summed(grad * call[factor], call.shape[name])
    return found


def clamp_gradients(grad: Tensor, call: Call) -> Gradients:
    """The gradient where the input is within its bounds, on them, too."""
    x, is_inside = call["input"], torch.ones((), dtype=torch.bool, device=grad.device)
    if call["min"] is not None:
        is_inside = is_inside & (x >= call["min"])
    if call["max"] is not None:
        is_inside = is_inside & (x <= call["max"])
    return {"input": torch.where(is_inside, grad, torch.zeros_like(grad))}


def where_gradients(grad: Tensor, call: Call) -> Gradients:
    """The gradient where each was taken, 0 elsewhere."""
    condition, zero = call["condition"], torch.zeros_like(grad)
    found: Gradients = {}
    if "input" in call.needs:
        found["input"] = _summed(torch.where(condition, grad, zero), call.shape["input"])
    if "other" in call.needs:
        found["other"] = _summed(torch.where(condition, zero, grad), call.shape["other"])
    return found


def cat_gradients(grad: Tensor, call: Call) -> Gradients:
    """The parts."""
    names = [name for name in CAT_INPUTS if name in call.shape]
    parts = grad.split([call.shape[name][call["dim"]] for name in names], call["dim"])
    return {name: part for name, part in zip(names, parts, strict=True) if name in call.needs}


def cast_gradients(grad: Tensor, call: Call) -> Gradients:
    """The gradient, which autograd gives the dtype of the input."""
    return {"input": grad}


# --- fake functions


def pair_fake(op: str) -> Callable[..., Tensor]:
    """Shapes that broadcast."""

    def fake(input: Tensor, other: Tensor, **_: Any) -> Tensor:
        _one_dtype(op, input=input, other=other)
        return input.new_empty(torch.broadcast_shapes(input.shape, other.shape))

    return fake


def where_fake(condition: Tensor, input: Tensor, other: Tensor, **_: Any) -> Tensor:
    """As pair_fake."""
    _one_dtype("where", input=input, other=other)
    return input.new_empty(torch.broadcast_shapes(condition.shape, input.shape, other.shape))


def clamp_fake(input: Tensor, min: Any = None, max: Any = None, **_: Any) -> Tensor:
    """As `input`."""
    return input.new_empty(input.shape)


def cat_fake(t0: Tensor, *more: Tensor | None, dim: int = 0, **_: Any) -> Tensor:
    """Along `dim` the sum of extents."""
    given = [t0, *(tensor for tensor in more if tensor is not None)]
    _one_dtype("cat", **{f"t{n}": tensor for n, tensor in enumerate(given)})
    if not -t0.dim() <= dim < t0.dim():
        raise lz.InvalidArgument(f"cat: dim is {dim}; allowed: {-t0.dim()} to {t0.dim() - 1}; pass one of them")
    shape = list(t0.shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in given)
    return t0.new_empty(shape)


def cast_fake(input: Tensor, dtype: str, **_: Any) -> Tensor:
    """As `input`, in `dtype`."""
    if dtype not in CAST_DTYPES:
        raise lz.InvalidArgument(f"cast: dtype is {dtype!r}; allowed: {' or '.join(CAST_DTYPES)}; pass one of them")
    return input.new_empty(input.shape, dtype=getattr(torch, dtype))


def _one_dtype(op: str, **tensors: Tensor) -> None:
    names = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
    if len(set(names.values())) > 1:
        found = ", ".join(f"{name} is {dtype}" for name, dtype in names.items())
        raise lz.InvalidArgument(f"{op}: {found}; allowed: one dtype for all; convert them")


# --- batch rules: the mapped dimension in front


def by_elements(name: str, count: int) -> Callable[..., tuple[Tensor, int]]:
    """Of `count` tensors that broadcast: extents of 1 behind the mapped dimension, as many as others have more."""

    def rule(info: Any, dims: Dims, *args: Any, **options: Any) -> tuple[Tensor, int]:
        tensors = args[:count]
        ndims = [tensor.dim() - (dim is not None) for tensor, dim in zip(tensors, dims, strict=False)]
        moved = []
        for tensor, dim, ndim in zip(tensors, dims, ndims, strict=False):
            one = tensor if dim is None else tensor.movedim(dim, 0)
            if dim is not None:
                one = one.reshape(one.shape[0], *[1] * (max(ndims) - ndim), *one.shape[1:])
            moved.append(one)
        return getattr(ops, name)(*moved, *args[count:], **options), 0

    return rule


def cat_batch(info: Any, dims: Dims, *tensors: Tensor | None, dim: int = 0, **options: Any) -> tuple[Tensor, int]:
    """What is not mapped is expanded, which copies nothing."""
    moved = [
        None
        if tensor is None
        else tensor.expand(info.batch_size, *tensor.shape)
        if place is None
        else tensor.movedim(place, 0)
        for tensor, place in zip(tensors, dims, strict=False)
    ]
    return ops.cat(*moved, dim=dim if dim < 0 else dim + 1, **options), 0
