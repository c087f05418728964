"""The answer to the request `plan`: kernels for calls that feed each other. Made in steps, since it takes as long as
many calls; what it may have is looked at before anything is done with it."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from layerzero.broker.queries.broker_view import BrokerView
from layerzero.broker.selection.blocks import MAX_NODES, Link, Ranked, block_of, check_counts
from layerzero.broker.selection.planner import Block, fixed_plan
from layerzero.broker.selection.signature import CallSpec
from layerzero.ipc.errors import InvalidArgument, LayerZeroError

PARSED_A_STEP = 16
_Steps = Generator[None, None, dict[str, Any]]


def plan(server: BrokerView, params: Mapping[str, Any]) -> _Steps:
    """Kernels for calls that feed each other, chosen together, and what they cost when each is chosen by itself.

    routes: encoded Route messages; calls: for each call its route's position; links: [source, target, argument];
    rewrites: [positions of calls, route's position] of single calls that do the same. Chooses and changes nothing.
    """
    try:
        calls, block = yield from _block(server, params)
    except (KeyError, IndexError, TypeError, ValueError) as exc:
        if isinstance(exc, LayerZeroError):
            raise
        raise InvalidArgument(f"plan takes routes, calls, links and rewrites: {type(exc).__name__}: {exc}") from exc
    yield
    joint = yield from server.planner.plan(block)
    alone = fixed_plan(block, [node.choices[0].kernel_id for node in block.nodes])
    return {
        "steps": [{"kernel_id": step.kernel_id, "calls": list(step.nodes), "us": step.us} for step in joint.steps],
        "cost_us": joint.cost_us,
        "runner_up_us": joint.runner_up_us,
        "alone_us": alone.cost_us,
        "transforms": [{"source": t.source, "target": t.target, "us": t.us} for t in joint.transforms],
        "unmeasured": [number for number, call in enumerate(calls) if not call.is_measured],
        "is_exact": joint.is_exact,
    }


def _block(server: BrokerView, params: Mapping[str, Any]) -> Generator[None, None, tuple[list[Ranked], Block]]:
    routes, numbers, links, rewrites = (_listed(params, name) for name in ("routes", "calls", "links", "rewrites"))
    check_counts(len(numbers), len(links), len(rewrites))
    if len(routes) > MAX_NODES + len(rewrites) or sum(len(covered) for covered, _ in rewrites) > MAX_NODES:
        raise InvalidArgument(f"a plan has at most {MAX_NODES} calls, and as many that rewrites cover")
    specs = []
    for at, body in enumerate(routes):
        specs.append(CallSpec.parse(body))
        if at % PARSED_A_STEP == PARSED_A_STEP - 1:
            yield
    joined = [Link(*link) for link in links]
    after: list[set[str]] = [set() for _ in numbers]
    for link in joined:
        after[link.source].add(specs[numbers[link.target]].op)
    yield
    now_s, engine, unavailable = time.monotonic(), server.state.engine, server.state.unavailable
    known: dict[tuple[int, tuple[str, ...]], Ranked] = {}
    wanted = [(number, tuple(sorted(ops))) for number, ops in zip(numbers, after, strict=True)]
    for number, next_ops in (*wanted, *((number, ()) for _, number in rewrites)):
        if (number, next_ops) not in known:
            spec = replace(specs[number], next_ops=next_ops)
            verdicts = engine.rank(spec, engine.context(spec), unavailable, now_s)
            known[number, next_ops] = Ranked(spec, verdicts, engine.policy_for(spec).weights.perfdb)
            yield
    calls = [known[key] for key in wanted]
    return calls, block_of(calls, joined, [(tuple(covered), known[number, ()]) for covered, number in rewrites])


def _listed(params: Mapping[str, Any], name: str) -> Sequence[Any]:
    found = params[name]
    if not isinstance(found, list):
        raise TypeError(f"{name} is a list")
    return found
