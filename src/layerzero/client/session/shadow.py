"""Shadow checks: a sampled call runs once more on a reference backend, off the caller's path, and the two results are
compared. The broker is told how far they were apart; broker/selection/shadow.py decides what follows. A call on a GPU
is copied there, and run again there, in a stream of the thread's own; the two results are compared in host memory.

Watchers (`Shadow.watch`, for lz.compare) are shown calls as well, and may run them again; of that the broker is told
nothing. The same samples serve background tuning: where policy gives time for it (`tune_budget`), the broker may ask to
run one on a kernel that it knows little about, and notes the time.

Both are off by default; policy turns them on (`shadow_rate`, `tune_budget`), and `Shadow.rate` goes before it. A call
that is not sampled pays for one comparison of integers; calls on a GPU take the way in Python as long as any are
sampled, past the call cache. Calls that run in this process are not sampled, nor are those in the application's CUDA
graphs, which are counted.
"""

from __future__ import annotations

import hashlib
import math
import queue
import random
import threading
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from layerzero.client.connection import arena as arenas
from layerzero.client.connection.call import Sample
from layerzero.client.connection.link import Pending
from layerzero.client.connection.overlay import Scope, only
from layerzero.client.connection.report import Copy, SelectionReport
from layerzero.client.gpu import deaths
from layerzero.client.gpu.own_arrays import GpuArray
from layerzero.client.gpu.samples import MAX_SAMPLE_BYTES, REASON, GpuSample
from layerzero.client.session.watched import ONLY_UNNAMED, WatchedCall, Watcher, takes
from layerzero.ipc.errors import BackendError, InvalidArgument, LayerZeroError, from_wire
from layerzero.ipc.transport import messages, wire
from layerzero.ipc.transport.wire import NO_ARENA, REF, Kind
from layerzero.ipc.vocabulary.numerics import difference, gather, unpack
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec

if TYPE_CHECKING:
    from layerzero.client.connection.call import Route, Submitted
    from layerzero.client.session.session import Session

NEVER = 1 << 63  # above any sequence number
REFERENCES = ("torch", "torch-cuda", "onnx-reference")  # backends whose results count as right, the most trusted first
QUEUE = 4  # checks that wait; more are dropped, and counted
MAX_COMPARED = 1 << 16  # elements, evenly spread; others at each check
MAX_OVERLAYS = 64  # whose rates are remembered
TUNE_RATE = 1 / 32  # share of calls that are offered for background tuning, where policy gives time for it
IDLE_S = 5.0  # the thread ends when nothing was sampled for so long
TUNED_RUNS = 8  # of a sample on a GPU at most: a worker tells the time of a run with a later one
_Code = Literal["B", "H", "I", "Q"]
_CODES: dict[int, _Code] = {1: "B", 2: "H", 4: "I", 8: "Q"}


