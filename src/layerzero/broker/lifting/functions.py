"""Calls of functions that are lifted: told beside a route of theirs, since that says nothing of their arrays, and good
for the process that computes them, whose modules may have been others in an earlier one, until they change there."""

from __future__ import annotations

import math
import secrets
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from layerzero.broker.core import events as ev
from layerzero.broker.core.model import Worker
from layerzero.broker.core.worker_fsm import WorkerState
from layerzero.broker.lifting import answers
from layerzero.broker.lifting.known import Known
from layerzero.broker.lifting.store import LiftStore
from layerzero.broker.selection.signature import CallSpec
from layerzero.capabilities.descriptor import KernelCapability
from layerzero.ipc.errors import DeadlineExceeded, InvalidArgument, LayerZeroError, ProtocolError
from layerzero.ipc.functions import frames
from layerzero.ipc.lifting.reasons import MODULES_CHANGED, TRIAL_BEGUN, LiftReason
from layerzero.ipc.lifting.specimen import Specimen
from layerzero.ipc.lifting.trial import fits_dtype, ranges_of
from layerzero.ipc.transport.messages import Lifted
from layerzero.ipc.vocabulary.ops import FUNCTION, FUNCTION_ON_GPU, OPS
from layerzero.ipc.vocabulary.shapes import check_call
from layerzero.ipc.vocabulary.tensors import TensorSpec

MAX_TEXT = 4096  # of an attribute
TRIAL_S = 30.0  # of a function, which is nobody's call; others' calls wait meanwhile
ENDED = "its worker ended when it was lifted: see lz logs"
LATE = "its trial had not ended {}, which ended its worker"


class LiftedFunctions:
    """For the broker's own thread."""

    def __init__(self) -> None:
        self._nonce = secrets.token_hex(8)  # of this broker, whose count of workers begins anew
        # By backend and call: why what was lifted when its worker ended is not tried again.
        self._ended: dict[tuple[str, str], tuple[LiftReason, str]] = {}
        self._forgiven: dict[str, int] = {}  # backends whose worker somebody has restarted, and which that was
        self._changes = Counter[str]()  # of modules in their process, by backend

    def told_call(self, spec: CallSpec, params: Mapping[str, Any], worker: Worker) -> CallSpec:
        """The call that a client wants to launch: of a function's route that has `spec` the one that it tells of
        beside it, else `spec`. Raises InvalidArgument."""
        name = f"{self._nonce}.{self._changes[worker.backend]}.{worker.generation}"
        return _told_call(spec, params["call"], name) if "call" in params else spec

    def have_changed(self, backend: str, said: Lifted) -> bool:
        """Whether a worker says that a file of a function is another one, and with it perhaps what others import."""
        is_so = not said.number and said.reason == MODULES_CHANGED
        self._changes[backend] += is_so
        return is_so

    def has_begun(self, backend: str, generation: int, said: Lifted, asked: Iterable[Known]) -> bool:
        """Whether a worker says that it begins the trial of the oldest one that it was asked for. `asked` as of
        `refusal`."""
        if said.number or said.reason != TRIAL_BEGUN:
            return False
        its = [one for one in asked if (one.backend, one.generation) == (backend, generation) and not one.is_answered]
        known = min(its, key=lambda one: one.asked_s, default=None)
        if known is not None:
            known.begun_s = min(known.begun_s, time.monotonic())
        return True

    def late(self, known: Known, now_s: float) -> ev.WorkerMisbehaved | None:
        """What ends a worker that is in a trial for too long. The call is not tried again."""
        if known.is_answered or now_s < known.begun_s + TRIAL_S:
            return None
        self._note(known, LiftReason.TOO_SLOW, LATE.format(f"after {TRIAL_S:g} s"))
        text = f"the trial of {label_of(known.spec)}, which has lift=True, ran longer than {TRIAL_S:g} s"
        return ev.WorkerMisbehaved(known.backend, known.generation, f"{text}, and its worker was killed", is_late=True)

    def _note(self, known: Known, reason: LiftReason, why: str) -> None:
        self._ended.setdefault((known.backend, known.spec.attrs["call"]), (reason, why))

    def forgive(self, worker: Worker) -> None:
        """Somebody wants it to begin anew: what has ended earlier ones may be tried in the next one."""
        self._forgiven[worker.backend] = worker.generation

    def look(self, calls: dict[str, Known], workers: Mapping[str, Worker]) -> bool:
        """Whether clients are to ask anew, as a worker is another process by now: for calls that they launch, and for
        those that were refused, since the next process may do what that one could not. The latter are dropped."""
        begun = {name for name, number in self._forgiven.items() if workers[name].generation != number}
        for name in begun:
            del self._forgiven[name]
        ended = [one for one in self._ended if one[0] in begun]
        for one in ended:
            del self._ended[one]
        old = [one for one in calls.values() if is_function(one.spec)]
        old = [one for one in old if workers[one.backend].generation != one.generation]
        refused = [one for one in old if one.entry is not None and one.entry.reason]
        for call in refused:  # of the others a client may still tell that it has lost its GPU
            del calls[call.key]
        return bool(ended or refused) or any(one.granted for one in old)

    def note_ended(self, known: Known, asked: Iterable[Known], worker: Worker) -> None:
        """Its process has ended. Where it was at this call, and nobody has ended it, the call must not do that to the
        next ones. `asked` as of `refusal`; `worker` as it is now."""
        if known.is_answered or not is_function(known.spec):
            return
        had = [one for one in asked if (one.backend, one.generation) == (known.backend, known.generation)]
        is_at = known.asked_s <= min((one.asked_s for one in had if not one.is_answered), default=-math.inf)
        has_died = worker.state is WorkerState.DISABLED or any(died_s >= known.asked_s for died_s in worker.deaths_s)
        if is_at and known.begun_s < math.inf and isinstance(worker.cause, DeadlineExceeded):
            self._note(known, LiftReason.TOO_SLOW, LATE.format("by the deadline of a call that waited for it"))
        elif is_at and has_died:
            self._note(known, LiftReason.WORKER_FAILED, ENDED)

    def refusal(self, spec: CallSpec, worker: Worker, asked: Collection[Known]) -> dict[str, Any] | None:
        """Why a call stays in its worker. `asked`: what workers and proofs are at."""
        if not is_function(spec):
            return None
        for one in asked:  # of an earlier process, whose end was not looked at yet
            if one.backend == worker.backend and one.generation != worker.generation:
                self.note_ended(one, asked, worker)
        reason, why = self._ended.get((worker.backend, spec.attrs["call"]), (None, ""))
        return None if reason is None else answers.refused(reason, told(spec, worker.backend, why))


