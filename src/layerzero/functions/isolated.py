"""Functions of a module that run in an environment of their own."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any, Generic, ParamSpec, TypeVar, cast

from layerzero.client.connection.report import Candidate as Verdict
from layerzero.client.facade import default_session
from layerzero.client.gpu.arrays import is_on_gpu
from layerzero.client.session.preparation import BYTES
from layerzero.functions.calling import MIN_ROOM, Arguments, plan
from layerzero.functions.calls import SHORT_NS, UNKNOWN_NS, Call
from layerzero.functions.chunks import demand_size, each, in_chunks, why_alone
from layerzero.functions.code import reference
from layerzero.functions.devices import like_on
from layerzero.functions.environment import FunctionEnv, env_of
from layerzero.functions.express import Begun, Express
from layerzero.functions.futures import FunctionFuture
from layerzero.functions.handle import wrap_of
from layerzero.functions.lifting import LiftedCall, demand_liftable
from layerzero.functions.options import Options, options_of
from layerzero.functions.placement import THIS_PROCESS, CallHere, Placing, Threads
from layerzero.functions.places import Candidate, Places
from layerzero.functions.report import IN_WORKER, FunctionExplanation, FunctionReport
from layerzero.functions.shapes import OUT, Shaped, ShapedCall, ShapedExpress, takes_out, without_out
from layerzero.functions.warming import warm_up
from layerzero.ipc.errors import EnvError, InvalidArgument, LayerZeroError
from layerzero.ipc.functions import surface
from layerzero.ipc.functions.frames import Code
from layerzero.ipc.vocabulary import pools
from layerzero.ipc.vocabulary.ops import FUNCTION

P = ParamSpec("P")
R = TypeVar("R")
TUNE_CALLS = 5
_log = logging.getLogger("layerzero.functions")


class Isolated(Generic[P, R]):
    """A function that runs in an environment: called as ever. Threads may share it."""

    def __init__(
        self,
        function: Callable[P, R] | None,
        where: FunctionEnv,
        options: Options,
        code: Code,
        *,
        is_stream: bool = False,
        is_coroutine: bool = False,
        others: Sequence[Candidate] = (),
    ) -> None:
        """`function`: None for one that this process does not have, which is a generator function with `is_stream`, and
        calls of which are awaited with `is_coroutine`. `others`: its implementations in further environments. Raises
        InvalidArgument."""
        if options.process != "pool":
            raise InvalidArgument("lz.isolated: process is for classes; a function has workers=")
        self._is_stream = is_stream or surface.is_stream(function)
        self._is_coroutine = is_coroutine or surface.is_coroutine(function)
        self._code = code  # as the file was when the function was decorated
        self._function, self._env, self._options = function, where, options
        self._places = Places([Candidate(where, code), *others], options.workers)
        self._has_out = takes_out(function, options)
        self._signature = None if function is None else inspect.signature(function)
        if self._has_out and self._signature is not None:
            self._signature = without_out(self._signature)
        if options.shapes is not None and self._is_stream:
            raise InvalidArgument(f"{code.label}: shapes is for functions; items of a generator come without")
        if options.shadow and (self._is_stream or options.keep):
            text = "shadow compares results that come here; allowed: 0 for generators and with keep=True"
            raise InvalidArgument(f"{code.label}: {text}")
        self._placing = self._place()
        self._threads = Threads(self._places.count_of(where))
        self._counts = NO_COUNTS if self._signature is None else plain_counts(self._signature)
        self._names = () if self._signature is None else names_by_place(self._signature)
        if options.lift:
            is_plain, workers = not self._is_stream and not self._is_coroutine, len(self._places.backends)
            demand_liftable(code.label, options, is_plain=is_plain, counts=self._counts, workers=workers)
        self._room, self._kernel_ns = MIN_ROOM, UNKNOWN_NS
        self._express = self._own_express() if self._takes_express else None
        self._last = threading.local()
        self.__name__, self.__qualname__, self.__module__ = code.qualname.rpartition(".")[2], code.qualname, code.module
        if function is not None:
            functools.update_wrapper(self, function)

    def _place(self) -> Placing | None:
        """Who says where calls are made; None where all are made in workers."""
        asked = self._options.placement
        if asked == "worker":
            return None
        if self._is_stream or self._is_coroutine or self._options.keep or len(self._places.candidates) > 1:
            text = f"{self._label}: placement is {asked!r}; allowed: worker, for generators, coroutine functions"
            raise InvalidArgument(f"{text}, with keep=True, and in several environments")
        if self._function is None:
            raise InvalidArgument(f"{self._label} is of its environment alone; allowed as placement: worker")
        return Placing(self._env, asked, self._label)

    def _own_express(self) -> Express:
        shapes = self._options.shapes
        return (
            Express(self, self._counts)
            if shapes is None
            else ShapedExpress(self, self._counts, shapes, self._names, has_out=self._has_out)
        )

    @property
    def _takes_express(self) -> bool:
        """Whether nothing about its calls needs a look at each."""
        options, placed = self._options, self._placing is not None
        is_plain = bool(self._counts) and not (self._is_stream or options.keep or options.shadow)
        return is_plain and not placed and len(self._places.backends) == 1

    @property
    def env(self) -> FunctionEnv:
        return self._env

    def __repr__(self) -> str:
        return f"<lz.isolated {self._label} in {self._env.backend}>"

    @property
    def _label(self) -> str:
        return self._code.label

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run it in its environment. Arguments are lent: they must not change before it returns. Of a generator
        function it gives a Stream; a coroutine function is sent, and gives a FunctionFuture to be awaited.

        Raises RemoteError for what it raised there, InvalidArgument for arguments and results that cannot cross,
        EnvError where its environment cannot serve, DeadlineExceeded, BackendError where its worker died, and what a
        call of any op raises besides.
        """
        if self._is_coroutine:
            return self.submit(*args, **kwargs)  # type: ignore[return-value]
        express = self._express
        if express is not None:
            begun = self._begun(express, args, kwargs) if kwargs else express.begin(args)
            if begun is not None:
                return begun.run()  # type: ignore[no-any-return]
        return self._start(args, kwargs).finish()  # type: ignore[no-any-return]

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> FunctionFuture:
        """Send a call and return at once. Arguments must not change before it is done."""
        if self._express is not None and self._kernel_ns < SHORT_NS:
            begun = self._begun(self._express, args, kwargs) if kwargs else self._express.begin(args)
            if begun is not None:
                return FunctionFuture(begun)
        call = self._start(args, kwargs)
        call.send()
        return FunctionFuture(call)

    def _begun(self, express: Express, args: tuple[Any, ...], kwargs: Any) -> Begun | None:
        """A call that passes the broker; None for one that has to go the longer way, such as one with an argument by
        name behind one that is left out."""
        given = [*args]
        for name in self._names[len(args) :]:
            if name not in kwargs:
                break
            given.append(kwargs[name])
        return express.begin((*given,)) if len(given) == len(args) + len(kwargs) else None

    def map(self, *iterables: Any, chunksize: int = 1) -> Iterator[R]:
        """Results of calls with items of these, in order; some calls are on their way ahead. The first that fails
        raises; those that were sent behind it run. With `chunksize` so many calls cross as one: they run one after the
        other, have the time of all of them together, and behind one that raised none of its chunk runs. Those of a
        chunk with an array on a GPU cross one by one, as without `chunksize`. Raises InvalidArgument."""
        is_plain = not self._is_stream and not self._is_coroutine
        size = demand_size(chunksize, self._label, self._options, is_plain=is_plain)
        calls = zip(*iterables)  # noqa: B905  # as map() of Python does
        if size == 1 or not self._is_elsewhere:
            return each(self.submit, calls, self._label)
        return in_chunks(self, size, calls, self.submit, self._demand_fit)

    def local(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run it here, in this process, with what is installed here."""
        if self._function is None:
            raise InvalidArgument(f"{self._label} is a function of its environment alone")
        if self._has_out:
            device = self._options.device
            there = [one for one in (*args, *kwargs.values()) if is_on_gpu((one,))]
            like = there[0] if there else None if device is None else like_on(device).obj
            kwargs[OUT] = self._shaped(args, kwargs).empty(like)
        return self._function(*args, **kwargs)

    def options(self, **changes: Any) -> Isolated[P, R]:
        """The same function with other options: timeout_s, fallback, idempotent, keep, shapes, workers, shadow,
        tolerance, placement, lift, trial, device. `last_report` is of its calls, too. Raises InvalidArgument."""
        options = options_of(replace, self._options, **changes)
        changed = self._changed(options, self._places.candidates[1:])
        changed._last = self._last
        return changed

    def _changed(self, options: Options, others: Sequence[Candidate]) -> Isolated[P, R]:
        kinds = {"is_stream": self._is_stream, "is_coroutine": self._is_coroutine}
        return Isolated(self._function, self._env, options, self._code, **kinds, others=others)

    def as_torch_op(
        self,
        name: str,
        schema: str | None = None,
        *,
        fake: Callable[..., Any] | None = None,
        backward: Callable[..., Any] | None = None,
        arrays: str | None = None,
    ) -> Any:
        """This function as an op of torch, `torch.ops.mylib.name` for the name "mylib::name": with gradients, in
        torch.compile and torch.export. Returns the op. Imports torch.

        schema: as torch writes it, "(Tensor x, float scale=1.0) -> Tensor"; of the annotations when left out. fake: of
        the same arguments; returns empty tensors of the results' shapes and dtypes. backward: takes the gradients of
        the results and then the arguments, and returns a gradient for each tensor argument, or None; an isolated
        function, or one of torch's ops. arrays: "torch", "numpy": what the function takes and gives, by its
        annotations when left out. Raises InvalidArgument.
        """
        try:
            from layerzero.torch.function_ops import define
        except ImportError as exc:
            text = f"{self._label}.as_torch_op needs torch 2.13 or newer: pip install 'layerzero-broker[torch]' ({exc})"
            raise InvalidArgument(text) from exc
        if self._is_stream or self._is_coroutine or self._options.keep or self._has_out:
            text = f"{self._label}: an op of torch has tensors as results"
            raise InvalidArgument(f"{text}; not of generators, coroutines, keep=True or out=")
        is_remote = isinstance(backward, Isolated)
        served = self if self._placing is None else self.options(placement="worker")  # its memory is torch's there
        return define(served, self._label, name, schema, fake, backward, is_remote, arrays)

    def explain(self, *args: P.args, **kwargs: P.kwargs) -> FunctionExplanation:
        """Where such a call would run, and what it would copy. Runs nothing. Raises InvalidArgument for arguments that
        cannot go there."""
        self._bind(args, kwargs)
        placed = IN_WORKER if self._placing is None else self._placing.of(args, kwargs)
        if placed.is_here:
            where, code, here = self._env, self._code, "in_process"
            nothing: tuple[Any, ...] = (THIS_PROCESS, "", (), 0, (), "", here, placed.reason)
            return FunctionExplanation(self._label, where.name, where.backend, code.file, code.sha256, *nothing)
        given = self._given(args, kwargs)
        state, command, joins = "", "", False
        try:
            told = default_session.session().ask("health", backend=self._env.backend)
            state, joins = str(told["detail"]), bool(told.get("joins"))
        except InvalidArgument:
            state = "the broker learns of it by the first call"
        except LayerZeroError as exc:
            state = exc.message.partition("\n")[0]
        where, code = self._env, self._code
        interpreter = ""
        if not joins and (unready := where.unready()):
            cause, command = str(unready.facts["cause"]), str(unready.facts["repair"])
            state = "its environment is not built" if cause == "not built" else cause
        with contextlib.suppress(EnvError):
            interpreter = where.found()
        return FunctionExplanation(
            self._label,
            where.name,
            where.backend,
            code.file,
            code.sha256,
            state,
            command,
            tuple(given.copies),
            given.uncopied_bytes + (0 if given.on_gpu is None else given.on_gpu.nbytes),
            self._verdicts(given),
            interpreter,
            "worker",
            placed.reason,
            self._not_lifted,
            given.device,
        )

    def _verdicts(self, given: Arguments) -> tuple[Verdict, ...]:
        """The broker's, on the workers that may serve a call; none where there is one alone, or where it knows none."""
        places, session = self._places, default_session.session()
        if len(given.backends) == 1:
            return ()
        places.introduce(session)
        lent = [None if one is None else BYTES for one in given.lent]
        body = session.route_body(plan(BYTES, *lent, of=places.of(given.nbytes)), pools.joined(given.backends))
        try:
            found = session.explain_route(FUNCTION, body)
        except InvalidArgument:  # one that is not known, of an environment that is not built
            return ()
        return tuple(one for one in found.candidates if one.backend in given.backends)

    def implementation(self, where: FunctionEnv | Sequence[str]) -> Callable[[Callable[..., Any]], Isolated[..., Any]]:
        """Have another function of a module be this one in another environment, as a further candidate: it serves where
        policy prefers it, where it was measured to be faster (`tune`), and after the one before has died or has taken
        too long.

        where: as of lz.isolated. What it gives is the other function, isolated in its environment. Raises
        InvalidArgument.
        """

        if self._placing is not None:
            raise InvalidArgument(f"{self._label}: placement is for functions of one environment; allowed here: worker")
        if self._options.lift:
            raise InvalidArgument(f"{self._label}: lift is for functions of one environment; leave it out")

        def decorate(function: Callable[..., Any]) -> Isolated[..., Any]:
            code = reference(function)
            if (code.module, code.qualname) == (self._code.module, self._code.qualname):
                text = f"{self._label}: give its implementation a name of its own"
                raise InvalidArgument(f"{text}; workers import it by that")
            self._demand_alike(function, code.label)
            env = env_of(where, function.__name__)
            self._places = Places([*self._places.candidates, Candidate(env, code)], self._options.workers)
            return Isolated(function, env, self._options, code)

        return decorate

    def _demand_alike(self, function: Any, label: str) -> None:
        """Raises InvalidArgument for what is not called as this function is."""
        of_ours = (self._is_stream, self._is_coroutine, self._has_out)
        of_its = (surface.is_stream(function), surface.is_coroutine(function), takes_out(function, self._options))
        kinds = (
            ("a generator function", "a function that is no generator"),
            ("a coroutine function", "a function that is no coroutine"),
            ("a function with a parameter out", "a function without a parameter out"),
        )
        for (one, other), ours, its in zip(kinds, of_ours, of_its, strict=True):
            if isinstance(function, type) or ours != its:
                text = f"{label}: allowed as an implementation of {self._label}"
                raise InvalidArgument(f"{text}: {one if ours else other}")

    def tune(self, *args: P.args, **kwargs: P.kwargs) -> dict[str, float]:
        """Call it in each of its environments, a few times, so that the broker has times to choose by. Returns the
        median of each, in us, by the environment's backend; of one that failed inf, and a warning says why. Raises
        InvalidArgument for arguments that do not fit, and of a generator function."""
        if self._is_stream:
            raise InvalidArgument(f"{self._label} is a generator; allowed: functions, whose calls have a time")
        self._bind(args, kwargs)
        return {one.env.backend: self._measured_us(one.env, args, kwargs) for one in self._places.candidates}

    def _measured_us(self, where: FunctionEnv, args: Any, kwargs: Any) -> float:
        times_us = []
        options = replace(self._options, fallback=None, shadow=0.0)
        for _ in range(TUNE_CALLS):
            given = Arguments(args, kwargs, self._places.backends_of(where)[:1], device=options.device)
            start_ns = time.perf_counter_ns()
            try:
                self._call_of(given, args, kwargs, options).finish()
            except LayerZeroError as exc:
                _log.warning("%s.tune: %s: %s", self._label, where.backend, exc.message.partition("\n")[0])
                return math.inf
            times_us.append((time.perf_counter_ns() - start_ns) / 1e3)
        return statistics.median(times_us)

    def warmup(self) -> float:
        """Start its workers and import its module there; nothing where its calls are made in this process. Returns
        seconds. Raises as a call does."""
        if self._is_elsewhere:
            return warm_up(self)
        assert self._placing is not None
        found = self._placing.now()
        refusal = None if found.is_here else self._placing.refusal(found)
        if refusal is not None:
            raise refusal
        return 0.0

    def last_report(self) -> FunctionReport:
        """Of this thread's last call of this function. Raises InvalidArgument before the first one."""
        call: Call | LiftedCall | None = getattr(self._last, "call", None)
        if call is None:
            raise InvalidArgument(f"{self._label}: call it first; this thread has not yet")
        report = call.report
        assert report is not None
        report = replace(report, not_chunked=why_alone(self, call))
        return replace(report, not_lifted=self._not_lifted) if self._options.lift else report

    @property
    def _not_lifted(self) -> str:
        """As of a report, of this thread's last call."""
        is_lifted = isinstance(getattr(self._last, "call", None), LiftedCall)
        return self._express.not_lifted if isinstance(self._express, ShapedExpress) and not is_lifted else ""

    def _bind(self, args: Any, kwargs: Any) -> None:
        if self._signature is None:
            return
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as exc:
            raise InvalidArgument(f"{self._label}: {exc}") from None

    def _demand_fit(self, args: Any, kwargs: Any = None) -> None:
        if kwargs or len(args) not in self._counts:
            self._bind(args, kwargs or {})

    def _start(self, args: Any, kwargs: Any) -> Call:
        self._demand_fit(args, kwargs)
        if self._placing is None:
            return self._call_of(self._given(args, kwargs), args, kwargs, self._options)
        return self._placed(self._placing, args, kwargs)

    @property
    def _is_elsewhere(self) -> bool:
        """Whether calls are made in a worker, as policy is now."""
        placing = self._placing
        return placing is None or (not (found := placing.now()).is_here and placing.refusal(found) is None)

    def _placed(self, placing: Placing, args: Any, kwargs: Any) -> Call:
        found = placing.of(args, kwargs)
        refusal = None if found.is_here else placing.refusal(found)
        if found.is_here or refusal is not None:
            function = cast("MethodType", self.local)
            return CallHere(self, function, args, kwargs, self._options, found, refusal, self._threads)
        call = self._call_of(self._given(args, kwargs), args, kwargs, self._options)
        call.placed = found
        return call

    def _given(self, args: Any, kwargs: Any) -> Arguments:
        return Arguments(args, kwargs, self._places.backends, device=self._options.device)

    def _call_of(self, given: Arguments, args: Any, kwargs: Any, options: Options) -> Call:
        if options.shapes is not None:
            return ShapedCall(self, given, args, kwargs, options, self._shaped(args, kwargs), has_out=self._has_out)
        wrap = wrap_of(options, self._label, is_stream=self._is_stream, given=given.on_gpu)
        return Call(self, given, args, kwargs, options, wrap=wrap)

    def _shaped(self, args: Any, kwargs: Any) -> Shaped:
        said = self._express.said(args, kwargs) if isinstance(self._express, ShapedExpress) else None
        return said or Shaped(self._label, cast("Callable[..., Any]", self._options.shapes), args, kwargs)


def plain_counts(signature: inspect.Signature) -> range:
    """So many arguments fit without a look; none where each call needs one."""
    parameters = signature.parameters.values()
    plain = [one for one in parameters if one.kind in _POSITIONAL]
    if len(plain) + any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in parameters) < len(parameters):
        return NO_COUNTS
    least = sum(one.default is inspect.Parameter.empty for one in plain)
    return range(least, len(plain) + 1 if len(plain) == len(parameters) else MAX_COUNT)


def names_by_place(signature: inspect.Signature) -> tuple[str, ...]:
    """Of the arguments that are given by place or by name, where all of them are."""
    parameters = signature.parameters.values()
    if any(one.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD for one in parameters):
        return ()
    return tuple(signature.parameters)


NO_COUNTS, MAX_COUNT = range(0), 1 << 20
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
