"""The function mode that hands calls of torch's functions to our ops, or to torch where they are not for us.

In eager mode each call is looked at and counted. While torch traces, the decision becomes part of the graph: what is
taken over is a node of torch.ops.layerzero there."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
from torch._C import _current_graph_task_id
from torch.overrides import TorchFunctionMode

import layerzero as lz
from layerzero.client.connection import overlay
from layerzero.client.session import in_process
from layerzero.client.session.session import Session
from layerzero.torch.acceleration.functions import (
    CHECKPOINTED,
    RULES,
    Planned,
    Rule,
    Taken,
    is_flash_first_by_order,
    unfit,
    unfit_traced,
)
from layerzero.torch.acceleration.looking import Looks, library, torchs
from layerzero.torch.acceleration.tally import Tally
from layerzero.torch.calls import is_alone
from layerzero.torch.evidence import SLOWER, TRYING, Evidence, Trial, Turn
from layerzero.torch.refusals import Refusals
from layerzero.torch.registration import KERNELS, watcher

POLICY_TRACED = "a policy of accelerate does not reach into compiled graphs; use lz.configure"
CHOSEN_TRACED = "compiled, where layers that got faster cannot be told from others"
IN_KERNEL = "inside of a kernel that runs in this process"
IN_BACKWARD = "inside of a backward pass"
NOT_FASTER = "not faster in layerzero.torch.benchmark, or not measured there"
# Errors that come before anything of a call is enqueued on a GPU. Others may mean that its memory is in use.
_BEFORE = (lz.InvalidArgument, lz.NoBackend, lz.NotConnected, lz.CudaGraphUnsafe, lz.NoTransport)


class _Thread(threading.local):
    """`is_ours`: a call of ours runs just now, maybe by torch in this very process. `ops`: those of a model's that are
    taken over in this call of it; None for all."""

    is_ours = False
    ops: frozenset[str] | None = None


thread = _Thread()


class _Backward(NamedTuple):
    """Counts what becomes of the backward passes of one layer's calls."""

    tally: Tally
    layer: str
    session: Session
    overlay: overlay.Overlay | None

    def policy(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.overlay is None else overlay.Scope(self.overlay)

    def took(self, op: str) -> None:
        self.tally.took(self.layer, op, self.session)

    def left(self, op: str, why: str) -> None:
        self.tally.left(self.layer, op, why)


class Listener(Protocol):
    def note(self, op: str) -> None:
        """A call of it is ours, or timed beside ours."""


class Takeover:
    """What is taken over, and the count of it. `layers`: (layer, op) that alone are; None for all.
    `evidence`: calls that it shows to be slower are not."""

    def __init__(
        self,
        ops: Sequence[str],
        tally: Tally,
        *,
        layers: frozenset[tuple[str, str]] | None = None,
        has_policy: bool,
        evidence: Evidence | None = None,
    ) -> None:
        self.rules: Mapping[Any, Rule] = {function: rule for function, rule in RULES.items() if rule.op in ops}
        self.ops = frozenset(ops)
        self.tally = tally
        self.layers = layers
        self.has_policy = has_policy
        self.evidence = evidence
        self.overlay: overlay.Overlay | None = None  # the policy, for backward passes: they come later
        self._listener: Listener | None = None
        self._refusals = Refusals()
        self._backward: dict[str, _Backward] = {}  # by layer, of the last session
        self._known = Looks()
        self.looks: Any = None  # the C's, where there is one
        if library is not None:
            self.looks = self._known.compiled(
                tally,
                anew=self.look,
                watched=self._watched,
                failed=self._why_failed,
                thread=thread,
                refused=self._refusals.known,
                not_faster=NOT_FASTER,
                layers=layers,
                listener=None,
                is_exact=evidence is not None,
            )

    def hear(self, listener: Listener, evidence: Evidence | None) -> None:
        """From now on `listener` hears of calls that are ours, or timed, and this is the evidence."""
        self._listener, self.evidence = listener, evidence
        self._known.known.clear()
        if self.looks is not None:
            self.looks.learn(listener=listener, is_exact=evidence is not None)

    def look(
        self,
        rule: Rule,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        keys: Any = None,
        key: bytes | None = None,
        is_plain: bool = False,
        above: int = 0,
    ) -> Any:
        """One call now: ours, or torch's. `keys`: of dispatch, which `function` is given first. `key`: of
        calls like this one, for which what is found will hold, too; of tensors, and that it is ours, only if the call
        `is_plain`. `above`: so many frames of ours called this."""
        if keys is not None:
            function = functools.partial(function, keys)
        kwargs = kwargs or {}
        if thread.is_ours or (thread.ops is not None and rule.op not in thread.ops):  # a kernel of ours may be torch's
            return function(*args, **kwargs)
        try:
            why: Any = rule.plan(*args, **kwargs)
        except (TypeError, AttributeError):  # torch says what is wrong with it
            return function(*args, **kwargs)
        layer = self.tally.layer(above + 2)
        if type(why) is str:
            self._known.leave(key, why, is_written=True)
        else:
            why = self.attempt(layer, rule.op, why, torchs(args, kwargs), key if is_plain else None)
            if type(why) is Trial:
                self.tally.left(layer, rule.op, TRYING)
                start_ns = time.perf_counter_ns()
                found = function(*args, **kwargs)
                why.add(Turn.TRY_NATIVE, time.perf_counter_ns() - start_ns)
                return found
            if type(why) is not str:
                return why
        self.tally.left(layer, rule.op, why)
        return function(*args, **kwargs)

    def attempt(
        self, layer: str, op: str, planned: Taken, given_to_torch: Sequence[Any] = (), key: bytes | None = None
    ) -> Any:
        """The result, or why there is none: a text, or the trial in which the call is torch's. The last two: as those
        of `look`, and all that torch's function was given."""
        if self.layers is not None and (layer, op) not in self.layers:
            return NOT_FASTER
        if in_process.thread.is_running:  # it would wait for itself
            return IN_KERNEL
        if _current_graph_task_id() != -1:  # formulas of ours, and what a checkpoint computes anew
            return IN_BACKWARD
        call, given = planned
        why = unfit(given, op)
        if why is not None:
            if self.layers is None and why != CHECKPOINTED:
                self._known.leave(key, why, is_written=False)
            return why
        if op == "attention" and is_flash_first_by_order():
            self._known.see_order()
        try:
            session = lz.session()
        except lz.NotConnected as error:
            return f"{error.code}: {_first_line(error)}"
        trial = None if self.evidence is None else self.evidence.trial(op, given)
        self._known.take(key, planned, given_to_torch, trial)
        refused = self._refusals.why(op, given)
        if refused:
            return refused
        turn = Turn.OURS if trial is None else trial.turn()
        if turn is Turn.NATIVE:
            return SLOWER
        if self._listener is not None:
            self._listener.note(op)
        if turn is Turn.TRY_NATIVE:
            return trial
        if trial is None or turn is Turn.OURS:
            return self._made(layer, op, call, given, session)
        start_ns = time.perf_counter_ns()
        found = self._made(layer, op, call, given, session)
        if type(found) is not str:
            trial.add(turn, time.perf_counter_ns() - start_ns)
        return found

    def _made(self, layer: str, op: str, call: Callable[..., Any], given: tuple[Any, ...], session: Session) -> Any:
        """Our result, or why there is none."""
        kernel = KERNELS.get(id(call))
        try:
            if kernel is None or not is_alone(given):  # by torch's dispatcher, which costs more
                found = self._watched(layer, call, given, session)
            else:
                thread.is_ours = True
                try:
                    found = kernel(*given)
                finally:
                    thread.is_ours = False
        except lz.LayerZeroError as error:
            return self._why_failed(op, given, error)
        self._refusals.forget(op, given)
        self.tally.took(layer, op, session)
        return found

    def _watched(self, layer: str, call: Callable[..., Any], given: tuple[Any, ...], session: Session) -> Any:
        """A call by torch's dispatcher, whose backward pass will be counted."""
        one = self._backward.get(layer)
        if one is None or one.session is not session:
            one = self._backward[layer] = _Backward(self.tally, layer, session, self.overlay)
        watching = watcher.set(one)
        thread.is_ours = True
        try:
            return call(*given)
        finally:
            thread.is_ours = False
            watcher.reset(watching)

    def _why_failed(self, op: str, given: tuple[Any, ...], error: Exception) -> str:
        """Raises it where torch cannot do any better."""
        if not isinstance(error, lz.LayerZeroError):
            raise error
        is_on_gpu = any(isinstance(one, torch.Tensor) and one.is_cuda for one in given)
        if error.facts.get("is_earlier") or (is_on_gpu and not isinstance(error, _BEFORE)):
            raise error
        why = f"{error.code}: {_first_line(error)}"
        if isinstance(error, lz.NoBackend):
            self._refusals.note(op, given, why)
        return why


BY_NUMBER: WeakValueDictionary[int, Interception] = WeakValueDictionary()


class Interception(TorchFunctionMode):
    """Calls in the thread that has entered it go to a takeover."""

    def __init__(self, takeover: Takeover, within: Callable[..., Any]) -> None:
        """`within`: as that of seam.py."""
        super().__init__()
        self.takeover = takeover
        self.within = within
        self.rules = takeover.rules
        self.number = id(self)
        BY_NUMBER[self.number] = self
        is_chosen = takeover.layers is not None or takeover.evidence is not None
        self.untraced = POLICY_TRACED if takeover.has_policy else CHOSEN_TRACED if is_chosen else ""
        self.is_on = True  # else it is left in another thread's stack

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        rule = self.rules.get(func)
        if rule is None:
            # torch 2.13 cannot trace this one under any function mode: its code calls super().
            if func is torch.Tensor.unflatten and torch.compiler.is_compiling():
                return torch.unflatten(*args, **(kwargs or {}))
            return func(*args, **kwargs) if kwargs else func(*args)
        if not self.is_on:
            return func(*args, **kwargs) if kwargs else func(*args)
        if torch.compiler.is_compiling():
            return self._traced(rule, func, args, kwargs or {})
        if rule.is_composite:
            return self.within(self.takeover, func, args, kwargs or {})
        looks = self.takeover.looks
        if looks is not None:
            return looks.call(rule, func, args, kwargs, 1)
        return self.takeover.look(rule, func, args, kwargs, above=1)

    def _traced(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        """While torch traces: only what it can trace."""
        why = self.untraced
        if not why:
            planned: Planned = rule.plan(*args, **kwargs)
            if isinstance(planned, str):
                why = planned
            else:
                call, given = planned
                refused = unfit_traced(given, rule.op)
                if refused is None:
                    _note(self.number, rule.op, "")
                    return call(*given)
                why = refused
        _note(self.number, rule.op, why)
        return func(*args, **kwargs)


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _note(number: int, op: str, why: str) -> None:
    """Count what is decided while tracing: once for each graph, not for each run of it."""
    mode = BY_NUMBER.get(number)
    if mode is not None:
        mode.takeover.tally.traced(op, why)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:160]
