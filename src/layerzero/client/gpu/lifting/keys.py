"""By what a call is known whatever memory its arrays lie in: all that settles it, and how its memory is aligned."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from layerzero.client.arrays.recognition import Array
from layerzero.client.connection import overlay
from layerzero.client.connection.call import Request
from layerzero.ipc.lifting.form import alignment_class

Key = bytes | tuple[Any, ...]


def key_of(request: Request) -> tuple[Any, ...] | None:
    """None for what must be looked at each time. client/gpu/_call_key.h does the same."""
    key = _values(request)
    if key is None:
        return None
    for arg in (*request.args, request.out):
        if arg is None:
            key.append(None)
            continue
        part = _part(arg)
        if part is None:
            return None
        key.append(part)
    return tuple(key)


def described_key(request: Request, arrays: Sequence[Array | None]) -> tuple[Any, ...] | None:
    """The same of arrays that tell nothing before they are described, as JAX's: with `out=` there is none, since nobody
    would tell their library that it is written."""
    key = _values(request)
    if key is None or request.out is not None:
        return None
    for array in arrays:
        if array is None:
            key.append(None)
            continue
        spec = array.spec
        key.append((array.kind, alignment_class(array.address), array.device, spec.shape, spec.strides, spec.dtype))
    return (*key, None)


def _values(request: Request) -> list[Any] | None:
    """What settles a call beside its arrays."""
    if (
        request.is_rigid
        or request.timeout_s is not None
        or request.output_bytes is not None
        or overlay.baked.get() is not None
    ):
        return None
    policy = overlay.current()
    values = request.params.values()
    return [request.op, request.backend, None if policy is None else policy.text, *values, *map(type, values)]


def further(key: Key, older: Key, count: int, arrays: int) -> Key | None:
    """The key of the call that comes `count` steps after the one of `key`, where `older` came a step before it. What
    grows are extents of arrays, of which there are `arrays`, left out ones included; None where anything else differs.
    Both as of `key_of`, or of _call_key.h. Raises OverflowError for what no array can be."""
    if isinstance(key, tuple) and isinstance(older, tuple):
        values = len(key) - arrays
        if len(key) != len(older) or key[:values] != older[:values]:
            return None
        parts = [_further_part(a, b, count) for a, b in zip(key[values:], older[values:], strict=True)]
        return None if False in parts else (*key[:values], *parts)
    if not (isinstance(key, bytes) and isinstance(older, bytes)) or len(key) != len(older):
        return None
    places = _extents(key, arrays)
    if places is None or places != _extents(older, arrays):
        return None
    made, rest = bytearray(key), bytearray(older)
    for at in places:
        number, before = _number(key, at), _number(older, at)
        made[at : at + 8] = (number + count * (number - before)).to_bytes(8, sys.byteorder, signed=True)
        rest[at : at + 8] = key[at : at + 8]
    return bytes(made) if rest == key else None


def _number(key: bytes, at: int) -> int:
    return int.from_bytes(key[at : at + 8], sys.byteorder, signed=True)


def _further_part(part: Any, older: Any, count: int) -> Any:
    """Of an array; False where more than extents differs."""
    if part == older:
        return part
    if part is None or older is None or len(part) != len(older):
        return False
    made = []
    for one, before in zip(part, older, strict=True):
        if isinstance(one, tuple) and isinstance(before, tuple) and len(one) == len(before):
            made.append(tuple(a + count * (a - b) for a, b in zip(one, before, strict=True)))
        elif one == before:
            made.append(one)
        else:
            return False
    return tuple(made)


def _extents(key: bytes, arrays: int) -> list[int] | None:
    """Where the numbers of shapes and strides lie in a key; None for one that is written otherwise."""
    places, at = list[int](), 0
    for _ in range(arrays):
        tag = key[at : at + 1]
        if tag == b"n":
            at += 1
        elif tag in (b"X", b"Y"):  # append_looked
            ndim = int.from_bytes(key[at + 2 : at + 4], sys.byteorder)
            at += 16
            places += range(at, at + 16 * ndim, 8)
            at += 16 * ndim
        elif tag in (b"P", b"G", b"C"):  # tag and alignment, then tags of one byte with numbers of eight
            at += 2 + 9
            for _ in range(2):
                ndim = _number(key, at + 1)
                at += 9
                places += range(at + 1, at + 1 + 9 * ndim, 9)
                at += 9 * ndim
            at += 9
        else:
            return None
    return places


def addresses_of(request: Request) -> list[int]:
    """Of the arguments' first elements, then of `out`; 0 where there is none. For calls that have a key."""
    return [0 if arg is None else _address(arg) for arg in (*request.args, request.out)]


def _part(arg: Any) -> tuple[Any, ...] | None:
    torch, cupy, kind = sys.modules.get("torch"), sys.modules.get("cupy"), type(arg)
    if cupy is not None and kind is getattr(cupy, "ndarray", None):
        return kind, alignment_class(arg.data.ptr), arg.data.device_id, arg.shape, arg.strides, arg.dtype
    if torch is not None and kind in (torch.Tensor, torch.nn.Parameter):
        has_grad = arg.requires_grad
        if (has_grad and torch.is_grad_enabled()) or arg.is_neg():
            return None
        place = (alignment_class(arg.data_ptr()), arg.get_device())
        return (*place, arg.shape, arg.stride(), arg.dtype, has_grad)
    return None


def _address(arg: Any) -> int:
    data = getattr(arg, "data_ptr", None)
    return int(arg.data.ptr if data is None else data())
