"""lz.jit: a call of arrays of fixed shapes and dtypes, whose kernel is chosen and compiled beforehand, as an object."""

from __future__ import annotations

import functools
import inspect
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerzero.client.arrays.recognition import CPU, describe
from layerzero.client.connection.overlay import Overlay, Scope
from layerzero.client.connection.record import kernel_of
from layerzero.client.connection.report import SelectionReport
from layerzero.client.facade import default_session, running
from layerzero.client.gpu.outcomes import Enqueued
from layerzero.client.tools.calls import Call
from layerzero.client.tools.compile import BONUS
from layerzero.client.tools.compiling import in_line
from layerzero.ipc import files
from layerzero.ipc.errors import InvalidArgument, NoBackend
from layerzero.ipc.vocabulary.tensors import TensorSpec

if TYPE_CHECKING:
    from layerzero.client.session.session import Session

KIND, SCHEMA = "layerzero executor", 1
MAX_BYTES = 1 << 20
MAX_CHANGES = 32  # the last ones are kept


@dataclass(frozen=True)
class Change:
    """Another kernel was chosen than before; `at_s`: in seconds since 1970."""

    old: str
    new: str
    why: str
    at_s: float

    def __str__(self) -> str:
        return f"{self.old} -> {self.new}: {self.why}"


