"""Making a capsule's call again: on each backend, some times, by a broker of its own that ends with it. Workers may
die of it: nobody else needs them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

from layerzero.client.arrays.recognition import CPU
from layerzero.client.capsules.form import ALIGNMENTS, CUDA, WRONG, Argument, Capsule, Segment
from layerzero.client.connection import start
from layerzero.client.connection.call import Request
from layerzero.client.facade import api, default_session
from layerzero.client.facade.memory import empty
from layerzero.client.gpu.memory import ordinal_of
from layerzero.client.gpu.own_arrays import GpuArray
from layerzero.client.tools.inputs import random_inputs, tensor_names
from layerzero.ipc.errors import DeadlineExceeded, EnvError, InvalidArgument, LayerZeroError, NoBackend
from layerzero.ipc.transport.endpoints import Endpoints
from layerzero.ipc.vocabulary.numerics import TOLERANCE
from layerzero.ipc.vocabulary.ops import OPS, PUBLIC_OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.ipc.vocabulary.worker_codes import STICKY_EXIT

# The broker of a replay: a worker that dies is there again at once, and inputs may kill as many as they are sent to.
SETTINGS = {
    "LAYERZERO_RESTART_BUDGET": "100000",
    "LAYERZERO_BACKOFF_S": "0.01",
    "LAYERZERO_BACKOFF_MAX_S": "0.01",
    "LAYERZERO_POISON_QUARANTINE_S": "0.001",
    "LAYERZERO_EXPRESS": "false",
    "LAYERZERO_CAPSULES": "off",
    "LAYERZERO_STANDBY": "0",
}
MAX_LOG_BYTES = 1 << 20
END_S = 10.0  # of a broker that is told to end
START_S = 300.0  # until a worker has answered its first call


@dataclass
class Outcome:
    """What became of the runs on one backend. `runs`: by what they ended in, "ok" for an answer. `kernel_us`: of each
    that ended well. `error`: how far the furthest result is from the reference, as a share of its largest number; None
    where there is nothing to compare. `is_same`: all results have the same bits. `difference`: of a function's result
    from the reference, in words."""

    backend: str
    runs: dict[str, int] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)
    kernel_us: list[float] = field(default_factory=list)
    error: float | None = None
    is_same: bool = True
    difference: str = ""

    @property
    def is_right(self) -> bool:
        """Every run gave an answer, and none that is wrong."""
        return set(self.runs) == {"ok"}

    def note(self, what: str, detail: str = "") -> None:
        self.runs[what] = self.runs.get(what, 0) + 1
        self.details.setdefault(what, detail)

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "is_right": self.is_right}


def replay(
    capsule: Capsule,
    data: Sequence[bytes],
    *,
    backends: Sequence[str] | None = None,
    times: int = 1,
    timeout_s: float | None = None,
    seed: int = 0,
    begins: Callable[[str], None] = lambda _: None,
    device: str = "",
    variables: Mapping[str, str] = MappingProxyType({}),
    log: Callable[[str, str], None] = lambda _backend, _text: None,
) -> list[Outcome]:
    """Make the call on each of the backends; None: on all that have the op and can serve here. `data`: the capsule's
    memory; where that is empty, random numbers of this seed. Results are compared with those of the first backend that
    gave one, torch before the others; of a capsule of a wrong result, that which it was compared with. `device`: as
    torch says it; where the capsule's call was when left out.
    `variables`: of the broker and its workers. `log` gets what each backend's workers have written. Needs NumPy, and
    ml_dtypes for dtypes that NumPy lacks. Raises EnvError without, InvalidArgument for backends or a device that are
    not there."""
    ordinal = where(capsule, device)
    with own_broker(**variables) as session:
        known = {row["name"]: row for row in session.ask("status")["backends"]}
        able = [name for name, row in known.items() if capsule.op in row["ops"] and not row["unavailable"]]
        able = [name for name in able if (known[name]["platform"] == CUDA) == (ordinal != CPU)]
        named = able if backends is None else backends
        for name in named:
            if name not in known:
                raise InvalidArgument(f"no backend is called {name!r:.80}; known: {', '.join(known)}")
        arguments = lay_out(capsule.op, capsule.arguments, capsule.segments, data, seed, device=ordinal)
        found: dict[str, Outcome] = {}
        reference: list[Any] | None = None
        right = capsule.served_by.partition(".")[0] if capsule.failed.outcome == WRONG else "torch"
        for name in sorted(named, key=lambda one: (one != right, one != "torch", one)):
            begins(name)
            found[name] = outcome = Outcome(name)
            reference = outcome_on(session, capsule, arguments, outcome, times, timeout_s, reference)
            log(name, _written(session, name))
    return [found[name] for name in named]


def where(capsule: Capsule, device: str = "") -> int:
    """The ordinal of the GPU that the call is made on; CPU for none. Raises InvalidArgument, saying what else there is
    for a call on a GPU."""
    try:
        return ordinal_of(device or capsule.device)
    except InvalidArgument as exc:
        if device or capsule.device != CUDA:
            raise
        text = "replay it on a machine with an NVIDIA GPU, or with --device cpu on backends for CPUs: its call was on a"
        raise InvalidArgument(f"{text} GPU, and {exc.message}") from exc


def _written(session: Any, backend: str) -> str:
    """The end of what the workers of a backend have written."""
    try:
        data = Endpoints(session.path.parent).worker_log(backend).read_bytes()
    except OSError:
        return ""
    return data[-MAX_LOG_BYTES:].decode(errors="replace")


@contextmanager
def own_broker(**more: str) -> Iterator[Any]:
    """A session with a broker for this process alone, in a folder of its own. `more`: of its variables."""
    with (
        tempfile.TemporaryDirectory(prefix="lz-replay-") as folder,
        mock.patch.dict(os.environ, {**SETTINGS, **more, "LAYERZERO_RUNTIME_DIR": folder}),
    ):
        session = default_session.connect(runtime_dir=Path(folder))
        try:
            yield session
        finally:
            with suppress(LayerZeroError):  # it is gone already
                session.ask("shutdown")
            default_session.disconnect()
            start.wait_for_end(start.endpoints(Path(folder)), END_S)  # it writes to the folder


def lay_out(
    op: str,
    given: Sequence[Argument],
    segments: Sequence[Segment],
    data: Sequence[bytes],
    seed: int,
    *,
    device: int = CPU,
) -> dict[str, Any]:
    """The arguments of a call as NumPy's arrays in shared memory: with the strides, the overlaps and the alignment that
    kernels met. Without data: random numbers, which share no memory. `device`: the ordinal of a GPU, where they lie
    then, in memory of ours. Raises EnvError, OutOfMemory."""
    specs = {a.name: a.spec for a in given}
    if device != CPU:
        return _on_gpu(op, given, segments, data, seed, device)
    if not data and given:
        return random_inputs(op, specs, seed)
    try:
        import numpy as np
    except ImportError as exc:
        raise EnvError(
            "arguments that were kept are NumPy's arrays, which is not installed here",
            cause=str(exc),
            repair="pip install 'layerzero-broker[demo]'",
        ) from exc
    if any(not hasattr(np, a.spec.dtype) and a.spec.dtype != "bool" for a in given):
        try:
            import ml_dtypes  # type: ignore[import-not-found,unused-ignore]  # noqa: F401  # teaches NumPy the names
        except ImportError as exc:
            raise EnvError(
                "NumPy lacks dtypes of the call, and ml_dtypes is not installed here",
                cause=str(exc),
                repair="pip install ml_dtypes",
            ) from exc
    blocks = []
    for segment, kept in zip(segments, data, strict=True):
        room = empty(segment.nbytes + ALIGNMENTS, "uint8")
        start = (segment.offset - room.ctypes.data) % ALIGNMENTS
        block = room[start : start + segment.nbytes]
        block[...] = np.frombuffer(kept, np.uint8)
        blocks.append(block)
    made = {}
    for a in given:
        spec, block = a.spec, blocks[a.segment]
        strides = tuple(step * spec.itemsize for step in spec.strides)
        if spec.numel:
            made[a.name] = np.ndarray(spec.shape, np.dtype(spec.dtype), block, a.start, strides)
        else:
            made[a.name] = np.empty(spec.shape, spec.dtype)
    return made


def _on_gpu(
    op: str, given: Sequence[Argument], segments: Sequence[Segment], data: Sequence[bytes], seed: int, device: int
) -> dict[str, Any]:
    blocks, starts = [], []
    for number, segment in enumerate(segments):
        room = GpuArray(device, TensorSpec.contiguous("uint8", (segment.nbytes + ALIGNMENTS,)))
        blocks.append(room)
        starts.append((segment.offset - room.address) % ALIGNMENTS)
        if data and segment.nbytes:
            whole = TensorSpec.contiguous("uint8", (segment.nbytes,))
            room.part(whole, starts[-1]).store(memoryview(bytearray(data[number])))
    made = {a.name: blocks[a.segment].part(a.spec, starts[a.segment] + a.start) for a in given}
    if not data:
        for name, values in random_inputs(op, {a.name: a.spec for a in given}, seed, device=device).items():
            made[name].store(memoryview(bytearray(values.load())))
    return made


def kept_as_they_are(arguments: Mapping[str, Any]) -> Callable[[], None]:
    """What makes them so again: ops in place write to them, and so do kernels where they must not."""
    before = {name: a.load() if isinstance(a, GpuArray) else a.copy() for name, a in arguments.items()}

    def restore() -> None:
        for name, array in arguments.items():
            if isinstance(array, GpuArray):
                array.store(memoryview(bytearray(before[name])))
            else:
                array[...] = before[name]

    return restore


def on_host(array: Any) -> Any:
    """A result as NumPy's array; bfloat16 as float32 where NumPy does not know it."""
    if not isinstance(array, GpuArray):
        return array
    import numpy as np

    spec, data = array.spec, array.load()
    if spec.dtype == "bfloat16":
        wide = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
        data, dtype, itemsize = wide.tobytes(), "float32", 4
    else:
        dtype, itemsize = spec.dtype, spec.itemsize
    if not spec.numel:
        return np.empty(spec.shape, dtype)
    return np.ndarray(spec.shape, dtype, data, 0, tuple(step * itemsize for step in spec.strides))


