"""What calls of functions with arrays on a GPU have in common that are alike but for where these lie."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from typing import Any, NamedTuple

ALIGNMENT = 256  # at which ranges of memory begin
_PLAIN = frozenset({type(None), bool, int, str, bytes})
types: set[type] = set()
"""Of arrays that were on a GPU."""


class Key(NamedTuple):
    """What such calls have in common, and where the arrays of one are."""

    key: Hashable
    addresses: tuple[int, ...]


def key_of(args: tuple[Any, ...], device: int | None = None) -> Key | None:
    """None for a call without an array on a GPU, and for what is looked at each time. `device`: of a call whose results
    are on that GPU, with such an array or without."""
    if device is None and types.isdisjoint(map(type, args)):
        return None
    key: list[Any] = [device]
    addresses: list[int] = []
    for arg in args:
        kind = type(arg)
        if kind in _PLAIN:
            key += (kind, arg)
        elif kind is float:
            key += (kind, arg or repr(arg))  # there are two zeros
        elif kind is _torch.tensor:
            has_grad = arg.requires_grad
            if not arg.is_cuda or arg.is_neg() or arg.is_conj() or (has_grad and _torch.is_grad_enabled()):
                return None
            try:
                address, strides = arg.data_ptr(), arg.stride()
            except RuntimeError:  # a tensor without memory, such as a sparse one: what checks it names it
                return None
            addresses.append(address)
            key.append((address % ALIGNMENT, arg.shape, strides, arg.dtype, arg.get_device()))
        elif kind is _cupy.tensor:
            address = arg.data.ptr
            addresses.append(address)
            key.append((address % ALIGNMENT, arg.shape, arg.strides, arg.dtype, arg.device.id))
        else:
            return None
    if not addresses and device is None:
        return None
    return Key(tuple(key), tuple(addresses))


def versions_of(args: tuple[Any, ...]) -> list[int | None]:
    """Torch's counts of writes, of the arrays on a GPU among arguments that have a key."""
    return [_version_of(arg) for arg in args if type(arg) in types]


def _version_of(arg: Any) -> int | None:
    try:
        return int(arg._version)
    except (AttributeError, RuntimeError):  # of CuPy; made in inference mode
        return None


def learn(kind: type) -> None:
    """Of the type of an array on a GPU."""
    if kind.__module__ == "torch" and kind.__name__ == "Tensor":
        _torch.tensor, _torch.is_grad_enabled = kind, sys.modules["torch"].is_grad_enabled
        types.add(kind)
    cupy = sys.modules.get("cupy")
    if cupy is not None and kind is getattr(cupy, "ndarray", None):
        _cupy.tensor = kind
        types.add(kind)


class _Library:
    """What of an array library each call needs, once there was an array of it."""

    tensor: type = type("none", (), {})
    is_grad_enabled: Any = staticmethod(bool)


_torch, _cupy = _Library(), _Library()
