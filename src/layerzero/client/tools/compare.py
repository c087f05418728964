"""lz.compare: one call, one function, or a running program on several backends or versions, side by side."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

from layerzero.client.arrays.copies import copy_into
from layerzero.client.arrays.recognition import CPU, describe
from layerzero.client.connection.overlay import Overlay, Scope
from layerzero.client.connection.report import Candidate
from layerzero.client.facade import api
from layerzero.client.gpu.own_arrays import GpuArray
from layerzero.client.session.shadow import compare as difference_of
from layerzero.client.tools.calls import Call
from layerzero.client.tools.compare_report import Compared, CompareReport
from layerzero.client.tools.tune import Trial
from layerzero.client.tools.tune_report import TunedKernel
from layerzero.client.tools.watch import BOTH, Comparison
from layerzero.ipc.errors import BrokerLost, InvalidArgument, LayerZeroError, NotConnected
from layerzero.ipc.names import unknown_name
from layerzero.ipc.vocabulary.numerics import gather, tolerance
from layerzero.ipc.vocabulary.ops import PUBLIC_OPS
from layerzero.ipc.vocabulary.shape_class import class_dtype
from layerzero.ipc.vocabulary.tensors import TensorSpec

BUDGET_S = 5.0
MAX_RUNS = 30  # of a function on each backend
_MAX_DEPTH = 8  # of lists and dicts in a function's result


@overload
def compare(first: str, /, *backends: str, rate: float = ...) -> Comparison: ...
@overload
def compare(
    first: str | Callable[..., Any],
    /,
    *args: Any,
    backends: Sequence[str],
    budget_s: float = ...,
    **kwargs: Any,
) -> CompareReport: ...
def compare(
    first: str | Callable[..., Any],
    /,
    *args: Any,
    backends: Sequence[str] | None = None,
    rate: float = 1.0,
    budget_s: float = BUDGET_S,
    **kwargs: Any,
) -> Comparison | CompareReport:
    """Compare results and times of backends, versions of one backend for instance.

    lz.compare("softmax", x, dim=-1, backends=["onnxruntime", "onnxruntime@1.16"]) makes the call on each, with these
    very arrays, and compares with the first; one name alone is compared with what would serve the call.
    lz.compare(fn, x, backends=[...]) calls a function of yours, whose lz calls go to that backend alone. budget_s:
    seconds for all timed runs.

    with lz.compare("onnxruntime@1.16") as c: ... watches a program: the share `rate` of its calls is run again on those
    backends, off its path; c.report() says what was found. A version may be a series: its newest that the broker has.
    Raises InvalidArgument, NotConnected, BrokerLost; what a backend raises is in the report.
    """
    is_op = isinstance(first, str) and first in PUBLIC_OPS
    if isinstance(first, str) and backends is None and not (is_op and (args or kwargs)):
        if kwargs:
            raise InvalidArgument(f"a block takes names of backends and rate=, not {', '.join(kwargs)}")
        return Comparison(named((first, *args)), rate)
    if not backends or isinstance(backends, str):
        raise InvalidArgument('backends is missing; pass a list: backends=["onnxruntime", "onnxruntime@1.16"]')
    chosen = named(backends)
    name = first if isinstance(first, str) else getattr(first, "__name__", "")
    if isinstance(first, str) or (name in PUBLIC_OPS and first is api.function_of(name)):
        call = Call.of(first, *args, **kwargs)
        return compare_call(call, chosen, _arguments(call, args, kwargs), budget_s=budget_s)
    return _compare_function(first, args, kwargs, chosen, budget_s)


def named(backends: Sequence[str]) -> list[str]:
    """The names, each series of versions as its newest version that the broker has. Raises InvalidArgument."""
    known = [str(row["name"]) for row in api.status()["backends"]]
    found = []
    for name in backends:
        fitting = [one for one in known if one == name or ("@" in str(name) and one.startswith(f"{name}."))]
        if not fitting:
            raise InvalidArgument(unknown_name("backend", name, known))
        found.append(max(fitting, key=_release))
    return list(dict.fromkeys(found))


def _release(name: str) -> list[int]:
    return [int(part) for part in name.rpartition("@")[2].split(".") if part.isdecimal()]


def _arguments(call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Those that were given; where specs stand for arrays, random ones."""
    given = dict(inspect.signature(call.function).bind(*args, **kwargs).arguments)
    if any(isinstance(value, TensorSpec) for value in given.values()):
        return call.arguments()
    return given


