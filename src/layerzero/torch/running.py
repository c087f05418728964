"""Calls of ours from a layer of a framework's model: with gradients where they are wanted, connected where nobody has
yet, and handed over where they fail."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

import layerzero as lz
from layerzero.ipc.vocabulary.variables import is_disabled
from layerzero.torch import registration  # noqa: F401  # defines torch.ops.layerzero
from layerzero.torch.refusals import Refusals
from layerzero.torch.tally import SERVED, Tally

_ops = torch.ops.layerzero

IS_DISABLED = is_disabled(os.environ)
T = TypeVar("T")

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DEVICES = ("cpu", "cuda")


class HandedOver(Exception):
    """A call is not ours; the message says why. Only within a framework's package."""


class Runner:
    """Calls of one framework's layers. `framework`: its name, for people; `tally` counts them; what failed is said
    once by the logger layerzero.NAME."""

    def __init__(self, framework: str) -> None:
        self.framework = framework
        self.tally = Tally()
        self.log = logging.getLogger(f"layerzero.{framework.lower()}")
        self._warned: set[str] = set()
        self._refusals = Refusals()

    def call(self, name: str, *args: Any, **options: Any) -> Tensor:
        """The op of this name. Raises HandedOver where it fails.

        By torch's dispatcher where something of torch's has to know of it: gradients, autocast, compilation, subclasses
        of Tensor. Else by lz's own function, which costs less."""
        found: Tensor = self._call(name, args, options, is_last=True)
        return found

    def try_call(self, name: str, *args: Any, **options: Any) -> Any:
        """As `call`, where other ops follow if it fails: nothing is said then."""
        return self._call(name, args, options, is_last=False)

    def _call(self, name: str, args: tuple[Any, ...], options: dict[str, Any], *, is_last: bool) -> Any:
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
        given = (*args, *options, *options.values())
        refused = self._refusals.why(name, given)
        if refused:
            raise HandedOver(refused)
        try:
            found = self.connected(name, lambda: function(*args, **options), is_last=is_last)
        except HandedOver as why:
            if isinstance(why.__cause__, lz.NoBackend):
                self._refusals.note(name, given, str(why))
            raise
        self._refusals.forget(name, given)
        return found

    def connected(self, name: str, run: Callable[[], T], *, is_last: bool = True) -> T:
        """What `run` returns, connected where nobody has yet. Raises HandedOver where it fails, which is logged if it
        `is_last` and the framework computes it then."""
        try:
            try:
                return run()
            except (lz.NotConnected, lz.BrokerLost):
                lz.ensure_connected()
                return run()
        except lz.LayerZeroError as error:
            if is_last and error.code not in self._warned:
                self._warned.add(error.code)
                self.log.warning("%s is computed by %s: %s", name, self.framework, str(error).partition("\n")[0])
            raise HandedOver(f"error {error.code}") from error

    def count(self, layer: object, what: str, outcome: str = SERVED) -> None:
        """One more call in the report; none while torch compiles."""
        if not torch.compiler.is_compiling():
            self.tally.count(layer, what, outcome)


def check_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    """Raises HandedOver for tensors that lz.attention does not take: other than four dimensions, dtypes that are no
    floats of 16 to 64 bits or differ, devices but CPU and CUDA, masks that are neither bool nor floats."""
    if any(tensor.dim() != 4 for tensor in (query, key, value)):
        raise HandedOver("not 4 dimensions")
    if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
        raise HandedOver("dtypes")
    if query.device.type not in DEVICES:
        raise HandedOver(f"device {query.device.type}")
    if mask is not None and (mask.dim() > 4 or not (mask.dtype == torch.bool or mask.dtype.is_floating_point)):
        raise HandedOver("kind of mask")
