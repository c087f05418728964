"""A trace's calls made again: on other backends, with the bytes that were kept, with what earlier calls of the run
gave, or with random numbers."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from layerzero.client.connection.report import SelectionReport, time_text
from layerzero.client.tools.inputs import random_inputs
from layerzero.client.tools.replay import START_S, distance, lay_out, most_of, request_of, results_of, why_of
from layerzero.client.traces.calls import FUNCTION, RecordedCall
from layerzero.client.traces.contents import TraceContents, cut
from layerzero.ipc.errors import EnvError, InvalidArgument, LayerZeroError, NoBackend
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.ipc.wording import counted

KEPT, FLOW, RANDOM = "kept", "flow", "random"
"""Where the arguments of a call come from; "flow" with random ones for those that no call has made."""
RECORDED = "recorded"
TORCH, ANY, CPU_NAME = "torch", "", "cpu"
MAX_ROWS = 20


@dataclass
class CallAgain:
    """A call on one backend. `arguments`: KEPT, FLOW or RANDOM. `outcome`: "ok", or what it ended in, with `detail`.
    `kernel_us` of each run that ended well. `difference`: of its results from those of `reference`, as a share of their
    largest number; `reference` is "recorded" for the results that the trace has, else a backend that had the same
    arguments, "" for none. `is_wrong`: it is larger than kernels of the dtype may differ."""

    number: int
    label: str
    name: str
    backend: str
    arguments: str
    recorded_us: float
    recorded_backend: str
    outcome: str = "ok"
    detail: str = ""
    kernel_us: list[float] = field(default_factory=list)
    difference: float | None = None
    reference: str = ""
    is_wrong: bool = False

    @property
    def is_right(self) -> bool:
        """It gave an answer, and none that is known to be wrong."""
        return self.outcome == "ok" and not self.is_wrong

    def cells(self) -> tuple[str, ...]:
        kernel = time_text(statistics.median(self.kernel_us)) if self.kernel_us else ""
        then = time_text(self.recorded_us) if self.recorded_us else ""
        if self.outcome != "ok":
            said = self.outcome
        elif self.difference is None:
            said = "not compared"
        else:
            said = "same numbers" if not self.difference else f"{self.difference:.1e}"
            said += "" if self.reference == RECORDED else f" of {self.reference}"
            said += ", WRONG" if self.is_wrong else ""
        return str(self.number), self.name, self.backend or "none", self.arguments, kernel, then, said


@dataclass(frozen=True)
class TraceRun:
    """Calls that were made again. `left_out`: why others were not, and how many. Printed it is a table in 80 columns,
    with what went wrong first."""

    calls: tuple[CallAgain, ...]
    left_out: Mapping[str, int]

    @property
    def is_right(self) -> bool:
        """Whether every call gave an answer, and none that is known to be wrong."""
        return all(one.is_right for one in self.calls)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        rows = [{**vars(one), "is_right": one.is_right} for one in self.calls]
        return {"calls": rows, "left_out": dict(self.left_out), "is_right": self.is_right}

    def headline(self) -> str:
        found = Counter(_word(one) for one in self.calls)
        parts = [f"{count:,} {word}" for word, count in found.items()]
        made = counted(len({one.number for one in self.calls}), "call")
        lines = [f"{made} made again: {', '.join(parts)}" if parts else "no call was made again"]
        lines += [f"left out: {count:,}, {why}" for why, count in self.left_out.items()]
        return "\n".join(lines)

    def text(self, most: int | None = MAX_ROWS) -> str:
        """The table, of the `most` rows that matter most; None for all."""
        ordered = sorted(self.calls, key=lambda one: (one.is_right, -(one.difference or 0.0), one.number))
        shown = sorted(ordered[:most], key=lambda one: (one.is_right, one.number))
        rows = [("call", "op", "backend", "with", "kernel", "then", "result"), *(one.cells() for one in shown)]
        widths = [max(len(row[n]) for row in rows) for n in range(6)]
        widths[1], widths[2] = min(widths[1], 18), min(widths[2], 16)
        lines = [self.headline()]
        for row in rows if shown else ():
            cells = [cut(cell, width) for cell, width in zip(row, widths, strict=False)]
            cells = [c.rjust(w) if n in (0, 4, 5) else c.ljust(w) for n, (c, w) in enumerate(zip(cells, widths))]  # noqa: B905
            lines.append(cut(f"{'  '.join(cells)}  {row[6]}".rstrip(), 80))
        if len(shown) < len(self.calls):
            lines.append(f"and {len(self.calls) - len(shown):,} more rows: text(most=None)")
        for one in [one for one in self.calls if one.detail][:3]:
            lines.append(cut(f"{one.number} on {one.backend}: {one.detail}".replace("\n", " "), 80))
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()


def _word(one: CallAgain) -> str:
    if one.outcome != "ok":
        return "failed"
    if one.difference is None:
        return "not compared"
    return "WRONG" if one.is_wrong else "with the same numbers" if not one.difference else "within tolerance"


def run_again(
    session: Any,
    contents: TraceContents,
    *,
    backends: Sequence[str] | None = None,
    everywhere: bool = False,
    times: int = 1,
    timeout_s: float | None = None,
    seed: int = 0,
    begins: Callable[[RecordedCall], None] = lambda _: None,
) -> TraceRun:
    """Make the calls of a trace again, in their order, by a session: each on the backend that served it, or where that
    is not here on the one that is chosen; on those of `backends`; or `everywhere`, on all that have the op. Calls that
    were on a GPU are made on the CPU.

    Raises InvalidArgument for backends that are not there, EnvError without NumPy."""
    if type(times) is not int or times < 1:
        raise InvalidArgument(f"times is {times!r:.40}; allowed: how often each call is made, 1 or more")
    rows = session.ask("status")["backends"]
    for name in backends or ():
        if name not in {row["name"] for row in rows}:
            known = ", ".join(row["name"] for row in rows)
            raise InvalidArgument(f"no backend is called {name!r:.80}; known: {known}")
    able = {row["name"]: row["ops"] for row in rows if not row["unavailable"]}
    made = _Runs(session, contents, able, times, timeout_s or START_S, seed)
    left_out: Counter[str] = Counter()
    found: list[CallAgain] = []
    for call in contents.calls:
        why = _why_not(call)
        if why:
            left_out[why] += 1
            continue
        begins(call)
        named = list(backends or ())
        if everywhere:
            named = [name for name, ops in able.items() if call.name in ops]
        elif backends is None:
            named = [call.backend if call.name in able.get(call.backend, ()) and call.device == CPU_NAME else ANY]
        for one in made.run(call, named):
            if everywhere and one.outcome == NoBackend.code:
                left_out[f"{call.name} on {one.backend}: it does not take such a call"] += 1
            else:
                found.append(one)
    return TraceRun(tuple(found), dict(left_out))


def _why_not(call: RecordedCall) -> str:
    if call.kind == FUNCTION:
        return "functions: their code and their objects are not in a trace"
    if call.name not in OPS:
        return "ops that this version does not have"
    if OPS[call.name].sized_output:
        return "texts: a trace does not have them"
    if not OPS[call.name].inputs:
        return "calls without arguments"
    return "" if call.inputs else "calls whose arguments could not be described"


class _Runs:
    """`able`: ops by backend that can serve here. `results`: what the calls gave that later ones take, by call and
    name."""

    def __init__(
        self,
        session: Any,
        contents: TraceContents,
        able: Mapping[str, Sequence[str]],
        times: int,
        timeout_s: float,
        seed: int,
    ) -> None:
        self._session, self._contents, self._able = session, contents, able
        self._times, self._timeout_s, self._seed = times, timeout_s, seed
        self._last_use: dict[int, int] = {}
        for call in contents.calls:
            self._last_use.update((source.call, call.number) for source in call.sources)
        self._results: dict[tuple[int, str], Any] = {}

    def run(self, call: RecordedCall, named: Sequence[str]) -> Iterator[CallAgain]:
        """On each backend, with the same arguments."""
        try:
            arguments, origin = self._arguments(call)
        except EnvError:
            raise
        except (LayerZeroError, ValueError, TypeError, MemoryError) as exc:
            yield self._outcome(call, "", RANDOM, outcome="ARGUMENTS", detail=str(exc))
            return
        answers: dict[str, list[Any]] = {}
        rows = [self._on(call, name, arguments, origin, answers) for name in named]
        reference, by = self._recorded(call) if origin == KEPT else None, RECORDED
        if reference is None:
            by = self._reference(call, [row.backend for row in rows], arguments, answers)
            reference = answers.get(by)
        most = most_of(one.spec.dtype for one in call.inputs)
        for row in rows:
            if reference is not None and row.backend in answers and row.backend != by:
                pairs = zip(answers[row.backend], reference, strict=False)
                row.difference, row.reference = max((distance(a, b) for a, b in pairs), default=0.0), by
                row.is_wrong = row.difference > most
            yield row
        self._keep(call, next(iter(answers.values()), None) if reference is None else reference)

    def _reference(
        self, call: RecordedCall, tried: Sequence[str], arguments: dict[str, Any], answers: dict[str, list[Any]]
    ) -> str:
        """The backend whose answer the others are compared with, torch's before others; where only one was asked,
        another one is. "" for none."""
        able = [name for name in (TORCH, *self._able) if call.name in self._able.get(name, ())]
        if len(tried) < 2:
            for name in dict.fromkeys(able):
                if name not in tried and self._on(call, name, arguments, "", answers).outcome == "ok":
                    return name
            return ""
        return next((name for name in (TORCH, *tried) if name in answers), "")

    def _outcome(self, call: RecordedCall, backend: str, origin: str, **more: Any) -> CallAgain:
        recorded = (call.kernel_ns / 1e3, call.backend)
        return CallAgain(call.number, call.label, call.name, backend, origin, *recorded, **more)

    def _on(
        self, call: RecordedCall, backend: str, arguments: dict[str, Any], origin: str, answers: dict[str, list[Any]]
    ) -> CallAgain:
        """`backend`: ANY for the one that is chosen. The answer goes to `answers`, by the backend that gave it."""
        row = self._outcome(call, backend, origin)
        before = {name: array.copy() for name, array in arguments.items()}
        for _ in range(self._times):
            try:
                request = request_of(call.name, call.params, arguments, row.backend or None, self._timeout_s)
                results = results_of(self._session.run(request, is_recorded=True), request)
            except LayerZeroError as exc:
                row.outcome, row.detail = why_of(exc)
                answers.pop(row.backend, None)
                if isinstance(exc, (NoBackend, InvalidArgument)):
                    break
            except (TypeError, ValueError, MemoryError) as exc:  # parameters that the op has not, of another version
                row.outcome, row.detail = type(exc).__name__, str(exc)
                break
            else:
                report = self._session.last_report()
                if isinstance(report, SelectionReport):
                    row.kernel_us += [report.kernel_us] if report.kernel_us else []
                    row.backend = row.backend or report.backend or ""
                if row.outcome == "ok":
                    answers.setdefault(row.backend, [result.copy() for result in results])
            for name, array in arguments.items():  # ops in place
                array[...] = before[name]
        return row

    # --- arguments

    def _arguments(self, call: RecordedCall) -> tuple[dict[str, Any], str]:
        kept = call.kept
        if kept is not None and kept.arguments:
            data = [self._contents.memory[segment.sha256] for segment in kept.segments]
            return lay_out(call.name, kept.arguments, kept.segments, data, self._seed), KEPT
        specs: dict[str, TensorSpec | None] = {one.name: one.spec for one in call.inputs}
        made: dict[str, Any] = random_inputs(call.name, specs, self._seed + call.number)
        flows = {source.input: found for source in call.sources if (found := self._flowing(call, source)) is not None}
        return {**made, **flows}, FLOW if flows else RANDOM

    def _flowing(self, call: RecordedCall, source: Any) -> Any:
        """The argument as it lies in an earlier result; None where that was not made again."""
        import numpy as np

        result = self._results.get((source.call, source.output))
        spec = next((one.spec for one in call.inputs if one.name == source.input), None)
        told = next((one.spec for one in self._contents.calls[source.call].outputs if one.name == source.output), None)
        if result is None or spec is None or told is None or result.shape != told.shape:
            return None
        size, start = told.itemsize, source.offset
        if spec.dtype != told.dtype or start + spec.span_bytes > told.span_bytes or start % size:
            return None
        block = np.zeros(told.span_bytes // size, result.dtype)
        whole = np.lib.stride_tricks.as_strided(block, told.shape, [size * step for step in told.strides])
        whole[...] = result
        steps = [size * step for step in spec.strides]
        return np.lib.stride_tricks.as_strided(block[start // size :], spec.shape, steps)

    # --- results

    def _recorded(self, call: RecordedCall) -> list[Any] | None:
        kept = call.kept
        if kept is None or not kept.results:
            return None
        import numpy as np

        found = [np.frombuffer(self._contents.memory[digest], spec.dtype) for _, spec, digest in kept.results]
        return [flat.reshape(spec.shape) for flat, (_, spec, _) in zip(found, kept.results, strict=True)]

    def _keep(self, call: RecordedCall, results: list[Any] | None) -> None:
        if results is not None and self._last_use.get(call.number, -1) > call.number:
            named = zip(OPS[call.name].outputs, results, strict=False)
            self._results.update({(call.number, name): result for name, result in named})
        for key in [key for key in self._results if self._last_use.get(key[0], -1) <= call.number]:
            del self._results[key]