def compare_call(
    call: Call, backends: Sequence[str], arguments: Mapping[str, Any], *, budget_s: float = BUDGET_S
) -> CompareReport:
    """One call on the best kernel of each of the backends; the first is what the others are compared with, or, of one
    alone, what would serve the call. Raises InvalidArgument, NotConnected, BrokerLost."""
    if not 0.0 < budget_s < float("inf"):
        raise InvalidArgument(f"budget_s is {budget_s!r}; allowed: a positive number of seconds")
    names = list(backends)
    if len(names) == 1:
        served = call.explain().backend
        if served is None or served == names[0]:
            what = "no kernel serves it" if served is None else f"{served} would serve it itself"
            raise InvalidArgument(f"{call.label}: {what}; name two backends to compare")
        names.insert(0, served)
    kernels = {name: _kernel(call, name) for name in names}
    trial = Trial(call, lambda doing, rounds: None, [one for one in kernels.values() if isinstance(one, Candidate)])
    times: dict[str, TunedKernel] = {}
    results: dict[str, Any] = {}
    errors: dict[str, str] = {name: one for name, one in kernels.items() if isinstance(one, str)}
    for name, one in kernels.items():
        if isinstance(one, Candidate):
            try:
                results[name] = call.result_on(one.kernel_id, name, arguments)[0]
            except (BrokerLost, NotConnected):
                raise
            except LayerZeroError as exc:
                errors[name] = f"{exc.code}: {' '.join(exc.message.split())}"
    trial.run(budget_s)
    times = {one.backend: one for one in trial.result(is_cut_short=True).kernels}
    first, *others = names
    rows = [_row(call, first, other, kernels, times, results, errors) for other in others]
    return CompareReport(tuple(rows))


def _kernel(call: Call, backend: str) -> Candidate | str:
    """The best kernel of the backend, or why it has none."""
    report = call.explain(backend)
    call.compile({backend})
    report = call.explain(backend) if report.kernel_id is None else report
    own = [one for one in report.candidates if one.backend == backend]
    accepted = [one for one in own if one.accepted and not one.lifted_only]
    if accepted:
        return accepted[0]
    reasons = [f"{reason.code}: {reason.detail}" for one in own[:1] for reason in one.reasons]
    return "; ".join(reasons) or f"has no {call.op}"


def _row(
    call: Call,
    first: str,
    other: str,
    kernels: Mapping[str, Candidate | str],
    times: Mapping[str, TunedKernel],
    results: Mapping[str, Any],
    errors: Mapping[str, str],
) -> Compared:
    inputs = tuple(call.arrays.values())
    kernel = kernels[other]
    row = Compared(
        call.op,
        class_dtype(call.op, inputs),
        call.label.partition("(")[2].rpartition(")")[0],
        first,
        other,
        kernel.kernel_id if isinstance(kernel, Candidate) else "",
    )
    failures = {f"{name}: {errors[name]}": 1 for name in (first, other) if name in errors}
    if failures:
        return replace(row, failures=failures)
    error, allowed = difference(results[other], results[first], call.op)
    measured = {name: one.kernel.median_us for name, one in times.items() if one.kernel is not None}
    us, base_us = measured.get(other), measured.get(first)
    return replace(row, calls=1, error=error, allowed=allowed, us=us, baseline_us=base_us)


