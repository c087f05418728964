"""client/gpu/lent.py: which arrays on GPUs may be the arguments of one call."""

from __future__ import annotations

from typing import Any

import pytest

from layerzero.client.arrays.recognition import Array
from layerzero.client.gpu.lent import GpuArguments
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.tensors import TensorSpec


def array(kind: Any = "torch", device: int = 0) -> Array:
    return Array(kind, TensorSpec.contiguous("float32", (4,)), 4096, object(), None, device=device)


def test_arrays_of_a_call_are_on_one_gpu_and_of_one_library() -> None:
    """Each library has a stream of its own, and a call has one."""
    given = GpuArguments(array())
    given.add(array(), [])
    given.add(array(), [])
    assert given.nbytes == 32
    with pytest.raises(InvalidArgument, match=r"cuda:1 beside one on cuda:0; move the arrays of a call to one GPU"):
        given.add(array(device=1), [])
    with pytest.raises(InvalidArgument, match="pass arrays of one library"):
        given.add(array("cupy"), [])