class Executor:
    """A call that keeps to one kernel. Made by lz.jit and Executor.load.

    Called with arrays of the shapes and dtypes that it was made for, in the order of its function's arguments, or by
    name. Its kernel is preferred, not required: when it fails, or may not serve the call, the next best answers, and
    is kept to from then on (`changes`).
    """

    def __init__(self, call: Call) -> None:
        self._call, self._function = call, call.function
        self._names = [name for name, spec in call.arrays.items() if spec is not None]
        self._specs = [spec for spec in call.arrays.values() if spec is not None]
        self._given = dict(call.params)
        self._leads = [*inspect.signature(self._function).parameters][: len(self._names)] == self._names
        self._seen: list[Any] = [None] * len(self._names)
        self._session: Session | None = None
        self._kernel = self._backend = ""
        self._scope: Scope | None = None
        self._record: Any = None
        self._changes: list[Change] = []

    # --- what is known of it

    @property
    def op(self) -> str:
        return self._call.op

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """What it takes, by the names of its function's arguments."""
        return dict(zip(self._names, self._specs, strict=True))

    @property
    def kernel_id(self) -> str:
        """The kernel that it keeps to."""
        return self._kernel

    @property
    def backend(self) -> str:
        return self._backend

    @property
    def changes(self) -> tuple[Change, ...]:
        """When it has turned to other kernels, and why; the last ones."""
        return tuple(self._changes)

    @property
    def report(self) -> SelectionReport | None:
        """As lz.last_report(), of its last call in any thread; None before the first one, and after the broker that
        served it is gone."""
        session = self._session
        return None if session is None or self._record is None else session.report_of(self._record)

    @property
    def call(self) -> Call:
        return self._call

    def explain(self) -> SelectionReport:
        """As lz.explain, of the next call: which kernel would serve it, and why not the others. Runs nothing."""
        if self._scope is None:
            return self._call.explain()
        with self._scope:
            return self._call.explain()

    def __repr__(self) -> str:
        return f"<lz.Executor of {self._call.label} by {self._kernel or 'no kernel yet'}>"

    # --- calls

    def __call__(self, *arrays: Any, out: Any = None, timeout_s: float | None = None, **named: Any) -> Any:
        """The op's result. Raises InvalidArgument for arrays that it was not made for, and what the op raises."""
        if named:
            arrays = self._by_name(arrays, named)
        if len(arrays) != len(self._names):
            raise InvalidArgument(f"{self.op}: {len(arrays)} arrays were given; allowed: {', '.join(self._names)}")
        for number, array in enumerate(arrays):
            told = (
                type(array),
                getattr(array, "shape", None),
                getattr(array, "dtype", None),
                getattr(array, "device", None),
            )
            if told != self._seen[number]:
                self._check(number, array, told)
        if running.handler.get() is not None or (running.tracing is not None and running.tracing.is_on()):
            return self._run(arrays, out, timeout_s)  # somebody asks what would be called
        session = default_session.session()
        if session is not self._session:
            self._choose(session, "its broker is another one than before")
        assert self._scope is not None
        with self._scope:
            result = self._run(arrays, out, timeout_s)
        self._record = record = session.last_record
        served = kernel_of(record)[0] or _enqueued_on(record)
        if served and served != self._kernel:
            self._turn(served)
        return result

    def _run(self, arrays: Sequence[Any], out: Any, timeout_s: float | None) -> Any:
        given = self._given
        if out is not None or timeout_s is not None:
            more = {"out": out, "timeout_s": timeout_s}
            given = {**given, **{name: value for name, value in more.items() if value is not None}}
        if self._leads:
            return self._function(*arrays, **given)
        return self._function(**dict(zip(self._names, arrays, strict=True)), **given)

    def _by_name(self, arrays: Sequence[Any], named: Mapping[str, Any]) -> tuple[Any, ...]:
        left = self._names[len(arrays) :]
        if unknown := sorted(named.keys() - set(left)):
            text = f"{unknown[0]!r:.80} is no array of it, or was given twice; allowed: {', '.join(self._names)}"
            raise InvalidArgument(f"{self.op}: {text}; other arguments are given to lz.jit")
        return (*arrays, *(named[name] for name in left if name in named))

    def _check(self, number: int, array: Any, told: Any) -> None:
        """Raises InvalidArgument for an array of another kind; of the same kind it is not looked at again."""
        name, wanted = self._names[number], self._specs[number]
        found = describe(array)
        if (found.spec.dtype, found.spec.shape) != (wanted.dtype, wanted.shape):
            text = f"{name} is {_told(found.spec)}; this executor was made for {_told(wanted)}"
            raise InvalidArgument(f"{self.op}: {text}; make another one: lz.jit({self.op!r}, ...)")
        is_on_gpu = found.device != CPU
        if is_on_gpu != self._call.is_on_gpu:
            where = "a GPU" if is_on_gpu else "the CPU"
            raise InvalidArgument(f"{self.op}: {name} is on {where}; this executor was made for {self._call.device}")
        if None not in told[:3]:  # else the same may be told of other arrays
            self._seen[number] = told

    # --- its choice

    def refresh(self) -> bool:
        """Choose anew, as the broker would now, by what it has measured since; whether that is another kernel. Raises
        NoBackend, NotConnected."""
        was = self._kernel
        self._choose(default_session.session(), "it was asked to choose anew", prefers="")
        return self._kernel != was

    def _choose(self, session: Session, why: str, prefers: str | None = None) -> None:
        """Take `prefers`, by default the kernel that it has, where that may serve the call; else the best one."""
        wanted = self._kernel if prefers is None else prefers
        report = self._call.explain()
        line = in_line(report)
        if not line and report.kernel_id is None:
            raise NoBackend(f"nobody serves {self._call.label}: lz.explain says why\n{report}")
        first = next((one.kernel_id for one in line if one.kernel_id == wanted), "")
        chosen = first or (line[0].kernel_id if line else str(report.kernel_id))
        backend = next((one.backend for one in report.candidates if one.kernel_id == chosen), report.backend or "")
        if wanted and chosen != wanted:
            refused = next((one for one in report.candidates if one.kernel_id == wanted), None)
            codes = "unknown here" if refused is None else ", ".join(reason.code for reason in refused.reasons)
            why = f"{wanted} cannot serve it ({codes or 'refused'})"
        self._call.compile([backend])
        self._hold(chosen, backend, why, since=wanted or self._kernel)
        self._session = session

    def _turn(self, served: str) -> None:
        """Another kernel answered: keep to that."""
        report = self.report
        failed = [one for one in report.attempts if one.outcome is not None] if report is not None else []
        why = ", ".join(f"{one.backend}: {one.outcome}" for one in failed) or "the broker has chosen it"
        backend = report.backend if report is not None and report.backend else served.partition(".")[0]
        self._hold(served, backend, why, since=self._kernel)

    def _hold(self, kernel_id: str, backend: str, why: str, since: str) -> None:
        if since and since != kernel_id:
            self._changes = [*self._changes, Change(since, kernel_id, why, time.time())][-MAX_CHANGES:]
        if kernel_id != self._kernel or self._scope is None:
            scope = Scope(_held(kernel_id))
            scope.end()  # until a call
            self._kernel, self._backend, self._scope = kernel_id, backend, scope

    # --- on disk

    def export(self, path: str | Path) -> None:
        """Write the call and its choice to a file, for Executor.load in another process or on another machine. What its
        kernel compiled travels by `lz cache export`, what was lifted of it by `lz lift export`. Raises InvalidArgument
        for arguments that are no plain values, and for a place that cannot be written."""
        value = {
            "kind": KIND,
            "schema": SCHEMA,
            "op": self.op,
            "device": "cuda" if self._call.is_on_gpu else "cpu",
            "arrays": {name: spec and spec.to_wire() for name, spec in self._call.arrays.items()},
            "params": self._given,
            "kernel": self._kernel,
        }
        try:
            _plain(self._given.values())
            text = json.dumps(value, indent=1, allow_nan=False)
        except (TypeError, ValueError) as exc:
            raise InvalidArgument(f"{self.op} cannot be exported: {exc}; allowed: plain values") from exc
        try:
            files.put(Path(path), text + "\n")
        except OSError as exc:
            raise InvalidArgument(f"name a file that can be written: {path}: {exc.strerror}") from exc

    @classmethod
    def load(cls, path: str | Path) -> Executor:
        """What `export` has written, with its kernel where that may serve the call here, else with the best one, which
        `changes` tells. Raises InvalidArgument for other files, NoBackend, NotConnected."""
        try:
            value = json.loads(files.read(Path(path), MAX_BYTES))
            if (value["kind"], value["schema"]) != (KIND, SCHEMA):
                raise InvalidArgument(f"it says that it is {value['kind']!r:.80}, schema {value['schema']!r:.20}")
            arrays = {name: spec and TensorSpec.from_wire(spec) for name, spec in value["arrays"].items()}
            params, device = dict(value["params"]), value["device"]
            kernel, op = value["kernel"], value["op"]
            if not (type(kernel) is str and type(op) is str and device in ("cpu", "cuda")):
                raise InvalidArgument("its kernel, op or device is no text that could be one")
            call = Call.of(op, device=device, **{**arrays, **params})
        except OSError as exc:
            raise InvalidArgument(f"name a file that Executor.export has written: {path}: {exc.strerror}") from exc
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
            raise InvalidArgument(f"export it again: {path} holds no executor: {exc!r:.200}") from exc
        except InvalidArgument as exc:
            raise InvalidArgument(f"export it again: {path} holds no executor: {exc.message:.300}") from exc
        made = cls(call)
        made._choose(default_session.session(), "loaded", prefers=kernel)
        return made


