"""lz.readiness_check: is everything in order to serve? Asks the broker, and tries what only a client can try."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from layerzero.client.arrays.recognition import CPU
from layerzero.client.connection.report import SelectionReport, html_of_text
from layerzero.client.facade import api, default_session
from layerzero.client.gpu.memory import ordinal_of
from layerzero.client.tools.calls import DEFAULTS, Call, on_gpu
from layerzero.client.tools.inputs import plain_inputs
from layerzero.client.tools.small_tokenizers import small_tokenizers
from layerzero.ipc.errors import BrokerLost, InvalidArgument, LayerZeroError, NotConnected
from layerzero.ipc.shm import huge_pages
from layerzero.ipc.vocabulary.ops import FUNCTION, OPS

GPU_DTYPES = ("float16", "bfloat16", "float32")
LOADING_S, POLL_S = 60.0, 0.1  # so long a library may take to be probed and loaded in this process


@dataclass(frozen=True)
class Check:
    """`detail`: what was found. `repair`: the command or change that helps; empty when `ok`."""

    name: str
    ok: bool
    detail: str
    repair: str = ""


@dataclass(frozen=True)
class ReadinessReport:
    """`ok` when every check is. Prints as a table; `exit_code` is for scripts."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def exit_code(self) -> int:
        """0 when ready, 1 when not."""
        return 0 if self.ok else 1

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"ok": self.ok, "checks": [asdict(check) for check in self.checks]}

    def _headline(self) -> str:
        failed = sum(not check.ok for check in self.checks)
        return f"not ready: {failed} of {len(self.checks)} checks failed" if failed else "ready"

    def __str__(self) -> str:
        width = max((len(check.name) for check in self.checks), default=0)
        lines = [self._headline()]
        for check in self.checks:
            first, *more = check.detail.splitlines() or [""]
            lines.append(f"  {'ok  ' if check.ok else 'FAIL'}  {check.name:<{width}}  {first}".rstrip())
            lines += [f"{'':{width + 10}}{line}" for line in more]
            if check.repair:
                lines.append(f"{'':{width + 10}}repair: {check.repair}")
        return "\n".join(lines)

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for name in ("check", "", "found"):
            table.add_column(name, no_wrap=name != "found", overflow="fold")
        for check in self.checks:
            style = "" if check.ok else "bold red"
            detail = f"{check.detail}\nrepair: {check.repair}" if check.repair else check.detail
            table.add_row(*(Text(cell) for cell in (check.name, "ok" if check.ok else "FAIL", detail)), style=style)
        return Group(Text(self._headline(), style="bold green" if self.ok else "bold red"), table)

    def _repr_html_(self) -> str:
        return html_of_text(str(self))


def readiness_check(
    *, backends: Sequence[str] | None = None, calls: Sequence[Call] = (), starts_workers: bool = True
) -> ReadinessReport:
    """Is everything in order to serve? For gates before a deployment: `.ok`, `.exit_code`, and a repair for each fault.

    Environments are built and probed, descriptors and policy valid, the dispatch table (where the policy names one) was
    made for this machine, measured times can be kept, memory headroom and graphs are as the policy asks.
    backends: which ones are needed; all that the policy allows if left out. starts_workers: run a small call on each,
    in the isolation that the policy asks for, on the device that it is for; what has to be compiled for it is compiled
    first. calls: what would serve them was run before (lz.warmup).
    Raises InvalidArgument, NotConnected, BrokerLost.
    """
    names = None if backends is None else list(backends)
    answer = default_session.session().ask("readiness", backends=names)
    tried: dict[str, Check] = {}
    if starts_workers:
        rows = {row["name"]: row for row in api.status()["backends"]}
        usable = [name for name in answer["backends"] if _is_tried(rows[name])]  # `checks` has why, of others
        gpus = answer["gpus"]
        tried = {name: _try_backend(name, rows[name]["ops"], answer["isolation"][name], gpus[name]) for name in usable}
        answer = default_session.session().ask(
            "readiness", backends=names
        )  # environments that nobody had used were probed
    checks = [Check(row["name"], row["ok"], row["detail"], row["repair"]) for row in answer["checks"]]
    reason = huge_pages.why_none()
    checks.append(
        Check("huge pages", True, f"shared memory has none: {reason}" if reason else "shared memory has them")
    )
    unfit = {check.name for check in checks if not check.ok}
    checks += [check for name, check in tried.items() if f"environment {name}" not in unfit]
    checks += [_is_warm(call) for call in calls]
    return ReadinessReport(tuple(checks))


