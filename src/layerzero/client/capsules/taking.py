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
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from layerzero.client.arrays.addresses import address_of
from layerzero.client.arrays.copies import copy_into
from layerzero.client.arrays.recognition import CPU, Array
from layerzero.client.capsules.form import (
    ALIGNMENTS,
    CALL,
    LAST_CALLS,
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
from layerzero.client.capsules.form import CPU as IN_HOST
from layerzero.client.capsules.kernel_log import lines_of
from layerzero.client.capsules.of_function import FunctionCall
from layerzero.client.capsules.store import folder_of, keep_within
from layerzero.client.connection import arena as arenas
from layerzero.client.connection.call import Submitted
from layerzero.client.connection.report import Attempt, SelectionReport
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
WAITED = "queued"  # the phase of an attempt of a call that its worker had not begun
_LEFT_OUT = "LAYERZERO_CAPSULES=shapes; small and full keep the arguments' bytes, too"


@dataclass(frozen=True)
class Kept:
    """A copy of an argument that lies where workers reach it."""

    address: int
    spec: TensorSpec
    needs_copy: bool = False


@dataclass(frozen=True)
class Memory:
    """Of a call's arguments. `load`: the bytes of each segment, asked for once and only where they are to be kept; may
    raise LayerZeroError, whose message says then why there are none. `left_out`: why they cannot be had at all."""

    segments: tuple[Segment, ...]
    load: Callable[[], Sequence[Any]]
    left_out: str = ""


@dataclass(frozen=True)
class Failed:
    """A call that ended badly, as a capsule tells of it. `likeness`: equal for calls of which one is enough."""

    op: str
    failures: Sequence[Failure]
    likeness: Hashable
    params: Mapping[str, Any] = field(default_factory=dict)
    arguments: tuple[Argument, ...] = ()
    output: TensorSpec | None = None
    served_by: str = ""
    report: str = ""  # JSON
    device: str = IN_HOST
    function: FunctionCall | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    pids: Collection[int] = ()  # of the workers


class Capsules:
    """Of one session. Threads may share it. `ask`: a question to the broker; `log_of`: where a backend's log lies."""

    def __init__(self, ask: Callable[..., Any], log_of: Callable[[str], Path]) -> None:
        """Raises ConfigError for LAYERZERO_CAPSULES or LAYERZERO_CAPSULE_MIB."""
        self._mode, self._most_bytes = mode_of(os.environ), _most_bytes(os.environ)
        self._folder = folder_of(os.environ)
        self._ask, self._log_of = ask, log_of
        self._taken_s: dict[tuple[object, ...], float] = {}
        self._lock = threading.Lock()

    @property
    def is_on(self) -> bool:
        return self._mode != OFF

    @property
    def keeps_data(self) -> bool:
        """Whether bytes of arguments may be kept."""
        return self._mode in (SMALL, FULL)

    @property
    def most_bytes(self) -> int:
        """Of the arguments of one call, that its capsule has the bytes of."""
        return {OFF: 0, SHAPES: 0, SMALL: SMALL_BYTES, FULL: min(FULL_BYTES, self._most_bytes)}[self._mode]

    def too_large(self, nbytes: int) -> str:
        """Why a capsule does not have so many bytes of arguments."""
        return f"{nbytes:,} bytes of arguments; LAYERZERO_CAPSULES={self._mode} keeps {self.most_bytes:,}"

    def take(self, submitted: Submitted, report: SelectionReport) -> str:
        """A note that names the capsule of a call, "" where there is none to be had."""
        failures = failures_of(report.attempts)
        if not failures or not self.is_on or not _can_be_kept(submitted):
            return ""
        told = json.dumps(report.to_dict(), default=str)
        pids = pids_of(report)
        return self._keep_op(submitted, lambda: _given(submitted), failures, report.kernel_id or "", told, pids)

    def take_wrong(
        self, submitted: Submitted, blocks: Sequence[memoryview], kernel_id: str, reference: str, error: float
    ) -> None:
        """Of a call that ended well long ago, with a result that is `error` from that of the kernel `reference`.
        `blocks`: a copy of each argument's memory, as kernels got it."""
        failure = wrong(kernel_id, reference, error)
        if not self.is_on or not _can_be_kept(submitted):
            return
        pairs = list(zip(blocks, _given(submitted), strict=True))
        if any(block.nbytes != spec.span_bytes or not block.nbytes for block, (_, _, spec) in pairs):
            return  # the kernel got it in another shape
        given = [(name, Kept(address_of(block), spec), spec) for block, (name, _, spec) in pairs]
        self._keep_op(submitted, lambda: given, [failure], reference, "")

    def _keep_op(
        self,
        submitted: Submitted,
        given: Callable[[], Sequence[tuple[str, Any, TensorSpec]]],
        failures: Sequence[Failure],
        served_by: str,
        report: str,
        pids: Collection[int] = (),
    ) -> str:
        op, outs = submitted.request.op, submitted.outs
        own: dict[str, Any] = {}  # until the bytes are written

        def describe() -> tuple[Failed, Memory]:
            arguments, segments, blocks = lay_out(given(), own)
            output = outs[0].spec if len(outs) == 1 else None
            params = dict(submitted.request.params)
            failed = Failed(op, failures, None, params, arguments, output, served_by, report, pids=pids)
            return failed, Memory(segments, lambda: blocks)

        likeness = (op, tuple(None if array is None else array.spec for array in submitted.arrays))
        return self.keep(failures[0], likeness, describe)

    def keep(self, first: Failure, likeness: Hashable, describe: Callable[[], tuple[Failed, Memory]]) -> str:
        """A note that names the capsule of a failed call, "" where one like it was kept a moment ago. Raises
        nothing: what fails is the note."""
        try:
            if not self._is_new((first.kernel_id, first.what, likeness)):
                return ""
            name = self._write(*describe())
        except Exception as exc:  # a full disk must not cost the caller its result, nor anything else
            return not_kept(exc)
        return f"capsule of the failure: lz replay {name}"

    def _is_new(self, key: tuple[object, ...]) -> bool:
        now_s = time.monotonic()
        with self._lock:
            if now_s - self._taken_s.get(key, -AGAIN_S) < AGAIN_S:
                return False
            if len(self._taken_s) >= 1024:
                self._taken_s.clear()
            self._taken_s[key] = now_s
        return True

    def _write(self, failed: Failed, memory: Memory) -> str:
        first, made_s = failed.failures[0], time.time()
        when = time.strftime("%Y%m%dT%H%M%S", time.gmtime(made_s))
        what = failed.op if failed.function is None else failed.function.short
        name = f"{when}-{what}-{_word(first)}-{os.urandom(3).hex()}"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = self._folder / f".{name}"
        draft.mkdir(mode=0o700)
        try:
            blocks, left_out = self._blocks_of(memory)
            _write_blocks(draft, blocks)
            capsule = Capsule(
                name,
                failed.op,
                made_s,
                failed.arguments,
                memory.segments,
                failed.params,
                failed.output,
                tuple(failed.failures),
                failed.served_by,
                left_out,
                {**self._facts(first.backend, OPS[failed.op].in_place, failed.pids), **failed.facts},
                failed.device,
                failed.function,
            )
            (draft / CALL).write_text(json.dumps(capsule.to_dict(), indent=1))
            if failed.report:
                (draft / REPORT).write_text(failed.report[:MAX_TEXT_BYTES])
            with suppress(OSError):
                (draft / LOG).write_bytes(_tail(self._log_of(first.backend)))
            draft.rename(self._folder / name)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        keep_within(self._folder, self._most_bytes)
        if not left_out:
            with suppress(RuntimeError):  # the program is ending
                threading.Thread(target=_hash, args=(self._folder / name, capsule), name="lz-capsule").start()
        return name

    def _blocks_of(self, memory: Memory) -> tuple[Sequence[Any], str]:
        """The bytes of each segment, or none and why."""
        nbytes = sum(segment.nbytes for segment in memory.segments)
        if self._mode == SHAPES:
            return (), _LEFT_OUT
        if memory.left_out:
            return (), memory.left_out
        if nbytes > self.most_bytes:
            return (), self.too_large(nbytes)
        try:
            return memory.load(), ""
        except LayerZeroError as exc:
            return (), exc.message

    def _facts(self, backend: str, in_place: Sequence[str], pids: Collection[int]) -> dict[str, Any]:
        import platform  # only where a capsule is made

        facts: dict[str, Any] = {
            "layerzero": __version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "program": Path(sys.argv[0]).name if sys.argv else "",
        }
        if said := lines_of(pids):
            facts["kernel's log"] = said
        if in_place:
            facts["written in place"] = f"{', '.join(in_place)}: as the failed attempts left them"
        with suppress(LayerZeroError):
            for row in self._ask("status", within_s=ASK_S)["backends"]:
                if row["name"] == backend:
                    facts["versions"] = row["versions"]
        try:
            told = self._ask("last_calls", backend=backend, pids=list(pids), within_s=ASK_S)
            facts[LAST_CALLS] = told["calls"] or told["why"] or "it had none"
        except LayerZeroError as exc:
            facts[LAST_CALLS] = f"not known: {exc.message}"
        return facts


def not_kept(exc: Exception) -> str:
    """The note of a call whose capsule could not be made, and a line of the log."""
    log("capsule.failed", error=f"{type(exc).__name__}: {exc}")
    why = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc) or type(exc).__name__
    return f"no capsule of the failure was kept: {why}"


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


