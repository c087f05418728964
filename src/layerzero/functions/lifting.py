"""Calls of functions whose kernels this process launches itself (docs/lifting.md): a function's worker hands them over
as that of a backend does, and from then on has no part in such calls."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from layerzero.client.arrays.recognition import describe
from layerzero.client.connection import arena as arenas
from layerzero.client.connection import observing, overlay
from layerzero.client.connection.call import Request, Route
from layerzero.client.facade import default_session
from layerzero.client.facade.running import handler
from layerzero.client.gpu.device import Gpu
from layerzero.client.gpu.fastpath import MISS
from layerzero.client.gpu.lent_keys import types
from layerzero.client.gpu.session_view import Placed
from layerzero.client.planning.plans import Plan
from layerzero.client.session.session import Session
from layerzero.client.session.shadow import NEVER
from layerzero.functions.calling import Arguments
from layerzero.functions.calls import Owner
from layerzero.functions.options import Options
from layerzero.functions.report import FunctionReport
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.functions import frames
from layerzero.ipc.lifting.trial import fits_dtype, pack_ranges
from layerzero.ipc.transport.plain import pack_tree
from layerzero.ipc.vocabulary.ops import COUNTED_AS, FUNCTION_ON_GPU, GPU_ARRAYS
from layerzero.ipc.vocabulary.tensors import TensorSpec

MAX_KNOWN = 256
MIN_ALIKE = 3  # calls, before it is asked for such: each is tried with ten runs
NOT_ASKED = "NOT_YET: its calls do not pass the broker by so far"
UNSUPPORTED = "ARRAYS_UNSUPPORTED"  # beside LiftReason: found here


class Called(Protocol):
    """What is called, as of GpuExpress."""

    owner: Owner

    @property
    def label(self) -> str: ...
    @property
    def backends(self) -> tuple[str, ...]: ...
    @property
    def has_out(self) -> bool: ...
    def results(self, args: tuple[Any, ...]) -> tuple[TensorSpec, ...] | None: ...
    def head(self) -> bytes: ...
    def tail(self, level: int) -> bytes: ...


class Site(Protocol):
    """What calls that are alike have in common on their way to a worker, as of GpuExpress."""

    session: Session
    gpu: Gpu
    route: Route
    results: tuple[TensorSpec, ...]
    stream: Callable[[], int]
    make: Callable[[Any], tuple[Any, int]]
    is_capturing: Callable[[int], bool]


def demand_liftable(label: str, options: Options, *, is_plain: bool, counts: range, workers: int) -> None:
    """`is_plain`: neither a generator function nor a coroutine function; `counts`: of arguments that fit without a look
    at them; `workers`: that may serve it. Raises InvalidArgument for one whose calls are never lifted."""
    wrong = {
        "leave keep out: what stays in a worker is there alone": options.keep,
        "say shapes=, which tells the result's memory": options.shapes is None,
        "have a function that returns its result, no generator and no coroutine function": not is_plain,
        "have one that takes its arguments by place": not counts,
        "let it have one environment with one worker": workers > 1,
        "leave placement out: policy says where lifted calls run": options.placement != "worker",
        "leave shadow out: nobody else computes what is launched here": bool(options.shadow),
    }
    for text, is_so in wrong.items():
        if is_so:
            raise InvalidArgument(f"{label} has lift=True: {text}")


class Liftable(NamedTuple):
    """Calls that are alike, of one session. `name`: what tells them from others; `places`: of their arrays among the
    arguments; `nbytes`: of these and the result."""

    session: Session
    route: Route
    name: str
    places: tuple[int, ...]
    nbytes: int

    def request(self, args: Sequence[Any]) -> Request:
        """One of them, as lifted calls are known by."""
        arrays = [args[place] for place in self.places]
        arrays += [None] * (len(GPU_ARRAYS) - len(arrays))
        return Request(FUNCTION_ON_GPU, tuple(arrays), {"call": self.name}, _nobody_plans, backend=self.route.asked[0])


def _nobody_plans(*_: Any, **__: Any) -> Plan:
    raise InvalidArgument(f"{FUNCTION_ON_GPU} is no op that can be called")


class Lifting:
    """Of one function. Threads may share it."""

    def __init__(self, called: Called, names: Sequence[str], trial: Callable[..., Any] | None) -> None:
        """`names`: of the arguments, by their places; `trial`: as of lz.isolated."""
        self._called, self._names, self._trial = called, names, trial
        self._known: dict[Hashable, Liftable | str] = {}  # by what calls are alike by; why some are never lifted
        self._by_name: dict[str, Liftable] = {}
        self._counts: dict[Hashable, int] = {}  # likewise: calls before it is asked for such
        self._asked_in: dict[Hashable, tuple[Route, int, int]] = {}  # and by which route, epoch, `forgotten` of Lifts
        self._last = threading.local()  # `found`: of a thread's last call that was looked at

    @property
    def why(self) -> str:
        """What keeps this thread's last call in its worker that was looked at."""
        last: Liftable | str = getattr(self._last, "found", NOT_ASKED)
        if isinstance(last, str):
            return last
        return last.route.not_lifted or f"NOT_YET: {last.route.awaits or 'the broker was asked for it'}"

    def run(self, args: tuple[Any, ...], key: Hashable, results: Hashable, start_ns: int) -> LiftedCall | None:
        """A call that was launched; None for one that its worker is to run. `results`: as of Called. Raises the error
        of an earlier call on the GPU that failed after it had returned."""
        if not self._known:
            return None
        session, found = default_session.session(), self._known.get((key, results))
        if not isinstance(found, Liftable) or found.session is not session or not _is_plain(session):
            self._last.found = found if isinstance(found, str) else NOT_ASKED
            return None
        result = session.lifts.run_again(found.request(args), start_ns)
        return None if result is MISS else LiftedCall(self._called, found, result)

    def ask(self, site: Site, args: tuple[Any, ...], key: Hashable) -> LiftedCall | None:
        """Whether calls that come again may be launched here, is asked beside them, once for each epoch; a call that
        was launched, where that is known. Raises InvalidArgument for what `trial` gives that is no range."""
        whole, session, found = (key, site.results), site.session, self._known.get((key, site.results))
        if isinstance(found, Liftable) and not _is_of(found, site):
            found = None
        if found is None and not self._comes_again(whole):
            self._last.found = f"NOT_YET: calls like it come too rarely; needed: {MIN_ALIKE}"
            return None
        if found is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
                self._by_name.clear()
                self._asked_in.clear()
            found = self._known[whole] = self._liftable(site, args)
        self._last.found = found
        if isinstance(found, str) or not _is_plain(session):
            return None
        asked_in = found.route, site.gpu.order.page.lift_epoch, session.lifts.forgotten  # all may change meanwhile
        return None if self._asked_in.get(whole) == asked_in else self._serve(site, found, args, whole, asked_in)

    def _comes_again(self, whole: Hashable) -> bool:
        """Whether calls like this one have come so often that they may be worth a trial."""
        if len(self._counts) >= MAX_KNOWN:
            self._counts.clear()
        count = self._counts[whole] = self._counts.get(whole, 0) + 1
        return count >= MIN_ALIKE

    def _serve(
        self, site: Site, found: Liftable, args: tuple[Any, ...], whole: Hashable, when: tuple[Route, int, int]
    ) -> LiftedCall | None:
        start_ns, asked_in, request = time.perf_counter_ns(), overlay.process(), found.request(args)
        arrays = tuple([None if one is None else describe(one) for one in request.args])
        like, gpu, stream = arrays[0], site.gpu, site.stream()
        assert like is not None
        with gpu.memory.context:
            if site.is_capturing(stream):
                return None
            made, address = site.make(like.obj)
            placed = Placed(request, found.route, arrays, None, like, gpu, stream, address, start_ns, asked_in)
            is_launched = found.session.lifts.serve(placed)
            if placed.has_its_policy:  # else it was not asked
                self._asked_in[whole] = when
        return LiftedCall(self._called, found, made) if is_launched else None

    def _liftable(self, site: Site, args: tuple[Any, ...]) -> Liftable | str:
        """Calls like this one; why they never are lifted. Raises InvalidArgument."""
        called, results = self._called, site.results
        given = Arguments(args, {}, called.backends)
        assert given.on_gpu is not None
        arrays, nodes = given.on_gpu.arrays, given.on_gpu.nodes
        specs, places = [one.spec for one in arrays], [n for n, arg in enumerate(args) if type(arg) in types]
        if len(results) != 1:
            return f"{UNSUPPORTED}: {len(results)} results; allowed: 1"
        names = [self._names[place] if place < len(self._names) else f"args[{place}]" for place in places]
        ranges = self._ranges(args, dict(zip(names, specs, strict=True)))
        unknown = [n for n, s in zip(names, specs, strict=True) if "int" in s.dtype and n not in ranges]
        if unknown:
            text = "an array of integers is tried with values that trial= names"
            return f"{UNSUPPORTED}: {unknown[0]}: {text}"
        for position, node in enumerate(nodes):
            node[-2:] = [position, 0]
        out = frames.array_node(frames.OF_GPU, results[0], len(arrays), 0)
        call = called.head() + pack_tree(given.trees[0]) + called.tail(logging.WARNING)
        head = b"\x94" + pack_tree(frames.GPU) + call + pack_tree([out]) + pack_tree(called.has_out)
        inputs: list[TensorSpec | None] = [*specs, *[None] * (len(GPU_ARRAYS) - len(specs))]
        told = {
            "inputs": [None if spec is None else spec.to_wire() for spec in inputs],
            "outputs": [spec.to_wire() for spec in results],
            "call": (frames.prefix(len(head)) + head).hex(),
            "ranges": pack_ranges({GPU_ARRAYS[names.index(name)]: ends for name, ends in ranges.items()}),
        }
        name = hashlib.sha256(f"{told['call']} {told['ranges']} {site.gpu.uuid}".encode()).hexdigest()
        known = self._by_name.get(name)
        if known is not None and _is_of(known, site):
            return known
        plan = Plan(FUNCTION_ON_GPU, tuple(inputs), {}, results, results)
        of, asked = site.route, (called.backends[0], overlay.current())
        route = Route(of.number, plan, decisions=of.decisions, near=of, is_armed=True, asked=asked)
        route.beside = {"call": told}
        nbytes = sum(spec.span_bytes for spec in (*specs, *results))
        found = self._by_name[name] = Liftable(site.session, route, name, tuple(places), nbytes)
        return found

    def _ranges(self, args: tuple[Any, ...], arrays: Mapping[str, TensorSpec]) -> dict[str, tuple[int, int]]:
        """What arrays of integers are tried with, by name. Raises InvalidArgument, and what `trial` raises."""
        told = {} if self._trial is None else self._trial(*args)
        if not isinstance(told, dict):
            told = {"": told}
        for name, values in told.items():
            spec = arrays.get(name)
            is_whole = isinstance(values, range) and values.step == 1 and len(values) > 0
            if spec is None or "int" not in spec.dtype or not is_whole or not fits_dtype(spec.dtype, _ends(values)):
                text = f"{self._called.label}: trial gives {name!r:.40}: {values!r:.80}"
                known = ", ".join(one for one, its in arrays.items() if "int" in its.dtype) or "none"
                raise InvalidArgument(f"{text}; allowed: ranges of values that arrays of integers can have: {known}")
        return {name: _ends(values) for name, values in told.items()}


