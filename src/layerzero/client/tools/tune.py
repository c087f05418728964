"""lz.tune: run a call on every backend that accepts it, side by side, and say which is fastest."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from layerzero.client.arrays.recognition import describe
from layerzero.client.connection.report import Candidate, SelectionReport
from layerzero.client.facade import api, default_session
from layerzero.client.tools.compiling import compile_ahead, in_line
from layerzero.client.tools.inputs import random_inputs, tensor_names
from layerzero.client.tools.tune_report import Times, TunedCall, TunedKernel, TuneReport
from layerzero.ipc.errors import BrokerLost, InvalidArgument, LayerZeroError, NotConnected
from layerzero.ipc.names import unknown_name
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec

BUDGET_S = 30.0
MIN_ROUNDS = 8  # before a median can have settled
MAX_ROUNDS = 200
SETTLED = 0.05  # the medians of the first and the second half of the runs differ by less than this
WARM_UPS = 3  # runs that do not count: start of the worker, compilation, caches


def _f32(*shape: int) -> TensorSpec:
    return TensorSpec.contiguous("float32", shape)


@dataclass(frozen=True)
class Call:
    """A call to measure: an op, the specs of its arrays, its other parameters."""

    op: str
    arrays: Mapping[str, TensorSpec | None] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
        """lz.Call.of("matmul", a, b): as the call would be made; a TensorSpec may stand for an array. Raises
        InvalidArgument."""
        return _bind(_name(op), args, kwargs)

    @property
    def function(self) -> Callable[..., Any]:
        return api.function_of(self.op)

    def explain(self) -> SelectionReport:
        """As lz.explain."""
        return api.explain(self.function, **{**self.arrays, **self.params})

    def compile(self, backends: Iterable[str]) -> None:
        """Wait until their kernels are compiled for it, or could not be."""
        body = api.signature(self.function, **self.arrays, **self.params)
        compile_ahead(default_session.session(), body, list(backends))

    @property
    def label(self) -> str:
        arrays = [f"{'x'.join(map(str, spec.shape))}:{spec.dtype}" for spec in self.arrays.values() if spec is not None]
        params = [f"{name}={value!r:.24}" for name, value in self.params.items()]
        return f"{self.op}({', '.join((*arrays, *params))})"


def _prefill_and_decode() -> tuple[Call, ...]:
    q, one, kv = _f32(1, 8, 256, 64), _f32(1, 8, 1, 64), _f32(1, 8, 1024, 64)
    causal = Call("attention", {"q": q, "k": q, "v": q}, {"is_causal": True})
    return causal, Call("attention", {"q": one, "k": kv, "v": kv})


def _int32(*shape: int) -> TensorSpec:
    return TensorSpec.contiguous("int32", shape)


def _rope(tokens: int) -> Call:
    return Call("rope", {"x": _f32(tokens, 8, 64), "cos": _f32(tokens, 32), "sin": _f32(tokens, 32)})


# What an op is tuned with when nobody says: one token and a few hundred of a small transformer.
DEFAULTS: dict[str, tuple[Call, ...]] = {
    "attention": _prefill_and_decode(),
    "attention_varlen": (
        Call(
            "attention_varlen",
            {**{name: _f32(512, 8, 64) for name in "qkv"}, "cu_seqlens_q": _int32(5), "cu_seqlens_k": _int32(5)},
            {"is_causal": True},
        ),
    ),
    "paged_attention": (
        Call(
            "paged_attention",
            {
                "q": _f32(8, 8, 64),
                **{name: _f32(256, 16, 8, 64) for name in ("k_cache", "v_cache")},
                "block_tables": _int32(8, 32),
                "seq_lens": _int32(8),
            },
        ),
    ),
    "append_kv": (
        Call(
            "append_kv",
            {
                **{name: _f32(256, 8, 64) for name in ("key", "value")},
                **{name: _f32(256, 16, 8, 64) for name in ("k_cache", "v_cache")},
                "slots": _int32(256),
            },
        ),
    ),
    "rope": (_rope(1), _rope(256)),
    "matmul": (Call("matmul", {"a": _f32(256, 256), "b": _f32(256, 256)}),),
    "linear": tuple(Call("linear", {"input": _f32(n, 512), "weight": _f32(2048, 512)}) for n in (1, 256)),
    "softmax": (Call("softmax", {"input": _f32(8, 256, 256)}, {"dim": -1}),),
    "layer_norm": (
        Call(
            "layer_norm",
            {"input": _f32(256, 512), "weight": _f32(512), "bias": _f32(512)},
            {"normalized_shape": 512},
        ),
    ),
    "rms_norm": (Call("rms_norm", {"input": _f32(256, 512), "weight": _f32(512)}, {"normalized_shape": 512}),),
    "gelu": (Call("gelu", {"input": _f32(256, 2048)}),),
    "silu": (Call("silu", {"input": _f32(256, 2048)}),),
    "swiglu": (Call("swiglu", {"gate": _f32(256, 2048), "up": _f32(256, 2048)}),),
    "embedding": (Call("embedding", {"input": TensorSpec.contiguous("int64", (256,)), "weight": _f32(8192, 512)}),),
    "quantize": (Call("quantize", {"x": _f32(256, 2048), "scale": _f32(256, 1)}, {"dtype": "int8"}),),
    "dequantize": (Call("dequantize", {"x": TensorSpec.contiguous("int8", (256, 2048)), "scale": _f32(256, 1)}),),
    "null": (Call("null"),),
}


@dataclass(frozen=True)
class Progress:
    """Where tuning is: `rounds` timed rounds of call number `index` (from 0) of `total` are done."""

    index: int
    total: int
    label: str
    doing: str
    rounds: int
    elapsed_s: float


def tune(
    op: str | Callable[..., Any] | Sequence[str | Callable[..., Any] | Call] | None = None,
    *args: Any,
    budget_s: float = BUDGET_S,
    **kwargs: Any,
) -> TuneReport:
    """Measure which kernel is fastest for a call; the broker remembers the kernel times and chooses by them.

    lz.tune("matmul", a, b) tunes the call lz.matmul(a, b), with random arrays of the same dtypes, shapes and strides;
    a TensorSpec may stand for an array. lz.tune("matmul") and lz.tune(["matmul", "silu"]) tune typical shapes,
    lz.tune() those of all ops. budget_s: seconds for all runs; starts of workers and compilations come on top. A call
    that was begun gets at least one timed run of each kernel, and what is left goes to calls that have not settled. An
    interrupt (Ctrl-C) ends it; the report has what was measured until then.
    Raises InvalidArgument, NotConnected, BrokerLost.
    """
    return tune_calls(calls_of(op, args, kwargs), budget_s=budget_s)


def calls_of(
    what: str | Callable[..., Any] | Sequence[str | Callable[..., Any] | Call] | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> list[Call]:
    """The calls that are meant: one with its arguments, or typical ones of the ops named, or of all. Raises
    InvalidArgument."""
    if isinstance(what, str) or callable(what):
        name = _name(what)
        return [_bind(name, args, kwargs)] if args or kwargs else list(default_calls(name))
    if args or kwargs:
        raise InvalidArgument("arguments of a call need its op: name it first, as in lz.tune(op, ...)")
    found: list[Call] = []
    for one in DEFAULTS if what is None else what:
        found += [one] if isinstance(one, Call) else default_calls(_name(one))
    return found


def default_calls(op: str) -> tuple[Call, ...]:
    """Typical calls of an op. Raises InvalidArgument for an op without any."""
    calls = DEFAULTS.get(op)
    if calls is None:
        raise InvalidArgument(f"{op} has no typical shapes; give its arguments. Ops with some: {', '.join(DEFAULTS)}")
    return calls


def tune_calls(
    calls: Sequence[Call], *, budget_s: float = BUDGET_S, on_progress: Callable[[Progress], None] | None = None
) -> TuneReport:
    """As `tune`, for calls in any number. `on_progress` is called between runs, never during one."""
    if not 0.0 < budget_s < float("inf"):
        raise InvalidArgument(f"budget_s is {budget_s!r}; allowed: a positive number of seconds")
    began_s = time.monotonic()
    trials: list[_Trial | TunedCall] = []
    was_interrupted = False
    setup_s = 0.0  # starts of workers, compilations: they take as long as they take
    for index, call in enumerate(calls):
        left_s = budget_s - (time.monotonic() - began_s - setup_s)
        if was_interrupted or (index and left_s <= 0):
            why = "interrupted" if was_interrupted else f"the budget of {budget_s:g} s was spent"
            trials.append(TunedCall(call.op, call.label, None, None, (), f"not measured: {why}"))
            continue

        def tell(doing: str, rounds: int, index: int = index, call: Call = call) -> None:
            if on_progress is not None:
                elapsed_s = time.monotonic() - began_s
                on_progress(Progress(index, len(calls), call.label, doing, rounds, elapsed_s))

        trial = _Trial(call, tell)
        trials.append(trial)
        try:
            trial.run(left_s / (len(calls) - index))
        except KeyboardInterrupt:
            was_interrupted = True
        setup_s += trial.setup_s
    begun = [trial for trial in trials if isinstance(trial, _Trial)]
    try:
        while not was_interrupted and (unsettled := [trial for trial in begun if not trial.is_over]):
            left_s = budget_s - (time.monotonic() - began_s - setup_s)
            if left_s <= 0:
                break
            unsettled[0].measure(left_s / len(unsettled), at_least=1)
            begun.append(begun.pop(begun.index(unsettled[0])))
    except KeyboardInterrupt:
        was_interrupted = True
    done = tuple(one.result(is_cut_short=was_interrupted) if isinstance(one, _Trial) else one for one in trials)
    return TuneReport(done, time.monotonic() - began_s, budget_s, was_interrupted)


class _Runner:
    """The samples of one backend."""

    def __init__(self, candidate: Candidate) -> None:
        self.kernel_id, self.backend = candidate.kernel_id, candidate.backend
        self.samples: list[tuple[float, float]] = []  # (kernel, call) in us; pairs, as an interrupt may come anywhere
        self.first_ms = 0.0
        self.error = ""

    @property
    def is_settled(self) -> bool:
        kernel_us = [us for us, _ in self.samples]
        middle = len(kernel_us) // 2
        if len(kernel_us) < MIN_ROUNDS:
            return False
        early, late = statistics.median(kernel_us[:middle]), statistics.median(kernel_us[middle:])
        return abs(late - early) <= SETTLED * max(early, late)

    def result(self) -> TunedKernel:
        if not self.samples:
            return TunedKernel(self.kernel_id, self.backend, first_ms=self.first_ms, note=self.error or "not reached")
        kernel, call = (Times.of(column) for column in zip(*self.samples, strict=True))
        return TunedKernel(self.kernel_id, self.backend, kernel, call, self.first_ms, self.is_settled, self.error)


class _Trial:
    """One call on all backends that accept it. Rounds of one run each, in turn, so that a busy moment meets all."""

    def __init__(self, call: Call, tell: Callable[[str, int], None]) -> None:
        self._call, self._tell = call, tell
        self.setup_s = 0.0  # until every worker had answered once
        self._rounds = 0
        self._before: SelectionReport | None = None
        self._runners: list[_Runner] = []
        self._not_pinned: list[Candidate] = []

    @property
    def is_over(self) -> bool:
        """More rounds would say nothing new."""
        live = [runner for runner in self._runners if not runner.error]
        return all(runner.is_settled for runner in live) or self._rounds >= MAX_ROUNDS

    def run(self, budget_s: float) -> None:
        """Raises BrokerLost, NotConnected, EnvError, InvalidArgument; what a backend raises is its result."""
        began_s = time.monotonic()
        self._before = self._call.explain()
        self._tell("compiling", 0)
        self._call.compile({candidate.backend for candidate in in_line(self._before)})
        for candidate in self._call.explain().candidates:
            if candidate.accepted and any(r.backend == candidate.backend for r in self._runners):
                self._not_pinned.append(candidate)  # a call is pinned to a backend, which takes its best kernel
            elif candidate.accepted:
                self._runners.append(_Runner(candidate))
        if not self._runners:
            return
        arguments = self._arguments()
        for runner in self._runners:
            self._tell(f"warming up {runner.kernel_id}", 0)
            report = self._once(runner, arguments)
            if report is not None:
                runner.first_ms = (report.elapsed_us or 0.0) / 1e3
        self.setup_s = time.monotonic() - began_s
        for _ in range(WARM_UPS - 1):
            for runner in self._runners:
                self._once(runner, arguments)
        del arguments  # those of the rounds are made anew
        self.measure(budget_s - (time.monotonic() - began_s - self.setup_s), at_least=1)

    def _arguments(self) -> dict[str, Any]:
        return {**random_inputs(self._call.op, self._call.arrays, seed=0), **self._call.params}

    def measure(self, budget_s: float, *, at_least: int) -> None:
        """Rounds until all have settled, or the time is over. Raises as `run`."""
        end_s, arguments = time.monotonic() + budget_s, self._arguments()
        while not self.is_over and (at_least > 0 or time.monotonic() < end_s):
            at_least -= 1
            live = [runner for runner in self._runners if not runner.error]
            turn = self._rounds % len(live)
            self._rounds += 1
            for runner in (*live[turn:], *live[:turn]):
                report = self._once(runner, arguments)
                if report is not None and len(report.attempts) == 1 and report.kernel_us:
                    runner.kernel_id = report.kernel_id or runner.kernel_id
                    runner.samples.append((report.kernel_us, report.elapsed_us or 0.0))
            self._tell("measuring", self._rounds)

    def _once(self, runner: _Runner, arguments: Mapping[str, Any]) -> SelectionReport | None:
        """One run; None when the backend has failed, now or before."""
        if runner.error:
            return None
        try:
            self._call.function(**arguments, backend=runner.backend)
        except (BrokerLost, NotConnected):
            raise
        except LayerZeroError as exc:
            runner.error = f"{exc.code}: {' '.join(exc.message.split())}"
            return None
        return api.last_report()

    def result(self, *, is_cut_short: bool) -> TunedCall:
        kernels = [runner.result() for runner in self._runners]
        kernels += [
            TunedKernel(c.kernel_id, c.backend, note="not run: its backend prefers another kernel")
            for c in self._not_pinned
        ]
        kernels.sort(key=lambda k: k.kernel.median_us if k.kernel is not None else float("inf"))
        before = self._before.kernel_id if self._before else None
        now = before if is_cut_short or self._before is None else self._call.explain().kernel_id
        note = "" if self._runners else "no kernel accepts it; lz explain says why" if self._before else "interrupted"
        return TunedCall(self._call.op, self._call.label, before, now, tuple(kernels), note)


def _name(op: str | Callable[..., Any]) -> str:
    """An op's name, checked. Raises InvalidArgument."""
    name = op if isinstance(op, str) else str(getattr(op, "__name__", op))
    if name in OPS and (isinstance(op, str) or op is api.function_of(name)):
        return name
    raise InvalidArgument(unknown_name("op", name, OPS))


def _bind(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """A call as it would be made, with specs for its arrays. Raises InvalidArgument."""
    function = api.function_of(op)
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError as exc:
        raise InvalidArgument(f"{op}: {exc}") from exc
    refused = sorted({"out", "backend", "timeout_s"} & given.keys())
    if refused:
        raise InvalidArgument(f"every backend is tried, with outputs of its own; leave out {', '.join(refused)}")
    names = tensor_names(function)
    arrays = {name: _spec(given[name]) for name in names if name in given}
    return Call(op, arrays, {name: value for name, value in given.items() if name not in arrays})


def _spec(value: Any) -> TensorSpec | None:
    return value if value is None or isinstance(value, TensorSpec) else describe(value).spec