def pids_of(report: SelectionReport) -> list[int]:
    """Of the workers of attempts that failed."""
    return [one.worker_pid for one in report.attempts if one.outcome is not None]


def failures_of(attempts: Iterable[Attempt], *, waited: bool = False) -> list[Failure]:
    """Of attempts those that a capsule is made for: their worker died of the call, or was killed for it. An exception
    of a kernel tells all by itself; a call that only waited for a worker that died is not what that died of, unless
    `waited`."""
    return [
        Failure(a.backend, a.kernel_id, a.outcome, a.detail[:1000], a.exit_signal, a.exit_code)
        for a in attempts
        if a.outcome is not None
        and (waited or a.phase != WAITED)
        and (a.exit_signal is not None or a.exit_code is not None or a.outcome == DeadlineExceeded.code)
    ]


def wrong(kernel_id: str, reference: str, error: float) -> Failure:
    """Of a result that is `error` from that of the kernel `reference`."""
    detail = f"{error:.3g} from {reference}, found by a shadow check"
    return Failure(kernel_id.partition(".")[0], kernel_id, WRONG, detail, None, None)


def _can_be_kept(submitted: Submitted) -> bool:
    """Texts and what came from another node have no arguments that a capsule describes; those of functions are
    described where they are made (functions/capsules.py), those on a GPU in client/gpu/deaths.py."""
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
    name, array, and what a worker gets of it: that very memory, or a copy. Where that is as the array lies, its own
    bytes are the copy's; else there is a dense one, in memory that `own` keeps."""
    places: dict[str, tuple[int, TensorSpec]] = {}
    apart = dict[str, int]()
    for name, array, spec in given:
        address = array.address
        if array.needs_copy or spec != array.spec:
            block = own[name] = ctypes.create_string_buffer(spec.span_bytes + ALIGNMENTS)
            address = ctypes.addressof(block)
            address += -address % ALIGNMENTS
            if spec.span_bytes:
                copy_into(array, bytes_at(address, spec.span_bytes))
        elif arenas.pool.find(address, spec.span_bytes) is None:  # kernels met a copy of these very bytes
            apart[name] = address
            continue
        places[name] = address, spec
    arguments, segments, starts = merge(places)
    specs = {name: spec for name, _, spec in given}
    alone = [Argument(name, specs[name], len(segments) + n, 0) for n, name in enumerate(apart)]
    found = {a.name: a for a in (*arguments, *alone)}
    segments += tuple(Segment(specs[name].span_bytes, 0) for name in apart)
    blocks = [bytes_at(at, segment.nbytes) for at, segment in zip((*starts, *apart.values()), segments, strict=True)]
    return tuple(found[name] for name in specs), segments, blocks