def request_of(
    op: str, params: Mapping[str, Any], arguments: Mapping[str, Any], backend: str | None, timeout_s: float | None
) -> Request:
    """A call with the params of an earlier one's request. `arguments`: by the names that OPS has for the op's inputs.
    Raises InvalidArgument, also for an op whose calls cannot be made from these alone."""
    if op not in PUBLIC_OPS or PUBLIC_OPS[op].sized_output:  # a text's tokenizer is not among these
        raise InvalidArgument(f"calls of {op} cannot be made again; what is known of them can be shown")
    function, inputs = api.function_of(op), OPS[op].inputs
    own = {name: name if name in inputs else one for name, one in zip(tensor_names(function), inputs, strict=True)}
    tensors = {name: arguments[one] for name, one in own.items() if arguments.get(one) is not None}
    return api.request(function, **tensors, **params, backend=backend, timeout_s=timeout_s)


def outcome_on(
    session: Any,
    capsule: Capsule,
    arguments: dict[str, Any],
    outcome: Outcome,
    times: int,
    timeout_s: float | None,
    reference: list[Any] | None,
) -> list[Any] | None:
    """Make the call `times` on the outcome's backend, and fill that in. Returns the results that those which follow are
    compared with: `reference`, or these where there was none; None for no answer."""
    restore = kept_as_they_are(arguments)
    first: list[Any] | None = None
    for number in range(times):
        within_s = timeout_s if number else timeout_s or START_S
        request = request_of(capsule.op, capsule.params, arguments, outcome.backend, within_s)
        try:
            value, report = session.run_apart(request)
            results = list(map(on_host, results_of(value, request)))
        except LayerZeroError as exc:
            outcome.note(*why_of(exc))
            if isinstance(exc, (NoBackend, InvalidArgument)):
                break  # it will say so each time
        else:
            outcome.note("ok")
            if report.kernel_us:
                outcome.kernel_us.append(report.kernel_us)
            if first is not None and any(a.tobytes() != b.tobytes() for a, b in zip(first, results, strict=True)):
                outcome.is_same = False
            first = first or [result.copy() for result in results]
            if reference is not None:
                far = max((distance(a, b) for a, b in zip(results, reference, strict=True)), default=0.0)
                outcome.error = max(far, outcome.error or 0.0)
        restore()
    return reference if reference is not None else first


