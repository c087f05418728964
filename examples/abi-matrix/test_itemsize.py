"""In three versions of NumPy: pytest --lz-matrix examples/abi-matrix"""

import pytest

NUMPY = pytest.mark.lz_env("numpy==1.26.4", "numpy==2.0.2", "numpy==2.2.6")


@NUMPY
def test_the_struct_is_read_as_this_numpy_has_it():
    import numpy
    from itemsize import itemsize

    for name in ("int8", "float64", "S100"):
        assert itemsize(numpy.dtype(name)) == numpy.dtype(name).itemsize


@NUMPY
def test_what_was_built_for_numpy_1_alone(lz_env):
    import numpy
    from itemsize import INT_AT_32, itemsize

    is_right = itemsize(numpy.dtype("float64"), INT_AT_32) == 8
    assert is_right == lz_env.startswith("numpy==1.")  # NumPy 2 has flags there
