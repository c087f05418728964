"""lz.compile: kernels chosen once for all calls of a function, and preferred from then on."""

from __future__ import annotations

import functools
import inspect
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layerzero.client.arrays.recognition import CPU, describe
from layerzero.client.connection import overlay
from layerzero.client.connection.call import Request
from layerzero.client.connection.overlay import Overlay
from layerzero.client.connection.report import html_of_text
from layerzero.client.facade import default_session
from layerzero.client.session.session import Session
from layerzero.client.tools.compiling import compile_ahead, in_line
from layerzero.client.tools.dry_run import PlanReport, plan_calls
from layerzero.client.tools.trace import Key, TracedCall, bucket_key, call_key, imagine, watch
from layerzero.ipc.errors import InvalidArgument, LayerZeroError
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.ipc.wording import counted

MAX_PLANS = 256  # of one function; the one that was not used for longest goes
MAX_UNPLANNED = 64  # different calls that a report names
BONUS = 5_000.0  # above measured times and dispatch tables, below what lz.prefer asks for
_PLAIN = (str, bytes, int, float, bool, complex, type(None))


@dataclass(frozen=True)
class BakedPlan:
    """The plan for arguments of one bucket. `problem` says why nothing was baked."""

    plan: PlanReport | None
    problem: str = ""


@dataclass(frozen=True)
class CompileReport:
    """What lz.compile has done so far. `planned_calls` ran with their baked kernel preferred; `unplanned` counts calls
    that no plan has, by op and shapes: they ran like any other."""

    plans: tuple[BakedPlan, ...]
    runs: int
    planned_calls: int
    unplanned: Mapping[str, int]

    def __str__(self) -> str:
        runs, plans = counted(self.runs, "run"), counted(len(self.plans), "plan")
        lines = [f"{runs} with {plans}, {counted(self.planned_calls, 'call')} as planned"]
        lines += [f"  {counted(count, 'call')} in no plan: {label}" for label, count in self.unplanned.items()]
        for baked in self.plans:
            lines += f"plan: {baked.plan or baked.problem}".splitlines()
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return html_of_text(str(self))


@dataclass
class _Baked:
    """`kernels` has, for each kind of call, what was chosen for its occurrences in order."""

    kernels: dict[Key, tuple[Overlay | None, ...]]
    report: BakedPlan


class _Run:
    """One run of the function under a plan. `seen` counts the calls of each kind so far."""

    def __init__(self, baked: _Baked) -> None:
        self.planned = 0
        self.unplanned: Counter[str] = Counter()
        self._kernels = baked.kernels
        self._seen: Counter[Key] = Counter()
        self._lock = threading.Lock()  # asyncio.to_thread takes the context along

    def overlay_for(self, request: Request, specs: tuple[TensorSpec | None, ...], gpu: str) -> Overlay | None:
        """What the call asks of selection: the caller's policy, and the baked kernel if the plan has the call."""
        current = overlay.current()
        try:
            key = call_key(request.op, request.shape_specs(specs), request.params, gpu)
            chosen = self._kernels.get(key, ())
        except TypeError:  # an argument that cannot be hashed: the call's own checks name it
            return current
        with self._lock:
            occurrence = self._seen[key]
            self._seen[key] += 1
            if occurrence >= len(chosen):
                self.unplanned[f"{request.op}({', '.join(str(spec) for spec in specs if spec is not None)})"] += 1
                return current
            self.planned += 1
        wish = chosen[occurrence]
        return current if wish is None else overlay.on_top(current, wish)


