"""LAYERZERO_DEBUG=1: each call is waited for, checked, and told in a line of stderr. docs/debugging.md."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from layerzero.client.arrays.copies import copy_into
from layerzero.client.arrays.recognition import CPU, Array, describe
from layerzero.client.connection import arena as arenas
from layerzero.client.connection.call import Request, describe_args
from layerzero.client.connection.report import SelectionReport
from layerzero.client.session.session import Session
from layerzero.ipc.errors import BackendError, LayerZeroError
from layerzero.ipc.logs import log
from layerzero.ipc.vocabulary.ops import OPS

MAX_REFUSED = 8  # kernels of which it is told why they were refused
# All bits of the exponent are set in NaN and infinity, and of those infinity alone has no other one but the sign.
_EXPONENTS: dict[str, tuple[Literal["H", "I", "Q"], int]] = {
    "float16": ("H", 0x7C00),
    "bfloat16": ("H", 0x7F80),
    "float32": ("I", 0x7F80_0000),
    "float64": ("Q", 0x7FF0 << 48),
}
# Results whose meaning has -infinity: of a token that is removed, the log-sum-exp (of inputs, too) of a row that sees
# nothing.
_MEANS_LOWEST = {
    ("filter_logits", 0),
    *((f"{name}_forward", 1) for name in ("attention", "attention_varlen", "paged_attention")),
    *((name, 1) for name in ("merge_attention", "mla_decode")),
}
_INDICES: dict[str, Literal["i", "q"]] = {"int32": "i", "int64": "q"}
_SIGNS = {"H": 1 << 15, "I": 1 << 31, "Q": 1 << 63}


class CheckedSession(Session):
    """Calls by the Python alone, one after the other. Raises BackendError where a kernel has written where it must not,
    or has made NaN or infinity of finite numbers; the result is lost then."""

    def run(self, request: Request, *, is_recorded: bool = False) -> Any:
        """As Session.run, with the checks."""
        if request.places is not None:  # of a function: what it does with its arguments is its own affair
            return super().run(request, is_recorded=is_recorded)
        self.repeats.forget()
        inputs = list(_inputs(request))
        was_finite = all(_first_strange(one, means_lowest=name.startswith("lse")) is None for name, one in inputs)
        is_defined = not _is_mean_of_nothing(request, inputs)
        start_s = time.monotonic()
        try:
            result = super().run(request, is_recorded=is_recorded)
            self.gpus.synchronize(None)
        except LayerZeroError as exc:
            log("call.failed", op=request.op, error=exc.code, detail=exc.message.partition("\n")[0])
            raise
        report = self.last_report()
        assert report is not None
        _tell(request, report, inputs, time.monotonic() - start_s)
        written = [f"it has written {where}" for where in arenas.pool.overruns()]
        wrong = [*written, *(_strange_results(request.op, result) if was_finite and is_defined else ())]
        if wrong:
            log("call.wrong", op=request.op, kernel=report.kernel_id, wrong=wrong)
            if_so = "" if written else " where others do better (lz.compare)"  # the numbers may be at fault
            raise BackendError(
                f"avoid {report.kernel_id} for this call (lz.avoid){if_so}, and report it: {'; '.join(wrong)}. Found "
                "by LAYERZERO_DEBUG",
                backend=report.backend,
                kernel_id=report.kernel_id,
            )
        return result


def _inputs(request: Request) -> Iterator[tuple[str, Array]]:
    for name, one in zip(OPS[request.op].inputs, describe_args(request), strict=False):
        if one is not None:
            yield name, one


def _is_mean_of_nothing(request: Request, inputs: Sequence[tuple[str, Array]]) -> bool:
    """Whether no target of cross_entropy counts: its mean is NaN then."""
    if request.op != "cross_entropy" or request.params["reduction"] != "mean":
        return False
    target = dict(inputs).get("target")
    if target is None or target.device != CPU or target.spec.dtype not in _INDICES:  # what is wrong is told by others
        return False
    plain = bytearray(target.nbytes)
    copy_into(target, memoryview(plain))
    form = _INDICES[target.spec.dtype]
    return all(number == request.params["ignore_index"] for number in memoryview(plain).cast(form))


def _first_strange(array: Array, *, means_lowest: bool = False) -> str | None:
    """The first NaN or infinity of floats in the CPU's memory, in words; of -infinity nothing where it is meant."""
    if array.spec.dtype not in _EXPONENTS or array.device != CPU:
        return None
    form, mask = _EXPONENTS[array.spec.dtype]
    plain = bytearray(array.nbytes)
    copy_into(array, memoryview(plain))
    meant = mask | _SIGNS[form] if means_lowest else None
    for n, bits in enumerate(memoryview(plain).cast(form)):
        if bits & mask == mask and bits != meant:
            return f"{'infinity' if bits & ~_SIGNS[form] == mask else 'NaN'} at {_place(n, array.spec.shape)}"
    return None


def _place(number: int, shape: Sequence[int]) -> list[int]:
    """The indices of an element, of those in row-major order."""
    found: list[int] = []
    for extent in reversed(shape):
        number, index = divmod(number, extent)
        found.insert(0, index)
    return found


def _strange_results(op: str, result: Any) -> Iterator[str]:
    for n, one in enumerate(result if isinstance(result, tuple) else (result,)):
        if one is None:
            continue
        found = _first_strange(describe(one), means_lowest=(op, n) in _MEANS_LOWEST)
        if found is not None:
            yield f"result {n} has {found}, and no input has any"


def _tell(request: Request, report: SelectionReport, inputs: Sequence[tuple[str, Array]], seconds: float) -> None:
    refused = [one for one in report.candidates if not one.accepted]
    log(
        "call.decided",
        op=request.op,
        inputs=[f"{name} {one.spec}" for name, one in inputs],
        kernel=report.kernel_id,
        path=report.path,
        us=round(1e6 * seconds),
        others=[one.kernel_id for one in report.candidates if one.accepted and one.kernel_id != report.kernel_id],
        refused={one.kernel_id: "; ".join(map(str, one.reasons)) for one in refused[:MAX_REFUSED]},
        attempts=[f"{one.kernel_id}: {one.outcome}" for one in report.attempts],
        copies=[f"{one.arg}: {one.nbytes} bytes, {one.reason}" for one in report.copies],
    )