def jit(op: str | Callable[..., Any], *args: Any, device: str | None = None, **kwargs: Any) -> Executor:
    """Choose the kernel of a call now, compile it, and return the call as an object: lz.jit("linear", x, w)(x, w).

    Arguments are as of the op; an lz TensorSpec, or an array, stands for each array, all others are fixed. device:
    where the arrays are for which specs stand ("cpu", "cuda", "cuda:1" or a GPU's UUID). Waits for compilers, and
    starts no worker: lz.warmup does. Raises InvalidArgument, NoBackend, NotConnected.
    """
    if fixed := sorted({"out", "backend", "timeout_s"} & kwargs.keys()):
        text = f"leave out {', '.join(fixed)}: an executor chooses its kernel and makes its result"
        raise InvalidArgument(f"{text}; for one backend: with lz.prefer(NAME): lz.jit(...)")
    made = Executor(Call.of(op, *args, device=device, **kwargs))
    made._choose(default_session.session(), "made")
    return made


@functools.lru_cache(maxsize=1024)
def _held(kernel_id: str) -> Overlay:
    """Prefers a kernel to all others that measured times and dispatch tables speak for."""
    return Overlay.of({"origin": "lz.jit", "values": {"rules": [{"prefer": [kernel_id], "bonus": BONUS}]}})


def _told(spec: TensorSpec) -> str:
    return f"{'x'.join(map(str, spec.shape)) or 'one number'}:{spec.dtype}"


def _enqueued_on(record: Any) -> str:
    """The kernel that a call on a GPU was enqueued for."""
    decision = record.route.decisions.get(record.route.slot) if isinstance(record, Enqueued) else None
    return "" if decision is None else str(decision.kernel_id)


def _plain(values: Iterable[Any]) -> None:
    """Raises TypeError for what JSON would give back as something else."""
    for value in values:
        if isinstance(value, (list, tuple)):
            _plain(value)
        elif value is not None and not isinstance(value, (bool, int, float, str)):
            raise TypeError(f"{value!r:.80} is a {type(value).__name__}")