def _compare_function(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    backends: Sequence[str],
    budget_s: float,
) -> CompareReport:
    """A function of the user's, whose lz calls go to one backend alone; its own wall time."""
    if len(backends) < 2:
        raise InvalidArgument(f"a function is compared on two backends or more; got {', '.join(backends)}")
    times: dict[str, list[float]] = {name: [] for name in backends}
    results: dict[str, Any] = {}
    errors: dict[str, str] = {}
    end_s = time.monotonic() + budget_s
    for turn in range(MAX_RUNS):
        if turn > 1 and time.monotonic() >= end_s:
            break
        for name in backends:
            if name in errors:
                continue
            layer = {"origin": f"lz.compare on {name}", "values": {"rules": [{"allow_sources": [name]}]}}
            start_s = time.perf_counter()
            try:
                with Scope(Overlay.of(layer)):
                    result = function(*args, **kwargs)
                    api.synchronize()
            except (BrokerLost, NotConnected):
                raise
            except LayerZeroError as exc:
                errors[name] = f"{exc.code}: {' '.join(exc.message.split())}"
                continue
            if turn:  # the first one starts workers
                times[name].append((time.perf_counter() - start_s) * 1e6)
            else:
                results[name] = result
    first, *others = backends
    rows = []
    for other in others:
        row = Compared(getattr(function, "__name__", "function"), "", "wall time", first, other)
        failures = {f"{name}: {errors[name]}": 1 for name in (first, other) if name in errors}
        if failures:
            rows.append(replace(row, failures=failures))
            continue
        error, allowed = difference(results[other], results[first])
        us, base_us = (sorted(times[name])[len(times[name]) // 2] if times[name] else None for name in (other, first))
        rows.append(replace(row, calls=1, error=error, allowed=allowed, us=us, baseline_us=base_us))
    return CompareReport(tuple(rows))


def difference(found: Any, expected: Any, op: str = "", depth: int = 0) -> tuple[float, float]:
    """The largest error of a result against another, and what is allowed of it. Whatever is no array must be equal."""
    pairs: list[tuple[Any, Any]] = []
    if depth < _MAX_DEPTH and type(found) is type(expected):
        if isinstance(found, (tuple, list)) and len(found) == len(expected):
            pairs = list(zip(found, expected, strict=True))
        elif isinstance(found, dict) and found.keys() == expected.keys():
            pairs = [(found[key], expected[key]) for key in found]
    if pairs:
        errors = [difference(one, other, op, depth + 1) for one, other in pairs]
        return max(errors, key=lambda one: one[0] / one[1] if one[1] else (one[0] and float("inf")))
    one, other = _dense(found), _dense(expected)
    if one is None or other is None:
        return (0.0 if one is other and found == expected else float("inf")), 0.0
    (memory, spec), (other_memory, other_spec) = one, other
    allowed = BOTH * tolerance(spec.dtype, op, spec.dtype)
    if (spec.dtype, spec.shape) != (other_spec.dtype, other_spec.shape):
        return float("inf"), allowed
    return (difference_of(memory, other_memory, spec, 0) if spec.numel else 0.0), allowed


def _dense(value: Any) -> tuple[memoryview, TensorSpec] | None:
    """The elements of an array of any library we know, row-major; None for anything else."""
    if isinstance(value, GpuArray):
        dense = TensorSpec.contiguous(value.spec.dtype, value.spec.shape)
        return memoryview(gather(memoryview(value.load()), value.spec)), dense
    try:
        array = describe(value)
        if array.device != CPU:  # torch's and CuPy's
            array = describe(value.cpu() if hasattr(value, "cpu") else value.get())
    except (InvalidArgument, AttributeError):
        return None
    dense = TensorSpec.contiguous(array.spec.dtype, array.spec.shape)
    memory = memoryview(bytearray(dense.span_bytes))
    if dense.span_bytes:
        copy_into(array, memory)
    return memory, dense
