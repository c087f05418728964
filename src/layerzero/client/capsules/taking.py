"""Taking a capsule: after a worker's confirmed death, when the call has its answer or its error. The arguments are the
caller's and are still there; nothing is done before. And of a result that a shadow check found wrong, whose arguments
were copied for the check."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from layerzero.client.arrays.addresses import address_of
from layerzero.client.arrays.copies import copy_into
from layerzero.client.arrays.recognition import CPU, Array
from layerzero.client.capsules.form import (
    ALIGNMENTS,
    CALL,
    LOG,
    MAX_SEGMENTS,
    MAX_TEXT_BYTES,
    REPORT,
    WRONG,
    Argument,
    Capsule,
    Failure,
    Segment,
    memory_name,
)
from layerzero.client.capsules.store import folder_of, keep_within
from layerzero.client.connection import arena as arenas
from layerzero.client.connection.call import Submitted
from layerzero.client.connection.report import SelectionReport
from layerzero.ipc.errors import ConfigError, DeadlineExceeded, LayerZeroError
from layerzero.ipc.logs import log
from layerzero.ipc.version import __version__
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec

OFF, SHAPES, SMALL, FULL = "off", "shapes", "small", "full"
MODES = (OFF, SHAPES, SMALL, FULL)
SMALL_BYTES = 1 << 20
FULL_BYTES = 1 << 30
TAIL_BYTES = 8192  # of the worker's log
AGAIN_S = 60.0  # a failure like one of before gets no other capsule so soon
ASK_S = 1.0
_LEFT_OUT = "LAYERZERO_CAPSULES=shapes; small and full keep the arguments' bytes, too"


@dataclass(frozen=True)
class Kept:
    """A copy of an argument that lies where workers reach it."""

    address: int
    spec: TensorSpec
    needs_copy: bool = False


class Capsules:
    """Of one session. Threads may share it. `ask`: a question to the broker; `log_of`: where a backend's log lies."""

    def __init__(self, ask: Callable[..., Any], log_of: Callable[[str], Path]) -> None:
        """Raises ConfigError for LAYERZERO_CAPSULES or LAYERZERO_CAPSULE_MIB."""
        self._mode, self._most_bytes = mode_of(os.environ), _most_bytes(os.environ)
        self._folder = folder_of(os.environ)
        self._ask, self._log_of = ask, log_of
        self._taken_s: dict[tuple[object, ...], float] = {}
        self._lock = threading.Lock()

    def take(self, submitted: Submitted, report: SelectionReport) -> str:
        """A note that names the capsule of a call, "" where there is none to be had."""
        failures = [
            Failure(a.backend, a.kernel_id, a.outcome, a.detail[:1000], a.exit_signal, a.exit_code)
            for a in report.attempts
            if a.outcome is not None and _is_end(a.outcome, a.exit_signal, a.exit_code)
        ]
        if not failures or self._mode == OFF or not _can_be_kept(submitted) or not self._is_new(submitted, failures[0]):
            return ""
        told = json.dumps(report.to_dict(), default=str)
        try:
            given = _given(submitted)
            name = self._write(submitted, given, failures, report.kernel_id or "", told)
        except OSError as exc:  # a full disk must not cost the caller its result
            log("capsule.failed", error=str(exc), folder=str(self._folder))
            return f"no capsule of the failure was kept: {exc.strerror or exc}"
        return f"capsule of the failure: lz replay {name}"

    def take_wrong(
        self, submitted: Submitted, blocks: Sequence[memoryview], kernel_id: str, reference: str, error: float
    ) -> None:
        """Of a call that ended well long ago, with a result that is `error` from that of the kernel `reference`.
        `blocks`: a copy of each argument's memory, as kernels got it."""
        detail = f"{error:.3g} from {reference}, found by a shadow check"
        failure = Failure(kernel_id.partition(".")[0], kernel_id, WRONG, detail, None, None)
        if self._mode == OFF or not _can_be_kept(submitted) or not self._is_new(submitted, failure):
            return
        pairs = list(zip(blocks, _given(submitted), strict=True))
        if any(block.nbytes != spec.span_bytes or not block.nbytes for block, (_, _, spec) in pairs):
            return  # the kernel got it in another shape
        given = [(name, Kept(address_of(block), spec), spec) for block, (name, _, spec) in pairs]
        try:
            self._write(submitted, given, [failure], reference, "")
        except OSError as exc:
            log("capsule.failed", error=str(exc), folder=str(self._folder))

    def _is_new(self, submitted: Submitted, first: Failure) -> bool:
        specs = tuple(None if array is None else array.spec for array in submitted.arrays)
        key = (submitted.request.op, first.kernel_id, first.what, specs)
        now_s = time.monotonic()
        with self._lock:
            if now_s - self._taken_s.get(key, -AGAIN_S) < AGAIN_S:
                return False
            if len(self._taken_s) >= 1024:
                self._taken_s.clear()
            self._taken_s[key] = now_s
        return True

    def _write(
        self,
        submitted: Submitted,
        given: Sequence[tuple[str, Any, TensorSpec]],
        failures: Sequence[Failure],
        served_by: str,
        report: str,
    ) -> str:
        op, made_s = submitted.request.op, time.time()
        when = time.strftime("%Y%m%dT%H%M%S", time.gmtime(made_s))
        name = f"{when}-{op}-{_word(failures[0])}-{os.urandom(3).hex()}"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = self._folder / f".{name}"
        draft.mkdir(mode=0o700)
        try:
            arguments, segments, left_out = self._keep_memory(given, draft)
            outs = submitted.outs
            capsule = Capsule(
                name,
                op,
                made_s,
                arguments,
                segments,
                dict(submitted.request.params),
                outs[0].spec if len(outs) == 1 else None,
                tuple(failures),
                served_by,
                left_out,
                self._facts(failures[0].backend, OPS[op].in_place),
            )
            (draft / CALL).write_text(json.dumps(capsule.to_dict(), indent=1))
            if report:
                (draft / REPORT).write_text(report[:MAX_TEXT_BYTES])
            with suppress(OSError):
                (draft / LOG).write_bytes(_tail(self._log_of(failures[0].backend)))
            draft.rename(self._folder / name)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        keep_within(self._folder, self._most_bytes)
        return name

    def _keep_memory(
        self, given: Sequence[tuple[str, Any, TensorSpec]], draft: Path
    ) -> tuple[tuple[Argument, ...], tuple[Segment, ...], str]:
        own: dict[str, Any] = {}  # until the bytes are written
        arguments, segments, blocks = lay_out(given, own)
        nbytes = sum(segment.nbytes for segment in segments)
        most = {SHAPES: 0, SMALL: SMALL_BYTES, FULL: min(FULL_BYTES, self._most_bytes)}[self._mode]
        if self._mode == SHAPES:
            return arguments, segments, _LEFT_OUT
        if nbytes > most:
            return arguments, segments, f"{nbytes:,} bytes of arguments; LAYERZERO_CAPSULES={self._mode} keeps {most:,}"
        kept = []
        for number, (segment, block) in enumerate(zip(segments, blocks, strict=True)):
            with (draft / memory_name(number)).open("xb") as file:
                file.write(block)
            kept.append(replace(segment, sha256=hashlib.sha256(block).hexdigest()))
        return arguments, tuple(kept), ""

    def _facts(self, backend: str, in_place: Sequence[str]) -> dict[str, Any]:
        import platform  # only where a capsule is made

        facts: dict[str, Any] = {
            "layerzero": __version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "program": Path(sys.argv[0]).name if sys.argv else "",
        }
        if in_place:
            facts["written in place"] = f"{', '.join(in_place)}: as the failed attempts left them"
        with suppress(LayerZeroError):
            for row in self._ask("status", within_s=ASK_S)["backends"]:
                if row["name"] == backend:
                    facts["versions"] = row["versions"]
        return facts