def _is_tried(row: Mapping[str, Any]) -> bool:
    """Of lz.status(). What functions do in an environment of theirs is nothing that anybody could try; its probe asks
    whether it answers."""
    return not row["unavailable"] and row["ops"] != [FUNCTION]


def _try_backend(backend: str, served: Sequence[str], isolation: str, gpu: str) -> Check:
    """It answers a small call, where the policy wants it to run. `gpu`: the UUID of the one that it is tried on."""
    name = f"worker {backend}"
    why = "it serves no op that could be tried"
    try:
        device = ordinal_of(gpu or "cpu")
    except InvalidArgument as exc:
        return Check(name, False, f"this process cannot call it: {exc.message}", "unset CUDA_VISIBLE_DEVICES")
    for call in (call for op in served for call in small_calls(op, device)):
        try:
            report = _run(call, backend, is_wanted_here=isolation == "in_process")
        except (BrokerLost, NotConnected):
            raise
        except LayerZeroError as exc:
            why = f"{call.op}: {exc.code}: {exc.message}"
            if exc.code == "NO_BACKEND":
                continue  # it does not take this call; perhaps another one
            return Check(name, False, why, str(exc.facts.get("repair") or f"lz logs {backend}"))
        is_here = report.worker_pid == os.getpid()
        where = "in this process" if is_here else f"in process {report.worker_pid}"
        where += f" on {call.device} ({gpu})" if gpu else ""
        detail = f"{report.kernel_id} answered {where}; isolation: {isolation}"
        if isolation == "in_process" and not is_here and not gpu:  # a GPU's calls of tools are of its worker
            detail += "".join(f"; {note}" for note in report.notes)
            return Check(name, False, detail, f"lz env probe {backend}, or backend_isolation: {backend}: auto")
        return Check(name, True, detail)
    return Check(name, False, why, f"lz explain, or avoid_sources: [{backend}] in the policy")


def small_calls(op: str, device: int = CPU) -> tuple[Call, ...]:
    """One for each way of calling it that a backend may insist on; on a GPU, by its ordinal, in each dtype that kernels
    there compute in."""
    if device != CPU:
        calls = DEFAULTS.get(op, ()) if OPS[op].runs_on_gpus else ()
        return tuple(on_gpu(call, device, dtype) for dtype in GPU_DTYPES for call in calls)
    if op == "tokenize":
        return tuple(Call(op, {}, {"text": "a", "tokenizer": one}) for one in small_tokenizers())
    if op == "detokenize":
        return tuple(Call(op, {}, {"ids": [0], "tokenizer": one}) for one in small_tokenizers())
    return DEFAULTS.get(op, ())


def _run(call: Call, backend: str, *, is_wanted_here: bool) -> SelectionReport:
    """The report of the call. Where policy wants the backend in this process: of the first call that ran here, since
    workers answer while its library is probed and loaded; of one that did not when this process has refused it."""
    if call.is_on_gpu:
        call.compile([backend])  # its own time limit is far longer than a call's
        arrays = plain_inputs(call.op, call.arrays, device=ordinal_of(call.device))
        return api.run_apart(call.function, **arrays, **call.params, backend=backend)[1]
    arrays = plain_inputs(call.op, call.arrays)
    until_s = time.monotonic() + LOADING_S
    while True:
        call.function(**arrays, **call.params, backend=backend)
        report = api.last_report()
        refused = default_session.session().refusals()
        is_settled = report.worker_pid == os.getpid() or backend in refused or report.kernel_id in refused
        if not is_wanted_here or is_settled or time.monotonic() >= until_s:
            return report
        time.sleep(POLL_S)


def _is_warm(call: Call) -> Check:
    """The kernel that would serve the call has been measured."""
    name = f"warm {call.label}"
    report = call.explain()
    chosen = next((c for c in report.candidates if c.kernel_id == report.kernel_id), None)
    if chosen is None:
        return Check(name, False, "no kernel accepts it", f"lz explain {call.op}")
    if chosen.measured_us is None:
        return Check(name, False, f"{chosen.kernel_id} was never measured with it", "lz.warmup, or lz tune")
    return Check(name, True, f"{chosen.kernel_id}, {chosen.measured_us:,.0f} us")
