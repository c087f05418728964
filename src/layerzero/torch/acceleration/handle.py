"""layerzero.torch.accelerate: torch's own functions served by LayerZero, in a block, a thread or a model's calls."""

from __future__ import annotations

import contextlib
import copyreg
import difflib
import functools
import os
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Self
from weakref import WeakKeyDictionary, ref

import torch
from torch._dynamo.eval_frame import OptimizedModule
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode

import layerzero as lz
from layerzero.client.connection import overlay
from layerzero.client.facade import policy as policies
from layerzero.ipc.vocabulary.variables import is_disabled
from layerzero.torch.acceleration import seam, whole_calls
from layerzero.torch.acceleration.functions import OPS
from layerzero.torch.acceleration.interception import Interception, Takeover, thread
from layerzero.torch.acceleration.report import AccelerationReport
from layerzero.torch.acceleration.resting import Resting
from layerzero.torch.acceleration.tally import Tally
from layerzero.torch.acceleration.whole_calls import WholeCalls, WholeComparison
from layerzero.torch.evidence import Comparison, Evidence


def accelerate(
    model: torch.nn.Module | None = None,
    ops: Iterable[str] | None = None,
    policy: Mapping[str, Any] | None = None,
    *,
    if_faster: bool = False,
) -> Acceleration:
    """Serve calls of torch's own functions by LayerZero: scaled_dot_product_attention, linear, layer_norm, rms_norm,
    group_norm, instance_norm, batch_norm, silu, gelu, embedding, softmax and log_softmax. What is not for us goes to
    torch, and layerzero.torch.report() says why.

    model: only inside of its calls, in every thread that makes one; without it all calls of this thread. ops: names of
    our ops that alone take over. policy: keys of docs/policy.md that hold meanwhile. if_faster: on a CPU calls of a
    kind go to ours and to torch's in turns, each once, until it is known which are faster; from then on there. On a GPU
    whole calls of `model` are timed with each op taken over and with none; ops that made them faster are from then on.
    Takes effect at once, until its `with` block ends, or `remove()`. Connects, unless lz.connect() has. With
    LAYERZERO_DISABLE=1 it does nothing, and its report says so.
    Raises InvalidArgument, BrokerLost.
    """
    return Acceleration(model, ops, policy, if_faster=if_faster)