def mode_of(environ: Mapping[str, str]) -> str:
    """What is kept of a failure. Raises ConfigError."""
    mode = environ.get("LAYERZERO_CAPSULES", "").strip().lower() or SHAPES
    if mode not in MODES:
        raise ConfigError(f"LAYERZERO_CAPSULES: {mode!r:.40}; allowed: {', '.join(MODES)}")
    return mode


def _most_bytes(environ: Mapping[str, str]) -> int:
    text = environ.get("LAYERZERO_CAPSULE_MIB", "").strip() or "1024"
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"LAYERZERO_CAPSULE_MIB: {text!r:.40}; allowed: MiB that all capsules may take together")
    return int(text) << 20


def _is_end(outcome: str, exit_signal: int | None, exit_code: int | None) -> bool:
    """Whether its worker died of it, or was killed for it; an exception of a kernel tells all by itself."""
    return exit_signal is not None or exit_code is not None or outcome == DeadlineExceeded.code


def _can_be_kept(submitted: Submitted) -> bool:
    """Texts, functions and what came from another node have no arguments that a capsule describes; memory of a GPU may
    be lost with it."""
    request = submitted.request
    return (
        request.places is None
        and request.output_bytes is None
        and request.finish is None
        and all(array is None or array.device == CPU for array in submitted.arrays)
        and len(submitted.arrays) <= MAX_SEGMENTS
    )


