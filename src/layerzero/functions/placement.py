"""Calls in this process, where a function's own requirements hold in it: whether they may be, and how they are made."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import MethodType
from typing import TYPE_CHECKING, Any

from layerzero.client.connection import overlay
from layerzero.client.facade.policy import policy
from layerzero.envs import conflicts
from layerzero.functions.calling import Inside
from layerzero.functions.calls import Call, Owner
from layerzero.functions.environment import HERE, FunctionEnv
from layerzero.functions.options import Options
from layerzero.functions.report import Placement
from layerzero.ipc.errors import EnvError, InvalidArgument, LayerZeroError, RemoteError, kind_of, text_of

if TYPE_CHECKING:
    pass

THIS_PROCESS = "this process"
POLICY_S = 1.0  # so long what policy says is taken as it was; a broker looks at its file as often
_ISOLATION = "backend_isolation."


class Placing:
    """Where the calls of one function are made. Threads may share it."""

    def __init__(self, env: FunctionEnv, asked: str, label: str) -> None:
        """`asked`: "auto" or "in_process"."""
        self._env, self._asked, self._label = env, asked, label
        self._told: tuple[Any, float, Placement] | None = None

    def now(self) -> Placement:
        """By what policy says now. Raises NotConnected."""
        unmet, holds = _requirements(self._env)
        if unmet:
            return Placement(False, f"not in this process: {unmet[0]}", *unmet)
        asked_in, now_s = overlay.current(), time.monotonic()
        told = self._told
        if told is None or told[0] is not asked_in or now_s >= told[1]:
            told = self._told = (asked_in, now_s + POLICY_S, self._by_policy(holds))
        return told[2]

    def of(self, args: Any, kwargs: Any) -> Placement:
        """Of a call with these arguments. Raises InvalidArgument for an object of the environment where calls are made
        in this process alone."""
        found = self.now()
        if not found.is_here or (not _has_inside(args) and not (kwargs and _has_inside(kwargs))):
            return found
        text = "an argument is an object that lives in its environment"
        if self._asked == "in_process":
            raise InvalidArgument(f'{self._label}: {text}; allowed with placement="in_process": values of this process')
        return Placement(False, f"not in this process: {text}", text)

    def refusal(self, found: Placement) -> LayerZeroError | None:
        """What a call is refused with; None where the environment serves it."""
        if self._asked == "auto":
            return None
        text = f'run: {found.repair}, or let it run in its environment: placement="auto"\n{self._label}: {found.reason}'
        return EnvError(text, env=self._env.backend, cause=found.cause, repair=found.repair)

    def _by_policy(self, holds: str) -> Placement:
        values = policy()["values"]
        backend = self._env.backend
        for name in (f"{backend}.call", backend, "*"):
            row = values.get(f"{_ISOLATION}{name}")
            if row is not None:
                break
        if row is not None and row["value"] == "subprocess":
            cause = f"policy: backend_isolation of {name} is subprocess, by {row['origin']}"
            repair = f"lz policy show, and have backend_isolation say lifted for {backend}"
            return Placement(False, f"not in this process: {cause}", cause, repair)
        return Placement(True, f"in this process: {holds}; policy allows it")


class CallHere(Call):
    """A call that this process makes. What the function raises is a RemoteError, as elsewhere; it has no deadline."""

    def __init__(
        self,
        owner: Owner,
        function: MethodType,
        args: Any,
        kwargs: Any,
        options: Options,
        found: Placement,
        refusal: LayerZeroError | None,
        threads: Threads,
    ) -> None:
        """`function`: `local` of the owner. `refusal`: what keeps it from being made; `threads`: for submitted ones."""
        super().__init__(owner, None, args, kwargs, options)
        self.placed = found
        self._function, self._refusal, self._threads = function, refusal, threads
        self._running: Future[Any] | None = None

    def send(self) -> None:
        if self._refusal is None and not self._threads.is_inside:
            self._running = self._threads.submit(self._function, self.args, self.kwargs)

    @property
    def is_sent(self) -> bool:
        return self._running is not None and not self._running.done()

    def finish(self, timeout: float | None = None) -> Any:
        if self._refusal is not None:
            self._failures.append(f"{self.owner._env.name}: {self._refusal.code}: {self._refusal.facts['cause']}")
            return self._fall_back(self._refusal)
        running = self._running
        if running is not None and not wait([running], timeout).done:
            raise TimeoutError(f"{self.label} has not ended after {timeout:g} s")
        self._attempts = 1
        try:
            value = self._function(*self.args, **self.kwargs) if running is None else running.result()
        except (Exception, SystemExit) as exc:
            raise self._raised(exc) from exc
        self._note(THIS_PROCESS, value)
        return value

    def _raised(self, exc: BaseException) -> RemoteError:
        kind, message = kind_of(exc), text_of(exc)
        tb = exc.__traceback__
        while tb is not None and tb.tb_next is not None and tb.tb_frame.f_code is not self._function.__func__.__code__:
            tb = tb.tb_next
        tb = tb if tb is None or tb.tb_next is None else tb.tb_next  # what is above the function is ours
        trace = "".join(traceback.format_exception(type(exc), exc, tb))
        env = self.owner._env.name
        text = f"{self.label} of {env}, in this process, raised {kind}: {message}\n{trace.rstrip()}"
        self._failures.append(f"{THIS_PROCESS}: {RemoteError.code}: {kind}")
        self._note("")
        return RemoteError(text, type=kind, message=message, traceback=trace, env=env)


class Threads:
    """Of a function's submitted calls in this process: as many as its environment would have workers."""

    def __init__(self, count: int) -> None:
        self._count, self._lock, self._inside = count, threading.Lock(), threading.local()
        self._made: tuple[int, ThreadPoolExecutor] | None = None

    @property
    def is_inside(self) -> bool:
        """Whether this thread is one of them, which would wait for itself."""
        return getattr(self._inside, "is_ours", False)

    def submit(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Future[Any]:
        with self._lock:
            if self._made is None or self._made[0] != os.getpid():  # a forked child has none of them
                made = ThreadPoolExecutor(self._count, "layerzero-function", self._begin)
                self._made = (os.getpid(), made)
            return self._made[1].submit(function, *args, **kwargs)

    def _begin(self) -> None:
        self._inside.is_ours = True


@functools.lru_cache(maxsize=256)
def _requirements(env: FunctionEnv) -> tuple[tuple[str, str] | None, str]:
    """(why they do not hold in this process and what would help, or None; why they do). What is installed is taken as
    it was at the first look."""
    from layerzero.envs.build.requirements import unmet

    if env.image:
        return (f"it is what image {env.image} has", f"the packages of {env.image}"), ""
    if env.interpreter:
        if not conflicts.is_this_interpreter(env.interpreter):
            return (f"{env.interpreter} is another interpreter than {sys.executable}", f"{env.interpreter}"), ""
    elif env.python != HERE:
        return (f"it requires Python {env.python}, and this is {HERE}", f"python{env.python}"), ""
    wrong = unmet(env.requires, conflicts.here, conflicts.markers, is_deep=True)
    if wrong:
        cause = "; ".join(f"{asked}: {why}" for asked, why in wrong)
        asked = " ".join(f"'{one}'" for one in dict.fromkeys(asked for asked, _ in wrong))
        return (cause, f"{sys.executable} -m pip install {asked}"), ""
    return None, f"{', '.join(env.requires) or f'Python {HERE}'} holds here"


def _has_inside(value: Any) -> bool:
    """Whether there is an object of an environment in it."""
    if isinstance(value, Inside):
        return True
    if isinstance(value, (list, tuple)):
        return any(map(_has_inside, value))
    if isinstance(value, dict):
        return any(map(_has_inside, value.values()))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return any(_has_inside(getattr(value, field.name, None)) for field in dataclasses.fields(value))
    return False
