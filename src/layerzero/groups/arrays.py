"""Arrays that a group's calls take and give: NumPy's and torch's, of the CPU, as bytes and back; torch's of a GPU as
tensors."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from layerzero.client.arrays.copies import copy_into
from layerzero.client.arrays.recognition import CPU, Array, describe
from layerzero.client.facade.memory import empty
from layerzero.ipc.errors import InvalidArgument

KINDS = ("numpy", "torch")


class Given:
    """An argument: `data` are its bytes in row-major order, None on a GPU, where `keep` is the tensor. `copied`: how
    many of them are a copy, of strided ones."""

    __slots__ = ("array", "copied", "data", "device", "dtype", "keep", "kind", "shape")

    def __init__(self, value: Any, what: str = "x") -> None:
        """Raises InvalidArgument."""
        array = describe(value)
        if array.kind not in KINDS or (array.device != CPU and array.kind != "torch"):
            place = f"a {array.kind} array of a GPU" if array.device != CPU else f"a {type(value).__name__}"
            allowed = "NumPy arrays and torch tensors of the CPU, and torch tensors of a GPU"
            raise InvalidArgument(f"{what} is {place}; allowed: {allowed}")
        if array.requires_grad and sys.modules["torch"].is_grad_enabled():
            raise InvalidArgument(
                f"{what} requires a gradient, which would end here; pass {what}.detach(), or call under torch.no_grad()"
            )
        self.array, self.kind = array, array.kind
        self.dtype, self.shape = array.spec.dtype, tuple(array.spec.shape)
        self.keep: Any = value
        self.copied, self.device = 0, array.device
        self.data: Any = None
        if array.device != CPU:
            self.keep = value if array.spec.is_contiguous else value.contiguous()
            self.copied = 0 if array.spec.is_contiguous else int(array.nbytes)
        elif array.needs_copy or not array.spec.is_contiguous:
            self.keep = np.empty(array.nbytes, np.uint8)
            copy_into(array, memoryview(self.keep))
            self.data, self.copied = self.keep, array.nbytes
        else:
            self.data = _bytes_at(array)

    @property
    def nbytes(self) -> int:
        return int(self.array.nbytes)


class Result:
    """Where a result goes: `value` is what the caller gets, `data` its bytes."""

    __slots__ = ("data", "value")

    def __init__(self, like: Given, shape: tuple[int, ...], out: Any, *, may_be_input: bool) -> None:
        """`out`: the caller's, or None for new memory that workers reach without a copy. Raises InvalidArgument,
        OutOfMemory."""
        self.data: Any = None
        if out is None and like.device != CPU:
            self.value = like.keep.new_empty(shape)
            return
        if out is None:
            self.value = new(like.kind, like.dtype, shape)
            self.data = _bytes_at(describe(self.value))
            return
        array = demand_out(out, like.device)
        found = (array.kind, array.spec.dtype, tuple(array.spec.shape))
        if found != (like.kind, like.dtype, shape):
            raise InvalidArgument(
                f"out is {array.kind} {array.spec.dtype} {list(array.spec.shape)}; allowed: {like.kind} {like.dtype} "
                f"{list(shape)}"
            )
        same = may_be_input and array.address == like.array.address and not like.copied
        if not same and _overlap(array, like.array):
            raise InvalidArgument("out lies over a part of x; pass other memory")
        self.value = out
        if like.device == CPU:
            self.data = _bytes_at(array)


def demand_out(out: Any, device: int = CPU) -> Array:
    """Raises InvalidArgument for what cannot be written row by row, or is elsewhere."""
    array = describe(out)
    if array.kind not in KINDS or array.device != device:
        where = "the CPU" if device == CPU else f"GPU {device}, as x"
        raise InvalidArgument(f"out is no NumPy array or torch tensor of {where}")
    if not array.writable or array.needs_copy or not array.spec.is_contiguous:
        raise InvalidArgument("out must be writable and contiguous")
    if array.requires_grad and sys.modules["torch"].is_grad_enabled():
        raise InvalidArgument("out requires a gradient; pass out.detach()")
    return array


def new(kind: str, dtype: str, shape: tuple[int, ...]) -> Any:
    """An array of ours in shared memory."""
    return empty(shape, getattr(sys.modules["torch"], dtype) if kind == "torch" else dtype)


def _overlap(one: Array, other: Array) -> bool:
    begin, end = one.address, one.address + one.nbytes
    return begin < other.address + other.spec.span_bytes and other.address < end


def _bytes_at(array: Array) -> Any:
    """The memory of a contiguous array, which the caller keeps alive."""
    return np.asarray(_At(array.address, array.nbytes)) if array.nbytes else np.empty(0, np.uint8)


class _At:
    """Memory as NumPy asks for it."""

    __slots__ = ("__array_interface__",)

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {"version": 3, "data": (address, False), "shape": (nbytes,), "typestr": "|u1"}
