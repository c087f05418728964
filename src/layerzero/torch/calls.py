"""How a call of an op of ours gets from torch's dispatcher to what runs it: what is done below autograd, and whether
anybody else of torch's has a part in it.

The kernels for torch are Python's, and for plain calls C's (_calls.c), where that was compiled: the same steps. Those
of the C are given the Python's, and call it where a call is not plain."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet, _AutoDispatchBelowADInplaceOrView
from torch.autograd import forward_ad, profiler

from layerzero.client.connection import overlay
from layerzero.client.gpu.fastpath_library import DISABLED
from layerzero.torch.op_entry import OpEntry

DETERMINISTIC = overlay.Overlay.of(
    {"origin": "torch.use_deterministic_algorithms", "values": {"requires_deterministic": True}}
)


def _load() -> Any:
    if os.environ.get(DISABLED):
        return None
    try:
        import layerzero.torch._calls as found
    except ImportError:
        return None
    return found


library = _load()
"""The module, or None where there is none."""


def _plain_keys() -> frozenset[int]:
    """As numbers, the sets of dispatch keys of a call that nobody but autograd has a part in: no mode of dispatch, no
    transform of torch.func, no functionalization, no subclass that dispatches, no lazy negation or conjugation."""
    found = set()
    for device in ("CPU", "CUDA"):
        keys = DispatchKeySet(getattr(DispatchKey, device)).add(getattr(DispatchKey, f"Autograd{device}"))
        found |= {keys.raw_repr(), keys.add(DispatchKey.ADInplaceOrView).raw_repr()}
    return frozenset(found)


PLAIN = _plain_keys()
# What a thread includes in every call: outside of all modes and transforms, and the same in inference mode.
OUTSIDE = frozenset(
    keys.raw_repr()
    for keys in (
        DispatchKeySet(DispatchKey.BackendSelect),
        DispatchKeySet(DispatchKey.BackendSelect).add(DispatchKey.ADInplaceOrView),
    )
)


def is_alone(args: Sequence[Any]) -> bool:
    """Whether a call of plain tensors concerns nobody else of torch's: no gradients, autocast, mode of dispatch or of
    functions, transform, tracing or profiler. What an op does below autograd may then be called in its place."""
    return (
        _included().raw_repr() in OUTSIDE
        and not (is_grad_on() and any_needs_grad(*args))
        and not _is_autocast()
        and not _function_modes()
        and not profiler._is_profiler_enabled
    )


is_grad_on: Callable[[], bool] = torch._C.is_grad_enabled
any_needs_grad: Callable[..., bool] = torch._C._any_requires_grad
is_functorch: Callable[[], bool] = torch._C._are_functorch_transforms_active
count: Callable[[Sequence[Tensor]], None] = torch._C._increment_version
_included = torch._C._dispatch_tls_local_include_set
_is_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_is_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms


# --- below autograd ------------------------------------------------------------------------------------------------


def kernel(entry: OpEntry, call: Callable[..., Any]) -> Callable[..., Any]:
    """The call, by kernels that say they are deterministic with torch.use_deterministic_algorithms, also in a compiled
    graph. Its result is a view of shared memory, which must be nobody's view for autograd, or the program could not
    change it in place."""
    by_torch, only_here = entry.by_torch, entry.only_here
    if library is not None:
        return _compiled(call, by_torch, only_here, None)

    def kernel(*args: Any, **options: Any) -> Any:
        with _AutoDispatchBelowADInplaceOrView():
            if by_torch is not None:
                found = by_torch(*args, **options)
                if found is not None:
                    return found
            if only_here:
                options = {name: value for name, value in options.items() if name not in only_here}
            return repeatably(call, *args, **options) if _is_deterministic() else call(*args, **options)

    return kernel


def out_kernel(entry: OpEntry, call: Callable[..., Any]) -> Callable[..., Any]:
    """The same of the form that writes its results into tensors of the caller's."""
    only_here, written = entry.only_here, entry.written
    is_several = len(written) > 1
    if library is not None:
        return _compiled(call, None, only_here, written if is_several else ())

    def kernel(*args: Any, **options: Any) -> None:
        if is_several:
            out = tuple(options.pop(name) for name in written)
            options["out"] = out
        if only_here:
            options = {name: value for name, value in options.items() if name not in only_here}
        with _AutoDispatchBelowADInplaceOrView():
            if _is_deterministic():
                repeatably(call, *args, **options)
            else:
                call(*args, **options)

    return kernel


def _compiled(
    call: Callable[..., Any],
    by_torch: Callable[..., Any] | None,
    only_here: frozenset[str],
    outs: tuple[str, ...] | None,
) -> Callable[..., Any]:
    assert library is not None
    made: Callable[..., Any] = library.Kernel(
        call=call,
        by_torch=by_torch,
        only_here=tuple(only_here),
        outs=outs,
        is_deterministic=_is_deterministic,
        repeatably=repeatably,
        guard=_AutoDispatchBelowADInplaceOrView,
    )
    return made


def repeatably(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The call by kernels that say they are deterministic."""
    scope = overlay.Scope(DETERMINISTIC)
    try:
        return call(*args, **options)
    finally:
        scope.end()


# --- at Autograd ---------------------------------------------------------------------------------------------------


def differentiable(
    python: Callable[..., Any],
    run: Callable[..., Any],
    apply: Callable[..., Any] | None,
    by_torch: Callable[..., Any] | None,
) -> Callable[..., Any]:
    """What an op does at Autograd, which is given the keys. `python` does so for all calls. `run`: below autograd;
    `apply`: of the torch.autograd.Function that has `forward`, if there is one."""
    if library is None:
        return python
    made: Callable[..., Any] = library.Differentiable(
        run=run,
        apply=apply,
        python=python,
        by_torch=by_torch,
        forward_ad=forward_ad,
        plain=PLAIN,
        is_grad_on=is_grad_on,
        any_needs_grad=any_needs_grad,
        is_functorch=is_functorch,
    )
    return made


def forward(
    run: Callable[..., Any], kept_of: Callable[..., Any], watcher: Callable[[], Any], *, has_also: bool
) -> Callable[..., Any] | None:
    """The `forward` of a torch.autograd.Function of an op's arguments, for plain calls without options; None where
    there is no C. `kept_of`: says of what needs gradients what is kept; `has_also`: the second result is saved."""
    if library is None:
        return None
    made: Callable[..., Any] = library.Forward(run=run, kinds={}, kept_of=kept_of, has_also=has_also, watcher=watcher)
    return made


def writing(
    python: Callable[..., Any], run: Callable[..., Any], places: Sequence[int], names: Sequence[str]
) -> Callable[..., Any]:
    """What an op that writes into its arguments does at Autograd: into those at `places`, and the options `names`.
    `python` does so for all calls. `run`: below autograd."""
    if library is None:
        return python
    made: Callable[..., Any] = library.Writing(
        run=run,
        python=python,
        plain=PLAIN,
        is_grad_on=is_grad_on,
        any_needs_grad=any_needs_grad,
        places=tuple(places),
        names=tuple(names),
        count=count,
    )
    return made
