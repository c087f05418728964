"""Arrays that workers reach without a copy: lz.empty, lz.empty_like, lz.share."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

from layerzero.client.arrays.array_types import ArrayT
from layerzero.client.arrays.copies import copy_into
from layerzero.client.arrays.recognition import CPU, Array, describe
from layerzero.client.arrays.wrapping import wrap
from layerzero.client.connection import arena as arenas
from layerzero.client.connection import observing
from layerzero.client.gpu.arrays import give, new_like
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.tensors import ITEMSIZE, TensorSpec

if TYPE_CHECKING:
    from numpy import dtype as NumPyDtype
    from numpy import float32, generic
    from numpy.typing import NDArray

    ScalarT = TypeVar("ScalarT", bound=generic)

T = TypeVar("T")


@overload
def empty(shape: int | Sequence[int]) -> NDArray[float32]: ...


@overload
def empty(shape: int | Sequence[int], dtype: type[ScalarT] | NumPyDtype[ScalarT]) -> NDArray[ScalarT]: ...


@overload
def empty(shape: int | Sequence[int], dtype: str) -> NDArray[Any]: ...


@overload
def empty(shape: int | Sequence[int], dtype: Any) -> Any: ...


def empty(shape: int | Sequence[int], dtype: Any = "float32") -> Any:
    """An uninitialised array that workers can use without a copy, as input and as out=.

    shape: extents. dtype: a torch.dtype gives a torch tensor; a NumPy dtype or a name gives a NumPy array.
    Raises OutOfMemory.
    """
    extents = (shape,) if isinstance(shape, int) else tuple(shape)
    if not all(isinstance(n, int) and n >= 0 for n in extents):
        raise InvalidArgument(f"shape is {shape!r}; allowed: non-negative integers")
    torch = sys.modules.get("torch")
    is_torch = torch is not None and isinstance(dtype, torch.dtype)
    name = str(dtype).removeprefix("torch.") if is_torch or isinstance(dtype, str) else getattr(dtype, "name", None)
    if name is None:
        name = getattr(dtype, "__name__", str(dtype))  # numpy.float32, the class
    if name not in ITEMSIZE:
        raise InvalidArgument(f"dtype is {dtype!r}; allowed: {', '.join(ITEMSIZE)}")
    spec = TensorSpec.contiguous(name, extents)
    return _fresh(spec, Array("torch" if is_torch else "numpy", spec, 0, None, None))[0]


def empty_like(array: ArrayT) -> ArrayT:
    """As `empty`, of the shape, dtype and kind of `array`."""
    like = describe(array)
    spec = TensorSpec.contiguous(like.spec.dtype, like.spec.shape)
    if like.device != CPU:
        return give(like, new_like(like, spec)[0])  # type: ignore[no-any-return]
    return _fresh(spec, like)[0]  # type: ignore[no-any-return]


def _fresh(spec: TensorSpec, like: Array) -> tuple[Any, memoryview]:
    memory, arena, offset = arenas.pool.allocate(spec.span_bytes)
    if observing.recorder is not None:
        observing.recorder.note_fresh(arena.address + offset, spec.span_bytes)
    value, was_copied = wrap(memory, spec, like)
    if was_copied:
        raise InvalidArgument(
            f"arrays of {type(like.obj).__name__} own their memory; use a NumPy array or a torch tensor"
        )
    return value, memory


def share(value: T) -> T:
    """Move data where workers reach it without a copy: do it once for weights and caches.

    An array gives a copy of its kind in shared memory (or itself, when it lies there already); lists, tuples and
    dicts give the same with all arrays inside shared. A torch.nn.Module is changed in place: its parameters and
    buffers move. Raises OutOfMemory; what had moved until then stays moved.
    """
    shared: T = _shared(value)
    return shared


def _shared(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _shared(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_shared(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.nn.Module):
        for tensor in (*value.parameters(), *value.buffers()):
            tensor.data = _shared(tensor.data)
        return value
    array = describe(value)
    if array.device != CPU:
        return value  # a worker on that GPU reaches it as it lies, or the report says why not
    if not array.needs_copy and arenas.pool.find(array.address, array.spec.span_bytes) is not None:
        return value
    shared, memory = _fresh(TensorSpec.contiguous(array.spec.dtype, array.spec.shape), array)
    copy_into(array, memory)
    return shared
