"""Which calls of functions with arrays on a GPU are alike but for where these lie."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

from layerzero.client.gpu import lent_keys
from layerzero.client.gpu.lent_keys import ALIGNMENT, key_of


class Pointer:
    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


class Device:
    id = 0


class Ndarray:
    """As much of CuPy's as is looked at."""

    device = Device()

    def __init__(self, ptr: int, shape: tuple[int, ...] = (2, 3), dtype: str = "float32") -> None:
        self.data, self.shape, self.dtype = Pointer(ptr), shape, np.dtype(dtype)
        self.strides = np.empty(shape, dtype).strides


@pytest.fixture(autouse=True)
def learnt() -> Iterator[None]:
    cupy = mock.Mock(ndarray=Ndarray)
    with (
        mock.patch.dict(sys.modules, {"cupy": cupy}),
        mock.patch.object(lent_keys, "types", set()),
        mock.patch.object(lent_keys._cupy, "tensor", type("none", (), {})),
    ):
        assert key_of((Ndarray(0),)) is None
        lent_keys.learn(Ndarray)
        yield


def key(*args: Any) -> Any:
    found = key_of(args)
    assert found is not None
    return found.key


def test_what_lies_elsewhere_is_alike_if_it_is_aligned_alike() -> None:
    first, second = key_of((Ndarray(1024), 2)), key_of((Ndarray(1024 + 3 * ALIGNMENT), 2))
    assert first is not None
    assert second is not None
    assert first.key == second.key
    assert (first.addresses, second.addresses) == ((1024,), (1024 + 3 * ALIGNMENT,))
    assert first.key != key(Ndarray(1028), 2)


def test_layouts_and_values_are_told_apart() -> None:
    x = Ndarray(0)
    others = [(x,), (x, x), (Ndarray(0, (3, 2)),), (Ndarray(0, (2, 3), "int32"),)]
    others += [(x, one) for one in (1, True, 1.0, 0, 0.0, -0.0, False, None, "1", b"1", "", -1)]
    keys = [key(*args) for args in others]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("args", [(), (1, "x"), (np.zeros(2),), ([1],)])
def test_calls_without_such_arrays_have_none(args: tuple[Any, ...]) -> None:
    assert key_of(args) is None


@pytest.mark.parametrize("other", [[1], {"a": 1}, np.zeros(2), object()])
def test_what_has_to_be_looked_at_each_time_has_none(other: Any) -> None:
    assert key_of((Ndarray(0), other)) is None


class Tensor:
    """As much of torch's as is looked at. `address`: None for a sparse one."""

    requires_grad, is_cuda, shape, dtype = False, True, (2, 3), "float32"

    def __init__(self, address: int | None, version: int | None = 0) -> None:
        self._address, self._its = address, version

    @property
    def _version(self) -> int:
        if self._its is None:
            raise RuntimeError("Inference tensors do not track version counter.")
        return self._its

    def is_neg(self) -> bool:
        return False

    is_conj = is_neg

    def stride(self) -> tuple[int, ...]:
        return 3, 1

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        if self._address is None:
            raise RuntimeError("Cannot access data pointer of Tensor that doesn't have storage")
        return self._address


@pytest.fixture
def torch() -> Iterator[None]:
    with mock.patch.object(lent_keys._torch, "tensor", Tensor):
        lent_keys.types.add(Tensor)
        yield


@pytest.mark.usefixtures("torch")
def test_a_tensor_without_memory_is_looked_at_each_time() -> None:
    assert key_of((Tensor(512),)) is not None
    assert key_of((Tensor(None),)) is None


@pytest.mark.usefixtures("torch")
def test_writes_are_counted_where_a_library_does() -> None:
    """In the order of the arrays among the arguments."""
    assert lent_keys.versions_of((Tensor(512, 3), 2, Ndarray(1024), "x", Tensor(512, None))) == [3, None, None]
