"""Our definitions in flashinfer's trace_apply: which calls are taken over, from `enable` to `disable`.

trace_apply gives a solution the inputs of its definition alone. Those lack epsilon, window, soft cap and more, and the
original cannot be called with them: so the arguments are read from the frame of trace_apply's own wrapper, which is
looked at once, when it is put in. trace_apply takes no patterns either: what it has wrapped is wrapped once more, by a
recorder that finds the name of each definition that is asked for. The first call of a shape is flashinfer's own."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import flashinfer
import torch
from flashinfer import trace_apply
from torch import Tensor

import layerzero as lz
from layerzero.engines.flashinfer.definitions import KINDS
from layerzero.engines.flashinfer.running import runner
from layerzero.engines.guard import Guard
from layerzero.torch import running

Function = Callable[..., Any]
Solution = Callable[..., Any]


class _Call:
    """A call that trace_apply has brought to a solution."""

    def __init__(self, original: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.original, self.args, self.kwargs = original, args, kwargs

    @staticmethod
    def under_way() -> _Call:
        """This thread's."""
        frame = sys._getframe(2)
        while frame.f_code.co_name != _WRAPPER or frame.f_globals["__name__"] != _APPLY:
            assert frame.f_back is not None, "solutions are called by trace_apply's wrapper alone"
            frame = frame.f_back
        found = frame.f_locals
        return _Call(found["original"], found["args"], found["kwargs"])

    def theirs(self) -> Any:
        """What flashinfer's own function returns."""
        return self.original(*self.args, **self.kwargs)

    def bound(self) -> dict[str, Any]:
        """All arguments by name, also those that are not given."""
        found = _signature(self.original).bind(*self.args, **self.kwargs)
        found.apply_defaults()
        return dict(found.arguments)


_WRAPPER, _APPLY = "wrapper", f"{trace_apply.__name__}.apply"
_signature = functools.lru_cache(maxsize=None)(inspect.signature)


def _is_known() -> bool:
    """Whether trace_apply's wrapper keeps a call's arguments where `_Call.under_way` reads them."""
    made = getattr(getattr(trace_apply, "apply", None), "_make_wrapper", None)
    codes = [one for one in made.__code__.co_consts if isinstance(one, types.CodeType)] if made else []
    return any(
        code.co_name == _WRAPPER and {"args", "kwargs"} <= set(code.co_varnames) and "original" in code.co_freevars
        for code in codes
    )


class _Thread(threading.local):
    """`is_reached`: trace_apply has brought the call that is under way to a solution. `is_ours`: one of our solutions
    runs, whose kernel may be flashinfer's, in this process."""

    is_reached = False
    is_ours = False


_thread = _Thread()


