"""Capsules of calls of functions (docs/capsules.md): what is known of one whose worker died or hung, or whose shadow
check found another result, and its arguments as they cross."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from layerzero.client.capsules.form import ALIGNMENTS, Failure, Segment
from layerzero.client.capsules.of_function import FunctionCall, Part, Target, given_of
from layerzero.client.capsules.taking import Capsules, Failed, Memory, not_kept, pids_of
from layerzero.client.connection.report import SelectionReport
from layerzero.functions.calling import Arguments
from layerzero.functions.places import Candidate
from layerzero.ipc.errors import LayerZeroError
from layerzero.ipc.transport.plain import pack_tree
from layerzero.ipc.vocabulary import pools
from layerzero.ipc.vocabulary.ops import FUNCTION

ON_GPU = "of arrays on a GPU among its arguments the shapes are kept alone"
OBJECTS = "objects among its arguments are in their worker alone"


class Asked(NamedTuple):
    """What a frame asks of a worker: as Part. `outs`: of results that have their memory before the call."""

    kind: str
    name: str
    stays: int
    given: Arguments
    outs: Sequence[Any] = ()


class Told(NamedTuple):
    """A call. `candidates`: what is called, in each environment. `asked`: the construction of an object first.
    `problem`: why it cannot be made again."""

    label: str
    candidates: Sequence[Candidate]
    asked: Sequence[Asked]
    problem: str
    tolerance: float


def take(
    capsules: Capsules, told: Told, failures: Sequence[Failure], served_by: str, report: SelectionReport | None = None
) -> str:
    """A note that names the capsule, "" where there is none. Costs nothing but a comparison where capsules are off.
    Raises nothing: what fails is the note."""
    if not capsules.is_on or not failures:
        return ""
    try:
        return _take(capsules, told, failures, served_by, report)
    except Exception as exc:  # the call has its result or its error all the same
        return not_kept(exc)


def _take(
    capsules: Capsules, told: Told, failures: Sequence[Failure], served_by: str, report: SelectionReport | None
) -> str:
    problem = told.problem or (OBJECTS if any(one.given.loans for one in told.asked) else "")
    problem = problem or (ON_GPU if any(one.given.on_gpu is not None for one in told.asked) else "")

    def describe() -> tuple[Failed, Memory]:
        parts, segments, loads = [], list[Segment](), list[Any]()
        for one in told.asked:
            args, kwargs, _ = one.given.trees
            first = len(segments)
            trees = pack_tree([args, kwargs])
            payload_bytes, ranges = one.given.memory
            segments += [Segment(len(trees), 0), Segment(payload_bytes, 0)]
            segments += [Segment(nbytes, address % ALIGNMENTS) for address, nbytes in ranges]
            loads.append((trees, one.given, ranges))
            memory = tuple(range(first, len(segments)))
            given = given_of(args, kwargs)
            parts.append(Part(one.kind, one.name, one.stays, given, memory, tuple(map(tuple, one.outs))))

        def load() -> list[Any]:
            found = list[Any]()
            for trees, given, ranges in loads:
                found += [trees, given.payload()]
                found += [ctypes.string_at(address, nbytes) for address, nbytes in ranges]
            return found

        first_env = pools.environment_of(failures[0].backend)
        inside = sorted(told.candidates, key=lambda one: one.env.backend != first_env)
        targets = tuple(Target.of(one.env.backend, one.code) for one in inside)
        function = FunctionCall(told.label, targets, tuple(parts), problem)
        failed = Failed(
            *(FUNCTION, failures, None, {"tolerance": told.tolerance}),
            served_by=served_by,
            report="" if report is None else json.dumps(report.to_dict(), default=str),
            function=function,
            facts={"environment": locked} if (locked := _locked(inside[0])) else {},
            pids=() if report is None else pids_of(report),
        )
        return failed, Memory(tuple(segments), load)

    likeness = (told.label, json.dumps([given_of(*one.given.trees[:2]) for one in told.asked]))
    return capsules.keep(failures[0], likeness, describe)


def _locked(where: Candidate) -> list[str] | str:
    try:
        return where.env.locked()
    except LayerZeroError as exc:
        return f"not known: {exc.message}"
