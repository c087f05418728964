"""OpenBLAS by its C interface: products of dense matrices, written into the caller's memory. Needs no NumPy."""

from __future__ import annotations

import ctypes
import itertools
import math
import os
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from layerzero.workers.provider import Block, Bound, Call, Loaded

# Multiplications from which on all cores take part; OpenBLAS itself has them wait for each other sooner.
PARALLEL = 1 << 25
_ROWS_FIRST, _AS_IS, _TRANSPOSED = 101, 111, 112  # of cblas.h
_REALS = {"float32": ("scipy_cblas_sgemm64_", ctypes.c_float), "float64": ("scipy_cblas_dgemm64_", ctypes.c_double)}


def load() -> Loaded:
    import scipy_openblas64

    path = Path(scipy_openblas64.get_lib_dir()) / f"lib{scipy_openblas64.get_library()}.so"
    library = _OpenBlas(ctypes.CDLL(os.fspath(path)))
    return Loaded(
        versions={"scipy-openblas64": version("scipy-openblas64")},
        kernels={
            "openblas.matmul": library.matmul,
            "openblas.addmm": library.addmm,
            "openblas.linear": library.linear,
        },
    )


class _OpenBlas:
    """A Bind for each op. Matrices of one row or column are spread over others by a product with ones: what is
    multiplied by 1 stays what it is."""

    def __init__(self, library: Any) -> None:
        self._set_threads = library.scipy_openblas_set_num_threads64_
        self._set_threads.argtypes, self._set_threads.restype = [ctypes.c_int], None
        self._cores = len(os.sched_getaffinity(0))
        self._gemms = {}
        for dtype, (name, real) in _REALS.items():
            gemm, extent = getattr(library, name), ctypes.c_int64
            matrix = (ctypes.c_void_p, extent)
            gemm.argtypes = [*[ctypes.c_int] * 3, *[extent] * 3, real, *matrix, *matrix, real, *matrix]
            gemm.restype = None
            self._gemms[dtype] = gemm

    def matmul(self, call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        (a, b), (out,) = map(_given, inputs), outputs
        (rows, deep), width = a.spec.shape[-2:], b.spec.shape[-1]
        batch = out.spec.shape[:-2]
        starts = [_starts(block, batch) for block in (a, b, out)]
        calls = [self._gemm(call, (rows, width, deep), one) for one in zip(*starts, strict=True)]
        return _all(calls, (a, b, out))

    def addmm(self, call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        (x, a, b), (out,) = map(_given, inputs), outputs
        (rows, deep), width = a.spec.shape, b.spec.shape[1]
        beta, alpha = call.attrs["beta"], call.attrs["alpha"]
        spread, held = self._spread(call, x, out, (rows, width), beta)
        addresses = _address(a), _address(b), _address(out)
        product = self._gemm(call, (rows, width, deep), addresses, alpha=alpha, beta=1.0 if beta else 0.0)
        return _all([*(spread if beta else ()), product], (x, a, b, out, *held))

    def linear(self, call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        (x, weight), bias, (out,) = map(_given, inputs[:2]), inputs[2], outputs
        width, deep = weight.spec.shape
        rows = math.prod(x.spec.shape[:-1])
        spread, held = ([], ()) if bias is None else self._spread(call, bias, out, (rows, width), 1.0)
        addresses = _address(x), _address(weight), _address(out)
        beta = 0.0 if bias is None else 1.0
        product = self._gemm(call, (rows, width, deep), addresses, beta=beta, is_transposed=True)
        return _all([*spread, product], (x, weight, bias, out, *held))

    def _spread(
        self, call: Call, x: Block, out: Block, shape: tuple[int, int], factor: float
    ) -> tuple[list[Callable[[], Any]], tuple[Any, ...]]:
        """What fills `out` with `factor` times a tensor that is (1|rows, 1|width), and what must be kept for it."""
        rows, width = shape
        real = _REALS[out.spec.dtype][1]
        source, size = x.spec.numel, rows * width
        ones = (real * max(rows, width, 1))(*[1.0] * max(rows, width, 1))
        address = ctypes.addressof(ones)
        if source == size:  # (rows, width), times 1 from the right for each element
            return [self._gemm(call, (size, 1, 1), (_address(x), address, _address(out)), alpha=factor)], (ones,)
        if source == 1:  # one number for all: for a row first, which is then spread over the others
            row = (real * width)()
            first = self._gemm(call, (1, width, 1), (_address(x), address, ctypes.addressof(row)), alpha=factor)
            then = self._gemm(call, (rows, width, 1), (address, ctypes.addressof(row), _address(out)))
            return [first, then], (ones, row)
        left, right = (address, _address(x)) if x.spec.shape[-1] == width else (_address(x), address)
        return [self._gemm(call, (rows, width, 1), (left, right, _address(out)), alpha=factor)], (ones,)

    def _gemm(
        self,
        call: Call,
        extents: tuple[int, int, int],
        addresses: tuple[int, ...],
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        is_transposed: bool = False,
    ) -> Callable[[], Any]:
        """(rows, deep) by (deep, width), or by a (width, deep) that is transposed."""
        rows, width, deep = extents
        gemm, (left, right, target) = self._gemms[call.outputs[0].dtype], addresses
        how = (_ROWS_FIRST, _AS_IS, _TRANSPOSED if is_transposed else _AS_IS)
        second = (right, deep if is_transposed else width)
        threads = self._cores if rows * width * deep >= PARALLEL else 1
        set_threads = self._set_threads

        def product() -> None:
            set_threads(threads)
            gemm(*how, rows, width, deep, alpha, left, deep, *second, beta, target, width)

        return product


def _all(calls: Sequence[Callable[[], Any]], held: Sequence[Any]) -> Bound:
    """All of them in turn; `held` lives as long as what is returned."""

    def bound(_: Sequence[Any] = held) -> None:
        for each in calls:
            each()

    return bound


def _given(block: Block | None) -> Block:
    assert block is not None
    return block


def _starts(block: Block, batch: tuple[int, ...]) -> list[int]:
    """Where the matrices of a tensor begin whose leading dimensions are spread over `batch`."""
    address, spec = _address(block), block.spec
    steps = spec.strides[:-2]
    lead = (0,) * (len(batch) - len(steps))
    strides = [*lead, *(0 if n == 1 else step for n, step in zip(spec.shape[:-2], steps, strict=True))]
    places = itertools.product(*map(range, batch))
    return [address + spec.itemsize * sum(i * s for i, s in zip(place, strides, strict=True)) for place in places]


class _Buffer(ctypes.Structure):
    """Py_buffer, which says where memory is that may only be read."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        *((name, ctypes.c_ssize_t) for name in ("len", "itemsize")),
        *((name, ctypes.c_int) for name in ("readonly", "ndim")),
        *((name, ctypes.c_void_p) for name in ("format", "shape", "strides", "suboffsets", "internal")),
    )


def _address(block: Block) -> int:
    """Of the first element. The block's memoryview holds the memory."""
    found = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(block.host), ctypes.byref(found), 0)
    address = found.buf or 0
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(found))
    return address