class Acceleration:
    """What accelerate() has switched on. `with` switches it off at the end of the block."""

    def __init__(
        self,
        model: torch.nn.Module | None,
        ops: Iterable[str] | None,
        policy: Mapping[str, Any] | None,
        *,
        layers: frozenset[tuple[str, str]] | None = None,
        if_faster: bool = False,
    ) -> None:
        if model is not None and not isinstance(model, torch.nn.Module):
            raise lz.InvalidArgument(
                f"accelerate: model is a {type(model).__name__}; allowed: a torch.nn.Module; pass the module, or use "
                "`with accelerate():` around calls of a function"
            )
        self.ops = OPS if ops is None else _known(ops)
        self.why_off = "LAYERZERO_DISABLE is set: everything is torch's" if is_disabled(os.environ) else ""
        self._tally = Tally(model)
        self._model = None if model is None else ref(model)
        self._thread = threading.get_ident()
        self._scope: overlay.Scope | None = None
        self._overlay: overlay.Overlay | None = None
        self._of_calls: overlay.Scope | None = None  # one for all: what is asked of the broker is known by it
        self.is_on = not self.why_off
        if self.is_on:
            lz.ensure_connected()
            if policy:
                self._overlay = policies._checked({"origin": "accelerate", "values": dict(policy)})
        self._evidence = Evidence() if if_faster else None
        self._is_measured = if_faster and model is not None
        self._pace: Resting | WholeCalls | None = None  # of calls on a CPU, and on a GPU
        takeover = Takeover(
            self.ops,
            self._tally,
            layers=layers,
            has_policy=bool(policy),
            evidence=self._evidence,
        )
        self.takeover = takeover
        takeover.overlay = self._overlay
        self._mode = _mode_for(takeover, is_reused=model is None)
        self._mode.is_on = self.is_on
        self._is_by_ops = model is not None and self.is_on and not _hides_ops(model)
        if model is not None:
            with _lock:
                _of_model[model] = self
            if self.is_on:
                _swap(model, self)
                if self._is_by_ops:
                    seam.need(takeover, self.ops)
        else:
            set_latest(self)
            if self.is_on:
                self._begin()

    def _begin(self) -> None:
        """In this thread from now on."""
        if self._overlay is not None:
            self._scope = overlay.Scope(self._overlay)
        _push_mode(self._mode)

    def __repr__(self) -> str:
        where = "this thread" if self._model is None else "its model"
        state = "on" if self.is_on else self.why_off or "removed"
        return f"<accelerate({', '.join(self.ops)}) in {where}: {state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Leave everything to torch again. From any thread; a second time it does nothing."""
        with _lock:
            if not self.is_on:
                return
            self.is_on = self._mode.is_on = False
        model = None if self._model is None else self._model()
        if model is not None:
            _restore(model, self)
        elif self._model is None and threading.get_ident() == self._thread:
            _take_out(self._mode)
            _spare.setdefault(_kind(self._mode.takeover), self._mode)
            if self._scope is not None:
                self._scope.end()
        seam.leave(self.takeover)

    @property
    def report(self) -> AccelerationReport:
        """What was taken over until now, and what was left, and why."""
        comparisons: tuple[Comparison | WholeComparison, ...] = ()
        if self._evidence is not None:
            comparisons = self._evidence.comparisons()
        if isinstance(self._pace, WholeCalls):
            comparisons += self._pace.comparisons()
        resting = () if self._pace is None else self._pace.ops
        return AccelerationReport.of(self._tally, self.ops, self.why_off, comparisons, resting)

    def native(self, call: Callable[[], Any]) -> Any:
        """The result of a call of the model with torch alone. For tools; other threads' calls are torch's, too."""
        was_on, self._mode.is_on = self._mode.is_on, False
        try:
            return call()
        finally:
            self._mode.is_on = was_on

    def policy(self) -> contextlib.AbstractContextManager[Any]:
        """A block in which this one's policy holds."""
        return contextlib.nullcontext() if self._overlay is None else overlay.Scope(self._overlay)

    def run(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        """A call of the model, with its functions taken over."""
        mode = self._mode
        if not mode.is_on:
            return call(*args, **kwargs)
        if torch.compiler.is_compiling():
            with mode:
                return call(*args, **kwargs)
        if self._is_by_ops and not torch._C._len_torch_function_stack():  # a mode would see calls before its ops are
            if seam.is_running(self.takeover):
                return call(*args, **kwargs)
            run = functools.partial(seam.run, self.takeover, call, args, kwargs)
        elif mode in _get_current_function_mode_stack():
            return call(*args, **kwargs)
        else:
            run = functools.partial(_within, mode, call, args, kwargs)
        if not self._is_measured:
            return self._taking(None, run)
        native = functools.partial(call, *args, **kwargs)
        if self._pace is None:
            gpu = whole_calls.gpu_of(args[0], args[1:], kwargs)
            if gpu is not None:
                self._pace, self._evidence = WholeCalls(self.ops, whole_calls.GpuClock(gpu)), None
            else:
                self._pace = Resting(self.ops)
            self.takeover.hear(self._pace, self._evidence)
        if isinstance(self._pace, WholeCalls):
            return self._whole(self._pace, run, native, args[1:], kwargs)
        found = self._taking(None, run if self._pace.awake else native)
        if self._pace.end():
            self._see(self._pace.awake)
        return found

    def _whole(
        self,
        whole: WholeCalls,
        run: Callable[[], Any],
        native: Callable[[], Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """A call of the model, with those ops taken over whose turn it is, or that were faster."""
        if whole.is_within:
            return native()
        turn = whole.begin(args, kwargs)
        if turn.is_other:
            self._see(turn.ops)
        return whole.run(turn, lambda: self._taking(turn.ops, run) if turn.ops else native())

    def _see(self, ops: Iterable[str]) -> None:
        """Of torch's ops that a model's functions come to, override those of these ops alone."""
        with _lock:
            if self.is_on and self._is_by_ops:
                seam.need(self.takeover, ops)

    def _taking(self, ops: frozenset[str] | None, run: Callable[[], Any]) -> Any:
        """With these ops taken over, None for all, whatever a model around this one takes over."""
        if thread.ops is ops:
            return self._with_policy(run)
        before, thread.ops = thread.ops, ops
        try:
            return self._with_policy(run)
        finally:
            thread.ops = before

    def _with_policy(self, run: Callable[[], Any]) -> Any:
        if self._overlay is None:
            return run()
        scope = self._of_calls = self._of_calls or overlay.Scope(self._overlay)
        with scope:
            return run()


def _within(mode: Interception, call: Any, args: Any, kwargs: Any) -> Any:
    with mode:
        return call(*args, **kwargs)


_HIDING = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer, torch.nn.RNNBase, torch.nn.RNNCellBase)


def _hides_ops(model: torch.nn.Module) -> bool:
    """Whether a function mode sees calls of it that the ops do not show: those in a compiled graph, those of layers for
    which torch has one op, unless a mode is there. And whether it has steps that only look like calls of its own."""
    return any(
        isinstance(module, (*_HIDING, OptimizedModule)) or module._compiled_call_impl is not None
        for module in model.modules()
    )


_lock = threading.RLock()
_of_model: WeakKeyDictionary[torch.nn.Module, Acceleration] = WeakKeyDictionary()
_latest: Any = None
_spare: dict[Hashable, Interception] = {}
"""Modes that were taken out, to be used again: compiled code is compiled anew for each that it has not seen."""


def _kind(takeover: Takeover) -> Hashable:
    return tuple(takeover.rules), takeover.layers, takeover.has_policy, takeover.evidence is None


def _mode_for(takeover: Takeover, *, is_reused: bool) -> Interception:
    with _lock:
        mode = _spare.pop(_kind(takeover), None) if is_reused else None
    if mode is None:
        return Interception(takeover, seam.within)
    mode.takeover = takeover
    return mode


def set_latest(one: Any) -> None:
    """What report() without a model tells of."""
    global _latest
    _latest = one


class _Activated:
    """Attention that torch.nn.attention.activate_flash_attention_impl has given us."""

    why_off = ""

    def __init__(self, takeover: Takeover) -> None:
        self._takeover = takeover

    @property
    def report(self) -> AccelerationReport:
        return AccelerationReport.of(self._takeover.tally, ("attention",), "")


seam.register(lambda takeover: set_latest(_Activated(takeover)))


def report(model: torch.nn.Module | None = None) -> AccelerationReport:
    """The report of the last accelerate(model), or of the last accelerate() without a model: which layers' calls were
    taken over, by which kernel, and which were left, and why. Prints as a table.

    Raises InvalidArgument where there was none."""
    found = _latest if model is None else _of_model.get(model)
    if found is None:
        which = "" if model is None else "model"
        raise lz.InvalidArgument(f"report: call layerzero.torch.accelerate({which}) first; nothing was accelerated yet")
    told: AccelerationReport = found.report
    return told


def _known(ops: Iterable[str]) -> tuple[str, ...]:
    names = (ops,) if isinstance(ops, str) else tuple(ops)
    for name in names:
        if name not in OPS:
            near = difflib.get_close_matches(str(name), OPS, n=1)
            hint = f"did you mean {near[0]}?" if near else "pass some of them, or leave ops out for all"
            raise lz.InvalidArgument(f"accelerate: ops has {name!r:.80}; allowed: {', '.join(OPS)}; {hint}")
    return names


def _take_out(mode: Interception) -> None:
    """Of this thread's stack of modes, which may have others on top."""
    above = []
    while mode in _get_current_function_mode_stack():
        top = _pop_mode()
        if top is not mode:
            above.append(top)
    for one in reversed(above):
        _push_mode(one)


# --- a model's calls ---------------------------------------------------------------------------------------------
# Its class is replaced by a subclass with a __call__ of ours, as torch's fully_shard does. Hooks would stay entered
# after Ctrl-C; a `forward` of the instance would be copied with the model and then run the original's.


class _Accelerated:
    """Marks such subclasses, of which each model has one."""

    layerzero: Acceleration
    layerzero_base: type


def _swap(model: torch.nn.Module, acceleration: Acceleration) -> None:
    earlier = getattr(type(model), "layerzero", None)
    if isinstance(earlier, Acceleration):
        earlier.remove()
    base: Any = type(model)

    def __call__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return acceleration.run(base.__call__, self, *args, **kwargs)  # compiled code may call it after the removal

    def __reduce_ex__(self: torch.nn.Module, protocol: Any) -> Any:
        """Copies and files have the model as it was."""
        made, given, *rest = base.__reduce_ex__(self, protocol)
        if made is copyreg.__newobj__ and given == (changed,):  # type: ignore[attr-defined]
            made, given = copyreg._reconstructor, (base, object, None)  # type: ignore[attr-defined]
        return (made, given, *rest)

    body = {
        "__call__": __call__,
        "__reduce_ex__": __reduce_ex__,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "layerzero": acceleration,
        "layerzero_base": base,
    }
    changed: Any = type(base.__name__, (_Accelerated, base), body)
    try:
        model.__class__ = changed
    except TypeError as exc:
        raise lz.InvalidArgument(
            f"accelerate: the class {base.__name__} of this model cannot be extended ({exc}); use `with accelerate():` "
            "around its calls"
        ) from exc


def _restore(model: torch.nn.Module, acceleration: Acceleration) -> None:
    """Unless somebody has changed the class since: then ours stays below, and does nothing."""
    if vars(type(model)).get("layerzero") is acceleration:
        model.__class__ = type(model).layerzero_base
