"""What was found of a call holds for all that are like it: those are looked at in C (_look.c), where that was compiled.

What is asked in C: whether nothing of torch's is on that the Python alone deals with (a backward pass, torch.func,
forward mode), and whether a call with the same key was looked at before. What is in the key says
_look.c. Evidence, refusals, layers and policy are looked up at each call. All else, and each call where there is no
C, goes the way of `Takeover.look`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.autograd import forward_ad, profiler

import layerzero as lz
from layerzero.client.gpu.fastpath_library import DISABLED
from layerzero.client.session import in_process
from layerzero.torch import calls, registration
from layerzero.torch.acceleration import functions, tally
from layerzero.torch.evidence import SLOWER, Trial, Turn

MAX_KNOWN = 4096  # kinds of calls; then all are forgotten
MAX_ORDERS = 8


def _load() -> Any:
    if os.environ.get(DISABLED):
        return None
    try:
        from layerzero.torch.acceleration import _look
    except ImportError:
        return None
    has_all = hasattr(Tensor, "__dlpack_c_exchange_api__") and hasattr(torch.compiler, "_is_compiling_flag")
    return _look if has_all else None


library = _load()
"""The module, or None where there is none, or none for this torch."""


def _plain_keys() -> frozenset[int]:
    """As calls.PLAIN, of what torch's dispatcher tells an overridden op, in inference mode, too."""
    found = set(calls.PLAIN)
    for device in ("CPU", "CUDA"):
        keys = DispatchKeySet(getattr(DispatchKey, device))
        found |= {keys.raw_repr(), keys.add(DispatchKey.ADInplaceOrView).raw_repr()}
    return frozenset(found)


class Site(NamedTuple):
    """How calls of one kind are made: by `call`, or where nobody else of torch's has a part in them by `kernel`, with
    arguments that lie at these `places` among torch's, or are `constants` where that is -1."""

    call: Callable[..., Any]
    kernel: Callable[..., Any] | None
    places: tuple[int, ...]
    constants: tuple[Any, ...]
    trial: Trial | None


class Looks:
    """What one takeover knows of calls: by key why they are left, whatever else is on or while all is plain, or their
    site. Threads may share it."""

    def __init__(self) -> None:
        self.known: dict[bytes, str | tuple[str] | Site] = {}
        self._orders: list[Any] = []

    def compiled(self, counts: tally.Tally, **told: Any) -> Any:
        """The C's part of it. `told`: see _look.pyi."""
        assert library is not None
        return library.Looks(
            known=self.known,
            orders=self._orders,
            took=counts.took,
            count_first=counts.count,
            counts=counts.local,
            names=counts.names,
            codes=tally.CODES,
            outside_layer=tally.OUTSIDE,
            **_OF_TORCH,
            **told,
        )

    def leave(self, key: bytes | None, why: str, *, is_written: bool) -> None:
        """Calls with this key stay with torch, because of what is written in them, or of their tensors."""
        if key is not None:
            self._room()[key] = why if is_written else (why,)

    def take(self, key: bytes | None, planned: functions.Taken, torchs: Iterable[Any], trial: Trial | None) -> None:
        """Calls with this key are ours. `torchs`: the arguments of torch's function, of which ours are some."""
        if key is None:
            return
        call, given = planned
        numbers = {id(one): n for n, one in enumerate(torchs)}
        places = tuple(numbers.get(id(one), -1) for one in given)
        constants = tuple(None if n >= 0 else one for n, one in zip(places, given, strict=True))
        if not any(isinstance(one, Tensor) for one in constants):
            self._room()[key] = Site(call, registration.KERNELS.get(id(call)), places, constants, trial)

    def see_order(self) -> None:
        """Torch's order of its kernels for attention just now is one in which our place comes first."""
        order = torch._C._get_sdp_priority_order()
        if order not in self._orders and len(self._orders) < MAX_ORDERS:
            self._orders.append(order)

    def _room(self) -> dict[bytes, str | tuple[str] | Site]:
        if len(self.known) >= MAX_KNOWN:
            self.known.clear()
        return self.known


_OF_TORCH: Mapping[str, Any] = {
    "module": torch.nn.Module,
    "kernels": in_process.thread,
    "session": lz.session,
    "native_turn": Turn.NATIVE,
    "our_turn": Turn.OURS,
    "slower": SLOWER,
    "forward_ad": forward_ad,
    "profiler": profiler,
    "key_sets": frozenset(functions.KEY_SETS),
    "plain_keys": _plain_keys(),
    "outside": calls.OUTSIDE,
    "dispatch_keys": torch._C._dispatch_keys,
    "included": torch._C._dispatch_tls_local_include_set,
    "function_modes": torch._C._len_torch_function_stack,
    "graph_task": torch._C._current_graph_task_id,
    "functorch_level": torch._C._functorch.maybe_current_level,
    "is_grad_on": torch._C.is_grad_enabled,
    "is_autocast": torch._C._is_any_autocast_enabled,
    "is_autocast_for": torch.is_autocast_enabled,
    "autocast_dtype": torch.get_autocast_dtype,
    "saved_hooks": torch._C._autograd._top_saved_tensors_default_hooks,
    "flash_enabled": torch._C._get_flash_sdp_enabled,
    "sdp_order": torch._C._get_sdp_priority_order,
    "dtype": torch.dtype,
    "tensor": Tensor,
    "parameter": torch.nn.Parameter,
    "size": torch.Size,
    "exchange": getattr(Tensor, "__dlpack_c_exchange_api__", None),
}


def torchs(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> tuple[Any, ...]:
    """All that torch's function was given, in the order in which places count it."""
    return (*args, *kwargs.values()) if kwargs else tuple(args)
