"""How calls of isolated functions went, and would go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from layerzero.client.connection.report import Candidate as Verdict
from layerzero.client.connection.report import Copy, SelectionReport


class Placement(NamedTuple):
    """Whether calls are made in this process, and why, or why not. `cause`: what keeps them out; empty for nothing.
    `repair`: what would let them in."""

    is_here: bool
    reason: str
    cause: str = ""
    repair: str = ""


IN_WORKER = Placement(False, "")


@dataclass(frozen=True)
class FunctionReport:
    """How a call of an isolated function went. `env`: the environment that served it, else the one that is wanted
    first. `served_by`: the worker's backend, or the fallback's name; empty where the call failed. `failures`: what went
    wrong before, as "where: code: message". `copies`: bytes that were copied, where and why; `uncopied_bytes`: of
    arrays that crossed as they lay, results included. `selection`: the broker's report of the last attempt there; None
    where it has none. `is_rebuilt`: an object of it was lost and constructed again. `shadow`: what came of a shadow
    check of it; empty where there was none. `placement`: "in_process" where this process made the call, else "worker";
    `placement_reason`: why, where the function's option left a choice. `capsule`: what names the capsule of its
    failure; empty where there is none. `not_lifted`: of a function with lift=True, why its worker ran it, as a code of
    docs/lifting.md and what it means, or what is waited for; empty where this process has launched it. `not_chunked`:
    of a call by `map` with `chunksize`, why it crossed by itself; empty where it crossed with others. `device`: of a
    call with the option of that name, the GPU that its results lie on which are on one; empty for others."""

    function: str
    env: str
    served_by: str
    attempts: int
    failures: tuple[str, ...]
    copies: tuple[Copy, ...]
    uncopied_bytes: int
    elapsed_us: float
    selection: SelectionReport | None = None
    is_rebuilt: bool = False
    shadow: str = ""
    placement: str = "worker"
    placement_reason: str = ""
    capsule: str = ""
    not_lifted: str = ""
    not_chunked: str = ""
    device: str = ""

    def __str__(self) -> str:
        copied = sum(copy.nbytes for copy in self.copies)
        lines = [
            f"{self.function} in {self.env}: {f'served by {self.served_by}' if self.served_by else 'failed'}, "
            f"{self.elapsed_us:,.0f} us, {self.uncopied_bytes:,} bytes of arrays uncopied, {copied:,} copied"
        ]
        lines += [f"  copied: {copy.arg}, {copy.nbytes:,} bytes ({copy.where}): {copy.reason}" for copy in self.copies]
        lines += [f"  failed: {text}" for text in self.failures]
        lines += ["  an object of it was constructed again"] if self.is_rebuilt else []
        lines += [f"  shadow check: {self.shadow}"] if self.shadow else []
        lines += [f"  {self.capsule}"] if self.capsule else []
        lines += [f"  {self.placement_reason}"] if self.placement_reason else []
        lines += [f"  not lifted: {self.not_lifted}"] if self.not_lifted else []
        lines += [f"  not chunked: {self.not_chunked}"] if self.not_chunked else []
        lines += [f"  results on a GPU lie on {self.device}"] if self.device else []
        return "\n".join(lines)


@dataclass(frozen=True)
class FunctionExplanation:
    """Where a call would run, and what would be copied. `file`, `sha256`: empty for a name of lz.module. `state`: of
    the environment's worker, or why there is none. `command`: what to run first; empty for nothing. `candidates`: where
    several workers may serve it, each with its score or every reason against it, the one that would be chosen first.
    `interpreter`: an existing one that the environment is, as it is now; empty for others. `placement`,
    `placement_reason`, `device`: as of a report; `not_lifted`: likewise, of this thread's last call."""

    function: str
    env: str
    backend: str
    file: str
    sha256: str
    state: str
    command: str
    copies: tuple[Copy, ...]
    uncopied_bytes: int
    candidates: tuple[Verdict, ...] = ()
    interpreter: str = ""
    placement: str = "worker"
    placement_reason: str = ""
    not_lifted: str = ""
    device: str = ""

    def __str__(self) -> str:
        of = f" of {self.file} ({self.sha256[:12]})" if self.file else ""
        lines = [f"{self.function}{of} in {self.backend}: {self.state}"]
        lines += [f"  {self.placement_reason}"] if self.placement_reason else []
        lines += [f"  interpreter: {self.interpreter}"] if self.interpreter else []
        lines += [f"  run: {self.command}"] if self.command else []
        lines += [f"  copied: {copy.arg}, {copy.nbytes:,} bytes: {copy.reason}" for copy in self.copies]
        for one in self.candidates:
            time = "" if one.measured_us is None else f", {one.measured_us:,.0f} us"
            why = f"score {one.score:g}{time}" if one.accepted else "; ".join(map(str, one.reasons))
            lines.append(f"  {one.backend}: {why}{''.join(f'; {note}' for note in one.notes)}")
        lines += [f"  not lifted: {self.not_lifted}"] if self.not_lifted else []
        lines += [f"  results on a GPU lie on {self.device}"] if self.device else []
        return "\n".join(lines)
