"""Attention where no function mode sees it: the op aten::scaled_dot_product_attention, overridden for the process.

torch has a registry of such overrides, torch.nn.attention.register_flash_attention_impl. Ours is in it as "LAYERZERO":
activate_flash_attention_impl("LAYERZERO") serves attention in all threads, until restore_flash_attention_impl(). Others
there override the flash kernel below this op, which must return a log-sum-exp for torch's backward; ours has none, and
so takes the op as a whole, with its gradients. What is not for us goes on to torch's own, which get_kernel keeps.

accelerate() needs it within torch.nn.functional.multi_head_attention_forward, which hides its calls from modes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch.library import Library, get_kernel
from torch.nn.attention import register_flash_attention_impl

from layerzero.torch.acceleration.functions import RULES
from layerzero.torch.acceleration.interception import Takeover
from layerzero.torch.acceleration.tally import Tally

NAME = "LAYERZERO"
OP = "scaled_dot_product_attention"
KEYS = ("CPU", "AutogradCPU", "CUDA", "AutogradCUDA")
WEIGHTS = "multi_head_attention_forward that returns its weights"
_RULE = RULES[F.scaled_dot_product_attention]


class _Thread(threading.local):
    """`takeover`: whose calls this thread's are. `seen`: so many came here."""

    takeover: Takeover | None = None
    seen = 0


_thread = _Thread()
_lock = threading.Lock()
_users = 0
_library: Library | None = None
_everywhere: Takeover | None = None
_needed_by: WeakSet[Takeover] = WeakSet()


def install() -> None:
    """Override the op, if nobody has yet. Each call needs its `remove`."""
    global _users, _library
    with _lock:
        _users += 1
        if _library is None:
            library = Library("aten", "IMPL")
            own = {key: get_kernel(f"aten::{OP}", key) for key in KEYS}  # all before the first is overridden
            for key, kernel in own.items():
                library.impl(OP, partial(_call, kernel), key, with_keyset=True)
            _library = library


def remove() -> None:
    """The override goes with its last user."""
    global _users, _library
    with _lock:
        _users -= 1
        if _users == 0 and _library is not None:
            _library._destroy()
            _library = None


def _call(own: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    thread = _thread
    takeover = thread.takeover or _everywhere
    native = partial(own.call_boxed, keys)
    if takeover is None or torch.compiler.is_compiling():
        return native(*args, **kwargs)
    thread.seen += 1
    return takeover.call(_RULE, native, args, kwargs)


def within(takeover: Takeover, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A function of torch that hides its attention, which goes to `takeover`."""
    thread = _thread
    with _lock:
        is_new = takeover not in _needed_by
        _needed_by.add(takeover)
    if is_new:
        install()
    before, seen = thread.takeover, thread.seen
    thread.takeover = takeover
    try:
        result = function(*args, **kwargs)
    finally:
        thread.takeover = before
    if thread.seen == seen:
        takeover.tally.left(takeover.tally.layer(3), _RULE.op, WEIGHTS)
    return result


def leave(takeover: Takeover) -> None:
    """It needs the override no more, if it ever did."""
    with _lock:
        was_needed = takeover in _needed_by
        _needed_by.discard(takeover)
    if was_needed:
        remove()


class Everywhere:
    """What torch's registry holds while ours is active there."""

    def __init__(self, takeover: Takeover) -> None:
        global _everywhere
        install()
        _everywhere = self._takeover = takeover

    def remove(self) -> None:
        global _everywhere
        if _everywhere is self._takeover:
            _everywhere = None
            remove()


def register(on_activation: Callable[[Takeover], None]) -> None:
    """Tell torch's registry of ours, without activating it. `on_activation` hears of it when somebody does."""

    def activate() -> Everywhere:
        takeover = Takeover((_RULE.op,), Tally(None), has_policy=False)
        on_activation(takeover)
        return Everywhere(takeover)

    register_flash_attention_impl(NAME, register_fn=activate)
