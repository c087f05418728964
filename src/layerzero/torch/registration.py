"""Each entry of the table as an op of torch: `torch.ops.layerzero.silu(x)`, and `torch.ops.layerzero.silu(x, out=y)`.

By `Library.define` and kernels for dispatch keys, which costs less in each call than torch.library.custom_op: below
Autograd the call itself, at Autograd what builds the graph, at Autocast what converts, at FuncTorchBatched what vmap
does."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet, _AutoDispatchBelowADInplaceOrView, _AutoDispatchBelowAutograd
from torch.autograd import forward_ad
from torch.library import Library, register_vmap

import layerzero as lz
from layerzero.torch import batching, calls
from layerzero.torch.backward import thread
from layerzero.torch.gradients import Call, Kept
from layerzero.torch.op_entry import OpEntry
from layerzero.torch.table import TABLE

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
AUTOCAST = {"cpu": DispatchKey.AutocastCPU, "cuda": DispatchKey.AutocastCUDA}


KERNELS: dict[int, Callable[..., Any]] = {}
"""What an op does below autograd, by the id of the op, which lives as long as LIBRARY: to hash one takes longer."""


def register(entry: OpEntry, call: Callable[..., Any]) -> None:
    """Define the op, in its functional and its `out` form, by which `call` is reached."""
    compliant = torch.Tag.pt2_compliant_tag
    LIBRARY.define(entry.schema, tags=(compliant,))
    if entry.written:
        LIBRARY.define(entry.out_schema, tags=(compliant,))
    packet = getattr(torch.ops.layerzero, entry.name)
    name, op = entry.name, packet.default
    KERNELS[id(op)] = kernel = calls.kernel(entry, call)
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    LIBRARY._register_fake(name, entry.fake)
    register_vmap(f"layerzero::{name}", entry.batch or batching.refused(name), lib=LIBRARY)
    if entry.autocast is not None:
        for device_type, key in AUTOCAST.items():
            LIBRARY.impl(name, _autocast(entry, op, device_type, key), key.name)
    if entry.mutates:
        _register_written(entry, name, op, kernel)
        return
    LIBRARY.impl(name, differentiable(entry, op, kernel), "Autograd", with_keyset=True)
    if not entry.written:
        return
    out = f"{name}.out"
    kernel = calls.out_kernel(entry, call)
    LIBRARY.impl(out, kernel, "CompositeExplicitAutograd")
    LIBRARY._register_fake(out, _out_fake(entry))
    _register_written(entry, out, packet.out, kernel)


def _out_fake(entry: OpEntry) -> Callable[..., Any]:
    """What the functional form would return is what `out` must look like."""
    written = entry.written

    def fake(*args: Any, **options: Any) -> None:
        given = {name: options.pop(name) for name in written}
        like = entry.fake(*args, **options)
        for (name, out), one in zip(given.items(), like if len(written) > 1 else (like,), strict=True):
            _check_out(entry.name, name, out, one)

    return fake


def _check_out(op: str, name: str, out: Tensor, like: Tensor) -> None:
    if like.dtype != out.dtype or like.dim() != out.dim():
        raise lz.InvalidArgument(
            f"{op}: {name} is {out.dtype} with shape {list(out.shape)}; allowed: {like.dtype} with shape "
            f"{list(like.shape)}; pass an {name} of this dtype and shape; it is never resized"
        )
    for found, wanted in zip(out.shape, like.shape, strict=True):
        torch._check(found == wanted, lambda: f"{op}: {name} has shape {list(out.shape)}, not {list(like.shape)}")


# --- gradients ---------------------------------------------------------------------------------------------------


# A kernel at Autograd is reached first. Where keys are plain it does what all below it would do, and calls at once:
# each further way through the dispatcher costs as much as this whole kernel.


def differentiable(entry: OpEntry, op: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """The op's kernel for Autograd, which is given the keys: where gradients are wanted it builds the graph.

    run: what the op does below autograd."""
    function, of_plain = _functions(entry, op, run)
    # Without what torch.autograd.Function.apply does for torch.func alone.
    apply = super(torch.autograd.Function, function).apply
    by_torch = entry.by_torch

    def kernel(keys: DispatchKeySet, *args: Any, **options: Any) -> Any:
        if by_torch is not None:
            found = by_torch(*args, **options)
            if found is not None:
                return found
        if forward_ad._current_level >= 0:
            _refuse_tangents(entry.label, args)
        is_wanted = calls.is_grad_on() and calls.any_needs_grad(*args)
        if keys.raw_repr() in calls.PLAIN:
            return apply(run, options, *args) if is_wanted else run(*args, **options)
        if not is_wanted:
            return below(*args, **options)
        if calls.is_functorch():
            from torch._functorch.autograd_function import enable_single_level_autograd_function

            # The dispatcher has brought us to one level of torch.func.grad; torch's own ops do no more there.
            with enable_single_level_autograd_function():
                return apply(below, options, *args)
        return function.apply(below, options, *args)

    def below(*args: Any, **options: Any) -> Any:
        with _AutoDispatchBelowAutograd():
            return op(*args, **options)

    apply_plain = None if of_plain is None else super(torch.autograd.Function, of_plain).apply
    return calls.differentiable(kernel, run, apply_plain, by_torch)


OUT, ALSO = -1, -2
FIRST = 2  # arguments of `apply` that are not those of the op


Function = type[torch.autograd.Function]


def _functions(entry: OpEntry, op: Any, run: Callable[..., Any]) -> tuple[Function, Function | None]:
    """What autograd knows of an op, whose first arguments are what computes the result and those given by name only;
    and of plain calls of it, which `run` computes, with the op's arguments alone: None where that is in no way less."""
    formula, label = entry.formula, entry.label
    names, defaults, tensors = _arguments(op)
    in_its_place = _in_its_place(entry, op) if entry.with_gradients else None

    @functools.cache
    def kept_of(needs: tuple[bool, ...]) -> Kept:
        """`needs`: for each argument. The dispatcher leaves out what has its default."""
        given = {arg: n for n, arg in enumerate(names[: len(needs)])}
        needed = frozenset(arg for arg, n in given.items() if needs[n])
        numbers = {**given, "out": OUT, **({entry.also_saved: ALSO} if entry.also_saved else {})}
        beside = tuple((arg, n) for arg, n in given.items() if arg not in tensors)
        reading = needed.union(arg for arg, _ in beside)
        saved = tuple(
            (arg, numbers[arg])
            for arg, readers in entry.saves.items()
            if arg in numbers and (not readers or readers & reading)
        )
        is_saved = {arg for arg, _ in saved}
        only_shapes = tuple((arg, n) for arg, n in given.items() if arg in tensors and arg not in is_saved)
        places = {arg: place for place, (arg, _) in enumerate((*saved, *beside))}
        wanted = tuple(arg if arg in needed else "" for arg in given)
        return Kept(needed, saved, only_shapes, beside, tuple(n for _, n in saved), places, wanted)

    def forward(ctx: Any, run: Callable[..., Any], options: Mapping[str, Any], *args: Any) -> Any:
        also = None
        if calls.is_functorch():
            # Levels of torch.func that lie outside build a graph of their own, for which this one's forward has
            # no_grad.
            with torch.enable_grad():
                out = run(*args, **options)
        elif in_its_place is not None:
            out, also = in_its_place(run, dict(zip(names, args, strict=False)), options)
        else:
            out = run(*args, **options)
        if entry.also_saved and not entry.with_gradients:
            also = out[1]
        kept = kept_of(ctx.needs_input_grad[FIRST:])
        _, _, only_shapes, others, numbers, *_ = kept
        ctx.save_for_backward(*[args[n] if n >= 0 else out if n == OUT else also for n in numbers])
        shapes = [None if args[n] is None else args[n].shape for _, n in only_shapes] if only_shapes else ()
        ctx.made = kept, options, shapes, [args[n] for _, n in others] if others else (), watcher.get()
        return out

    def backward(ctx: Any, *results: Tensor) -> tuple[Any, ...]:
        if formula is None:
            raise lz.InvalidArgument(
                f"{label} has no gradient formula; call it under torch.no_grad(), or pass .detach() of what "
                "requires gradients"
            )
        kept, options, shapes, others, seer = ctx.made
        saved = ctx.saved_tensors
        call = Call(kept, (*saved, *others), shapes, options, defaults)
        grad = results[0] if len(results) == 1 else results
        is_plain = seer is None and not calls.is_functorch()
        is_twice = calls.is_grad_on()
        if is_plain and not is_twice:
            found = formula(grad, call)
        else:
            with torch.no_grad() if is_plain else contextlib.nullcontext():  # what lies outside differentiates it
                with contextlib.nullcontext() if seer is None else seer.policy():
                    found = formula(grad, call)
        if seer is not None and entry.backward:
            if thread.why:
                seer.left(entry.backward, thread.why)
            else:
                seer.took(entry.backward)
        if is_plain and is_twice:
            grads = {arg: one for arg, one in found.items() if arg in kept.needed and one is not None}
            tensors = [one for one in saved if one is not None]
            once = _Once.apply(label, len(grads), *grads.values(), *results, *tensors)
            found = dict(zip(grads, once, strict=True))
        return tuple([found.get(arg) for arg in kept.wanted])

    def after_two(ctx: Any, *results: Tensor) -> tuple[Any, ...]:
        return None, None, *backward(ctx, *results)

    plain = None
    if in_its_place is None:
        plain = calls.forward(run, kept_of, watcher.get, has_also=bool(entry.also_saved))
    name = label.replace("::", "_")
    return _named(name, forward, after_two), None if plain is None else _named(name, plain, backward)


