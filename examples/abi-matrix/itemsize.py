"""A project that reads NumPy's C struct PyArray_Descr: its field `elsize` has moved, and grown, in NumPy 2."""

import ctypes

import numpy

INT_AT_32, INTP_AT_40 = (ctypes.c_int, 32), (ctypes.c_ssize_t, 40)


def itemsize(dtype: numpy.dtype, field=None) -> int:
    """Bytes of an element, as C has it. `field`: type and offset; those of this NumPy when left out."""
    kind, offset = field or (INT_AT_32 if numpy.__version__.startswith("1.") else INTP_AT_40)
    return kind.from_address(id(dtype) + offset).value
