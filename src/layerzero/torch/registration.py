"""Each entry of the table as an op of torch: `torch.ops.layerzero.silu(x)`, and `torch.ops.layerzero.silu(x, out=y)`.

By `Library.define` and kernels for dispatch keys, which costs less in each call than torch.library.custom_op: below
Autograd the call itself, at Autograd what builds the graph, at Autocast what converts, at FuncTorchBatched what vmap
does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet, _AutoDispatchBelowADInplaceOrView, _AutoDispatchBelowAutograd
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.library import Library, register_vmap

import layerzero as lz
from layerzero.client.connection import overlay
from layerzero.torch import batching
from layerzero.torch.backward import thread
from layerzero.torch.gradients import Call
from layerzero.torch.table import TABLE, OpEntry

LIBRARY = Library("layerzero", "FRAGMENT")  # the ops live as long as this does


class Watcher(Protocol):
    """Whoever makes calls in place of torch's own functions."""

    def policy(self) -> contextlib.AbstractContextManager[Any]:
        """A block for a backward pass, in which the policy of those calls holds."""

    def took(self, op: str) -> None:
        """A backward pass was made by a kernel; the session's last report is its."""

    def left(self, op: str, why: str) -> None:
        """A backward pass was computed in this process."""


watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)
"""Who made the calls in this context. Gradients of such calls may be differentiated, as those of torch's functions: the
formulas are torch's, so they can be."""
DETERMINISTIC = overlay.Overlay.of(
    {"origin": "torch.use_deterministic_algorithms", "values": {"requires_deterministic": True}}
)
AUTOCAST = {"cpu": DispatchKey.AutocastCPU, "cuda": DispatchKey.AutocastCUDA}


def register(entry: OpEntry, call: Callable[..., Any]) -> None:
    """Define the op, in its functional and its `out` form, by which `call` is reached."""
    compliant = torch.Tag.pt2_compliant_tag
    LIBRARY.define(entry.schema, tags=(compliant,))
    if not entry.mutates and entry.results == 1:
        LIBRARY.define(entry.out_schema, tags=(compliant,))
    packet = getattr(torch.ops.layerzero, entry.name)
    name, op = entry.name, packet.default
    LIBRARY.impl(name, _kernel(entry, call), "CompositeExplicitAutograd")
    LIBRARY._register_fake(name, entry.fake)
    register_vmap(f"layerzero::{name}", entry.batch or batching.refused(name), lib=LIBRARY)
    if entry.autocast is not None:
        for device_type, key in AUTOCAST.items():
            LIBRARY.impl(name, _autocast(entry, op, device_type, key), key.name)
    if entry.mutates:
        LIBRARY.impl(name, _in_place(entry, op), "Autograd")
        LIBRARY.impl(name, _counted(entry, op), "ADInplaceOrView")
        return
    LIBRARY.impl(name, differentiable(entry, op), "Autograd")
    if entry.results > 1:
        return
    out = f"{name}.out"
    LIBRARY.impl(out, _out_kernel(entry, call), "CompositeExplicitAutograd")
    LIBRARY._register_fake(out, _out_fake(entry))
    LIBRARY.impl(out, _out_autograd(entry, packet.out), "Autograd")
    LIBRARY.impl(out, _counted(entry, packet.out), "ADInplaceOrView")


def _kernel(entry: OpEntry, call: Callable[..., Any]) -> Callable[..., Any]:
    """The call. Its result is a view of shared memory, which must be nobody's view for autograd, or the program could
    not change it in place."""
    by_torch = entry.by_torch
    call = _repeatable(call)
    if entry.only_here:

        def reduced(*args: Any, **options: Any) -> Any:
            with _AutoDispatchBelowADInplaceOrView():
                return call(*args, **{name: value for name, value in options.items() if name not in entry.only_here})

        return reduced

    def kernel(*args: Any, **options: Any) -> Any:
        with _AutoDispatchBelowADInplaceOrView():
            if by_torch is not None:
                found = by_torch(*args, **options)
                if found is not None:
                    return found
            return call(*args, **options)

    return kernel


def _repeatable(call: Callable[..., Any]) -> Callable[..., Any]:
    """With torch.use_deterministic_algorithms by kernels that say they are, also in a compiled graph."""

    def chosen(*args: Any, **options: Any) -> Any:
        if not torch._C._get_deterministic_algorithms():
            return call(*args, **options)
        scope = overlay.Scope(DETERMINISTIC)
        try:
            return call(*args, **options)
        finally:
            scope.end()

    return chosen


