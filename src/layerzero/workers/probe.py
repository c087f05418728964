"""`python -m layerzero.workers.probe PROVIDER DESCRIPTOR [CALLS] [PARENT_PID]`: does this environment import and
compute right? CALLS: a JSON object, the dtypes of each op that are tried; left out: all that the descriptor has.

Run in a throw-away process by envs/probe/probe.py; ends with its parent when that is given. Prints one JSON line:
{"ok", "versions", "kernels": {id: {"certified", "failed", "max_error", "tolerance", "elapsed_us"}},
"certified": {id: {dtype: {shape class: largest error}}},
"failures": [{"kernel_id", "dtype", "shape_class", "case", "error", "tolerance", "detail"}],
"error": null | {"kind", "message", "missing", "traceback"}}.
A class in which one case fails is not certified; the others stay so. It is an error when nothing of what was tried is
certified.
While it works, a regular file on stdout holds {"at": [kernel id, dtype, case]} instead, or {"at": []} before the first
case: whoever finds that knows where the process died or hangs.
Kinds: import (something is missing), abi, version, load (the provider raised anything else), numeric, kernel (a kernel
raised), descriptor. The cases are those of workers/certify/cases.py.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import stat
import statistics
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from layerzero.ipc.vocabulary.numerics import difference, gather, scatter, tolerance, unpack
from layerzero.ipc.vocabulary.ops import FUNCTION
from layerzero.workers import boot
from layerzero.workers.certify.cases import Case, cases
from layerzero.workers.certify.claims import dtypes
from layerzero.workers.certify.memory import FILL, Bench, bench_for, placed
from layerzero.workers.certify.problems import PROBLEMS
from layerzero.workers.provider import Bind, Block, Bound, Call, Loaded

TIMED_RUNS = 5
ALWAYS = frozenset({"null", FUNCTION})  # ops that belong to every profile (capabilities/profiles.py)

# (kind, pattern over "ExceptionType: message"); the first that matches counts, its group is what is missing.
_CAUSES = (
    ("abi", r"undefined symbol: ([\w@.]+)"),
    (
        "abi",
        r"compiled using NumPy 1|numpy\.dtype size changed|numpy\.core\.(?:multiarray|umath) failed"
        r"|_ARRAY_API not found",
    ),
    ("abi", r"ABI version|version `(\S+)' not found"),
    ("version", r"only compatible with|needs to be compatible with|but PyTorch .{0,40} is found|requires torch"),
    ("version", r"Descriptors cannot (?:be )?created? directly|Protobuf Gencode/Runtime|incompatible .{0,20}version"),
    ("import", r"(\S+?): cannot open shared object file"),
    ("import", r"(\S+?): (?:file too short|invalid ELF header|cannot read file data)"),
    ("import", r"No module named '([^']+)'"),
    ("import", r"cannot import name '([^']+)'"),
)


@dataclass(frozen=True)
class Failure:
    """Why a kernel has no certificate for one dtype and shape class: the first case that went wrong."""

    kernel_id: str
    dtype: str
    shape_class: str
    case: str
    error: float
    tolerance: float
    detail: str


@dataclass
class KernelVerdict:
    """One kernel: its certificates, and what went wrong elsewhere. `max_error` and `tolerance` are those of the
    certified case that came closest to failing."""

    certified: dict[str, dict[str, float]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    first_exception: Exception | None = None
    max_error: float = 0.0
    tolerance: float = 0.0
    elapsed_us: float = 0.0

    def summary(self) -> dict[str, Any]:
        return {
            "certified": sum(map(len, self.certified.values())),
            "failed": len(self.failures),
            "max_error": self.max_error,
            "tolerance": self.tolerance,
            "elapsed_us": self.elapsed_us,
        }


def main(argv: Sequence[str]) -> int:
    provider, descriptor, *more = argv
    calls = json.loads(more.pop(0)) if more and more[0].startswith("{") else None
    if more:
        boot.die_with_parent(int(more[0]))
    boot.confine(os.environ)
    answer = os.fdopen(os.dup(1), "w")
    boot.point_stdout_at_stderr()
    position = Position(answer.fileno())
    kept = boot.enter_cache(os.environ)
    verdict = json.dumps(probe(provider, Path(descriptor), position, calls))
    if kept is not None:
        kept.seal()
    position.clear()
    print(verdict, file=answer, flush=True)
    return 0


class Position:
    """Where the probe is, in a file that whoever runs it can read; of other things than files, nothing is written."""

    def __init__(self, fd: int = -1) -> None:
        is_file = fd >= 0 and stat.S_ISREG(os.fstat(fd).st_mode)
        self._fd = fd if is_file and not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND else -1
        self.note()

    def note(self, *where: str) -> None:
        """It begins with this case; without words, to load the provider."""
        if self._fd >= 0:
            self.clear()
            os.pwrite(self._fd, json.dumps({"at": where}).encode(), 0)

    def clear(self) -> None:
        if self._fd >= 0:
            os.ftruncate(self._fd, 0)


def probe(
    provider: str,
    descriptor: Path,
    position: Position | None = None,
    calls: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Any]:
    """Load the provider and run every kernel of the descriptor, or those of `calls`. The result is described at the
    top."""
    verdict: dict[str, Any] = {"ok": False, "versions": {}, "kernels": {}, "certified": {}, "failures": []}
    try:
        loaded = boot.import_provider(provider).load()
    except Exception as exc:
        return {**verdict, "error": classify(exc)}
    verdict["versions"] = dict(loaded.versions)
    try:
        claims = json.loads(descriptor.read_text(encoding="utf-8"))["ops"]
        kernels = [(op, kernel) for op, listed in claims.items() for kernel in listed]
        absent = [kernel["kernel_id"] for _, kernel in kernels if kernel["kernel_id"] not in loaded.kernels]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as exc:
        return {**verdict, "error": _error("descriptor", f"{descriptor}: {exc!r}", exc)}
    if absent:
        message = f"the descriptor lists {', '.join(absent)}; the provider has {', '.join(sorted(loaded.kernels))}"
        return {**verdict, "error": _error("descriptor", message, missing=absent[0])}
    try:
        bench = bench_for(loaded)
    except Exception as exc:
        return {**verdict, "error": classify(exc)}
    position = position or Position()
    chosen = {kernel["kernel_id"]: (op, kernel, _dtypes(op, kernel, calls)) for op, kernel in kernels}
    checked = {
        kernel_id: _check(bench, loaded, op, kernel, tried, position)
        for kernel_id, (op, kernel, tried) in chosen.items()
        if tried
    }
    verdict["kernels"] = {kernel_id: one.summary() for kernel_id, one in checked.items()}
    verdict["certified"] = {kernel_id: one.certified for kernel_id, one in checked.items()}
    verdict["failures"] = [asdict(failure) for one in checked.values() for failure in one.failures]
    is_of_use = not checked or any(one.certified for one in checked.values())
    return {**verdict, "ok": is_of_use, "error": None if is_of_use else _nothing_certified(checked)}


def _nothing_certified(checked: Mapping[str, KernelVerdict]) -> dict[str, Any]:
    """The error of a backend of which nothing is certified: the cause of the first failure."""
    for kernel_id, one in checked.items():
        if one.first_exception is not None:
            error = classify(one.first_exception)
            kind = "kernel" if error["kind"] == "load" else error["kind"]
            return {**error, "kind": kind, "message": f"{kernel_id}: {error['message']}"}
        if one.failures:
            first = one.failures[0]
            return _error("numeric", f"{kernel_id}: {first.case} in {first.dtype}: {first.detail}")
    return _error("descriptor", f"no case fits the descriptor: {', '.join(checked) or 'it lists no kernel'}")


def classify(exc: BaseException) -> dict[str, Any]:
    """The error of a provider that did not load: what kind, and which module, library or symbol is missing."""
    chain: list[BaseException] = []
    link: BaseException | None = exc
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    for one in chain:
        text = f"{type(one).__name__}: {one}"
        for kind, pattern in _CAUSES:
            if found := re.search(pattern, text):
                return _error(kind, text, exc, missing=found.group(1) if found.re.groups else None)
    kind = "import" if isinstance(exc, ImportError) else "load"
    return _error(kind, f"{type(exc).__name__}: {exc}", exc)


def _error(kind: str, message: str, exc: BaseException | None = None, missing: str | None = None) -> dict[str, Any]:
    text = "".join(traceback.format_exception(exc)) if exc is not None else ""
    return {"kind": kind, "message": message[:2000], "missing": missing, "traceback": text[-4000:]}


def _dtypes(op: str, kernel: Mapping[str, Any], calls: Mapping[str, Sequence[str]] | None) -> list[str]:
    """Those of a kernel that are tried; of what has no dtypes, all."""
    found = dtypes(op, kernel)
    return [dtype for dtype in found if calls is None or op in ALWAYS or dtype in calls.get(op, ())]


def _check(
    bench: Bench, loaded: Loaded, op: str, kernel: Mapping[str, Any], tried: Sequence[str], position: Position
) -> KernelVerdict:
    """Run one kernel on every case of its op that its descriptor admits, in each of these dtypes."""
    verdict, kernel_id = KernelVerdict(), kernel["kernel_id"]
    problems = list(PROBLEMS[op](kernel)) if op in PROBLEMS else []
    for dtype in tried:
        allowed = tolerance(dtype, op)
        errors: dict[str, float] = {}
        failed: dict[str, Failure] = {}
        for case in cases(op, kernel, problems, dtype):
            name = case.shape_class
            if name in failed:
                continue
            position.note(kernel_id, dtype, case.name)
            try:
                error, detail = _run(bench, loaded.kernels[kernel_id], op, kernel_id, case, dtype), ""
                if not error <= allowed:
                    detail = f"error {error:.3g}, allowed {allowed:g}"
                elif not verdict.elapsed_us:
                    verdict.elapsed_us = _time(bench, loaded.kernels[kernel_id], op, kernel_id, case)
            except Exception as exc:
                verdict.first_exception = verdict.first_exception or exc
                error, detail = 0.0, f"raised {type(exc).__name__}: {exc}"[:500]
            if detail:
                errors.pop(name, None)
                failed[name] = Failure(kernel_id, dtype, name, case.name, _finite(error), allowed, detail)
                continue
            errors[name] = max(errors.get(name, 0.0), float(f"{error:.3g}"))
            if error * (verdict.tolerance or 1.0) >= verdict.max_error * (allowed or 1.0):
                verdict.max_error, verdict.tolerance = error, allowed
        if errors:
            verdict.certified[dtype] = errors
        verdict.failures += failed.values()
    return verdict


def _bind(bench: Bench, bind: Bind, op: str, kernel_id: str, case: Case) -> tuple[Bound, list[Block]]:
    inputs, outputs = placed(bench, op, case)
    return bind(Call(op, kernel_id, case.inputs, case.outputs, case.attrs), inputs, outputs), outputs


def _run(bench: Bench, bind: Bind, op: str, kernel_id: str, case: Case, dtype: str) -> float:
    """The error of one case, as a share of what is allowed for data of `dtype`, times that; raises when it returned or
    wrote what it must not."""
    bound, outputs = _bind(bench, bind, op, kernel_id, case)
    result = bench.run(bound)
    if type(result) is not type(case.result) or result != case.result:
        raise ValueError(f"{case.name}: the kernel returned {result!r:.200}, expected {case.result!r}")
    error = 0.0
    for block, expected in zip(outputs, case.expected, strict=True):
        spec, memory = block.spec, bench.content(block)
        data = gather(memory, spec)
        untouched = bytearray([FILL]) * spec.span_bytes
        scatter(data, spec, memoryview(untouched))
        if untouched != memory:
            raise ValueError(f"{case.name}: the kernel wrote between the elements of its output")
        found, allowed = difference(unpack(data, spec.dtype), expected, spec.dtype), tolerance(dtype, op, spec.dtype)
        of_data = tolerance(dtype, op)
        error = max(error, found * of_data / allowed if allowed else found and found + of_data)  # none is allowed
    return error


def _time(bench: Bench, bind: Bind, op: str, kernel_id: str, case: Case) -> float:
    """Median microseconds of some more runs."""
    bound, _ = _bind(bench, bind, op, kernel_id, case)
    runs_us = []
    for _ in range(TIMED_RUNS):
        start = time.perf_counter_ns()
        bench.run(bound)
        runs_us.append((time.perf_counter_ns() - start) / 1000)
    return round(statistics.median(runs_us), 3)


def _finite(value: float) -> float:
    """JSON has no infinity."""
    return value if math.isfinite(value) else sys.float_info.max


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