def _ends(values: range) -> tuple[int, int]:
    return values.start, values.stop


def _is_of(found: Liftable, site: Site) -> bool:
    """Whether the broker was told of such calls by the site's session, beside its route."""
    return found.session is site.session and found.route.near is site.route


def _is_plain(session: Session) -> bool:
    """Whether nobody looks at this process's calls, or has others than the broker's rules for them."""
    return (
        session.link.forks == arenas.forks  # of this very process: that connects a forked child
        and session.shadow.next_seq == NEVER
        and overlay.baked.get() is None
        and observing.recorder is None
        and handler.get() is None
    )


class LiftedCall:
    """A call that this process has launched: its result is valid in the caller's current stream."""

    is_sent = False

    def __init__(self, called: Called, of: Liftable, value: Any) -> None:
        self._called, self._session, self._value = called, of.session, value
        self._nbytes, self._record = of.nbytes, of.session.last_record

    @property
    def label(self) -> str:
        return self._called.label

    def run(self) -> Any:
        """As `finish`."""
        return self.finish()

    def finish(self, timeout: float | None = None) -> Any:
        """As Call.finish."""
        value, self._value, owner = self._value, None, self._called.owner
        owner._kernel_ns, owner._last.call = 0, self
        return value

    @property
    def report(self) -> FunctionReport:
        """As Call.report."""
        found = self._session.report_of(self._record)
        assert found is not None
        selection = replace(found, op=COUNTED_AS[FUNCTION_ON_GPU])
        env, backend = self._called.owner._places.env.name, self._called.backends[0]
        elapsed_us = selection.elapsed_us or 0.0
        return FunctionReport(self.label, env, backend, 1, (), (), self._nbytes, elapsed_us, selection)