def _out_kernel(entry: OpEntry, call: Callable[..., Any]) -> Callable[..., Any]:
    call = _repeatable(call)

    def kernel(*args: Any, out: Tensor, **options: Any) -> None:
        call(*args, out=out, **{name: value for name, value in options.items() if name not in entry.only_here})

    return kernel


def _out_fake(entry: OpEntry) -> Callable[..., Any]:
    """What the functional form would return is what `out` must look like."""

    def fake(*args: Any, out: Tensor, **options: Any) -> None:
        like = entry.fake(*args, **options)
        if like.dtype != out.dtype or like.dim() != out.dim():
            raise lz.InvalidArgument(
                f"{entry.name}: out is {out.dtype} with shape {list(out.shape)}; allowed: {like.dtype} with shape "
                f"{list(like.shape)}; pass an out of this dtype and shape; it is never resized"
            )
        for found, wanted in zip(out.shape, like.shape, strict=True):
            torch._check(
                found == wanted, lambda: f"{entry.name}: out has shape {list(out.shape)}, not {list(like.shape)}"
            )

    return fake


# --- gradients ---------------------------------------------------------------------------------------------------


def differentiable(entry: OpEntry, op: Any) -> Callable[..., Any]:
    """The op's kernel for Autograd: where gradients are wanted it builds the graph."""
    names, defaults, tensors = _arguments(op)
    function = _function(entry, op, names, defaults, tensors)
    apply = function.apply
    by_torch = entry.by_torch

    def kernel(*args: Any, **options: Any) -> Any:
        if by_torch is not None:
            found = by_torch(*args, **options)
            if found is not None:
                return found
        if forward_ad._current_level >= 0:
            _refuse_tangents(entry.label, args)
        if torch._C.is_grad_enabled() and torch._C._any_requires_grad(*args):
            if _is_functorch():
                from torch._functorch.autograd_function import enable_single_level_autograd_function

                # The dispatcher has brought us to one level of torch.func.grad; torch's own ops do no more there.
                with enable_single_level_autograd_function():
                    return super(torch.autograd.Function, function).apply(options, *args)
            return apply(options, *args)
        with _AutoDispatchBelowAutograd():
            return op(*args, **options)

    return kernel


_is_functorch: Callable[[], bool] = torch._C._are_functorch_transforms_active


def _function(
    entry: OpEntry, op: Any, names: Sequence[str], defaults: Mapping[str, Any], tensors: frozenset[str]
) -> type[torch.autograd.Function]:
    """What autograd knows of an op. Its first argument has those that are given by name only."""
    formula, saves, label = entry.formula, entry.saves, entry.label

    def forward(ctx: Any, options: Mapping[str, Any], *args: Any) -> Any:
        given = dict(zip(names, args, strict=False))  # the dispatcher leaves out what has its default
        also = None
        # Levels of torch.func that lie outside build a graph of their own, for which this one's forward has no_grad.
        with torch.enable_grad() if _is_functorch() else contextlib.nullcontext():
            with _AutoDispatchBelowAutograd():
                if entry.with_gradients and not _is_functorch():
                    out, also = _in_place_of(entry, given, options)
                else:
                    out = op(*args, **options)
        needed = {arg for arg, needs in zip(names, ctx.needs_input_grad[1:], strict=False) if needs}
        kept = {
            arg: out if arg == "out" else also if arg == entry.also_saved else given.get(arg)
            for arg, readers in saves.items()
            if not readers or readers & needed
        }
        kept = {arg: tensor for arg, tensor in kept.items() if tensor is not None}
        ctx.save_for_backward(*kept.values())
        ctx.kept = tuple(kept)
        ctx.values = {**defaults, **options, **{arg: value for arg, value in given.items() if arg not in tensors}}
        ctx.sizes = {arg: value.shape for arg, value in given.items() if arg in tensors and value is not None}
        ctx.count = len(args)
        ctx.watcher = watcher.get()
        return out

    def backward(ctx: Any, *results: Tensor) -> tuple[Any, ...]:
        if formula is None:
            raise lz.InvalidArgument(
                f"{label} has no gradient formula; call it under torch.no_grad(), or pass .detach() of what "
                "requires gradients"
            )
        needs = frozenset(arg for arg, is_needed in zip(names, ctx.needs_input_grad[1:], strict=False) if is_needed)
        saved = dict(zip(ctx.kept, ctx.saved_tensors, strict=True))
        call = Call({**ctx.values, **saved}, ctx.sizes, needs)
        grad = results[0] if len(results) == 1 else results
        is_plain = not _is_functorch() and ctx.watcher is None
        with torch.no_grad() if is_plain else contextlib.nullcontext():  # what lies outside differentiates the formula
            with contextlib.nullcontext() if ctx.watcher is None else ctx.watcher.policy():
                found = formula(grad, call)
        if ctx.watcher is not None and entry.backward:
            if thread.why:
                ctx.watcher.left(entry.backward, thread.why)
            else:
                ctx.watcher.took(entry.backward)
        grads = {arg: found[arg] for arg in names if arg in needs and found.get(arg) is not None}
        if is_plain and torch.is_grad_enabled():
            once = _Once.apply(label, len(grads), *grads.values(), *results, *saved.values())
            grads = dict(zip(grads, once, strict=True))
        return (None, *(grads.get(arg) for arg in names[: ctx.count]))

    return type(
        label.replace("::", "_"),
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(backward)},
    )


