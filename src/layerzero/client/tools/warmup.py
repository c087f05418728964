"""lz.warmup: run calls before they are needed, so that no caller waits for a start, an import or a compilation."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from layerzero.client.connection.report import SelectionReport, html_of_text, time_text
from layerzero.client.tools.calls import Call, calls_of
from layerzero.client.tools.compiling import in_line
from layerzero.ipc.errors import BrokerLost, LayerZeroError, NotConnected

LIKELY = 2  # the chosen kernel, and the one that takes over when it fails
MAX_RUNS = 80  # on a GPU, until a worker has told two times: it measures the first runs, and then each 32nd


@dataclass(frozen=True)
class Warmed:
    """One call on one kernel. `first_us`: what its first run cost the caller, start and compilation included;
    `later_us`: the kernel's own time in a run after it, on a GPU by the GPU's clock. `error`: why there are none."""

    call: str
    kernel_id: str
    backend: str
    first_us: float | None = None
    later_us: float | None = None
    error: str = ""


@dataclass(frozen=True)
class WarmupReport:
    """`ok` when every call ran on every kernel that it was meant to. `left_out`: typical calls that the broker's
    profile does not have."""

    runs: tuple[Warmed, ...]
    elapsed_s: float
    left_out: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not any(run.error for run in self.runs)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        runs = [asdict(run) for run in self.runs]
        return {"ok": self.ok, "elapsed_s": self.elapsed_s, "runs": runs, "left_out": list(self.left_out)}

    def __str__(self) -> str:
        failed = sum(bool(run.error) for run in self.runs)
        lines = [f"{len(self.runs) - failed} of {len(self.runs)} runs warm in {self.elapsed_s:.1f} s"]
        for run in self.runs:
            result = run.error
            if run.first_us is not None:
                then = "its time was not told" if run.later_us is None else time_text(run.later_us)
                result = f"first call {time_text(run.first_us)}, kernel then {then}"
            lines.append(f"  {run.call} on {run.kernel_id or 'no kernel'}: {result}")
        if self.left_out:
            lines.append(f"  outside of the broker's profile: {', '.join(self.left_out)}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return html_of_text(str(self))


def warmup(
    op: str | Callable[..., Any] | Sequence[str | Callable[..., Any] | Call] | None = None,
    *args: Any,
    every: bool = False,
    device: str | None = None,
    **kwargs: Any,
) -> WarmupReport:
    """Run calls twice on the kernel that would serve them and on the one that would take over, which is another
    backend's; on all that accept them with `every`. On a GPU they run until the kernel's time is known. Kernels that
    compile are compiled for the call first.

    Arguments as of lz.tune: lz.warmup("matmul", a, b), lz.warmup(["matmul", "silu"]), or calls made by lz.Call.of.
    The broker keeps the times. A backend that fails is a line of the report. It runs where the arrays are; device:
    where those are for which specs stand, and typical ones ("cpu", "cuda", "cuda:1" or a GPU's UUID).
    Raises InvalidArgument, EnvError without NumPy, OutOfMemory, NotConnected, BrokerLost.
    """
    began_s = time.monotonic()
    runs: list[Warmed] = []
    left_out: list[str] = []
    for call in calls_of(op, args, kwargs, device):
        report = call.explain()
        if op is None and _is_outside(report):
            left_out.append(call.label)
        else:
            runs += _warm(call, report, every=every)
    return WarmupReport(tuple(runs), time.monotonic() - began_s, tuple(left_out))


def _is_outside(report: SelectionReport) -> bool:
    """Whether the call does not belong to the broker's profile, which each candidate says then."""
    return any(reason.code == "NOT_IN_PROFILE" for candidate in report.candidates for reason in candidate.reasons)


def _warm(call: Call, report: SelectionReport, *, every: bool) -> list[Warmed]:
    chosen: dict[str, str] = {}  # kernel -> backend
    for candidate in in_line(report):
        if every or (len(chosen) < LIKELY and candidate.backend not in chosen.values()):
            chosen[candidate.kernel_id] = candidate.backend
    call.compile(chosen.values())
    if not chosen:
        return [Warmed(call.label, "", "", error="no kernel accepts it; lz explain says why")]
    arguments = call.arguments()
    return [_warm_on(call, arguments, kernel_id, backend) for kernel_id, backend in chosen.items()]


def _warm_on(call: Call, arguments: Mapping[str, Any], kernel_id: str, backend: str) -> Warmed:
    first_us, times = None, []  # of a run after the first there is a time, and on a GPU of a few later ones
    for _ in range(MAX_RUNS if call.is_on_gpu else 2):
        try:
            report = call.run_on(kernel_id, backend, arguments)
        except (BrokerLost, NotConnected):
            raise
        except LayerZeroError as exc:
            text = f"{exc.code}: {exc.message.partition(chr(10))[0]}"
            return Warmed(call.label, kernel_id, backend, error=text)
        first_us = report.elapsed_us if first_us is None else first_us
        times += [report.kernel_us] if report.kernel_us or not call.is_on_gpu else []
        if len(times) == 2:
            break
    return Warmed(call.label, kernel_id, backend, first_us, times[-1] if times else None)
