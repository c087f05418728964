"""lz.plan: a function whose calls are recorded once, with their data flow, and afterwards run as one."""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from layerzero.client.arrays.recognition import CPU
from layerzero.client.connection import observing, overlay
from layerzero.client.connection.overlay import Overlay
from layerzero.client.facade import default_session, running
from layerzero.client.plans.choices import Choices
from layerzero.client.plans.comparing import difference
from layerzero.client.plans.debugging import compared
from layerzero.client.plans.diagnostics import Diagnostics, PlanEvent, to_json
from layerzero.client.plans.frozen import FrozenPlan, apart
from layerzero.client.plans.graph_library import LIBRARIES
from layerzero.client.plans.graph_plan import GraphPlan
from layerzero.client.plans.guards import arrays_of, is_captured, key_of, label_of, modes_of
from layerzero.client.plans.keeping import KeptChoice
from layerzero.client.plans.layout import NOBODY
from layerzero.client.plans.passes import Program
from layerzero.client.plans.picturing import as_html, as_text
from layerzero.client.plans.preparing import FUSED_BY, alternatives, check_passes
from layerzero.client.plans.recording import CONSTANT, Recording, record
from layerzero.client.plans.showing import (
    PlanExplanation,
    SlotRow,
    Timing,
    explain_plan,
    mermaid,
    peak_bytes,
    slot_rows,
    timing_rows,
)
from layerzero.client.plans.verifying import largest_difference
from layerzero.client.session.session import Session
from layerzero.ipc.errors import InvalidArgument, LayerZeroError
from layerzero.ipc.wording import counted

COLD, WARM, FROZEN, CALLS = "COLD", "WARM", "FROZEN", "CALLS"
"""Phases of a plan: never run; recorded, perhaps more than once; laid out; not to be frozen, its function runs."""
MAX_VARIANTS = 64  # of one function; the one that was not used for longest goes


class Variant:
    """The plan for arguments of one kind: shapes, dtypes, plain values, policy."""

    def __init__(self, label: str, asked: Overlay | None) -> None:
        self.label, self.asked = label, asked
        self.phase, self.problem = COLD, ""
        self.recordings = 0
        self.runs = self.replays = self.fallbacks = 0
        self.replayed_ns = 0
        self.recording: Recording | None = None
        self.programs: list[Program] = []  # with all fusions, and without some
        self.unfused = ""  # why it was recorded anew, and has no fusions
        self.frozen: FrozenPlan | None = None
        self.graph: GraphPlan | None = None  # in its place, on a GPU
        self.choices: Choices | None = None
        self.kept: KeptChoice | None = None
        self.checked: set[tuple[str, int]] = set()  # candidates whose chains were compared with calls
        self.workers: dict[tuple[str, int], Mapping[int, str]] = {}  # of candidates: which ones it is laid out for
        self.lock = threading.Lock()

    @property
    def program(self) -> Program | None:
        """That of the chosen candidate."""
        if not self.programs:
            return None
        return self.programs[0 if self.choices is None else self.choices.chosen.program]


