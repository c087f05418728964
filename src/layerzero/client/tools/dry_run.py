"""lz.dry_run: which kernels a function's calls would get, alone and together, without executing any."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from layerzero.client.connection.report import SelectionReport, html_of_text, time_text
from layerzero.client.facade import default_session
from layerzero.client.gpu.arrays import gpu_name
from layerzero.client.planning.attention_plans import plan_attention
from layerzero.client.planning.plans import Plan
from layerzero.client.session.session import Session
from layerzero.client.tools.trace import TracedCall, imagine
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.wording import counted


@dataclass(frozen=True)
class PlannedCall:
    """One call of the function. `kernel_id` is the joint plan's choice, `report` what it would get by itself, `sources`
    the calls whose results it takes."""

    op: str
    label: str
    kernel_id: str | None
    us: float
    sources: tuple[int, ...]
    report: SelectionReport


@dataclass(frozen=True)
class Transform:
    """What has to be copied between two calls, in microseconds."""

    source: int
    target: int
    us: float


@dataclass(frozen=True)
class Rewrite:
    """One call that would do what several do, and be faster by `saves_us`, if nobody needs their other results."""

    calls: tuple[int, ...]
    instead: str
    kernel_id: str
    saves_us: float


@dataclass(frozen=True)
class PlanReport:
    """What a function would run. Times are measured medians, with what policy and priority are worth beside them
    (docs/plans.md). `unmeasured`: calls with kernels that were never measured, which count as fast as the fastest.

    `cost_us`: kernels and transforms of the joint plan; `runner_up_us`: of the second best; `alone_us`: of each call's
    own best kernel. All are None when a call has no kernel: `problem` says which.
    """

    calls: tuple[PlannedCall, ...]
    transforms: tuple[Transform, ...] = ()
    rewrites: tuple[Rewrite, ...] = ()
    cost_us: float | None = None
    runner_up_us: float | None = None
    alone_us: float | None = None
    unmeasured: tuple[int, ...] = ()
    is_exact: bool = True
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [counted(len(self.calls), "call") + (f": {self.problem}" if self.problem else "")]
        if self.unmeasured:  # a sum would be of guesses
            some = (
                "no times yet" if len(self.unmeasured) == len(self.calls) else f"{len(self.unmeasured)} without times"
            )
            lines[0] += f", {some}: lz.tune(...) or lz.warmup(...) measures them"
        elif self.cost_us is not None and self.alone_us is not None:
            lines[0] += (
                f", {self.cost_us:,.0f} us with the joint plan, {self.alone_us:,.0f} us with each call's own best"
            )
            if self.runner_up_us is not None:
                lines[0] += f"; the second best plan takes {self.runner_up_us:,.0f} us"
            if not self.is_exact:
                lines[0] += "; too wide to look at every plan"
        width = max((len(call.label) for call in self.calls), default=0)
        for number, call in enumerate(self.calls):
            taken = f"  after {', '.join(map(str, call.sources))}" if call.sources else ""
            time = "not measured" if number in self.unmeasured else f"{call.us:,.0f} us"
            lines.append(f"  {number:>3}  {call.label:<{width}}  {call.kernel_id or 'no kernel'}  {time}{taken}")
        for transform in self.transforms:
            lines.append(f"  copied between {transform.source} and {transform.target}: {time_text(transform.us)}")
        for rewrite in self.rewrites:
            calls = ", ".join(map(str, rewrite.calls))
            lines.append(
                f"  calls {calls} as {rewrite.instead} on {rewrite.kernel_id}: {rewrite.saves_us:,.0f} us less"
            )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return html_of_text(str(self))


def dry_run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> PlanReport:
    """What `function(*args, **kwargs)`, a function or a model, would run on which kernels. No kernel is executed.

    The function itself does run: each lz call in it returns zeros of the right shape, dtype and kind, and its own
    effects, such as an append to a cache, take place. Calls are linked where one takes the memory that another has
    returned; anything computed in between by other libraries parts them. Calls on arrays of a GPU are planned for that
    GPU; their zeros lie there, and take the room of the real results.
    Raises what the function raises, NotConnected, InvalidArgument.
    """
    session = default_session.session()
    return plan_calls(session, imagine(session, function, args, kwargs))


def plan_calls(session: Session, calls: Sequence[TracedCall]) -> PlanReport:
    """Let the broker choose kernels for traced calls, each alone and all together."""
    if not calls:
        raise InvalidArgument("the function makes no lz call, so that there is nothing to plan")
    bodies = list(dict.fromkeys(call.body for call in calls))
    ops = {call.body: call.op for call in calls}
    known = {body: session.explain_route(ops[body], body) for body in bodies}
    reports = [known[call.body] for call in calls]
    unserved = [number for number, report in enumerate(reports) if report.kernel_id is None]
    if unserved:
        problem = "no kernel for " + ", ".join(f"{n} {calls[n].label}" for n in unserved)
        return PlanReport(_planned(calls, reports, {}, {}), problem=problem)
    rewrites = find_attention(session, calls)
    ask: dict[str, Any] = {
        "routes": bodies,
        "calls": [bodies.index(call.body) for call in calls],
        "links": [[source, number, arg] for number, call in enumerate(calls) for arg, source in call.sources],
        "rewrites": [],
    }
    answer = session.ask("plan", **ask)
    kernels = {n: step["kernel_id"] for step in answer["steps"] for n in step["calls"]}
    times = {n: step["us"] for step in answer["steps"] for n in step["calls"]}
    return PlanReport(
        _planned(calls, reports, kernels, times),
        tuple(Transform(t["source"], t["target"], t["us"]) for t in answer["transforms"]),
        tuple(_worthwhile(session, ask, answer, rewrites)),
        answer["cost_us"],
        answer["runner_up_us"],
        answer["alone_us"],
        tuple(answer["unmeasured"]),
        answer["is_exact"],
    )


def _planned(
    calls: Sequence[TracedCall], reports: Sequence[SelectionReport], kernels: dict[int, str], times: dict[int, float]
) -> tuple[PlannedCall, ...]:
    return tuple(
        PlannedCall(
            call.op,
            call.label,
            kernels.get(number, report.kernel_id),
            times.get(number, 0.0),
            tuple(sorted({source for _, source in call.sources})),
            report,
        )
        for number, (call, report) in enumerate(zip(calls, reports, strict=True))
    )


# --- calls that another call replaces


@dataclass(frozen=True)
class _Attention:
    calls: tuple[int, int, int]
    body: bytes


def find_attention(session: Session, calls: Sequence[TracedCall]) -> list[_Attention]:
    """Each softmax(a @ b) @ v whose parts nothing else reads: attention of a, b transposed and v, with scale=1."""
    readers: dict[int, list[int]] = {}
    for number, call in enumerate(calls):
        for _, source in call.sources:
            readers.setdefault(source, []).append(number)
    found = []
    for last, call in enumerate(calls):
        middle = dict(call.sources).get("a")
        if call.op != "matmul" or middle is None or calls[middle].op != "softmax" or readers[middle] != [last]:
            continue
        first = dict(calls[middle].sources).get("x")
        if first is None or calls[first].op != "matmul" or readers[first] != [middle]:
            continue
        plan = _as_attention(calls[first].plan, calls[middle].plan, call.plan)
        if plan is not None:
            found.append(_Attention((first, middle, last), session.route_body(plan, None, gpu_name(call.device))))
    return found


def _as_attention(scores: Plan, softmax: Plan, product: Plan) -> Plan | None:
    (q, k), (x,), (p, v) = scores.inputs, softmax.inputs, product.inputs
    assert q is not None
    assert k is not None
    assert x is not None
    assert p is not None
    assert v is not None
    if not (q.ndim == k.ndim == v.ndim == 4) or softmax.attrs["dim"] != x.ndim - 1 or softmax.attrs["dtype"]:
        return None
    if not scores.outputs[0].shape == x.shape == p.shape:  # a view in between put other numbers side by side
        return None
    try:
        return plan_attention(q, k.permute(0, 1, 3, 2), v, None, scale=1.0)
    except InvalidArgument:  # leading dimensions that broadcast, say
        return None


def _worthwhile(
    session: Session, ask: Mapping[str, Any], answer: Mapping[str, Any], rewrites: Sequence[_Attention]
) -> Iterator[Rewrite]:
    """Those that the cheapest plan makes use of, once the broker knows of them."""
    if not rewrites:
        return
    routes = [*ask["routes"], *(rewrite.body for rewrite in rewrites)]
    offers = [[list(rewrite.calls), len(ask["routes"]) + n] for n, rewrite in enumerate(rewrites)]
    offered = session.ask("plan", **{**ask, "routes": routes, "rewrites": offers})
    for step in offered["steps"]:
        if len(step["calls"]) > 1:
            calls = set(step["calls"])
            before_us = sum(old["us"] for old in answer["steps"] if calls.issuperset(old["calls"]))
            before_us += sum(t["us"] for t in answer["transforms"] if {t["source"], t["target"]} <= calls)
            instead = "lz.attention(q, k, v, scale=1.0)"
            yield Rewrite(tuple(step["calls"]), instead, step["kernel_id"], before_us - step["us"])
