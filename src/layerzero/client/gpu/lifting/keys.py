"""By what a call is known whatever memory its arrays lie in: all that settles it, and how its memory is aligned."""

from __future__ import annotations

import sys
from typing import Any

from layerzero.client.connection import overlay
from layerzero.client.connection.call import Request
from layerzero.ipc.lifting.form import alignment_class

Key = bytes | tuple[Any, ...]


def key_of(request: Request) -> tuple[Any, ...] | None:
    """None for what must be looked at each time. client/gpu/_call_key.h does the same."""
    if (
        request.is_rigid
        or request.timeout_s is not None
        or request.output_bytes is not None
        or overlay.baked.get() is not None
    ):
        return None
    policy = overlay.current()
    values = request.params.values()
    key = [request.op, request.backend, None if policy is None else policy.text, *values, *map(type, values)]
    for arg in (*request.args, request.out):
        if arg is None:
            key.append(None)
            continue
        part = _part(arg)
        if part is None:
            return None
        key.append(part)
    return tuple(key)


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