def _told_call(spec: CallSpec, told: Any, worker: str) -> CallSpec:
    if spec.op != FUNCTION:
        raise InvalidArgument(f"lift: a call beside a route of {spec.op}; allowed: of {FUNCTION}")
    op = OPS[FUNCTION_ON_GPU]
    try:
        inputs = tuple(None if one is None else TensorSpec.from_wire(one) for one in told["inputs"])
        outputs = tuple(TensorSpec.from_wire(one) for one in told["outputs"])
        attrs = {name: _text(told[name]) for name in ("call", "ranges")}
        _check_ranges(dict(zip(op.inputs, inputs, strict=False)), attrs)
        bytes.fromhex(attrs["call"])
    except (KeyError, TypeError, ValueError, LayerZeroError) as exc:
        raise InvalidArgument(f"lift: no call of a function: {type(exc).__name__}: {exc}"[:500]) from exc
    if (len(inputs), len(outputs)) != (len(op.inputs), len(op.outputs)) or inputs[0] is None:
        raise InvalidArgument(f"lift: {op.name} has {len(op.inputs)} inputs, of which the first is there, and a result")
    attrs["result"] = " ".join(map(str, (outputs[0].dtype, *outputs[0].shape)))
    attrs["worker"] = worker
    check_call(op.name, inputs, outputs, attrs)
    return CallSpec(op.name, inputs, outputs, attrs, spec.pinned, device=spec.device)


def told(spec: CallSpec, backend: str, detail: str, *, is_final: bool = True) -> str:
    """What people are told of a refusal; of a function's call, of which function, and what has it tried again.
    `is_final`: nothing else does."""
    if not is_function(spec):
        return detail
    again = f"; it is tried again once its file has changed, or after lz restart {backend}" if is_final else ""
    return f"{label_of(spec)}: {detail}{again}"


def label_of(spec: CallSpec) -> str:
    """Of the function that a call is of, as its frame says."""
    try:
        _, head = frames.head_of(bytes.fromhex(spec.attrs["call"]))
        match head:
            case [frames.GPU, [frames.CALL, tree, *_], *_]:
                return f"{frames.Code.from_tree(tree).label:.200}"
    except ProtocolError:
        pass
    return "a function"


def is_function(spec: CallSpec) -> bool:
    """Whether what is lifted is a function's call."""
    return spec.op == FUNCTION_ON_GPU


def traits(spec: CallSpec, kernel: KernelCapability) -> tuple[bool, bool]:
    """Whether a call may be captured, and whether it repeats its bytes. Of a function its program says so; a trial and
    the proof show it."""
    return (True, True) if is_function(spec) else (kernel.is_cuda_graph_safe, kernel.deterministic)


def keep(store: LiftStore, known: Known, specimen: Specimen | None) -> None:
    """What is known of a call from now on. Of a function's, which no later broker can use, the machine code alone."""
    assert known.entry is not None
    if not is_function(known.spec):
        store.add(known.key, known.entry, specimen)
    elif specimen is not None:
        store.add_code(specimen.codes)


def have_leave(calls: Iterable[Known]) -> bool:
    """Whether clients launch calls of a function."""
    return any(known.granted and is_function(known.spec) for known in calls)


def spared(calls: Iterable[Known], asked: Collection[str]) -> set[str]:
    """Backends whose workers nobody needs while clients launch their calls; what functions keep, nobody else has."""
    lifted = {one.backend for one in calls if (one.granted or one.granted_here) and not is_function(one.spec)}
    return lifted - set(asked)


def _check_ranges(specs: Mapping[str, TensorSpec | None], attrs: Mapping[str, Any]) -> None:
    for name, ends in ranges_of(attrs).items():
        spec = specs.get(name)
        if spec is None or "int" not in spec.dtype or not fits_dtype(spec.dtype, ends):
            raise ValueError(f"ranges: {name:.40} is no array of integers that can have all values from its range")


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > MAX_TEXT:
        raise ValueError(f"{value!r:.40} is no text of at most {MAX_TEXT} characters")
    return value
