"""The GPU that results of a call lie on where its option `device` says so: those of torch in this process."""

from __future__ import annotations

import os
import sys
from typing import Any

from layerzero.client.arrays.recognition import Array, describe
from layerzero.client.gpu.arrays import device_name
from layerzero.client.gpu.lent import GpuArguments
from layerzero.ipc.errors import InvalidArgument

_likes: dict[int, Array] = {}
"""By GPU: an empty tensor, which results are made like."""
os.register_at_fork(after_in_child=_likes.clear)  # whose GPU a forked child does not have


def like_on(device: str) -> Array:
    """What results are made like on "cuda", torch's current device, or on "cuda:1". Raises InvalidArgument."""
    torch = _torch()
    try:
        if not _likes and not torch.cuda.is_available():
            raise InvalidArgument(f"{_OR_ELSE}: torch {torch.__version__} of this process sees no GPU")
        _, _, number = device.partition(":")
        ordinal = int(number) if number else int(torch.cuda.current_device())
        found = _likes.get(ordinal)
        if found is not None:
            return found
        count = int(torch.cuda.device_count())
        if ordinal >= count:
            there = ", ".join(map(device_name, range(count)))
            raise InvalidArgument(f"say device= of a GPU that is there, {there}: torch of this process has no {device}")
        made = torch.empty(0, dtype=torch.float32, device=torch.device("cuda", ordinal))
    except RuntimeError as exc:  # such as of a forked child
        raise InvalidArgument(f"{_OR_ELSE}: torch of this process: {exc!s:.200}") from exc
    return _likes.setdefault(ordinal, describe(made))


def on_that(device: str, given: GpuArguments | None) -> GpuArguments:
    """The arguments on a GPU of a call with that option, none of which need be there. Raises InvalidArgument where they
    are on another one."""
    like = like_on(device)
    if given is None:
        return GpuArguments(like)
    if given.like.device != like.device:
        text = f"an array on {device_name(given.like.device)}, of a call with device={device!r}"
        its = device_name(like.device)
        raise InvalidArgument(f"{text}; move the arrays of a call to {its}, where its results are to be")
    return given


def why_uncompared(given: GpuArguments) -> str:
    """Why there is no shadow check of such a call."""
    if given.arrays:
        return "arrays on a GPU among the arguments may be written by now"
    return "its results may be on a GPU, and are not compared there"


def without_gpu(label: str, given: GpuArguments | None) -> str:
    """What to do where the worker of such a call sees no GPU."""
    has_arrays = given is None or given.arrays
    return f"pass arrays of the CPU to {label}" if has_arrays else f"leave device= of {label} out"


def _torch() -> Any:
    """Raises InvalidArgument."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda"):  # or is being imported
        raise InvalidArgument(f"import torch, with CUDA, before the call, or {_OR_ELSE}: this program has none")
    return torch


_OR_ELSE = "leave device= out, and have the function return arrays of the CPU"