def results_of(value: Any, request: Request) -> list[Any]:
    """All arrays that a call has made, or written in place."""
    if value is None:  # of an op in place
        inputs = OPS[request.op].inputs
        return [request.args[inputs.index(name)] for name in OPS[request.op].in_place]
    return list(value) if isinstance(value, tuple) else [value]


def why_of(exc: LayerZeroError) -> tuple[str, str]:
    """In a word, and the detail."""
    report: Any = getattr(exc, "report", None)
    if isinstance(exc, DeadlineExceeded):  # the broker ended its worker
        return exc.code, exc.message
    ends = [a for a in (report.attempts if report is not None else ()) if a.outcome is not None]
    if ends and ends[-1].exit_signal is not None:
        return f"signal {ends[-1].exit_signal}", ends[-1].detail
    if ends and ends[-1].exit_code == STICKY_EXIT:
        return "GPU lost", ends[-1].detail
    if ends and ends[-1].exit_code is not None:
        return f"exit {ends[-1].exit_code}", ends[-1].detail
    return exc.code, exc.message


def distance(one: Any, other: Any) -> float:
    """Of results from the reference, as a share of its largest number, which counts as 1 at least; infinite where one
    is finite and the other is not."""
    import numpy as np

    a, b = (np.asarray(x).astype(np.float64) for x in (one, other))
    if a.shape != b.shape or not np.array_equal(np.isnan(a), np.isnan(b)):
        return float("inf")
    with np.errstate(invalid="ignore"):
        far = np.abs(a - b)
    far[(a == b) | np.isnan(a)] = 0
    finite = np.abs(b[np.isfinite(b)])
    return float(far.max(initial=0.0) / max(1.0, finite.max(initial=0.0)))


def is_far(outcome: Outcome, capsule: Capsule) -> bool:
    """Whether its results are further from the reference than kernels of that dtype may be."""
    return bool(outcome.difference) or (
        outcome.error is not None and outcome.error > most_of(a.spec.dtype for a in capsule.arguments)
    )


def most_of(dtypes: Iterable[str]) -> float:
    """So far may results be from a reference, of a call with arguments of these dtypes."""
    return max((TOLERANCE[dtype] for dtype in dtypes if dtype in TOLERANCE), default=0.0)