def merge(
    places: Mapping[str, tuple[int, TensorSpec]],
) -> tuple[tuple[Argument, ...], tuple[Segment, ...], list[int]]:
    """Arguments by address and spec, those that share memory in one piece; and the address of each piece."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted((address, address + spec.span_bytes) for address, spec in places.values()):
        if merged and start < merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    segments = tuple(Segment(end - start, start % ALIGNMENTS) for start, end in merged)
    arguments = []
    for name, (address, spec) in places.items():
        at = next(n for n, (start, end) in enumerate(merged) if start <= address and address + spec.span_bytes <= end)
        arguments.append(Argument(name, spec, at, address - merged[at][0]))
    return tuple(arguments), segments, [start for start, _ in merged]


def bytes_at(address: int, nbytes: int) -> Any:
    """A view of memory, and of nothing where there is none."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B") if nbytes else b""


def _write_blocks(draft: Path, blocks: Sequence[Any]) -> None:
    """The bytes are the caller's, who may write there once the call has its answer: they are in files before."""
    for number, block in enumerate(blocks):
        with (draft / memory_name(number)).open("xb", buffering=0) as file:
            left = memoryview(block)
            while left:  # one write has 2 GiB at most
                left = left[file.write(left) :]


def _hash(folder: Path, capsule: Capsule) -> None:
    """Tell what the bytes of a capsule are, of which the call has its answer. Where that fails it stays without: the
    capsule is one all the same."""
    hashes = []
    with suppress(OSError):  # it was removed
        for number, _ in enumerate(capsule.segments):
            with (folder / memory_name(number)).open("rb") as file:
                hashes.append(hashlib.file_digest(file, "sha256").hexdigest())
        segments = tuple(replace(one, sha256=word) for one, word in zip(capsule.segments, hashes, strict=True))
        draft = folder / f".{CALL}"
        draft.write_text(json.dumps(replace(capsule, segments=segments).to_dict(), indent=1))
        draft.rename(folder / CALL)


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