class Shadow:
    """A session's shadow checks. `counts` says what became of the samples: compared, beyond (their tolerance), tuned
    (run for background tuning), dropped (the queue was full), too_large, no_reference, failed (`last_error` says why);
    of calls on a GPU also captured (into a CUDA graph of the application: not sampled) and no_memory (for copies).
    """

    def __init__(
        self, session: Session, *, rate: float | None = None, references: tuple[str, ...] = REFERENCES
    ) -> None:
        self.next_seq = NEVER  # the first sequence number that is sampled again
        self.references = references
        self.counts: Counter[str] = Counter()
        self.last_error = ""
        self._session = session
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._queue: queue.Queue[tuple[Submitted, Sample] | GpuSample] = queue.Queue(QUEUE)
        self._gpu_calls = 0
        self._next_gpu_call = NEVER  # as next_seq, of calls on GPUs
        self._has_stream = False  # the thread has one on a GPU, and stays: streams are not given back
        self._of_overlays: dict[str, float] = {}  # what policy says with each on top, where it is more than 0
        self._rate = self._tune_rate = self._watch_rate = self._pair_rate = 0.0  # the highest in force
        self._pairs: dict[str, tuple[str, float]] = {}  # by backend: what a rollout compares it with, and how often
        self._watchers: tuple[Watcher, ...] = ()
        self._unseen = 0  # samples that are queued, or being looked at
        self._seen = threading.Condition(self._lock)
        self.rate = rate

    @property
    def rate(self) -> float:
        """Share of calls that are checked, 0 to 1. Set: for all calls of the session; None leaves it to policy, which
        may differ by call: then this is the highest."""
        return self._rate

    @rate.setter
    def rate(self, rate: float | None) -> None:
        if rate is not None and not (isinstance(rate, (int, float)) and 0 <= rate <= 1):
            raise InvalidArgument(
                f"shadow rate is {rate!r}; allowed: a number from 0 (never) to 1 (every call), or None (as policy says)"
            )
        self.own_rate = None if rate is None else float(rate)
        self._settle(self._tune_rate)

    @property
    def tunes(self) -> bool:
        """Whether calls are offered to the broker for background tuning."""
        return self._tune_rate > 0

    def follow_decision(self, route: Route, decision: messages.Decision) -> None:
        """The broker tells with each decision of a route what policy says of its calls."""
        self.follow(route.overlay, decision.shadow_rate, tunes=decision.offers_samples)
        pairs = {}
        for old, new, rate in decision.shadowed:
            pairs[str(old)], pairs[str(new)] = (str(new), float(rate)), (str(old), float(rate))
        if pairs != self._pairs:
            self._pairs, self._pair_rate = pairs, max((rate for _, rate in pairs.values()), default=0.0)
            self._restart()

    def follow(self, overlay: str, rate: float, *, tunes: bool) -> None:
        """What policy says of calls with this overlay; the broker tells it with each decision."""
        if rate != self._of_overlays.get(overlay, 0.0) or tunes != self.tunes:
            self._of_overlays.pop(overlay, None)
            if rate:
                self._of_overlays[overlay] = rate
                if len(self._of_overlays) > MAX_OVERLAYS:
                    del self._of_overlays[next(iter(self._of_overlays))]
            self._settle(TUNE_RATE if tunes else 0.0)

    def watch(self, watcher: Watcher) -> None:
        """Show it calls from now on."""
        self._set_watchers((*self._watchers, watcher))

    def unwatch(self, watcher: Watcher, timeout_s: float) -> bool:
        """Show it no more calls. Returns whether those that it was to see have been looked at within `timeout_s`."""
        with self._seen:
            is_done = self._seen.wait_for(lambda: not self._unseen, timeout_s)
        self._set_watchers(tuple(one for one in self._watchers if one is not watcher))
        return is_done

    def _set_watchers(self, watchers: tuple[Watcher, ...]) -> None:
        self._watchers, self._watch_rate = watchers, max((one.rate for one in watchers), default=0.0)
        self._restart()

    def _restart(self) -> None:
        """The highest rate may be another: count anew to the next sample, if there is to be one."""
        is_on = self._rate or self._tune_rate or self._watchers or self._pairs
        self.next_seq = self._next_gpu_call = 0 if is_on else NEVER

    @property
    def _highest(self) -> float:
        return max(self._rate, self._tune_rate, self._watch_rate, self._pair_rate)

    def _settle(self, tune_rate: float) -> None:
        before = self._rate, self._tune_rate
        rates = list(self._of_overlays.values())
        self._rate = self.own_rate if self.own_rate is not None else max(rates, default=0.0)
        self._tune_rate = tune_rate
        if before != (self._rate, tune_rate):
            self._restart()

    @property
    def is_on(self) -> bool:
        """Whether any calls are sampled."""
        return self.next_seq != NEVER

    def draw_on_gpu(self, route: Route) -> bool | None:
        """Whether a call on a GPU that comes now is to be compared (True) or is for tuning and watchers alone (False);
        None: it is not sampled."""
        self._gpu_calls += 1
        if self._gpu_calls < self._next_gpu_call:
            return None
        is_due, highest = self._next_gpu_call > 0 or bool(self._watchers), self._highest
        number = self._session.link.welcome.number
        self._next_gpu_call = self._gpu_calls + gap(number, self._gpu_calls, highest)
        is_checked = random.random() * highest < self._rate_of(route)
        if not is_due or not (is_checked or self.tunes or self._watchers):
            return None
        if self._queue.full():  # before anything is copied
            self._drop()
            return None
        return is_checked

    def count(self, what: str) -> None:
        """Say what became of a sample."""
        self.counts[what] += 1

    def put(self, sample: GpuSample) -> None:
        """Look at a call on a GPU once it is done."""
        self._enqueue(sample)

    def _rate_of(self, route: Route) -> float:
        """Of checks: as a rollout says of the backend that served the route last, or else as policy does."""
        latest = list(route.decisions.values())[-1:] if self._pairs else []  # other threads add to them
        pair = self._pairs.get(latest[0].backend) if latest else None
        return self._rate_by_policy(route) if pair is None else max(pair[1], self._rate_by_policy(route))

    def _rate_by_policy(self, route: Route) -> float:
        return self.own_rate if self.own_rate is not None else self._of_overlays.get(route.overlay, 0.0)

    def take(self, submitted: Submitted, seq: int) -> Sample | None:
        """Copy the inputs of a call that was just sent, and settle which call is next. The caller waits for this."""
        # 0: the rate was just set. The first sample is a gap away, like all others.
        # Whoever watches wants the first call, too.
        is_due, highest = self.next_seq > 0 or bool(self._watchers), self._highest
        self.next_seq = seq + gap(submitted.link.welcome.number, seq, highest)
        is_checked = random.random() * highest < self._rate_of(submitted.route)
        is_watched = random.random() * highest < self._watch_rate
        if not is_due or not (is_checked or is_watched or self.tunes):
            return None
        if is_watched and not (is_checked or self.tunes) and self._queue.full():  # before anything is copied
            self._drop()
            return None
        return self._copy(submitted, is_checked=is_checked, is_watched=is_watched)

    def _drop(self) -> None:
        self.count("dropped")
        self._miss("the queue was full")

    def _miss(self, why: str) -> None:
        for watcher in self._watchers:
            watcher.miss(why)

    def _copy(self, submitted: Submitted, *, is_checked: bool, is_watched: bool) -> Sample | None:
        plan = submitted.route.plan
        if OPS[plan.op].sized_output or OPS[plan.op].in_place or len(plan.outputs) != 1 or not plan.outputs[0].numel:
            self._miss("several results, results of unknown size and ops in place are not watched")
            return None
        refs = [REF.unpack_from(submitted.refs, i * REF.size) for i in range(len(plan.inputs) + 1)]
        if sum(nbytes for number, _, _, nbytes in refs if number != NO_ARENA) > MAX_SAMPLE_BYTES:
            self.counts["too_large"] += 1
            self._miss(f"more than {MAX_SAMPLE_BYTES >> 20} MiB of arrays")
            return None
        sample = Sample([], [], is_checked, is_watched)
        for name, (number, _, offset, nbytes) in zip(OPS[plan.op].inputs, refs[:-1], strict=True):
            if number == NO_ARENA:
                sample.refs.append(REF.pack(NO_ARENA, 0, 0, 0))
                continue
            block, arena, place = arenas.pool.allocate(nbytes)
            block[:] = self._session.arena_registry.arena(number).view[offset : offset + nbytes]
            sample.blocks.append(block)
            sample.refs.append(REF.pack(self._session.arena_registry[arena], 0, place, nbytes))
            submitted.copies.append(Copy(name, nbytes, "client", REASON))
        return sample

    def check(self, submitted: Submitted, sample: Sample, decision: messages.Decision) -> None:
        """Queue the comparison of a call that ended well. Copies its output: the caller may change it from now on."""
        reference = self._reference(decision) if sample.is_checked else None
        if reference is None:
            if sample.is_checked:
                self.counts["no_reference"] += 1
            if not (self.tunes or sample.is_watched):
                return
        number, _, offset, nbytes = REF.unpack_from(submitted.refs, len(submitted.refs) - REF.size)
        sample.output = bytes(self._session.arena_registry.arena(number).view[offset : offset + nbytes])
        submitted.copies.append(Copy("out", nbytes, "client", REASON))
        sample.kernel_id, sample.decision = decision.kernel_id, decision
        if reference is not None:
            sample.reference, sample.backend = reference
        self._enqueue((submitted, sample))

    def _enqueue(self, sample: tuple[Submitted, Sample] | GpuSample) -> None:
        with self._lock:
            try:
                self._queue.put_nowait(sample)
            except queue.Full:
                self._drop()
                return
            self._unseen += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="lz-shadow", daemon=True)
                self._thread.start()

    def _reference(self, decision: messages.Decision) -> tuple[str, str] | None:
        """Kernel and backend to compare with: it takes this call, and is trusted more than the one that served, or is
        the other version of a rollout."""
        pair = self._pairs.get(decision.backend)
        if pair is not None:
            name = decision.kernel_id.removeprefix(decision.backend)
            others = (one for one in decision.candidates if one["kernel_id"] == f"{pair[0]}{name}")
            return next(((one["kernel_id"], pair[0]) for one in others if takes(one)), None)
        for backend in self.references:
            if backend == decision.backend:
                return None
            for candidate in decision.candidates:
                reasons = {reason["code"] for reason in candidate["reasons"]}
                if candidate["backend"] == backend and reasons <= ONLY_UNNAMED:
                    return candidate["kernel_id"], backend
        return None

    def _is_new(self, backend: str) -> bool:
        """The new version of a rollout."""
        pair = self._pairs.get(backend)
        return pair is not None and backend.startswith(f"{pair[0]}@")

    def _work(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._queue.empty() and not (self._has_stream and self._session.is_alive):
                        self._thread = None
                        return
                continue
            try:
                if isinstance(item, tuple):
                    self._look(*item)
                else:
                    self._has_stream = True
                    self._look_on_gpu(item)
            except LayerZeroError as exc:  # the reference failed, or the broker is gone
                self.counts["failed"] += 1
                self.last_error = f"{exc.code}: {exc.message}"
            finally:
                with self._seen:
                    self._unseen -= 1
                    self._seen.notify_all()
            del item  # what it holds is freed now, not at the next sample

    def _look(self, submitted: Submitted, sample: Sample) -> None:
        if sample.backend:
            self._compare(submitted, sample)
        if self.tunes:
            self._tune(submitted, sample)
        if sample.is_watched:
            assert sample.decision is not None
            spec = submitted.route.plan.outputs[0]
            run = partial(self._run, submitted, sample)
            self._show(WatchedCall(submitted.route.plan, sample.decision, memoryview(sample.output), spec, run))

    def _show(self, call: WatchedCall) -> None:
        for watcher in self._watchers:
            watcher.look(call)

    def _compare(self, submitted: Submitted, sample: Sample) -> None:
        spec = submitted.route.plan.outputs[0]
        try:
            output, _ = self._run(submitted, sample, sample.backend, sample.reference)
        except BackendError:
            if not self._is_new(sample.backend):
                raise
            error = math.inf  # it has no result where the other version has one
        else:
            error = compare(memoryview(sample.output), output, spec, self.counts["compared"])
        self.counts["compared"] += 1
        answer = self._session.ask(
            "shadow", route=submitted.route.body, kernel_id=sample.kernel_id, reference=sample.reference, error=error
        )
        self.counts["beyond"] += bool(answer["is_beyond"])
        if answer["is_beyond"]:
            self._session.capsules.take_wrong(submitted, sample.blocks, sample.kernel_id, sample.reference, error)

    def _tune(self, submitted: Submitted, sample: Sample) -> None:
        """Run the sample where the broker wants to learn the time; it notes that by itself."""
        answer = self._session.ask("sample", route=submitted.route.body)
        if answer["backend"]:
            self._run(submitted, sample, str(answer["backend"]), str(answer["kernel_id"]))
            self.counts["tuned"] += 1

    def _look_on_gpu(self, sample: GpuSample) -> None:
        """As `_look`, for a call whose answer and whose copies may not be there yet."""
        sent = sample.sent
        assert sent is not None
        sent.gpu.wait_for(sent.point)
        sample.settle()
        if self._session.gpus.outcomes.error_of(sent) is not None or sent.header is None:
            return  # it has failed, as its caller hears
        header = sent.header
        decision = sent.route.decisions[header.aux]
        reference = self._reference(decision) if sample.is_checked else None
        if sample.is_checked and reference is None:
            self.counts["no_reference"] += 1
        if reference is not None:
            self._compare_on_gpu(sample, decision.kernel_id, *reference)
        if self.tunes:
            self._tune_on_gpu(sample)
        if self._watchers:
            assert sample.output is not None
            dense = memoryview(gather(memoryview(sample.output.load()), sample.output.spec))
            spec = TensorSpec.contiguous(sample.output.spec.dtype, sample.output.spec.shape)
            self._show(WatchedCall(sample.route.plan, decision, dense, spec, partial(self._rerun_on_gpu, sample)))

    def _rerun_on_gpu(self, sample: GpuSample, backend: str, kernel_id: str) -> tuple[memoryview, float]:
        """Several runs, until the worker has told a time; the last one's output, in host memory."""
        for _ in range(TUNED_RUNS):
            found, report = self._run_on_gpu(sample, backend, kernel_id)
            if report.kernel_us:
                break
        return memoryview(gather(memoryview(found.load()), found.spec)), report.kernel_us or 0.0

    def _compare_on_gpu(self, sample: GpuSample, kernel_id: str, reference: str, backend: str) -> None:
        assert sample.output is not None
        try:
            found, _ = self._run_on_gpu(sample, backend, reference)
            rows = [memoryview(gather(memoryview(one.load()), one.spec)) for one in (sample.output, found)]
        except BackendError:
            if not self._is_new(backend):
                raise
            error = math.inf  # as in `_compare`
        else:
            spec = TensorSpec.contiguous(found.spec.dtype, found.spec.shape)
            error = compare(rows[0], rows[1], spec, self.counts["compared"])
        self.counts["compared"] += 1
        answer = self._session.ask(
            "shadow", route=sample.route.body, kernel_id=kernel_id, reference=reference, error=error
        )
        self.counts["beyond"] += bool(answer["is_beyond"])
        if answer["is_beyond"]:
            deaths.take_wrong(self._session.capsules, sample, kernel_id, reference, error)

    def _tune_on_gpu(self, sample: GpuSample) -> None:
        """As `_tune`; several runs, until the worker has told a time."""
        answer = self._session.ask("sample", route=sample.route.body, runs=TUNED_RUNS)
        if not answer["backend"]:
            return
        for _ in range(TUNED_RUNS):
            if self._run_on_gpu(sample, str(answer["backend"]), str(answer["kernel_id"]))[1].kernel_us:
                break
        self.counts["tuned"] += 1

    def _run_on_gpu(self, sample: GpuSample, backend: str, kernel_id: str) -> tuple[GpuArray, SelectionReport]:
        """The result of a sample on one kernel, and its report; nobody else hears of its failure."""
        args = tuple(sample.inputs)
        request = replace(sample.request, args=args, out=None, backend=backend, timeout_s=None)
        with Scope(only(kernel_id)):
            value, report = self._session.run_apart(request)
        assert isinstance(value, GpuArray)
        return value, report

    def _run(self, submitted: Submitted, sample: Sample, backend: str, kernel_id: str) -> tuple[memoryview, float]:
        """The output of a sample on one kernel, in memory of its own, and the kernel's time in microseconds."""
        plan, link = submitted.route.plan, submitted.link
        spec = plan.outputs[0]
        output, arena, place = arenas.pool.allocate(spec.span_bytes)
        number = self._session.arena_registry[arena]
        body = b"".join([*sample.refs, REF.pack(number, 0, place, spec.span_bytes)])
        route = self._session.routes.define(link, (plan, backend, kernel_id), plan, backend, only(kernel_id))
        pending = Pending(hold=(sample.blocks, output))
        link.submit(pending, lambda seq: wire.pack_execute(0, route.number, seq, body))
        link.wait(pending)
        if pending.error is not None:
            raise pending.error
        if pending.header is not None and pending.header.kind == Kind.FAILED:
            raise from_wire(messages.decode(pending.body, messages.Outcome).error)
        return output, 0.0 if pending.header is None else pending.header.time / 1e3


def gap(seed: int, counter: int, rate: float) -> int:
    """How many calls until the next sample, 1 or more. Geometric with mean 1 / rate, and the same for equal arguments:
    a pattern in the calls cannot hide from it."""
    digest = hashlib.blake2b(f"{seed}:{counter}".encode(), digest_size=8).digest()
    uniform = (int.from_bytes(digest, "little") + 1) / (1 << 64)  # in (0, 1]
    if rate >= 1:
        return 1
    calls = math.log(uniform) / math.log1p(-rate) if rate > 0 else math.inf
    return 1 + int(calls) if calls < NEVER - 1 else NEVER


def compare(result: memoryview, expected: memoryview, spec: TensorSpec, turn: int) -> float:
    """Error of a result against another of the same spec (ipc/vocabulary/numerics.py), over at most MAX_COMPARED
    elements."""
    step = -(-spec.numel // MAX_COMPARED)
    code = _CODES[spec.itemsize]
    picked = []
    for memory in (result, expected):
        elements = memoryview(gather(memory, spec)).cast(code)
        picked.append(unpack(elements[turn % step :: step].tobytes(), spec.dtype))
    return difference(picked[0], picked[1], spec.dtype)
