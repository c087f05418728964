"""Named scopes that calls belong to: lz.trace_scope, plans, modules of torch."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar, Token
from typing import Any, NamedTuple

from layerzero.client.connection import observing

numbers = itertools.count()
"""Of scopes, calls, and what else traces tell apart: each later one has a higher one, in whatever thread."""


class ThreadName(NamedTuple):
    """`tid`: the system's number, which comes again when a thread has ended."""

    name: str
    tid: int


class Threads(threading.local):
    """Each thread's own number: those of the system come again."""

    names: dict[int, ThreadName] = {}  # by the number, of all threads
    _count = itertools.count()

    def __init__(self) -> None:
        self.number = next(self._count)
        self.names[self.number] = ThreadName(threading.current_thread().name, threading.get_native_id())


here = Threads()


class Scope:
    """One time that a scope was entered. `end_ns`: 0 while it lasts. On the clock of time.perf_counter_ns."""

    __slots__ = ("end_ns", "name", "number", "parent", "start_ns", "thread")

    def __init__(self, name: str, parent: Scope | None) -> None:
        self.name, self.parent = name, parent
        self.number, self.thread = next(numbers), here.number
        self.start_ns, self.end_ns = time.perf_counter_ns(), 0

    def chain(self) -> Iterator[Scope]:
        """This one, and those that it lies in, the innermost first."""
        found: Scope | None = self
        while found is not None:
            yield found
            found = found.parent


current: ContextVar[Scope | None] = ContextVar("trace_scope", default=None)


class TraceScope:
    """`with lz.trace_scope("layer 3"):` calls in the block, in this thread or task, belong to the scope. Scopes lie in
    each other. Where no trace is on it does nothing."""

    def __init__(self, name: str) -> None:
        self.name = str(name)
        self._entered: list[tuple[Scope, Token[Scope | None]] | None] = []

    def __repr__(self) -> str:
        return f"lz.trace_scope({self.name!r})"

    def __enter__(self) -> TraceScope:
        if observing.recorder is None:
            self._entered.append(None)
        else:
            scope = Scope(self.name, current.get())
            self._entered.append((scope, current.set(scope)))
        return self

    def __exit__(self, *_: object) -> None:
        entered = self._entered.pop()
        if entered is not None:
            scope, token = entered
            current.reset(token)
            finish(scope)


def finish(scope: Scope) -> None:
    """It ends now."""
    scope.end_ns = time.perf_counter_ns()
    recorder: Any = observing.recorder
    if recorder is not None:
        recorder.note_scope(scope)


class ModuleScopes:
    """Scopes of a torch model's modules, by hooks: each forward of one is a scope with its name in the model, the
    model itself one with its class's. A model that is compiled as a whole calls no hooks."""

    def __init__(self, model: Any) -> None:
        self._handles = []
        for name, module in model.named_modules():
            named = name or type(module).__name__
            self._handles.append(module.register_forward_pre_hook(_Enter(named)))
            self._handles.append(module.register_forward_hook(_Leave(named), always_call=True))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _Enter:
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, module: Any, args: Any) -> None:
        if observing.recorder is not None:
            current.set(Scope(self._name, current.get()))


class _Leave:
    """Ends the innermost scope of that name, and with it what lies in it: a forward that raised has left it open."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        innermost = current.get()
        chain = () if innermost is None else tuple(innermost.chain())
        ended = next((n for n, scope in enumerate(chain) if scope.name == self._name), None)
        if ended is not None:
            current.set(chain[ended].parent)
            for scope in chain[: ended + 1]:
                finish(scope)