def _named(name: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Function:
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), methods)


def _in_its_place(entry: OpEntry, op: Any) -> Callable[..., Any]:
    """The op that runs where gradients are wanted, with those of the arguments that it has, found at the first call:
    it may be defined later than this one. `run`: what would do without; a kernel needs no dispatcher."""

    @functools.cache
    def found() -> tuple[Any, Callable[..., Any], frozenset[str]]:
        one = getattr(torch.ops.layerzero, entry.with_gradients).default
        return one, KERNELS[id(one)], frozenset(arg.name for arg in one._schema.arguments)

    def call(run: Callable[..., Any], given: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
        one, kernel, known = found()
        given = {name: value for name, value in {**given, **options}.items() if name in known}
        if run is KERNELS.get(id(op)):
            return kernel(**given)
        with _AutoDispatchBelowAutograd():
            return one(**given)

    return call


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


def _register_written(entry: OpEntry, name: str, op: Any, run: Callable[..., Any]) -> None:
    """What an op that writes into its arguments does at Autograd, where it is refused, and below: autograd finds out by
    a tensor's version whether it was changed after it was saved."""
    names, _, _ = _arguments(op)
    written = [arg.name for arg in op._schema.arguments if arg.alias_info is not None and arg.alias_info.is_write]
    numbers = [names.index(name) for name in written if name in names]
    keywords = [name for name in written if name not in names]
    refused = (
        f"layerzero::{entry.name} changes its arguments and has no gradient; call it under torch.no_grad(), or pass "
        ".detach() of what requires gradients"
        if entry.mutates
        else f"layerzero::{entry.name} with out= has no gradient, as in torch; leave out= out, or call it under "
        "torch.no_grad()"
    )

    def count(args: Sequence[Any], options: Mapping[str, Any]) -> None:
        calls.count([*[args[number] for number in numbers], *[options[name] for name in keywords]])

    def differentiable(keys: DispatchKeySet, *args: Any, **options: Any) -> Any:
        if calls.is_grad_on() and calls.any_needs_grad(*args, **options):
            raise lz.InvalidArgument(refused)
        if keys.raw_repr() in calls.PLAIN:
            count(args, options)
            return run(*args, **options)
        with _AutoDispatchBelowAutograd():
            return op(*args, **options)

    def counted(*args: Any, **options: Any) -> Any:
        count(args, options)
        with _AutoDispatchBelowADInplaceOrView():
            return op(*args, **options)

    LIBRARY.impl(name, calls.writing(differentiable, run, numbers, keywords), "Autograd", with_keyset=True)
    LIBRARY.impl(name, counted, "ADInplaceOrView")


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
    kept = [number for number, name in enumerate(_arguments(op)[0]) if name in entry.singles]

    def kernel(*args: Any, **options: Any) -> Any:
        given = [arg for arg in args if isinstance(arg, Tensor)]
        dtype, result = rule(device_type, torch.get_autocast_dtype(device_type), given)
        with torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(key)):
            if dtype is None:
                return op(*args, **options)
            cast = [_cast(arg, dtype) if isinstance(arg, Tensor) else arg for arg in args]
            for number in kept:
                if number < len(args):
                    cast[number] = args[number]
            out = op(*cast, **options)
            if result is None:
                return out
            return tuple(one.to(result) for one in out) if isinstance(out, tuple) else out.to(result)

    def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor.to(dtype) if tensor.dtype in casts else tensor

    return kernel


for _entry in TABLE.values():
    register(_entry, _entry.call)
