"""Capsules of calls on a GPU: taken on a thread of their own once the broker has told what became of a call whose
worker died, or by the thread of shadow checks, of a wrong result. The client's context is intact then. Without
LAYERZERO_CAPSULES=small or full no argument is held for that.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from layerzero.client.arrays.recognition import Array
from layerzero.client.capsules.form import CUDA, Argument, Failure, Segment
from layerzero.client.capsules.taking import Capsules, Failed, Memory, failures_of, merge, not_kept, pids_of, wrong
from layerzero.client.connection.link import Link
from layerzero.client.connection.report import SelectionReport
from layerzero.client.gpu.arrays import version_of
from layerzero.client.gpu.memory import LOOK_S, READY_S
from layerzero.ipc.errors import BackendError, LayerZeroError
from layerzero.ipc.transport.wire import NO_ARENA, REF
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec

if TYPE_CHECKING:
    from layerzero.client.gpu.device import Gpu
    from layerzero.client.gpu.outcomes import Enqueued
    from layerzero.client.gpu.samples import GpuSample

NOTE_S = 10.0  # so long a report waits for the capsule that it names
LINGER_S = 1.0  # after a call is done its worker's death may not have been heard of yet
SWEEP_S = 0.25
MAX_PIDS = 1024
MAX_HELD_BYTES = 256 << 20  # of all calls together; the newest may have as much as a capsule
APART = 1 << 48  # between arenas, of which only numbers are known: offsets in them are less


class Given(NamedTuple):
    """The arguments of a call while they are held. `versions`: torch's counters of writes, None where there is none.
    `is_written`: the call writes into them."""

    arrays: tuple[Array | None, ...]
    versions: tuple[int | None, ...]
    is_written: bool

    @property
    def nbytes(self) -> int:
        """Of the arguments, each piece of memory once."""
        return sum({one.address: one.spec.span_bytes for one in self.arrays if one is not None}.values())

    @property
    def whole_bytes(self) -> int:
        """Of the memory that stays while they are held: a view of a tensor holds all of that."""
        return sum(dict([_whole(one) for one in self.arrays if one is not None]).values())

    def problem(self, names: Sequence[str]) -> str:
        """Why their bytes are not those that the kernel met; "" where they are, as far as that can be seen."""
        if self.is_written:
            return "the call writes into its arguments, and was made again elsewhere"
        for name, array, version in zip(names, self.arrays, self.versions, strict=True):
            if array is not None and version_of(array) != version:
                return f"the program has written to {name} since the call"
            if array is not None and array.needs_copy:
                return f"{name} has strides that cannot be described"
        return ""


class _Hold:
    """Of one call. `until_s`: once it was seen to be done."""

    def __init__(self, nbytes: int) -> None:
        self.until_s, self.nbytes = math.inf, nbytes


class _Taken:
    """What became of a capsule."""

    def __init__(self) -> None:
        self.is_done, self.note = threading.Event(), ""


class Deaths:
    """Of one connection. Threads may share it."""

    def __init__(self, capsules: Capsules, link: Link) -> None:
        self.holds = capsules.keeps_data
        self._capsules, self._link = capsules, link
        self._held: dict[Enqueued, _Hold] = {}  # oldest first
        self._held_bytes = 0
        self._queue: SimpleQueue[tuple[Enqueued, _Taken] | None] = SimpleQueue()  # None: look
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_finished = False
        self._pids: set[int] = set()  # of dead workers of which a call was kept

    # --- before a failure

    def give(
        self, enqueued: Enqueued, refs: bytes, arrays: tuple[Array | None, ...], out: Array | None, *, is_direct: bool
    ) -> None:
        """What a capsule of a call is made of, before that is sent. Where `holds`, its arguments stay until it is done,
        if they are not more than a capsule may have. `is_direct`: its result is not written over them."""
        enqueued.refs, enqueued.has_out = refs, out is not None
        if self.holds:
            versions = tuple([None if array is None else version_of(array) for array in arrays])
            given = Given(arrays, versions, not is_direct or bool(OPS[enqueued.op].in_place))
            most = self._capsules.most_bytes
            if given.nbytes > most:
                enqueued.not_held = self._capsules.too_large(given.nbytes)
            elif given.whole_bytes > max(most, MAX_HELD_BYTES):
                enqueued.not_held = f"they are views of {given.whole_bytes:,} bytes, which are not held for them"
            else:
                enqueued.given = given

    def hold(self, enqueued: Enqueued) -> None:
        """After it was sent: until it is done, and its worker's death would have been heard of. Where all together are
        more than MAX_HELD_BYTES, the oldest are let go of."""
        given = enqueued.given
        if given is not None:
            with self._lock:
                is_first, hold = not self._held, _Hold(given.whole_bytes)
                self._held[enqueued] = hold
                self._held_bytes += hold.nbytes
                while self._held_bytes > MAX_HELD_BYTES and len(self._held) > 1:
                    self._let_go(next(iter(self._held)), "let go of, for those of later calls")
            if is_first:
                self._put(None)

    def sweep(self) -> None:
        """Let go of the arguments of calls that were done LINGER_S ago; of all once the broker is lost, since
        nothing is heard of any then."""
        if self._held and self._link.lost is not None:
            with self._lock:
                for one in list(self._held):
                    self._let_go(one, "let go of when the broker was lost")
        elif self._held:
            self._link.read_nowait()  # a failure is heard of before its arguments go
            now_s = time.monotonic()
            with self._lock:
                for one, hold in list(self._held.items()):
                    if hold.until_s == math.inf and one.gpu.order.page.is_done(one.point):
                        hold.until_s = now_s + LINGER_S
                    elif hold.until_s <= now_s or one.taken:
                        self._let_go(one, "let go of when it was done")

    def _let_go(self, one: Enqueued, why: str) -> None:
        """Under the lock. What a capsule is being made of goes when that is done."""
        self._held_bytes -= self._held.pop(one).nbytes
        if not one.taken:
            one.given, one.not_held = None, why

    # --- after one

    def note(self, enqueued: Enqueued) -> None:
        """The broker has told of attempts that failed. Called where its answers are read: what is to be done takes a
        thread."""
        if not self._capsules.is_on:
            return
        taken = _Taken()
        with self._lock:
            enqueued.taken = (*enqueued.taken, taken)
        self._put((enqueued, taken))

    def _put(self, found: tuple[Enqueued, _Taken] | None) -> None:
        with self._lock:
            if self._thread is None and not self._is_finished:
                self._thread = threading.Thread(target=self._run, name="lz-capsules", daemon=True)
                self._thread.start()
        self._queue.put(found)

    def note_of(self, enqueued: Enqueued) -> str:
        """Of the capsule of a call; "" where there is none. Waits for one that is being taken."""
        until_s = time.monotonic() + NOTE_S
        for taken in enqueued.taken:
            taken.is_done.wait(max(until_s - time.monotonic(), 0.0))
        return next((taken.note for taken in enqueued.taken if taken.note), "")

    def finish(self) -> None:
        """Wait for what is being taken, not for ever."""
        with self._lock:
            self._is_finished, thread = True, self._thread
        if thread is not None:
            self._queue.put(None)
            thread.join(NOTE_S)
        with self._lock:
            self._held.clear()
            self._held_bytes = 0

    def _run(self) -> None:
        while True:
            try:
                found = self._queue.get(timeout=SWEEP_S if self._held else None)
            except Empty:
                found = None
            if found is not None:
                self._keep(*found)
                del found
                continue
            self.sweep()
            if self._is_finished and self._queue.empty():
                return

    def _keep(self, enqueued: Enqueued, taken: _Taken) -> None:
        try:
            taken.note = self._take(enqueued)
        except Exception as exc:  # the call has its result or its error all the same
            taken.note = not_kept(exc)
        finally:
            taken.is_done.set()
            enqueued.given = None

    def _take(self, enqueued: Enqueued) -> str:
        report, route = enqueued.outcomes.plain_report(enqueued), enqueued.route
        failures = self._failures(report)
        if not failures or route.asks is None:
            return ""
        params, specs = route.asks
        names = OPS[enqueued.op].inputs

        def describe() -> tuple[Failed, Memory]:
            facts: dict[str, Any] = {"gpu": _gpu(enqueued.gpu), "memory crosses by": enqueued.gpu.transport}
            given, places = enqueued.given, dict[str, tuple[int, TensorSpec]]()
            if given is not None:
                pairs = zip(names, given.arrays, strict=True)
                places = {name: (array.address, array.spec) for name, array in pairs if array is not None}
            else:
                places, is_known = _places(names, specs, enqueued.refs)
                if not is_known:
                    facts["alignment"] = "not known: 256 bytes"
            arguments, segments, starts = merge(places)
            if given is not None and None in [
                version for array, version in zip(given.arrays, given.versions, strict=True) if array is not None
            ]:
                facts["arguments"] = "as they were when the failure was heard of: not all of them count their writes"
            output = route.plan.results[0] if len(route.plan.results) == 1 and enqueued.has_out else None
            told = json.dumps(report.to_dict(), default=str)
            served_by = report.kernel_id or ""
            failed = Failed(
                *(enqueued.op, failures, None, dict(params), arguments, output, served_by, told, CUDA),
                facts=facts,
                pids=pids_of(report),
            )
            return failed, self._memory(enqueued, segments, starts)

        return self._capsules.keep(failures[0], (enqueued.op, specs), describe)

    def _failures(self, report: SelectionReport) -> list[Failure]:
        """Whom the broker blames; where it blames nobody, of each dead worker the first call that is heard of, which is
        the oldest that was open: what a GPU was in when it was lost is not always seen."""
        found = failures_of(report.attempts)
        pids = {one.worker_pid for one in report.attempts if one.outcome is not None}
        is_first = not pids <= self._pids
        if len(self._pids) >= MAX_PIDS:
            self._pids.clear()
        self._pids |= pids
        return found or (failures_of(report.attempts, waited=True) if is_first else [])

    def _memory(self, enqueued: Enqueued, segments: tuple[Segment, ...], starts: Sequence[int]) -> Memory:
        given = enqueued.given
        if given is None:
            why = enqueued.not_held or ("a call in a graph of the program" if self.holds else "not held")
            return Memory(segments, lambda: (), f"its arguments are gone: {why}")
        problem = given.problem(OPS[enqueued.op].inputs)
        return Memory(segments, lambda: self._load(enqueued, given, segments, starts), problem)

    def _load(
        self, enqueued: Enqueued, given: Given, segments: Sequence[Segment], starts: Sequence[int]
    ) -> list[bytearray]:
        """Raises LayerZeroError, CudaError too."""
        gpu, until_s = enqueued.gpu, time.monotonic() + READY_S
        while not gpu.order.page.is_ready(enqueued.point):
            if time.monotonic() >= until_s:
                raise BackendError(f"its arguments were not there within {READY_S:g} s")
            time.sleep(LOOK_S)
        blocks = gpu.memory.read([(start, one.nbytes) for start, one in zip(starts, segments, strict=True)])
        problem = given.problem(OPS[enqueued.op].inputs)  # meanwhile
        if problem:
            raise BackendError(problem)
        return blocks


def _whole(array: Array) -> tuple[int, int]:
    """Address and bytes of the memory that stays while an array is held: torch says what a view is of."""
    if array.kind == "torch":
        with suppress(AttributeError, RuntimeError):  # a subclass may have none: NotImplementedError is one of these
            storage = array.owner.untyped_storage()
            return storage.data_ptr(), storage.nbytes()
    return array.address, array.spec.span_bytes


def _places(
    names: Sequence[str], specs: Sequence[TensorSpec | None], refs: bytes
) -> tuple[dict[str, tuple[int, TensorSpec]], bool]:
    """Where arguments lie relative to each other: by what was lent, where that is known, else apart."""
    known = [REF.unpack_from(refs, n * REF.size) for n in range(len(refs) // REF.size)]
    places = {}
    for number, (name, spec) in enumerate(zip(names, specs, strict=True)):
        if spec is None:
            continue
        arena, _, offset, _ = known[number] if number < len(known) else (number + 1, 0, 0, 0)
        places[name] = (offset if arena == NO_ARENA else (arena + 1) * APART + offset, spec)
    return places, bool(known)


def take_wrong(capsules: Capsules, sample: GpuSample, kernel_id: str, reference: str, error: float) -> None:
    """Of a call that ended well long ago, with a result that is `error` from that of the kernel `reference`. Its
    arguments were copied for the check."""
    asks = sample.route.asks
    if asks is None or not capsules.is_on:
        return
    params, specs = asks
    failure = wrong(kernel_id, reference, error)
    copies = [(n, one) for n, one in zip(OPS[sample.request.op].inputs, sample.inputs, strict=True) if one is not None]

    def describe() -> tuple[Failed, Memory]:
        segments = tuple(Segment(one.spec.span_bytes, 0) for _, one in copies)
        arguments = tuple(Argument(name, one.spec, number, 0) for number, (name, one) in enumerate(copies))
        facts = {"gpu": _gpu(sample.gpu), "arguments": "copies of the check: what they shared, and where, is not kept"}
        failed = Failed(
            *(sample.request.op, [failure], None, dict(params), arguments, None, reference, "", CUDA), facts=facts
        )
        return failed, Memory(segments, lambda: [one.load() for _, one in copies])

    capsules.keep(failure, (sample.request.op, specs), describe)


def _gpu(gpu: Gpu) -> str:
    context = gpu.memory.context
    try:
        name, version = context.driver.name(context.ordinal), context.driver.version()
    except LayerZeroError:
        return gpu.uuid
    return f"{name}, driver's CUDA {version // 1000}.{version % 1000 // 10}"


def with_note(report: SelectionReport, note: str) -> SelectionReport:
    """The report, with what names a capsule."""
    return replace(report, notes=(*report.notes, note)) if note else report
