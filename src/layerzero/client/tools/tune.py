"""lz.tune: run a call on every kernel that accepts it, side by side, and say which is fastest."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layerzero.client.connection.report import Candidate, SelectionReport
from layerzero.client.tools.calls import Call, calls_of
from layerzero.client.tools.compiling import in_line
from layerzero.client.tools.tune_report import Times, TunedCall, TunedKernel, TuneReport
from layerzero.ipc.errors import BrokerLost, InvalidArgument, LayerZeroError, NotConnected

BUDGET_S = 30.0
MIN_ROUNDS = 8  # before a median can have settled
MAX_ROUNDS = 200
MAX_GPU_ROUNDS = 640  # a worker measures the first runs of a kind on a GPU, and then each 32nd
SETTLED = 0.05  # the medians of the first and the second half of the runs differ by less than this
WARM_UPS = 3  # runs that do not count: start of the worker, compilation, caches


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
    device: str | None = None,
    **kwargs: Any,
) -> TuneReport:
    """Measure which kernel is fastest for a call; the broker remembers the kernel times and chooses by them.

    lz.tune("matmul", a, b) tunes the call lz.matmul(a, b), with random arrays of the same dtypes, shapes and strides;
    a TensorSpec may stand for an array. lz.tune("matmul") and lz.tune(["matmul", "silu"]) tune typical shapes,
    lz.tune() those of all ops. budget_s: seconds for all runs; starts of workers and compilations come on top. A call
    that was begun gets at least one timed run of each kernel, and what is left goes to calls that have not settled. An
    interrupt (Ctrl-C) ends it; the report has what was measured until then. It measures where the arrays are; device:
    where those are for which specs stand, and typical ones ("cpu", "cuda", "cuda:1" or a GPU's UUID).
    Raises InvalidArgument, EnvError without NumPy, OutOfMemory, NotConnected, BrokerLost.
    """
    return tune_calls(calls_of(op, args, kwargs, device), budget_s=budget_s)


def tune_calls(
    calls: Sequence[Call], *, budget_s: float = BUDGET_S, on_progress: Callable[[Progress], None] | None = None
) -> TuneReport:
    """As `tune`, for calls in any number. `on_progress` is called between runs, never during one."""
    if not 0.0 < budget_s < float("inf"):
        raise InvalidArgument(f"budget_s is {budget_s!r}; allowed: a positive number of seconds")
    began_s = time.monotonic()
    trials: list[Trial | TunedCall] = []
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

        trial = Trial(call, tell)
        trials.append(trial)
        try:
            trial.run(left_s / (len(calls) - index))
        except KeyboardInterrupt:
            was_interrupted = True
        setup_s += trial.setup_s
    begun = [trial for trial in trials if isinstance(trial, Trial)]
    try:
        while not was_interrupted and (unsettled := [trial for trial in begun if not trial.is_over]):
            left_s = budget_s - (time.monotonic() - began_s - setup_s)
            if left_s <= 0:
                break
            unsettled[0].measure(left_s / len(unsettled), at_least=1)
            begun.append(begun.pop(begun.index(unsettled[0])))
    except KeyboardInterrupt:
        was_interrupted = True
    done = tuple(one.result(is_cut_short=was_interrupted) if isinstance(one, Trial) else one for one in trials)
    return TuneReport(done, time.monotonic() - began_s, budget_s, was_interrupted)


class _Runner:
    """The samples of one kernel."""

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


class Trial:
    """One call on all kernels that accept it, or on `candidates`. Rounds of one run each, in turn, so that a busy
    moment meets all. `tell` hears what it does, and how many rounds are done."""

    def __init__(
        self, call: Call, tell: Callable[[str, int], None], candidates: Sequence[Candidate] | None = None
    ) -> None:
        self._call, self._tell, self._candidates = call, tell, candidates
        self.setup_s = 0.0  # until every worker had answered once
        self._rounds = 0
        self._before: SelectionReport | None = None
        self._runners: list[_Runner] = []
        self._max_rounds = MAX_GPU_ROUNDS if call.is_on_gpu else MAX_ROUNDS

    @property
    def is_over(self) -> bool:
        """More rounds would say nothing new."""
        live = [runner for runner in self._runners if not runner.error]
        return all(runner.is_settled for runner in live) or self._rounds >= self._max_rounds

    def run(self, budget_s: float) -> None:
        """Raises BrokerLost, NotConnected, EnvError, OutOfMemory, InvalidArgument; what a kernel raises is its
        result."""
        began_s = time.monotonic()
        self._before = self._call.explain()
        self._tell("compiling", 0)
        if self._candidates is None:
            self._call.compile({candidate.backend for candidate in in_line(self._before)})
            accepted = [candidate for candidate in self._call.explain().candidates if candidate.accepted]
        else:
            accepted = list(self._candidates)
        self._runners += [_Runner(candidate) for candidate in accepted if not candidate.lifted_only]
        if not self._runners:
            return
        arguments = self._call.arguments()
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

    def measure(self, budget_s: float, *, at_least: int) -> None:
        """Rounds until all have settled, or the time is over, and each has `at_least` so many more samples. Raises as
        `run`."""
        end_s, arguments = time.monotonic() + budget_s, self._call.arguments()
        wanted = {runner: len(runner.samples) + at_least for runner in self._runners}
        while not self.is_over:
            live = [runner for runner in self._runners if not runner.error]
            if time.monotonic() >= end_s and all(len(runner.samples) >= wanted[runner] for runner in live):
                break
            turn = self._rounds % len(live)
            self._rounds += 1
            for runner in (*live[turn:], *live[:turn]):
                report = self._once(runner, arguments)
                if report is not None and len(report.attempts) == 1 and report.kernel_us:
                    runner.samples.append((report.kernel_us, report.elapsed_us or 0.0))
            self._tell("measuring", self._rounds)

    def _once(self, runner: _Runner, arguments: Mapping[str, Any]) -> SelectionReport | None:
        """One run; None when the kernel has failed, now or before."""
        if runner.error:
            return None
        try:
            return self._call.run_on(runner.kernel_id, runner.backend, arguments)
        except (BrokerLost, NotConnected):
            raise
        except LayerZeroError as exc:
            runner.error = f"{exc.code}: {' '.join(exc.message.split())}"
            return None

    def result(self, *, is_cut_short: bool) -> TunedCall:
        kernels = [runner.result() for runner in self._runners]
        kernels.sort(key=lambda k: k.kernel.median_us if k.kernel is not None else float("inf"))
        before = self._before.kernel_id if self._before else None
        now = before if is_cut_short or self._before is None else self._call.explain().kernel_id
        note = "" if self._runners else "no kernel accepts it; lz explain says why" if self._before else "interrupted"
        return TunedCall(self._call.op, self._call.label, before, now, tuple(kernels), note)
