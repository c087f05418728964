"""Calls where no function mode sees them: torch's own ops, overridden for the process. A mode is asked about each
function of torch's that a model calls, some 70 a layer, which takes longer than all that it may save; an override is
asked about its op alone, and costs 3 us where it leaves a call to torch.

torch has a registry of such overrides, torch.nn.attention.register_flash_attention_impl. Ours is in it as "LAYERZERO":
activate_flash_attention_impl("LAYERZERO") serves attention in all threads, until restore_flash_attention_impl(). Others
there override the flash kernel below this op, which must return a log-sum-exp for torch's backward; ours has none, and
so takes the op as a whole, with its gradients. What is not for us goes on to torch's own, which get_kernel keeps.

accelerate() needs it within torch.nn.functional.multi_head_attention_forward, which hides its calls from modes."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch.library import Library, get_kernel
from torch.nn.attention import register_flash_attention_impl

from layerzero.torch.acceleration import looking
from layerzero.torch.acceleration.functions import AROUND, OVERRIDDEN, RULES, Rule
from layerzero.torch.acceleration.interception import Takeover
from layerzero.torch.acceleration.tally import Tally

NAME = "LAYERZERO"
KEYS = ("CPU", "AutogradCPU", "CUDA", "AutogradCUDA")
WEIGHTS = "multi_head_attention_forward that returns its weights"
_RULE = RULES[F.scaled_dot_product_attention]


class _Thread(threading.local):
    """`takeover`: whose calls this thread's are, with the `ops` that are. `seen`: so many came here. `is_within`: one
    is being dealt with, and what torch calls for it is its own."""

    takeover: Takeover | None = None
    is_all = True
    seen = 0
    is_within = False


_thread = _Thread()
_lock = threading.Lock()
_libraries: dict[str, Library] = {}  # by the op of torch's that each overrides
_everywhere: Takeover | None = None
# Who needs which of our ops to be seen. One that was never removed is forgotten when the next one is.
_needed: WeakKeyDictionary[Takeover, frozenset[str]] = WeakKeyDictionary()


def _settle() -> None:
    """Override the ops that somebody needs, and no others. Needs the lock."""
    ops = set().union(*_needed.values())
    if _everywhere is not None:
        ops.add(_RULE.op)
    wanted = {name for name, rule in OVERRIDDEN.items() if rule.op in ops}
    wanted |= {around for op, around in AROUND.items() if op in ops}
    for name in wanted - _libraries.keys():
        own = {key: get_kernel(f"aten::{name}", key) for key in KEYS}  # all before the first is overridden
        library = Library("aten", "IMPL")
        with warnings.catch_warnings():  # torch's, that a kernel of its own is overridden
            warnings.simplefilter("ignore", UserWarning)
            for key, kernel in own.items():
                library.impl(name, _override(OVERRIDDEN[name], kernel), key, with_keyset=True)
        _libraries[name] = library
    for name in _libraries.keys() - wanted:
        _libraries.pop(name)._destroy()


def _override(rule: Rule, own: Any) -> Callable[..., Any]:
    """What the dispatcher calls in place of torch's kernel: `_call`, or the C that knows its plain way."""
    call = partial(_call, rule, own)
    if looking.library is None:
        return call
    made: Callable[..., Any] = looking.library.Override(
        rule=rule, own=own.call_boxed, call=call, here=_thread, compiler=torch.compiler, is_for_all=rule is _RULE
    )
    return made


def _call(rule: Rule, own: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    thread = _thread
    takeover = thread.takeover
    is_ours = takeover is not None and (thread.is_all or rule is _RULE)
    if not is_ours and rule is _RULE:
        takeover = _everywhere
        is_ours = takeover is not None
    if not is_ours or thread.is_within or torch.compiler.is_compiling():
        return own.call_boxed(keys, *args, **kwargs)
    assert takeover is not None
    thread.is_within = True
    try:
        if rule.op not in takeover.ops:
            return own.call_boxed(keys, *args, **kwargs)
        thread.seen += 1
        return takeover.look(rule, partial(own.call_boxed, keys), args, kwargs, above=1)
    finally:
        thread.is_within = False


def need(takeover: Takeover, ops: Iterable[str]) -> None:
    """It needs these of our ops to be seen, until `leave`."""
    with _lock:
        _needed[takeover] = frozenset(ops)
        _settle()


def is_running(takeover: Takeover) -> bool:
    """Whether this thread is within a call of `run`."""
    return _thread.takeover is takeover and _thread.is_all


def run(takeover: Takeover, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A call whose ops, in this thread, go to `takeover`, which needs the overrides."""
    thread = _thread
    before, was_all = thread.takeover, thread.is_all
    thread.takeover, thread.is_all = takeover, True
    try:
        return call(*args, **kwargs)
    finally:
        thread.takeover, thread.is_all = before, was_all


def within(takeover: Takeover, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A function of torch that hides its attention, which goes to `takeover`."""
    thread = _thread
    if takeover not in _needed:
        need(takeover, (_RULE.op,))
    before, was_all, seen = thread.takeover, thread.is_all, thread.seen
    thread.takeover, thread.is_all = takeover, False
    try:
        result = function(*args, **kwargs)
    finally:
        thread.takeover, thread.is_all = before, was_all
    if thread.seen == seen:
        takeover.tally.left(takeover.tally.layer(3), _RULE.op, WEIGHTS)
    return result


def leave(takeover: Takeover) -> None:
    """It needs the overrides no more, if it ever did."""
    with _lock:
        if _needed.pop(takeover, None) is not None:
            _settle()


class Everywhere:
    """What torch's registry holds while ours is active there."""

    def __init__(self, takeover: Takeover) -> None:
        global _everywhere
        with _lock:
            _everywhere = self._takeover = takeover
            _settle()

    def remove(self) -> None:
        global _everywhere
        with _lock:
            if _everywhere is self._takeover:
                _everywhere = None
                _settle()


def register(on_activation: Callable[[Takeover], None]) -> None:
    """Tell torch's registry of ours, without activating it. `on_activation` hears of it when somebody does."""

    def activate() -> Everywhere:
        takeover = Takeover((_RULE.op,), Tally(None), has_policy=False)
        on_activation(takeover)
        return Everywhere(takeover)

    register_flash_attention_impl(NAME, register_fn=activate)
