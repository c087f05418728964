"""A matrix product by the C interface."""

import ctypes
import os
from typing import Any


def op(memory: Any) -> tuple[list[Any], list[Any]]:
    import scipy_openblas64

    library = ctypes.CDLL(os.path.join(scipy_openblas64.get_lib_dir(), f"lib{scipy_openblas64.get_library()}.so"))
    size = memory.left.shape[0]
    left, right, out = ((ctypes.c_float * size**2)() for _ in range(3))
    left[:], right[:] = (memoryview(one.tobytes()).cast("f").tolist() for one in (memory.left, memory.right))
    n, one, zero = ctypes.c_int64(size), ctypes.c_float(1), ctypes.c_float(0)
    rows_first, as_is = 101, 111
    library.scipy_cblas_sgemm64_(rows_first, as_is, as_is, n, n, n, one, left, n, right, n, zero, out, n)
    return list(out), memory.product