class Compiled:
    """A function whose calls prefer the kernels of a plan. Made by lz.compile."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function, updated=())
        self._function = function
        self._plans: OrderedDict[Key, _Baked] = OrderedDict()
        self._lock = threading.Lock()
        self._unplanned: Counter[str] = Counter()
        self._runs = self._planned = 0

    def __repr__(self) -> str:
        name = getattr(self._function, "__qualname__", type(self._function).__name__)
        return f"<lz.compile of {name}: {counted(self._runs, 'run')}, {counted(len(self._plans), 'plan')}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key = arguments_key((args, kwargs))
        with self._lock:
            self._runs += 1
            baked = self._plans.get(key)
            if baked is not None:
                self._plans.move_to_end(key)
        if baked is None:
            session = default_session.session()
            value, calls = watch(session, self._function, args, kwargs)
            self._keep(key, _bake(session, calls))
            return value
        run = _Run(baked)
        token = overlay.baked.set(run.overlay_for)
        try:
            return self._function(*args, **kwargs)
        finally:
            overlay.baked.reset(token)
            self._note(run)

    def bake(self, *args: Any, **kwargs: Any) -> PlanReport:
        """Make the plan for such arguments now, with a dry run (see lz.dry_run), so that the first call has it. Kernels
        that would serve its calls once they are compiled are compiled first.

        Raises what lz.dry_run raises, and InvalidArgument when a call has no kernel.
        """
        session = default_session.session()
        calls = imagine(session, self._function, args, kwargs)
        for body, op in {call.body: call.op for call in calls}.items():
            first = in_line(session.explain_route(op, body))[:1]
            compile_ahead(session, body, [candidate.backend for candidate in first])
        baked = _bake(session, calls)
        if baked.report.plan is None or baked.report.problem:
            raise InvalidArgument(f"nothing to bake: {baked.report.problem}")
        self._keep(arguments_key((args, kwargs)), baked)
        return baked.report.plan

    def report(self) -> CompileReport:
        """The plans, and how many calls they have served."""
        with self._lock:
            plans = tuple(baked.report for baked in self._plans.values())
            return CompileReport(plans, self._runs, self._planned, dict(self._unplanned))

    def reset(self) -> None:
        """Forget the plans: the next call makes a new one, from what has been measured by then."""
        with self._lock:
            self._plans.clear()

    def _note(self, run: _Run) -> None:
        with self._lock:
            self._planned += run.planned
            for label, count in run.unplanned.items():
                is_known = label in self._unplanned or len(self._unplanned) < MAX_UNPLANNED
                self._unplanned[label if is_known else "others"] += count

    def _keep(self, key: Key, baked: _Baked) -> None:
        with self._lock:
            self._plans[key] = baked
            if len(self._plans) > MAX_PLANS:
                self._plans.popitem(last=False)


def compile(function: Callable[..., Any]) -> Compiled:
    """A function, or a model, that chooses the kernels for all its lz calls at once and keeps to them.

    The first run with arguments of a bucket (extents rounded up to powers of two) goes as usual and is watched; then
    the broker plans its calls together, and later runs prefer the chosen kernels; `bake` plans before the first run.
    Preferred is not required: when a kernel fails or may not serve a call, the next best does, and a call that the plan
    does not have runs like any other. `report()` counts them. Calls in threads that the function starts are not
    planned. Arguments other than arrays, plain values and lists, tuples and dicts of them are told apart by their type
    only.
    """
    if not callable(function):
        raise InvalidArgument(f"lz.compile takes a function or a model, not a {type(function).__name__}")
    if inspect.iscoroutinefunction(function):
        raise InvalidArgument(f"{function.__name__} is a coroutine function; compile the functions that it calls")
    return Compiled(function)


def _bake(session: Session, calls: Sequence[TracedCall]) -> _Baked:
    if not calls:
        return _Baked({}, BakedPlan(None, "the function makes no lz call"))
    try:
        plan = plan_calls(session, calls)
    except LayerZeroError as exc:
        return _Baked({}, BakedPlan(None, exc.message))
    kernels: dict[Key, tuple[Overlay | None, ...]] = {}
    for call, planned in zip(calls, plan.calls, strict=True):
        wish = None if call.is_pinned or planned.kernel_id is None else _wish(planned.kernel_id)
        kernels[call.key] = (*kernels.get(call.key, ()), wish)
    return _Baked(kernels, BakedPlan(plan, plan.problem))


@functools.lru_cache(maxsize=1024)
def _wish(kernel_id: str) -> Overlay:
    return Overlay.of({"origin": "lz.compile", "values": {"rules": [{"prefer": [kernel_id], "bonus": BONUS}]}})


def arguments_key(value: Any) -> Key:
    """Equal for arguments that share a plan."""
    if isinstance(value, _PLAIN):
        return (type(value), value)
    if isinstance(value, Mapping):
        return (dict, tuple((str(name), arguments_key(item)) for name, item in value.items()))
    if isinstance(value, (list, tuple)):
        return (type(value), *(arguments_key(item) for item in value))
    if isinstance(value, TensorSpec):
        return (CPU, *bucket_key(value))
    try:
        array = describe(value)
        return (array.device, *bucket_key(array.spec))
    except LayerZeroError:
        return (type(value),)