class Switch:
    """What `enable` has put in, until `remove()`, `disable()` or the end of the block."""

    def __init__(
        self, kinds: Sequence[str], names: Iterable[str], guard: Guard, solutions: Mapping[str, Solution]
    ) -> None:
        self._guard = guard
        self._given = dict(solutions)
        self._lock = threading.RLock()
        self._names = set(names)
        self._replaced: list[tuple[Any, str, Function]] = []
        recorded = dict.fromkeys((*kinds, *map(prefix_of, self._names)))
        self._recorders = [_Recorder(prefix, self, is_learning=prefix in kinds) for prefix in recorded]

    def put_in(self) -> None:
        """All recorders in their places, behind which trace_apply serves the definitions known so far."""
        with self._lock:
            self._take_out_recorders()
            if self._names:
                trace_apply.enable_apply({name: self._solution(name) for name in self._names})
            for recorder in self._recorders:
                recorder.routed = recorder.found()
                recorder.original = recorder.unwrapped()
                for owner, attribute in recorder.places():
                    self._replaced.append((owner, attribute, recorder.original))
                    setattr(owner, attribute, recorder.function)

    def remove(self) -> None:
        """flashinfer's own functions are in their places again."""
        with self._lock:
            if self._names:
                trace_apply.disable_apply()
            self._take_out_recorders()
        _forget(self)

    def learn(self, recorder: _Recorder, routed: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call was not brought to a solution: from now on its definition has one. trace_apply takes all of its
        functions out and puts them in again: calls of other threads in between may be flashinfer's, and not be
        counted."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        try:
            arguments = _Call(recorder.original, args, kwargs).bound()
            arguments.pop("self", None)
            name = recorder.original.fi_trace(**arguments)["name"]  # type: ignore[attr-defined]
        except Exception:  # of flashinfer, whose call has succeeded
            runner.log.warning("%s is left to flashinfer: it tells no definition", recorder.prefix, exc_info=True)
            recorder.is_learning = False
            return
        with self._lock:
            if self is not _enabled or routed is not recorder.routed:  # it has begun before another was learned
                return
            if name in self._names:
                runner.log.warning("%s is left to flashinfer: trace_apply does not route %s", recorder.prefix, name)
                recorder.is_learning = False
                return
            runner.count(recorder.prefix, name, "left to flashinfer: first call")
            self._names.add(name)
            try:
                self.put_in()
            except Exception:  # of flashinfer: an engine's request does not fail of it
                runner.log.warning("all calls are left to flashinfer: trace_apply failed", exc_info=True)
                self.remove()

    def definitions(self) -> tuple[str, ...]:
        """Names of the definitions that are served."""
        return tuple(sorted(self._names))

    def _take_out_recorders(self) -> None:
        while self._replaced:
            owner, attribute, original = self._replaced.pop()
            setattr(owner, attribute, original)

    def _solution(self, name: str) -> Solution:
        prefix = prefix_of(name)
        kind = KINDS[prefix]
        given = self._given.get(name)

        def solution(**inputs: Any) -> Any:
            call = _Call.under_way()
            _thread.is_reached = True
            if _thread.is_ours:
                return call.theirs()

            def ours() -> Sequence[Tensor]:
                _thread.is_ours = True
                try:
                    return kind.serve(call.bound()) if given is None else _tensors(given(**inputs))
                finally:
                    _thread.is_ours = False

            def made(result: Any) -> Sequence[Tensor]:
                arguments = call.bound()
                return [arguments[one] for one in kind.written] if kind.written else _tensors(result)

            return self._guard.run(prefix, name, ours, call.theirs, _result, made)

        return solution

    def __enter__(self) -> Switch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


class _Recorder:
    """Around one of flashinfer's functions, as trace_apply has wrapped it, or as it is."""

    def __init__(self, prefix: str, switch: Switch, is_learning: bool) -> None:
        self.prefix = prefix
        self.is_learning = is_learning
        self.owner, self.attribute = _resolved(KINDS[prefix].api)
        self.original = self.routed = self.found()

        @functools.wraps(self.original)
        def function(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return self.original(*args, **kwargs)
            routed, is_reached = self.routed, _thread.is_reached  # the latter of a call around this one
            _thread.is_reached = False
            try:
                result = routed(*args, **kwargs)
                if self.is_learning and not _thread.is_reached:
                    switch.learn(self, routed, args, kwargs)
            finally:
                _thread.is_reached = is_reached
            return result

        self.function = function

    def found(self) -> Function:
        """What is in its place now."""
        return getattr(self.owner, self.attribute)

    def unwrapped(self) -> Function:
        """flashinfer's own function."""
        is_wrapped = getattr(self.routed, "_trace_apply", False)
        return inspect.getattr_static(self.routed, "__wrapped__") if is_wrapped else self.routed

    def places(self) -> Iterator[tuple[Any, str]]:
        """All places that have it, also in modules of engines that have imported it by name."""
        yield self.owner, self.attribute
        if inspect.isclass(self.owner):
            return
        for module in list(sys.modules.values()):
            for attribute, value in list(getattr(module, "__dict__", {}).items()):
                if (value is self.routed or value is self.original) and module is not self.owner:
                    yield module, attribute


_enabled: Switch | None = None
_enabling = threading.Lock()


def enable(
    kinds: Sequence[str] | None = None,
    *,
    definitions: Iterable[str] = (),
    shadow: bool = False,
    share: float = 1.0,
    solutions: Mapping[str, Solution] | None = None,
) -> Switch:
    """Take flashinfer's calls over, in every thread of this process, until `disable()`, or as a context manager.

    `kinds`: keys of KINDS; all by default. The first call of each definition is flashinfer's own, but of those whose
    names are in `definitions`, as "rmsnorm_h4096". `shadow`: both compute, flashinfer's result is used, differences are
    counted and said. `share`: of the calls of each definition, 0 to 1; the others are left to flashinfer. `solutions`:
    your own, by names of definitions, under the same guard, as `flashinfer.trace_apply.enable_apply` takes them.

    Raises lz.InvalidArgument where trace_apply is in use already."""
    global _enabled
    given = dict(solutions or {})
    wanted = list(KINDS if kinds is None else kinds)
    names = (*definitions, *given)
    for name in (*wanted, *names):
        if name not in KINDS and (name in wanted or not prefix_of(name)):
            raise lz.InvalidArgument(f"name kinds of {', '.join(KINDS)}: {name!r} is none, nor a definition of one")
    guard = Guard(runner, shadow, share)
    if not _is_known():
        raise lz.InvalidArgument(f"install flashinfer-python 0.7: trace_apply of {flashinfer.__version__} is another")
    with _enabling:
        if _enabled is not None or trace_apply.is_enabled():
            raise lz.InvalidArgument(
                "call layerzero.engines.flashinfer.disable(), or flashinfer.trace_apply.disable_apply(), first: its "
                "solutions would be replaced"
            )
        switch = Switch([], [], guard, {}) if running.IS_DISABLED else Switch(wanted, names, guard, given)
        _enabled = switch
        try:
            switch.put_in()
        except BaseException:
            switch.remove()
            raise
    return switch


def disable() -> None:
    """Undo `enable`."""
    if _enabled is not None:
        _enabled.remove()


def is_enabled() -> bool:
    """Whether calls are taken over."""
    return _enabled is not None


def prefix_of(name: str) -> str:
    """The kind of a definition, by its name; "" where it is none of KINDS."""
    found = (prefix for prefix in KINDS if name == prefix or name.startswith(f"{prefix}_"))
    return max(found, key=len, default="")


def _forget(switch: Switch) -> None:
    global _enabled
    if _enabled is switch:
        _enabled = None


def _resolved(api: str) -> tuple[Any, str]:
    """The module or class that a function is in, and its name there."""
    _, *path, name = api.split(".")
    owner: Any = flashinfer
    for part in path:
        owner = getattr(owner, part)
    return owner, name


def _tensors(result: Any) -> Sequence[Tensor]:
    return result if isinstance(result, tuple | list) else (result,)


def _result(made: Sequence[Tensor]) -> Any:
    return made[0] if len(made) == 1 else tuple(made)