class ExecutionPlan:
    """A function that runs as a plan where it can. Made by lz.plan."""

    def __init__(
        self,
        function: Callable[..., Any],
        warmup: int,
        *,
        bake_constants: bool,
        fixed_weights: bool,
        keep_choice: bool,
        passes: frozenset[str],
        diagnostics: Diagnostics,
        is_timed: bool,
    ) -> None:
        functools.update_wrapper(self, function, updated=())
        self._function, self._warmup, self._bakes, self._keeps = function, warmup, bake_constants, keep_choice
        self._passes, self._has_fixed_weights, self._diagnostics = passes, fixed_weights, diagnostics
        self._is_timed = is_timed
        self._owner = getattr(function, "__self__", function)
        self._name = getattr(function, "__qualname__", type(function).__name__)
        self._variants: OrderedDict[Any, Variant] = OrderedDict()
        self._lock = threading.Lock()
        self._misses: Counter[str] = Counter()
        self._latest: Variant | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if running.handler.get() is not None or overlay.baked.get() is not None:  # lz.dry_run, lz.compile: they ask
            return self._function(*args, **kwargs)
        session = default_session.session()
        arrays: list[Any] = []
        variant = self._variant(args, kwargs, arrays)
        if not variant.lock.acquire(blocking=False):
            self._miss("another thread was in it")
            return self._function(*args, **kwargs)
        try:
            variant.runs += 1
            if observing.recorder is None:
                return self._run(session, variant, args, kwargs, arrays)
            with observing.recorder.scope(f"plan {self._name}"):
                return self._run(session, variant, args, kwargs, arrays)
        finally:
            variant.lock.release()

    def __repr__(self) -> str:
        return f"<lz.plan of {self._name}: {counted(len(self._variants), 'plan')}>"

    # --- what is seen of it

    @property
    def phase(self) -> str:
        """Of the plan that ran last: COLD, WARM, FROZEN, or CALLS where the function's calls go one by one."""
        return COLD if self._latest is None else self._latest.phase

    @property
    def runs_here(self) -> bool:
        """Whether the next run of what ran last asks no worker: it is a CUDA graph of kernels launched here."""
        return self._latest is not None and self._latest.graph is not None and self._latest.graph.runs_here

    def explain(self) -> PlanExplanation:
        """What became of the plan that ran last, and why: steps, messages, memory, passes, counters. Raises
        InvalidArgument before the first run."""
        return explain_plan(self.latest(), self.counters())

    def slots(self) -> list[SlotRow]:
        """The memory that the last plan's steps leave for each other; empty before it is frozen."""
        return slot_rows(self.latest())

    def timings(self) -> list[Timing]:
        """How each step of the last plan was run the last time; empty before it is frozen."""
        return timing_rows(self.latest())

    def show(self, form: str = "mermaid") -> str:
        """The last plan as a picture: a Mermaid flow chart, a table for terminals ("text"), or a page that needs no
        other file ("html"). Raises InvalidArgument for other forms."""
        if form == "mermaid":
            return mermaid(self.latest())
        if form not in ("text", "html"):
            raise InvalidArgument(f"form is {form!r}; allowed: mermaid, text, html")
        return (as_text if form == "text" else as_html)(self.latest(), self.counters())

    def diagnostics(self, category: str | None = None) -> list[PlanEvent]:
        """The last events of a category, or of all, as far as `diagnostics=` asked for them; the oldest first. Raises
        InvalidArgument for a category that there is not."""
        return self._diagnostics.events(category)

    def diagnostics_json(self, category: str | None = None) -> str:
        """As `diagnostics`, one JSON object a line."""
        return to_json(self._diagnostics.events(category))

    def counters(self) -> dict[str, Any]:
        """Runs, replays and their average time in us, why other runs were none, steps that left their chain
        ("fallbacks"), the bytes of the largest plan; how many choices over whole plans were "reused" from disk, "kept"
        there, or found there and "ignored"."""
        with self._lock:
            variants = list(self._variants.values())
            replays = sum(v.replays for v in variants)
            return {
                "runs": sum(v.runs for v in variants),
                "replays": replays,
                "average_us": sum(v.replayed_ns for v in variants) / 1e3 / replays if replays else 0.0,
                "plans": len(variants),
                "misses": dict(self._misses),
                "fallbacks": sum(v.fallbacks for v in variants),
                "choices": dict(Counter(state for v in variants if v.kept is not None for state in v.kept.states)),
                "peak_bytes": max(map(peak_bytes, variants), default=0),
            }

    def reset(self) -> None:
        """Forget all plans: the function is recorded anew. To be called when arrays that it has of its own were
        replaced by others."""
        with self._lock:
            self._variants.clear()
            self._latest = None

    def verify(self, *args: Any, **kwargs: Any) -> float:
        """Run the function, and its plan, on the same arguments: the largest difference of their results, relative to
        the largest number. 0.0 where there is no plan yet. Raises InvalidArgument when the results differ otherwise."""
        expected = self._function(*args, **kwargs)
        return largest_difference(expected, self(*args, **kwargs))

    def debug(self, *args: Any, compare: str | None = None, **kwargs: Any) -> Iterator[tuple[Any, ...]]:
        """Run the frozen plan of such arguments step by step, each as a call of its own: an iterator of steps and
        their results, which may be looked at, and changed. Raises InvalidArgument where there is no such plan.

        compare: a backend; each step's tuple has a Comparison behind the results, with what that backend made of the
        same arguments. The function cannot have an argument of that name here.
        """
        if compare is not None and not isinstance(compare, str):
            raise InvalidArgument(f"compare is {compare!r:.80}; allowed: the name of a backend")
        variant = self._variant(args, kwargs, [])
        if variant.phase != FROZEN:
            raise InvalidArgument(f"run it until it is FROZEN first: this plan is {variant.phase}; {variant.problem}")
        inputs = arrays_of((args, kwargs))
        with variant.lock:
            session = default_session.session()
            if variant.graph is not None:
                if compare is not None:
                    raise InvalidArgument("compare is for plans on the CPU; leave it out on a GPU")
                yield from self._graph(session, variant).walk(inputs)
                return
            frozen = self._frozen(session, variant)
            if compare is not None:
                yield from compared(frozen, inputs, compare)
            else:
                yield from ((step, results) for step, results, _ in frozen.debug(inputs))

    def _tell(self, variant: Variant, category: str, message: str, **facts: Any) -> None:
        variant.fallbacks += category == "fallback"
        self._diagnostics.tell(category, variant.label, message, **facts)

    def _miss(self, why: str) -> None:
        with self._lock:
            self._misses[why] += 1

    def latest(self) -> Variant:
        """The plan that ran last. Raises InvalidArgument before the first run."""
        if self._latest is None:
            raise InvalidArgument("run the plan first: it has made none yet")
        return self._latest

    # --- its life

    def _variant(self, args: Any, kwargs: Any, arrays: list[Any]) -> Variant:
        policy = overlay.current()
        mode = getattr(self._owner, "training", None)  # of a module of torch
        shapes = key_of((args, kwargs), arrays)
        key = (shapes, None if policy is None else policy.text, modes_of(arrays), mode)
        with self._lock:
            variant = self._variants.get(key)
            if variant is self._latest and variant is not None:
                return variant
            if variant is None:
                variant = self._variants[key] = Variant(label_of((args, kwargs)), policy)
                if len(self._variants) > MAX_VARIANTS:
                    self._variants.popitem(last=False)
            else:
                self._variants.move_to_end(key)
            self._latest = variant
        return variant

    def _run(self, session: Session, variant: Variant, args: Any, kwargs: Any, arrays: list[Any]) -> Any:
        if variant.phase == CALLS:
            self._miss(variant.problem)
            return self._function(*args, **kwargs)
        if is_captured(arrays):
            self._miss("its caller captures a CUDA graph, which has its calls")
            return self._function(*args, **kwargs)
        if variant.phase == FROZEN:
            return self._replay(session, variant, arrays)
        return self._record(session, variant, args, kwargs)

    def _record(self, session: Session, variant: Variant, args: Any, kwargs: Any) -> Any:
        value, made = record(session, self._function, args, kwargs)
        self._miss("recorded")
        problem = made.problem
        if not problem and variant.recording is not None:
            problem = difference(variant.recording, made, bakes_constants=self._bakes)
        variant.recordings += 1
        variant.phase = WARM
        self._tell(variant, "phase", "recorded", steps=len(made.steps), problem=problem)
        if problem:
            variant.phase, variant.problem, variant.recording = CALLS, problem, None
            self._tell(variant, "phase", f"its calls go one by one: {problem}", phase=CALLS)
        elif variant.recording is None:
            variant.recording = made
            if made.device != CPU:  # what it made is not to keep a GPU's memory
                made.let_go({storage.number for storage in made.storages if storage.origin == CONSTANT})
        elif variant.recordings > self._warmup:
            self._freeze(session, variant, made, args, kwargs, value)
            return value if variant.program is None else apart(variant.program, value)
        return value

    def _freeze(
        self, session: Session, variant: Variant, made: Recording, args: Any, kwargs: Any, expected: Any
    ) -> None:
        """Lay the plan out, and see that it gives what the function gave."""
        assert variant.recording is not None
        passes = self._passes - set(FUSED_BY.values()) if variant.unfused else self._passes
        first, variant.recording = variant.recording, None
        variant.programs = alternatives(session, first, made, passes, has_fixed_weights=self._has_fixed_weights)
        program = variant.programs[0]
        if made.device not in (None, CPU):
            self._freeze_graph(session, variant, made, arrays_of((args, kwargs)), expected)
            return
        if variant.unfused:
            program.done.append(f"no fusions: {variant.unfused}")
        variant.choices = Choices(variant.programs)
        if self._keeps:
            variant.kept = KeptChoice(self._function, program, variant.label)
            variant.kept.look(session, variant.choices)
        variant.phase = FROZEN
        frozen = self._frozen(session, variant)
        self._tell(variant, "phase", "laid out", phase=FROZEN, steps=len(program.steps), fused=program.fused)
        for line in program.done:
            self._tell(variant, "passes", line)
        layout = frozen.layout
        self._tell(variant, "memory", "slots", peak_bytes=layout.peak_bytes, sum_bytes=layout.sum_bytes)
        if made.writes_outside:
            for one in variant.programs:
                one.done.append("not checked against the function: it writes to arrays of its caller's")
            numbers = range(len(variant.programs))
            variant.checked |= {(one.backend, n) for one in variant.choices.candidates for n in numbers}
            return
        self._check(session, variant, arrays_of((args, kwargs)), expected, "the function")

    def _freeze_graph(
        self, session: Session, variant: Variant, made: Recording, inputs: list[Any], expected: Any
    ) -> None:
        """As `_freeze`, on a GPU."""
        assert variant.program is not None
        variant.phase = FROZEN
        graph = self._graph(session, variant)
        if made.writes_outside:
            variant.program.done.append("not checked against the function: it writes to arrays of its caller's")
            return
        try:
            largest_difference(expected, graph.run(inputs))
        except InvalidArgument as exc:
            graph.problem = f"its steps gave something else than the function: {exc.message}"
        self._look_at(variant, graph)

    def _graph(self, session: Session, variant: Variant) -> GraphPlan:
        """Of this very connection."""
        graph, program = variant.graph, variant.program
        assert program is not None
        if graph is None or graph.session is not session or graph.link is not session.link:
            library = LIBRARIES[program.recording.kind]
            graph = variant.graph = GraphPlan(session, program, library, is_timed=self._is_timed)
        return graph

    @staticmethod
    def _look_at(variant: Variant, graph: GraphPlan) -> None:
        if graph.problem:
            variant.phase, variant.problem, variant.graph = CALLS, graph.problem, None

    def _frozen(self, session: Session, variant: Variant) -> FrozenPlan:
        """Of this very connection and the chosen candidate, and with memory that nobody else may write to."""
        frozen = variant.frozen
        assert variant.program is not None
        assert variant.choices is not None
        wish = variant.choices.chosen.wish
        is_its = frozen is not None and frozen.session is session and frozen.link is session.link
        is_its = is_its and frozen is not None and frozen.program is variant.program
        if frozen is None or frozen.is_spoilt or not is_its or frozen.wish is not wish:
            workers = variant.workers.get(variant.choices.chosen.key, NOBODY)
            tell = functools.partial(self._tell, variant)
            frozen = variant.frozen = FrozenPlan(session, variant.program, wish, workers, tell, variant.asked)
        return frozen

    def _replay_graph(self, session: Session, variant: Variant, inputs: list[Any]) -> Any:
        graph = self._graph(session, variant)
        value = graph.run(inputs)
        if graph.why:
            self._miss(graph.why)
        else:
            variant.replays += 1
        self._look_at(variant, graph)
        return value

    def _replay(self, session: Session, variant: Variant, inputs: list[Any]) -> Any:
        if variant.graph is not None:
            return self._replay_graph(session, variant, inputs)
        frozen = self._frozen(session, variant)
        start_ns = time.perf_counter_ns()
        value = frozen.run(inputs)
        elapsed_ns = time.perf_counter_ns() - start_ns
        variant.replays += 1
        variant.replayed_ns += elapsed_ns
        if self._diagnostics.is_on("runs"):
            self._tell(variant, "runs", "replayed", us=elapsed_ns / 1e3, copied_bytes=frozen.copied_bytes)
        choices = variant.choices
        assert choices is not None
        chosen = choices.chosen.key
        if not choices.is_done and (chosen in variant.checked or not frozen.is_linked):
            had_backend = choices.has_backend
            choices.note(frozen, elapsed_ns)
            if choices.is_done:
                self._tell(variant, "choice", str(choices), backend=choices.backend)
            if choices.has_backend and not had_backend and variant.kept is not None:
                variant.kept.tell(session, choices)
        elif chosen not in variant.checked and frozen.is_linked and self._is_laid_out(variant, frozen):
            variant.checked.add(chosen)
            for segment in frozen.segments:
                segment.is_held = True
            try:
                self._check(session, variant, inputs, value, "its calls one by one")
            finally:
                for segment in frozen.segments:
                    segment.is_held = False
        return value

    @staticmethod
    def _is_laid_out(variant: Variant, frozen: FrozenPlan) -> bool:
        """Whether it is for the workers that serve it; else the next one will be."""
        assert variant.choices is not None
        chosen = variant.choices.chosen.key
        if chosen in variant.workers:
            return True
        variant.workers[chosen] = frozen.served()
        if variant.workers[chosen] == frozen.workers:
            return True
        variant.frozen = None
        return False

    def _check(self, session: Session, variant: Variant, inputs: list[Any], expected: Any, what: str) -> None:
        """Run it once more on the same arguments. A plan that gives something else is none."""
        assert variant.frozen is not None
        try:
            largest_difference(expected, variant.frozen.run(inputs))
        except InvalidArgument as exc:
            problem = f"the plan gave something else than {what}: {exc.message}"
            self._tell(variant, "fallback", problem)
            if variant.programs[0].fused and not variant.unfused:  # once more without them
                variant.unfused, variant.phase, variant.recordings = problem, WARM, 0
                variant.choices, variant.kept, variant.programs = None, None, []
                variant.checked.clear()
                variant.workers.clear()
            else:
                variant.phase, variant.problem = CALLS, problem
            variant.frozen = None
        except LayerZeroError:
            variant.frozen = None  # a call failed, and it was not the caller's: the next run has a plan of its own


