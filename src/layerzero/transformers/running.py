"""Calls of ours from a layer of a model: with gradients where they are wanted, connected where nobody has yet, and
handed over where they fail."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

import layerzero as lz
import layerzero.torch  # defines torch.ops.layerzero
from layerzero.ipc.vocabulary.variables import is_disabled
from layerzero.transformers import tally

log = logging.getLogger("layerzero.transformers")
_ops = torch.ops.layerzero
_warned: set[str] = set()

IS_DISABLED = is_disabled(os.environ)

T = TypeVar("T")


class HandedOver(Exception):
    """A call is not ours; the message says why. Only within this package."""


def call(name: str, *args: Any, **options: Any) -> Tensor:
    """The op of this name. Raises HandedOver where it fails.

    By torch's dispatcher where something of torch's has to know of it: gradients, autocast, compilation, subclasses
    of Tensor. Else by lz's own function, which costs less."""
    if torch.compiler.is_compiling():
        return getattr(_ops, name).default(*args, **options)
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    needs_torch = (
        (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
        or torch.is_autocast_enabled(tensors[0].device.type)
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or any(type(tensor) not in (Tensor, torch.nn.Parameter) for tensor in tensors)
    )
    function = getattr(_ops, name).default if needs_torch else getattr(lz, name)
    return connected(name, lambda: function(*args, **options))


def connected(name: str, run: Callable[[], T]) -> T:
    """What `run` returns, connected where nobody has yet. Raises HandedOver where it fails."""
    try:
        try:
            return run()
        except (lz.NotConnected, lz.BrokerLost):
            lz.ensure_connected()
            return run()
    except lz.LayerZeroError as error:
        if error.code not in _warned:
            _warned.add(error.code)
            log.warning("%s is computed by Transformers: %s", name, str(error).partition("\n")[0])
        raise HandedOver(f"error {error.code}") from error


def count(layer: object, what: str, outcome: str = tally.SERVED) -> None:
    """One more call in the report; none while torch compiles."""
    if not torch.compiler.is_compiling():
        tally.count(layer, what, outcome)