def _given(submitted: Submitted) -> list[tuple[str, Any, TensorSpec]]:
    """Name, array, and what a worker gets of it, of each tensor that the call has."""
    named = zip(OPS[submitted.request.op].inputs, submitted.arrays, strict=True)
    return [(n, a, spec_of(a, is_dense=n in submitted.adapted)) for n, a in named if a is not None]


def spec_of(array: Array, *, is_dense: bool = False) -> TensorSpec:
    """What a worker gets of an argument, with the caller's dimensions: the memory as it lies where workers reach that,
    else a dense copy."""
    spec = array.spec
    is_reached = not array.needs_copy and not is_dense and arenas.pool.find(array.address, spec.span_bytes) is not None
    return spec if is_reached or spec.is_contiguous else TensorSpec.contiguous(spec.dtype, spec.shape)


def lay_out(
    given: Sequence[tuple[str, Any, Any]], own: dict[str, Any]
) -> tuple[tuple[Argument, ...], tuple[Segment, ...], list[Any]]:
    """Where kernels met the arguments, those in one piece that share memory, and the bytes of each piece. `given`:
    name, array, and what a worker gets of it: that very memory, or a dense copy, which lies in memory that `own`
    keeps."""
    places: dict[str, tuple[int, TensorSpec]] = {}
    for name, array, spec in given:
        address = array.address
        if array.needs_copy or spec != array.spec or arenas.pool.find(address, spec.span_bytes) is None:
            block = own[name] = ctypes.create_string_buffer(spec.span_bytes + ALIGNMENTS)
            address = ctypes.addressof(block)
            address += -address % ALIGNMENTS
            if spec.span_bytes:
                copy_into(array, _bytes_at(address, spec.span_bytes))
        places[name] = address, spec
    merged: list[tuple[int, int]] = []
    for start, end in sorted((address, address + spec.span_bytes) for address, spec in places.values()):
        if merged and start < merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    segments = tuple(Segment(end - start, start % ALIGNMENTS) for start, end in merged)
    blocks = [_bytes_at(start, end - start) for start, end in merged]
    arguments = []
    for name, (address, spec) in places.items():
        at = next(n for n, (start, end) in enumerate(merged) if start <= address and address + spec.span_bytes <= end)
        arguments.append(Argument(name, spec, at, address - merged[at][0]))
    return tuple(arguments), segments, blocks


def _bytes_at(address: int, nbytes: int) -> Any:
    """A view of memory, and of nothing where there is none."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B") if nbytes else b""


def _word(failure: Failure) -> str:
    if failure.exit_signal is None or failure.is_late:
        return failure.what
    with suppress(ValueError):
        return signal.Signals(failure.exit_signal).name
    return failure.what


def _tail(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(os.fstat(file.fileno()).st_size - TAIL_BYTES, 0))
        return file.read(TAIL_BYTES)