def plan(
    function: Callable[..., Any],
    *,
    warmup: int = 1,
    bake_constants: bool = False,
    fixed_weights: bool = False,
    keep_choice: bool = True,
    passes: Iterable[str] | None = None,
    diagnostics: str | Mapping[str, str] = "summary",
    timed: bool = False,
) -> ExecutionPlan:
    """A function, or a model, whose lz calls are recorded once and afterwards run as one.

    The first runs with arguments of a kind (shapes, dtypes, plain values, policy) execute the function as usual and
    record what it does with the arrays it is given: lz calls, and operators, methods and functions of NumPy or torch.
    When `warmup` more runs did the same, the plan is frozen: from then on the function is not run; its steps are, from
    memory that was laid out once, and lz calls that follow each other on one worker cross as one message. A function
    that looks at numbers of its arrays, or does something else at each run, is run as ever; `explain()` says why.

    On a GPU, of torch's tensors, the steps are one CUDA graph.

    What the function does beside its arrays (printing, counting, lists that it fills) happens only while it is
    recorded, and twice in a run that cannot be recorded to its end. Arrays that it has of its own, such as weights, may
    be changed in place, and are seen; after they were replaced by other arrays, or numbers that it reads beside its
    arguments have changed, call `reset`.

    warmup: how many runs must agree with the first one; at least 1.
    bake_constants: arrays that the function makes anew at each run, and not of its arguments (a mask by numpy.tril,
    say), are kept as they were when it was recorded; without it such a function is run as ever.
    fixed_weights: the caller's word that arrays which the function has of its own are not changed: they may be folded,
    and weights of several projections laid side by side; after changes call `reset`. Without it, only arrays that are
    read-only down to bytes of Python's count as such.
    keep_choice: which backend its calls prefer together is looked for on disk, and written there, so that the next
    process need not time it; False times it in this process.
    passes: names of the passes that may change the program, of "constants", "identities", "common", "attention",
    "projections", "residuals", "gating", "activations", "sums" and "unused" (docs/plans.md); None: all of them.
    diagnostics: which events are kept and go to the loggers `layerzero.plan.<category>`: "off", "summary" (phase,
    choice, fallback), "detailed" (passes, memory and links, too), "full" (each run, too), or a map of categories to
    those. timed: on a GPU, each launch of the plan's graph is timed by two events; `timings()` has the last one's.
    Raises InvalidArgument for what cannot be called, and what the function's calls raise.
    """
    if not callable(function):
        raise InvalidArgument(f"lz.plan takes a function or a model, not a {type(function).__name__}")
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise InvalidArgument(f"{function.__name__} is a coroutine or generator; plan the functions that it calls")
    if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 1:
        raise InvalidArgument(f"warmup is {warmup!r}; allowed: 1 or more")
    return ExecutionPlan(
        function,
        warmup,
        bake_constants=bake_constants,
        fixed_weights=fixed_weights,
        keep_choice=keep_choice,
        passes=check_passes(passes),
        diagnostics=Diagnostics.of(diagnostics),
        is_timed=timed,
    )
