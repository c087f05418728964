"""Tensor descriptors: dtype, shape and strides, and the checks on them. Used by every process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from layerzero.ipc.errors import InvalidArgument

# name -> bytes per element. The names are NumPy's and torch's own.
ITEMSIZE: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float4_e2m1fn_x2": 1,  # two numbers, the first in the low bits; shapes count pairs
}
FLOAT_DTYPES = frozenset({"float16", "bfloat16", "float32", "float64"})  # that kernels compute in
NARROW_DTYPES = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2")  # that numbers are stored in

MAX_NDIM = 16
MAX_NBYTES = 1 << 46  # 64 TiB; far above any machine, far below a 64-bit overflow


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True)
class TensorSpec:
    """A strided view: dtype name, shape and strides, both in elements.

    Strides are never negative; a stride of 0 broadcasts. The data start is not part of the spec.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def contiguous(cls, dtype: str, shape: tuple[int, ...]) -> TensorSpec:
        return cls(dtype, tuple(shape), contiguous_strides(tuple(shape)))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @cached_property
    def numel(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @cached_property
    def span_bytes(self) -> int:
        """Bytes from the first element to the end of the last one; 0 for an empty tensor."""
        if self.numel == 0:
            return 0
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return (last + 1) * self.itemsize

    @cached_property
    def is_contiguous(self) -> bool:
        """True when the elements lie in row-major order without gaps (any stride on extents of 1)."""
        if self.numel == 0:
            return True
        step = 1
        for extent, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if extent != 1:
                if stride != step:
                    return False
                step *= extent
        return True

    def permute(self, *dims: int) -> TensorSpec:
        """The same memory with its dimensions in another order."""
        return TensorSpec(self.dtype, tuple(self.shape[d] for d in dims), tuple(self.strides[d] for d in dims))

    def unsqueeze(self, dim: int) -> TensorSpec:
        """The same memory with an extent of 1 inserted before `dim` (non-negative)."""
        shape, strides = list(self.shape), list(self.strides)
        strides.insert(dim, shape[dim] * strides[dim] if dim < len(shape) else 1)
        shape.insert(dim, 1)
        return TensorSpec(self.dtype, tuple(shape), tuple(strides))

    def as_dtype(self, dtype: str) -> TensorSpec:
        """Elements of another dtype in the same shape and strides."""
        return TensorSpec(dtype, self.shape, self.strides)

    def to_wire(self) -> list[object]:
        return [self.dtype, list(self.shape), list(self.strides)]

    @classmethod
    def from_wire(cls, value: object) -> TensorSpec:
        """Rebuild and check a spec that another process sent. Raises InvalidArgument."""
        if not (isinstance(value, list) and len(value) == 3):
            raise InvalidArgument(f"tensor spec must be [dtype, shape, strides], got {value!r:.200}")
        dtype, shape, strides = value
        if not isinstance(dtype, str) or dtype not in ITEMSIZE:
            raise InvalidArgument(f"unknown dtype {dtype!r:.80}; known: {', '.join(ITEMSIZE)}")
        for name, dims in (("shape", shape), ("strides", strides)):
            if (
                not isinstance(dims, list)
                or len(dims) > MAX_NDIM
                or not all(type(n) is int and 0 <= n <= MAX_NBYTES for n in dims)
            ):
                raise InvalidArgument(
                    f"tensor {name} must be at most {MAX_NDIM} non-negative integers, got {dims!r:.200}"
                )
        if len(shape) != len(strides):
            raise InvalidArgument(f"shape {shape} and strides {strides} differ in length")
        spec = cls(dtype, tuple(shape), tuple(strides))
        if spec.span_bytes > MAX_NBYTES:
            raise InvalidArgument(f"tensor of {spec.span_bytes} bytes is above the limit of {MAX_NBYTES}")
        return spec

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"