def _in_place_of(entry: OpEntry, given: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """The op that runs where gradients are wanted, with those of the arguments that it has."""
    op = getattr(torch.ops.layerzero, entry.with_gradients).default
    known = {arg.name for arg in op._schema.arguments}
    return op(**{name: value for name, value in {**given, **options}.items() if name in known})


class _Once(torch.autograd.Function):
    """Gradients that refuse to be differentiated themselves. `tensors`: those, and what they depend on."""

    @staticmethod
    def forward(ctx: Any, label: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.label = label
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise lz.InvalidArgument(
            f"{ctx.label} has no second derivative; call backward() or torch.autograd.grad() without "
            "create_graph, or use torch's own function where you differentiate twice"
        )


def _refuse_tangents(label: str, args: Sequence[Any]) -> None:
    """Without this a forward-mode derivative would be zero, and nobody told."""
    for arg in args:
        if isinstance(arg, Tensor) and forward_ad.unpack_dual(arg).tangent is not None:
            raise lz.InvalidArgument(
                f"{label} has no forward-mode derivative; use torch.func.grad, vjp or jacrev in place of jvp and jacfwd"
            )


def _in_place(entry: OpEntry, op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **options: Any) -> Any:
        if torch._C.is_grad_enabled() and torch._C._any_requires_grad(*args):
            raise lz.InvalidArgument(
                f"layerzero::{entry.name} changes its arguments and has no gradient; call it under torch.no_grad(), or "
                "pass .detach() of what requires gradients"
            )
        with _AutoDispatchBelowAutograd():
            return op(*args, **options)

    return kernel


def _out_autograd(entry: OpEntry, op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **options: Any) -> Any:
        if torch._C.is_grad_enabled() and torch._C._any_requires_grad(*args, **options):
            raise lz.InvalidArgument(
                f"layerzero::{entry.name} with out= has no gradient, as in torch; leave out= out, or call it under "
                "torch.no_grad()"
            )
        with _AutoDispatchBelowAutograd():
            return op(*args, **options)

    return kernel


def _counted(entry: OpEntry, op: Any) -> Callable[..., Any]:
    """Autograd finds out by a tensor's version whether it was changed after it was saved."""
    names, _, _ = _arguments(op)
    written = [arg.name for arg in op._schema.arguments if arg.alias_info is not None and arg.alias_info.is_write]

    def kernel(*args: Any, **options: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **options}
        increment_version([given[name] for name in written])
        with _AutoDispatchBelowADInplaceOrView():
            return op(*args, **options)

    return kernel


def _arguments(op: Any) -> tuple[tuple[str, ...], dict[str, Any], frozenset[str]]:
    """Names of the arguments that are given by position, defaults of all, and which are tensors."""
    arguments = op._schema.arguments
    names = tuple(arg.name for arg in arguments if not arg.kwarg_only)
    defaults = {arg.name: arg.default_value for arg in arguments if arg.has_default_value()}
    return names, defaults, frozenset(arg.name for arg in arguments if "Tensor" in str(arg.type))


# --- autocast ----------------------------------------------------------------------------------------------------


def _autocast(entry: OpEntry, op: Any, device_type: str, key: DispatchKey) -> Callable[..., Any]:
    rule, casts = entry.autocast, (torch.float16, torch.bfloat16, torch.float32)
    assert rule is not None

    def kernel(*args: Any, **options: Any) -> Any:
        given = [arg for arg in args if isinstance(arg, Tensor)]
        dtype, result = rule(device_type, torch.get_autocast_dtype(device_type), given)
        with torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(key)):
            if dtype is None:
                return op(*args, **options)
            out = op(*[_cast(arg, dtype) if isinstance(arg, Tensor) else arg for arg in args], **options)
            return out if result is None else out.to(result)

    def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor.to(dtype) if tensor.dtype in casts else tensor

    return kernel


for _entry in TABLE.values():
    register(_entry, _entry.call)
